"""The nearest calibration points, each of weight 1: found exactly, by the fastest way at hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ffcp.conformal.weights import Places

# Beyond these dimensions and this share of all points as neighbours, a search tree is slower than
# comparing with all points.
_TREE_DIMENSIONS, _TREE_SHARE = 4, 32


class NearestWeights:
    """Weight 1 for the nearest calibration points, whatever their distance."""

    own = 1

    def __init__(self, embedding: Tensor, orders: list[Tensor], neighbours: int) -> None:
        if neighbours > len(embedding):
            raise ValueError(
                f"there are only {len(embedding)} calibration points, fewer than the "
                f"{neighbours} neighbours asked for: lower the bandwidth"
            )
        self.neighbours = neighbours
        self._search = _neighbour_search(embedding, neighbours)
        self._ranks = [torch.empty_like(order) for order in orders]
        for ranks, order in zip(self._ranks, orders, strict=True):
            ranks[order] = torch.arange(len(order))

    def around(self, x: Tensor) -> Neighbours:
        """Find the neighbours of ``x``, (b, e)."""
        return Neighbours(self._search(x, self.neighbours), self._ranks)

    def around_calibration(self, x: Tensor, rows: Tensor) -> tuple[Neighbours, int]:
        """Find the neighbours of calibration points ``rows``, themselves and the farthest apart.

        The new point may push out the farthest neighbour, and take its place: it is the weight
        that is left out here.
        """
        nearest = self._search(x, self.neighbours)
        # Copies of a point may push it out of its own list; then the farthest goes.
        itself = nearest == rows[:, None]
        itself[:, -1] |= ~itself.any(dim=1)
        return Neighbours(nearest[~itself].view(len(nearest), -1), self._ranks), 1


class Neighbours:
    """The neighbours (b, k) of some points, by their rows."""

    def __init__(self, nearest: Tensor, ranks: list[Tensor]) -> None:
        self._nearest, self._ranks = nearest, ranks

    def sums(self, output: int) -> NearestSums:
        """Give them as positions among the sorted scores of one output."""
        return NearestSums(self._ranks[output][self._nearest], len(self._ranks[output]))


class NearestSums:
    """Neighbours as positions (b, k) among n sorted scores, each of weight 1.

    >>> sums = NearestSums(torch.tensor([[4, 1, 2]]), n=6)
    >>> sums.reach(torch.tensor([2])), sums.before(torch.tensor([4]))
    (tensor([2]), tensor([2]))
    """

    def __init__(self, positions: Tensor, n: int) -> None:
        self._positions = positions.sort(dim=1).values
        self._n = n

    @property
    def total(self) -> Tensor:
        """The number of neighbours of each point."""
        return torch.full((len(self._positions),), self._positions.shape[1])

    def reach(self, target: Tensor) -> Tensor:
        """Position of the target-th neighbour among the scores, or n."""
        width = self._positions.shape[1]
        if not width:
            return torch.full((len(self._positions),), self._n)
        reached = self._positions.gather(1, target.clamp(1, width)[:, None] - 1)[:, 0]
        return reached.where(target <= width, self._n)

    def before(self, row: Tensor) -> Tensor:
        """Count the neighbours with a score before a position."""
        return (self._positions < row[:, None]).sum(dim=1)


Search = Callable[[Tensor, int], Tensor]


def _neighbour_search(embedding: Tensor, neighbours: int) -> Search:
    """Return a search for the rows of the nearest points: with an index where that is faster."""
    if embedding.shape[1] == 1:
        return _search_sorted(embedding[:, 0])
    few = neighbours <= len(embedding) // _TREE_SHARE
    if few and embedding.shape[1] <= _TREE_DIMENSIONS:
        try:
            from sklearn.neighbors import KDTree
        except ImportError:  # scikit-learn is optional; comparing with all gives the same
            pass
        else:
            tree = KDTree(embedding.numpy())
            return lambda x, k: torch.from_numpy(
                tree.query(x.numpy(), k, return_distance=False, sort_results=True)
            )
    return _compare_all(embedding)


def _search_sorted(values: Tensor) -> Search:
    """On a line the nearest points stand side by side: find where they begin, by bisection."""
    line, rows = values.sort(stable=True)

    def search(x: Tensor, k: int) -> Tensor:
        at = x[:, 0]
        low = torch.zeros(len(at), dtype=torch.int64)
        high = torch.full_like(low, len(line) - k)
        while bool((low < high).any()):
            middle = (low + high) // 2
            # The window moves on while its first point is farther than the one behind its last.
            behind = line[(middle + k).clamp_max(len(line) - 1)]
            on = (at - line[middle] > behind - at) & (low < high)
            low, high = torch.where(on, middle + 1, low), torch.where(on, high, middle)
        nearest: Tensor = rows[low[:, None] + torch.arange(k)]
        return nearest

    return search


def _compare_all(embedding: Tensor) -> Search:
    points = Places(embedding, fine=0.01 * float(embedding.std(dim=0).max()))

    def search(x: Tensor, k: int) -> Tensor:
        distances = np.empty((len(x), len(points)), dtype=np.float32)
        for rows, squared in points.squared_distances(points.moved(x)):
            distances[:, rows] = squared.T.numpy()
        # numpy's vectorised partition of values, then who is within: torch.topk, which carries
        # indices along, takes three times as long.
        last = np.partition(distances, k - 1, axis=1)[:, k - 1 : k]
        within = distances <= last
        for row in np.flatnonzero(within.sum(axis=1) > k):  # equal distances at the edge
            edge = np.flatnonzero(distances[row] == last[row])
            within[row, edge[k - within[row].sum() :]] = False
        return torch.from_numpy(within.nonzero()[1].reshape(len(x), k))

    return search
