"""Coverage inside groups of rows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import ffcp
from ffcp import metrics


def band_of(hits: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A band around 0 and a target inside it exactly where ``hits`` is 1."""
    y = torch.tensor([0.0 if hit else 5.0 for hit in hits])
    return -torch.ones(len(hits)), torch.ones(len(hits)), y


def test_group_coverage_by_labels() -> None:
    lower, upper, y = band_of([1, 1, 0, 1, 0, 0])
    result = metrics.group_coverage((lower, upper), y, groups=[1, 1, 1, 2, 2, 2])
    assert {k: round(float(v), 3) for k, v in result.groups.items()} == {1: 0.667, 2: 0.333}
    assert result.worst_group == 2
    assert result.worst.rows == 3
    assert result.gap == pytest.approx(1 / 3)


@pytest.mark.parametrize("kind", ["str", "object", "category"])
def test_groups_may_be_a_column_of_words(kind: str) -> None:
    lower, upper, y = band_of([1, 1, 0, 0])
    groups = pd.Series(["far", "near", "far", "near"]).astype(kind)
    for column in (groups, groups.to_numpy()):
        found = metrics.group_coverage((lower, upper), y, groups=column).groups
        assert {name: float(share) for name, share in found.items()} == {"far": 0.5, "near": 0.5}


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
        ({"groups": ["a", "b"], "feature": [1.0, 2.0]}, "feature"),
        ({"feature": [[1.0], [2.0]]}, "feature"),
        ({"feature": [1.0, float("nan")]}, "NaN"),
        ({"feature": [1.0, 2.0], "slices": 0}, "slices"),
        ({"feature": [1.0, 2.0, 3.0]}, "groups"),
    ],
)
def test_group_coverage_refuses(more: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.group_coverage(([0.0, 0.0], [1.0, 1.0]), [0.5, 0.5], **more)


def test_one_huge_band_leaves_the_other_strata_apart() -> None:
    lengths = torch.tensor([1.0] * 50 + [2.0] * 50 + [1e6])
    band = torch.zeros(101), lengths
    assert len(metrics.size_stratified_coverage(band, torch.zeros(101), bins=2).groups) == 2


def test_coverage_of_groups_prints_a_line_for_each() -> None:
    lower, upper, y = band_of([1, 1, 0, 1, 0, 0])
    result = metrics.group_coverage((lower, upper), y, groups=[1, 1, 10, 1, 10, 10])
    lines = [" 1: 1.000 [0.439, 1.000] of 3 rows", "10: 0.000 [0.000, 0.561] of 3 rows"]
    assert repr(result).splitlines() == lines


def test_strata_of_nearly_equal_lengths_are_all_there() -> None:
    upper = 1 + 2e-5 * torch.arange(10)
    found = metrics.size_stratified_coverage((torch.zeros(10), upper), torch.zeros(10), bins=5)
    assert [share.rows for share in found.groups.values()] == [2] * 5
