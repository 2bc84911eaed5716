"""The nearest points, however they are looked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ffcp.conformal import neighbours
from ffcp.conformal.local import Local, Localizer
from ffcp.conformal.neighbours import NearestWeights
from tests.conftest import normal


@pytest.mark.parametrize("guarantee", ["none", "level"])
def test_a_tree_finds_the_same_neighbours(monkeypatch: pytest.MonkeyPatch, guarantee: str) -> None:
    pytest.importorskip("sklearn")

    def thresholds() -> Tensor:
        near = Local(Localizer("nearest", bandwidth=40), guarantee)
        near.add(normal(1500, 1, seed=0), {"embedding": normal(1500, 3, seed=1)})
        return near.threshold(0.1, {"embedding": normal(40, 3, seed=2)})

    by_tree = thresholds()
    monkeypatch.setattr(neighbours, "_TREE_DIMENSIONS", 0)
    assert torch.equal(thresholds(), by_tree)


def test_equal_distances_at_the_edge_still_give_the_asked_number() -> None:
    where = torch.zeros(30, 12)  # all in one place
    nearest, squared = neighbours._compare_all(where)(torch.zeros(4, 12), 7)
    assert not squared.any()
    assert nearest.shape == (4, 7)
    assert len(nearest[0].unique()) == 7


def test_copies_of_a_point_do_not_count_it_among_its_own_neighbours() -> None:
    # Many copies of few places: a point is often not first in the list of its neighbours.
    where = torch.arange(6.0).repeat(10)[:, None]
    scores = normal(60, seed=0)
    order = scores.argsort()
    rows, left = torch.arange(60), order.argsort()
    around = NearestWeights(where, [order], 14).around_calibration(where, rows, left, 0)
    # Nine copies are nearest, and five of those beside them: none of it is the point itself.
    assert around.everyone.tolist() == [14] * 60
    assert around.reach.tolist() == [1.0] * 60
    copies = (where[:, 0] == where) & (scores < scores[:, None])
    assert (around.smaller + around.pushed >= copies.sum(dim=1)).all()
    assert (around.smaller + around.pushed <= copies.sum(dim=1) + 5).all()


@pytest.mark.parametrize("k", [1, 40, 300, 1900, 2000])
def test_guessing_a_bound_finds_the_very_neighbours_of_a_full_sort(k: int) -> None:
    # Whole numbers: many distances are equal, at the edge too. In the last rows those that are
    # looked at for the bound are the smallest, so that it lets too few through.
    distances = (normal(30, 2000, seed=3) * 40).abs().round().numpy()
    distances[-5:] += 100
    distances[-5:, ::8] = 1
    expected = np.sort(np.argsort(distances, axis=1, kind="stable")[:, :k], axis=1)
    assert np.array_equal(neighbours.smallest(distances, k), expected)
