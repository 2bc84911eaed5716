"""The nearest calibration rows: those of a full sort of the distances."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

import ffcp
from tests.conftest import normal
from tests.core import filled, threshold


def nearest(points: Tensor, x: Tensor, k: int) -> Tensor:
    """Return the first, middle and last row of the k nearest, by scores that are row numbers."""
    localizer = ffcp.kernels.Localizer("nearest", on="input", bandwidth=k)
    near = ffcp.calibrations.Local(localizer, guarantee="none")
    near = filled(near, torch.arange(len(points))[:, None].double(), {"embedding": points})
    # With weight 1 for each neighbour and for the new row, rank i of k + 1 is the i-th neighbour.
    alphas = [1 - Fraction(i, k + 1) for i in ranks(k)]
    return torch.cat([threshold(near, alpha, {"embedding": x}) for alpha in alphas], dim=1)


def ranks(k: int) -> list[int]:
    return [1, (k + 1) // 2, k]


def by_sorting(points: Tensor, x: Tensor, k: int) -> Tensor:
    squared = (points.double() - x.double()[:, None]).square().sum(dim=-1)
    found = squared.argsort(dim=1)[:, :k].sort(dim=1).values
    return found[:, [i - 1 for i in ranks(k)]].double()


@pytest.mark.parametrize("width", [1, 2, 24])
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e14])
@pytest.mark.parametrize("k", [1, 40, 299, 300])
def test_the_nearest_are_those_of_a_full_sort(width: int, scale: float, k: int) -> None:
    points, x = scale * normal(300, width, seed=1), scale * normal(50, width, seed=2)
    assert torch.equal(nearest(points, x, k), by_sorting(points, x, k))
    one_by_one = torch.cat([nearest(points, one, k) for one in x.split(1)])
    assert torch.equal(one_by_one, by_sorting(points, x, k))


@pytest.mark.parametrize("far", [1e9, 1e12, 1e18, 9.97e36])
@pytest.mark.parametrize("width", [1, 10])
def test_one_row_that_is_far_away_changes_no_neighbours_of_others(far: float, width: int) -> None:
    points = normal(300, width, seed=7)
    expected = by_sorting(points[:-1], points[:50], 20)
    for changed in (slice(1), slice(None)):  # a coordinate, or all of them
        moved = points.clone()
        moved[-1, changed] = far
        assert torch.equal(nearest(moved, points[:50], 20), expected)


def test_autocast_changes_no_neighbours() -> None:
    points, x = normal(300, 24, seed=1), normal(50, 24, seed=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(nearest(points, x, 40), by_sorting(points, x, 40))
