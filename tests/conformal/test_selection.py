"""Rows that are set aside to select: which ones, how many, and that they do not calibrate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ffcp
from ffcp.conformal.selection import LearningDivision
from tests.conftest import normal, small_mlp
from tests.core import set_aside

fractions = st.floats(0.01, 0.99)


@pytest.mark.long
@given(
    fraction=fractions,
    seed=st.integers(0, 100),
    most=st.integers(0, 60),
    cuts=st.lists(st.integers(0, 50), min_size=1, max_size=6),
)
def test_the_division_depends_on_the_position_alone(
    fraction: float, seed: int, most: int, cuts: list[int]
) -> None:
    whole, rows = set_aside(sum(cuts), fraction, seed, most), 0
    for more in cuts:
        rows += more
        assert torch.equal(whole[:rows], set_aside(rows, fraction, seed, most))


@pytest.mark.long
@given(fraction=fractions, seed=st.integers(0, 9), most=st.integers(0, 60))
def test_no_more_rows_than_allowed_are_set_aside(fraction: float, seed: int, most: int) -> None:
    assert int(set_aside(7000, fraction, seed, most).sum()) <= most


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5])
def test_the_division_takes_the_asked_share(fraction: float) -> None:
    for most in (30, 10_000):
        mask = set_aside(1000, fraction, most=most)
        assert int(mask.sum()) == min(most, round(1000 * fraction))


@pytest.mark.parametrize(
    ("rows", "groups", "left"),
    [(50, 1, 30), (333, 1, 200), (800, 1, 320), (2500, 1, 1000), (9000, 1, 1000), (9000, 3, 3000)],
)
def test_most_rows_teach_and_a_thousand_calibrate(rows: int, groups: int, left: int) -> None:
    assert int((~LearningDivision(1000, 0, 20_000).mask(rows, groups)).sum()) == left


def test_as_many_rows_calibrate_as_are_asked_for() -> None:
    for rows, left in ((400, 300), (200, 200), (60_000, 40_000)):
        assert (
            int((~LearningDivision(1000, 0, 20_000, given=300).mask(rows, groups=5)).sum()) == left
        )


def test_every_row_is_as_likely_to_teach() -> None:
    masks = torch.stack([LearningDivision(12, seed, 100).mask(20) for seed in range(2000)])
    torch.testing.assert_close(
        masks.double().mean(dim=0), torch.full((20,), 0.4).double(), rtol=0, atol=0.04
    )


def test_another_seed_divides_otherwise() -> None:
    assert not torch.equal(set_aside(100, seed=0), set_aside(100, seed=1))


@pytest.mark.long
@pytest.mark.parametrize("fraction", [0.1, 0.2])
def test_every_row_is_as_likely_to_be_set_aside(fraction: float) -> None:
    masks = torch.stack([set_aside(20, fraction, seed) for seed in range(2000)])
    torch.testing.assert_close(
        masks.double().mean(dim=0), torch.full((20,), fraction).double(), rtol=0, atol=0.04
    )


# -- the loop ----------------------------------------------------------------------------------


def selecting(**common: Any) -> ffcp.LCP:
    """Return a predictor that selects a bandwidth and keeps the inputs of the rows it scores."""
    localizer = ffcp.kernels.Localizer("box", on="input")
    return ffcp.LCP(small_mlp(1), localizer, seed=0, **common)


@pytest.mark.parametrize("size", [1, 7, 100, 1000])
def test_every_row_selects_or_calibrates_in_its_order(size: int) -> None:
    x, y = torch.arange(300.0)[:, None], normal(300, seed=1)
    loader = list(zip(x.split(size), y.split(size), strict=True))
    predictor = selecting().calibrate(loader)
    mask = set_aside(300)
    assert torch.equal(predictor.calibration.embedding, x[~mask])
    assert predictor.bandwidth_choice.rows == int(mask.sum()) == 60
    whole = selecting(batch_size=size).calibrate(x, y)
    assert torch.equal(whole.calibration.embedding, x[~mask])
    assert whole.bandwidth_choice == predictor.bandwidth_choice


def test_a_long_stream_selects_before_its_end() -> None:
    rows, most = 12_000, 2000  # which are enough to select a bandwidth
    predictor = selecting(selection_fraction=0.5)
    loader = ((normal(500, 1, seed=i), normal(500, seed=99 + i)) for i in range(rows // 500))
    predictor.calibrate(loader)
    assert predictor.bandwidth_choice.rows == most
    assert len(predictor.calibration) == rows - most


def test_with_nothing_to_select_all_rows_calibrate() -> None:
    predictor = ffcp.CP(nn.Linear(1, 1)).calibrate(normal(9, 1, seed=0), normal(9, seed=1))
    assert len(predictor.calibration) == 9


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("rows", range(1, 9))
def test_few_rows_all_calibrate_where_there_is_a_default(rows: int) -> None:
    model = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1))
    predictor = ffcp.FFCP(model).calibrate(normal(rows, 1, seed=0), normal(rows, seed=1))
    assert len(predictor.calibration) == rows
    assert predictor.feature == "output"


def test_rows_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match="1"):
        selecting().calibrate(torch.zeros(1, 1), torch.zeros(1))


@pytest.mark.parametrize("make", [selecting, lambda: ffcp.CP(nn.Linear(1, 1))])
def test_no_rows_at_all(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="empty"):
        make().calibrate(iter([]))
