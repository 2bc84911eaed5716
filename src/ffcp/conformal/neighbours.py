"""The nearest calibration rows, each of weight 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ffcp.conformal.kernel_weights import Entry, Places, Surroundings

EXACT = 0.0  # no distance is too small to matter, so they are taken in float64
NEARLY = 1e-6  # relative difference below which squared distances count as equal


class NearestWeights:
    """Weight 1 for the nearest calibration rows, at any distance."""

    own = 1

    def __init__(self, embedding: Tensor, orders: list[Tensor], neighbours: int) -> None:
        if neighbours > len(embedding):
            raise ValueError(
                f"there are only {len(embedding)} calibration rows, fewer than the "
                f"{neighbours} requested neighbours: lower the bandwidth"
            )
        self.neighbours = neighbours
        self._embedding = embedding
        is_line = embedding.shape[1] == 1
        self._search = _on_a_line(embedding[:, 0]) if is_line else _among_all(embedding)
        self._ranks = [torch.empty_like(order) for order in orders]
        for ranks, order in zip(self._ranks, orders, strict=True):
            ranks[order] = torch.arange(len(order))

    def around(self, x: Tensor) -> Neighbours:
        """Find the neighbours of ``x``, (b, e)."""
        return Neighbours(self._search(x, self.neighbours)[0], self._ranks)

    def around_calibration(
        self, x: Tensor, rows: Tensor, left: Tensor, output: int
    ) -> Surroundings:
        """Count the neighbours of calibration rows ``rows``, which are not their own.

        A new row that is nearer than the farthest neighbour replaces it: that neighbour is counted
        separately, unless fewer others exist than neighbours were asked for.
        """
        k = self.neighbours
        is_full = k < len(self._embedding)
        nearest, squared = self._search(x, min(k + 1, len(self._embedding)))
        # With many copies of a row its own number may be missing: drop the last, which is as near.
        itself = nearest == rows[:, None]
        itself[:, -1] |= ~itself.any(dim=1)
        others = nearest[~itself].view(len(nearest), -1)
        squared = squared[~itself].view(len(nearest), -1)
        is_smaller = self._ranks[output][others] < left[:, None]
        smaller = is_smaller.sum(dim=1)
        if not is_full:
            none = torch.zeros_like(smaller)
            return Surroundings(smaller, none + k, none, torch.full(none.shape, math.inf).double())
        radius = squared.amax(dim=1)
        # If several are the farthest, the one is replaced that leaves the larger share.
        farthest = squared >= (radius * (1 - NEARLY))[:, None]
        replaced = (is_smaller | ~farthest).all(dim=1).long()
        return Surroundings(smaller - replaced, torch.full_like(smaller, k), replaced, radius)

    def entering(self, rows: Tensor, around: Surroundings) -> Callable[[Neighbours, Tensor], Entry]:
        """Return what computes the effect of new rows on the sums around calibration ``rows``."""
        distances = _distances_to(self._embedding, rows)
        replaced, radius = around.replaced[:, None].double(), around.squared_radius[:, None]

        def enter(near: Neighbours, x: Tensor) -> Entry:
            squared, rounding = distances(x)
            nearly = radius * NEARLY + rounding
            # At the edge a new row may enter or not, by how ties are broken: take the larger share.
            if_smaller = torch.where(squared <= radius + nearly, 1.0, replaced)
            if_not = torch.where(squared < radius - nearly, 0.0, replaced)
            return Entry(if_smaller, if_not, 1)

        return enter


def _distances_to(
    embedding: Tensor, rows: Tensor
) -> Callable[[Tensor], tuple[Tensor, Tensor | float]]:
    """Return a function to the squared distances (m, b) of some rows and their rounding."""
    if embedding.shape[1] == 1:
        line = embedding[rows]
        return lambda x: ((line - x[:, 0]).double().square(), 0.0)
    places = Places(embedding, order=rows, fine=EXACT)

    def distances(x: Tensor) -> tuple[Tensor, Tensor]:
        moved = places.moved(x)
        return places.from_each(moved).T, places.rounding(moved).T

    return distances


class Neighbours(NamedTuple):
    """The neighbours (b, k) of some rows, and the ranks of all scores of each output."""

    nearest: Tensor
    ranks: list[Tensor]

    def sums(self, output: int) -> NearestSums:
        """Return their positions among the sorted scores of one output."""
        ranks = self.ranks[output].numpy()
        # By numpy: for so little work torch's threads cost more than they save.
        return NearestSums(torch.from_numpy(ranks[self.nearest.numpy()]), len(ranks))


class NearestSums:
    """Neighbours as positions (b, k) among n sorted scores, each of weight 1.

    >>> sums = NearestSums(torch.tensor([[4, 1, 2]]), n=6)
    >>> sums.position(torch.tensor([2])), sums.before(torch.tensor([4]))
    (tensor([2]), tensor([2]))
    """

    def __init__(self, positions: Tensor, n: int) -> None:
        # Sorting takes an eighth of the time in 32 bits.
        self._positions = torch.from_numpy(np.sort(positions.numpy().astype(np.int32), axis=1))
        self._n = n

    @property
    def total(self) -> Tensor:
        """The number of neighbours of each point."""
        return torch.full((len(self._positions),), self._positions.shape[1])

    def position(self, target: Tensor) -> Tensor:
        """Position of the target-th neighbour among the scores, or n."""
        width = self._positions.shape[1]
        if not width:
            return torch.full((len(self._positions),), self._n)
        reached = self._positions.gather(1, target.clamp(1, width)[:, None] - 1)[:, 0]
        return reached.long().where(target <= width, self._n)

    def before(self, row: Tensor) -> Tensor:
        """Count the neighbours with a score before a position."""
        return (self._positions < row[:, None]).sum(dim=1)


Search = Callable[[Tensor, int], tuple[Tensor, Tensor]]  # rows, and squared distances


def _among_all(embedding: Tensor) -> Search:
    """Return a search that compares with every calibration row."""
    places = Places(embedding, fine=EXACT)

    def search(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        squared = places.from_each(places.moved(x))
        nearest, rows = squared.topk(k, largest=False)
        # Ties are broken by row number, so that results do not depend on the batch.
        tied = (squared <= nearest[:, -1:]).sum(dim=1) > k
        if bool(tied.any()):
            rows[tied] = squared[tied].argsort(dim=1, stable=True)[:, :k]
        return rows, nearest

    return search


def _on_a_line(values: Tensor) -> Search:
    """Return a search by bisection: on a line the nearest rows are consecutive."""
    line, rows = values.sort(stable=True)

    def search(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        at = x[:, 0]
        low = torch.zeros(len(at), dtype=torch.int64)
        high = torch.full_like(low, len(line) - k)
        while bool((low < high).any()):
            middle = (low + high) // 2
            # Move the window right while its first row is farther than the row behind its last.
            behind = line[(middle + k).clamp_max(len(line) - 1)]
            on = (at - line[middle] > behind - at) & (low < high)
            low, high = torch.where(on, middle + 1, low), torch.where(on, high, middle)
        places = low[:, None] + torch.arange(k)
        return rows[places], (line[places] - at[:, None]).double().square_()

    return search
