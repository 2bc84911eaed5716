"""Metrics against slow, obvious computations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import ffcp
from ffcp import metrics
from ffcp.metrics import Coverage, _worst_window, wilson


def band_of(hits: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A band around 0 and a target inside it exactly where ``hits`` is 1."""
    y = torch.tensor([0.0 if hit else 5.0 for hit in hits])
    return -torch.ones(len(hits)), torch.ones(len(hits)), y


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_agrees_with_scipy(case: tuple[int, int]) -> None:
    hits, n = case
    expected = stats.binomtest(hits, n).proportion_ci(0.95, method="wilson")
    assert wilson(hits / n, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_coverage_of_several_outputs() -> None:
    lower, upper = torch.zeros(2, 2), torch.ones(2, 2)
    y = torch.tensor([[0.5, 0.5], [0.5, 2.0]])
    assert metrics.coverage((lower, upper), y) == 0.75
    assert metrics.coverage((lower, upper), y, joint=True) == 0.5
    assert metrics.coverage((lower, upper), y).rows == 2


def test_ends_of_the_band_count_as_covered() -> None:
    assert metrics.coverage(([0.0, 0.0], [1.0, 1.0]), [0.0, 1.0]) == 1


def test_group_coverage_by_labels() -> None:
    lower, upper, y = band_of([1, 1, 0, 1, 0, 0])
    result = metrics.group_coverage((lower, upper), y, groups=[1, 1, 1, 2, 2, 2])
    assert {k: round(float(v), 3) for k, v in result.groups.items()} == {1: 0.667, 2: 0.333}
    assert result.worst_group == 2
    assert result.worst.rows == 3
    assert result.gap == pytest.approx(1 / 3)


def test_tertiles_cut_y_into_thirds() -> None:
    y = torch.randperm(300).float()
    labels = metrics.tertiles(y)
    assert {name: int((labels == name).sum()) for name in set(labels)} == {
        "low": 100, "middle": 100, "high": 100,
    }  # fmt: skip
    assert y[labels == "low"].max() < y[labels == "middle"].min()


def test_zeros_are_one_group_when_more_than_half_is_zero() -> None:
    y = torch.cat([torch.zeros(60), torch.arange(1, 41)])
    labels = metrics.tertiles(y)
    assert (labels[:60] == "zero").all()
    assert int((labels == "low").sum()) == int((labels == "high").sum()) == 20


def test_size_strata_show_narrow_bands_that_miss() -> None:
    length = torch.linspace(1, 2, 1000)
    y = torch.where(length < 1.2, 9.0, 0.0)
    result = metrics.size_stratified_coverage((-length, length), y, bins=5)
    shares = [float(share) for share in result.groups.values()]
    assert shares == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert [share.rows for share in result.groups.values()] == [200] * 5


def test_one_length_is_one_stratum() -> None:
    model = torch.nn.Linear(2, 1)
    x, y = torch.randn(100, 2), torch.randn(100)
    band = ffcp.CP(model).calibrate(x, y).predict_interval(x)
    assert len(metrics.size_stratified_coverage(band, y).groups) == 1


def test_interval_score_is_least_for_the_true_quantiles() -> None:
    y = torch.randn(20_000)
    z = stats.norm.ppf(0.95)
    best = metrics.interval_score((torch.full_like(y, -z), torch.full_like(y, z)), y, alpha=0.1)
    for other in (0.8 * z, 1.2 * z):
        band = (torch.full_like(y, -other), torch.full_like(y, other))
        assert metrics.interval_score(band, y, alpha=0.1) > best


@given(st.lists(st.integers(0, 1), min_size=2, max_size=30), st.floats(0.05, 1))
def test_worst_window_agrees_with_all_windows(hits: list[int], share: float) -> None:
    n = len(hits)
    least = max(1, int(np.ceil(n * share)))
    windows = [hits[i:j] for i in range(n) for j in range(i + least, n + 1)]
    expected = min(sum(w) / len(w) for w in windows)
    mean, low, high = _worst_window(torch.arange(n).double(), torch.tensor(hits).double(), share)
    assert mean == pytest.approx(expected)
    inside = hits[int(low) : int(high) + 1]
    assert sum(inside) / len(inside) == pytest.approx(expected)


def test_worst_slab_finds_a_region_that_is_not_covered() -> None:
    x = torch.randn(4000, 3)
    bad = x @ torch.tensor([1.0, 1.0, 0.0]) > 1.5
    y = torch.where(bad, 5.0, 0.0)
    band = (-torch.ones(4000), torch.ones(4000))
    worst = metrics.worst_slab_coverage(band, y, x, directions=200)
    assert worst < 0.3
    assert metrics.coverage(band, y) > 0.8


def test_worst_slab_does_not_invent_a_bad_region() -> None:
    x, y = torch.randn(4000, 3), torch.rand(4000)
    worst = metrics.worst_slab_coverage((torch.zeros(4000), torch.full((4000,), 0.9)), y, x,
                                        directions=200)  # fmt: skip
    assert worst.low <= 0.9 <= worst.high + 0.03


def test_bad_bands_and_targets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"target has shape \(3,\), band \(2,\)"):
        metrics.coverage(([0, 0], [1, 1]), [1, 2, 3])
    with pytest.raises(ValueError, match="band holds NaN"):
        metrics.coverage(([0, float("nan")], [1, 1]), [1, 2])
    with pytest.raises(ValueError, match="not empty"):
        metrics.mean_length(([], []))
    with pytest.raises(ValueError, match="expected one label per row"):
        metrics.group_coverage(([0, 0], [1, 1]), [1, 2], groups=[1])


def test_coverage_is_a_number_with_an_interval() -> None:
    value = Coverage(0.9, rows=100)
    assert value + 0 == 0.9
    assert value.low < 0.9 < value.high


def test_slices_of_a_feature_hold_about_equally_many_rows() -> None:
    values = torch.randn(300)
    labels = metrics.cut(values, slices=4)
    counts = np.unique(labels, return_counts=True)[1]
    assert counts.tolist() == [75, 75, 75, 75]
    for label in np.unique(labels):
        inside = values.numpy()[labels == label]
        assert label.split(": ")[1] == f"{inside.min():.4g} to {inside.max():.4g}"


def test_equal_values_stay_in_one_slice() -> None:
    assert len(np.unique(metrics.cut([1.0] * 50 + [2.0] * 3, slices=5))) == 2


def test_group_coverage_by_slices_of_a_feature() -> None:
    feature = torch.arange(90.0)
    upper = torch.where(feature < 30, 0.0, 1.0)  # misses the first third
    result = metrics.group_coverage(
        (torch.zeros(90), upper), torch.full((90,), 0.5), feature=feature, slices=3
    )
    assert [float(share) for share in result.groups.values()] == [0.0, 1.0, 1.0]
    assert result.worst_group == "1: 0 to 29"
    assert result.gap == 1.0
    assert result.worst.rows == 30
    assert result.worst.high < 0.2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"groups": ["a", "b"], "feature": [1.0, 2.0]}, "not both"),
        ({"feature": [[1.0], [2.0]]}, r"one number per row, got shape \(2, 1\)"),
        ({"feature": [1.0, float("nan")]}, "holds NaN"),
        ({"feature": [1.0, 2.0], "slices": 0}, "slices must be at least 1"),
        ({"feature": [1.0, 2.0, 3.0]}, "expected one label per row: 2"),
    ],
)
def test_group_coverage_refuses(more: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.group_coverage(([0.0, 0.0], [1.0, 1.0]), [0.5, 0.5], **more)
