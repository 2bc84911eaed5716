"""The nearest points, however they are looked for."""

from __future__ import annotations

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
