"""The nearest calibration rows: those of a full sort of the distances."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ffcp.conformal.neighbours import NearestWeights
from tests.conftest import normal


def nearest(points: Tensor, x: Tensor, k: int) -> Tensor:
    """Return the places of the k nearest among scores that ascend with the rows, sorted."""
    found = NearestWeights(points, [torch.arange(len(points))], k).around(x).sums(0)
    return torch.stack([found.position(torch.full((len(x),), i)) for i in range(1, k + 1)], dim=1)


def by_sorting(points: Tensor, x: Tensor, k: int) -> Tensor:
    squared = (points.double() - x.double()[:, None]).square().sum(dim=-1)
    return squared.argsort(dim=1)[:, :k].sort(dim=1).values


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


def test_copies_of_a_point_do_not_count_it_among_its_own_neighbours() -> None:
    # Many copies of few places: a point is often not first in the list of its neighbours.
    where = torch.arange(6.0).repeat(10)[:, None]
    scores = normal(60, seed=0)
    order = scores.argsort()
    rows, left = torch.arange(60), order.argsort()
    around = NearestWeights(where, [order], 14).around_calibration(where, rows, left, 0)
    # Nine copies are nearest, and five of those beside them: none of it is the point itself.
    assert around.everyone.tolist() == [14] * 60
    assert around.position.tolist() == [1.0] * 60
    copies = (where[:, 0] == where) & (scores < scores[:, None])
    assert (around.smaller + around.pushed >= copies.sum(dim=1)).all()
    assert (around.smaller + around.pushed <= copies.sum(dim=1) + 5).all()
