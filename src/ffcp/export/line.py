"""Localized thresholds of points on a line, as a graph looks them up.

By the nearest neighbours of one number x, a threshold depends on two kinds of comparisons: which
point is farther from x than the one behind the window of neighbours, and which calibration points
would have x among their own neighbours. Each changes at one or two places of the line, so the
threshold is constant between finitely many edges. Of an alpha that is known, all of them are worked
out by the library itself, one for every piece between two edges; the graph only searches for the
piece. Of an alpha that is an input there is no such table, and the graph does what
:mod:`ffcp.conformal.level` does: it bisects over the sorted scores.

The prediction of another machine may differ in its last digits, and lie in another piece: the
largest threshold within the distance of such a difference is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from ffcp.conformal.local import Local
from ffcp.conformal.neighbours import NEARLY, NearestWeights
from ffcp.export.share import Share, Thresholds
from ffcp.pieces import Seen

_UNITS = 64  # of rounding, of the farthest point: by so much predictions may differ


class OnALine:
    """Thresholds from the nearest calibration points, where points lie on a line."""

    def __init__(self, local: Local) -> None:
        self._local = local
        weights = local._weights(local.bandwidth or 0)
        assert isinstance(weights, NearestWeights)
        self._neighbours, self._ranks = weights.neighbours, weights._ranks
        self._line, self._rows = local.embedding[:, 0].sort(stable=True)
        outputs = range(local.coordinates)
        self._ends = [local._sorted_scores(output) for output in outputs]
        self._levels = []
        if local.guarantee == "level":
            self._levels = [local._level(weights, output) for output in outputs]
        self._off = _UNITS * float(self._line.abs().max()) * torch.finfo(torch.float32).eps

    def __call__(self, share: Share) -> Thresholds:
        """Look up the thresholds (n, columns)."""
        look_up = self._bisected(share)
        if isinstance(share.alpha, Fraction):
            look_up = self._tabled(share.alpha / share.parts)

        def thresholds(seen: Seen, group: Tensor | None) -> Tensor:
            return look_up(seen.output.reshape(-1, 1).to(torch.float32))

        return thresholds

    # -- an alpha that is known ---------------------------------------------------------------

    def _tabled(self, alpha: Fraction) -> Callable[[Tensor], Tensor]:
        edges = self._edges()
        before = _in_order(_number(edges[:1]) - 1)
        points = torch.cat([before, edges])[:, None]
        pieces = self._local.threshold(alpha, {"embedding": points})
        edges, table = _merged(*_widened(edges, pieces, self._off))
        width = max(1, math.isqrt(len(edges)))
        blocks = -(-max(1, len(edges)) // width)
        # Nothing is at or beyond NaN. The first edges of all blocks are searched, then a block.
        filled = edges.new_full((blocks * width,), math.nan)
        filled[: len(edges)] = edges
        in_blocks = filled.view(blocks, width)

        def look_up(at: Tensor) -> Tensor:
            block = ((in_blocks[:, 0] <= at).sum(dim=1) - 1).clamp_min(0)
            return table[block * width + (in_blocks[block] <= at).sum(dim=1)]

        return look_up

    def _edges(self) -> Tensor:
        """Give all places at which a threshold may change, ascending."""
        line, k = self._line, self._neighbours
        first, behind = line[: len(line) - k], line[k:]
        edges = [line[:1], _first(lambda x: x - first > behind - x, first)]
        for level in self._levels:
            reach = level.around.reach
            place = self._local.embedding[level.rows, 0]
            is_full = reach.isfinite()
            edges += _entering(place[is_full], reach[is_full])
        return torch.as_tensor(torch.cat(edges).unique())

    # -- an alpha that is an input ------------------------------------------------------------

    def _bisected(self, share: Share) -> Callable[[Tensor], Tensor]:
        moves = torch.tensor([-self._off, 0.0, self._off])

        def look_up(x: Tensor) -> Tensor:
            at = x + moves
            rows = self._rows[self._begin(at)[..., None] + torch.arange(self._neighbours)]
            columns = []
            for output, ends in enumerate(self._ends):
                ranks = self._ranks[output][rows]
                find = self._by_level if self._levels else self._plain
                columns.append(ends[find(share, output, at, ranks)].amax(dim=1))
            return torch.stack(columns, dim=1)

        return look_up

    def _begin(self, at: Tensor) -> Tensor:
        """Search for the first neighbour of every point."""
        last, k = len(self._line) - self._neighbours, self._neighbours

        def is_before(middle: Tensor) -> Tensor:
            behind = self._line[(middle + k).clamp_max(len(self._line) - 1)]
            return at - self._line[middle] > behind - at

        return _bisect(torch.zeros_like(at, dtype=torch.int64), last, is_before)

    def _plain(self, share: Share, output: int, at: Tensor, ranks: Tensor) -> Tensor:
        """Give the position of the neighbour's score that the share asks for."""
        ordered = torch.nn.functional.pad(ranks.sort(dim=-1).values, (0, 1), value=len(self._line))
        place = share.ranks(torch.tensor([self._neighbours])) - 1
        return ordered[..., place.clamp(0, self._neighbours)][..., 0]

    def _by_level(self, share: Share, output: int, at: Tensor, ranks: Tensor) -> Tensor:
        """Give the position of the score that ends the band.

        All shares are of neighbours and the point itself, so that their counts are compared.
        """
        level = self._levels[output]
        smaller, _, pushed, reach = level.around
        place = self._local.embedding[level.rows, 0]
        may_enter, must_enter = _enters(place, reach)
        if_smaller = smaller + torch.where(may_enter(at[..., None]), 1, pushed)
        if_not = smaller + torch.where(must_enter(at[..., None]), 0, pushed)
        wanted = share.ranks(torch.tensor([len(level.rows)]))

        def goes_on(middle: Tensor) -> Tensor:
            count = (ranks <= middle[..., None]).sum(dim=-1, keepdim=True)
            counts = torch.where(level.left > middle[..., None], if_smaller, if_not)
            return (counts < count).sum(dim=-1) < wanted

        return _bisect(torch.zeros_like(at, dtype=torch.int64), len(self._line), goes_on)


Condition = Callable[[Tensor], Tensor]


def _enters(place: Tensor, reach: Tensor) -> tuple[Condition, Condition]:
    """Say where a new point may, and where it must be among the neighbours of these points.

    ``reach`` is the squared distance of the farthest of them; see
    :class:`ffcp.conformal.neighbours.NearestWeights`.
    """

    def squared(x: Tensor) -> Tensor:
        return (place - x).double().square()

    nearly = reach * NEARLY
    return (lambda x: squared(x) <= reach + nearly), (lambda x: squared(x) < reach - nearly)


def _entering(place: Tensor, reach: Tensor) -> list[Tensor]:
    """Give the places from which on a new point enters, and no longer enters."""
    may, must = _enters(place, reach)
    return [
        _first(lambda x: (x > place) | may(x), place),
        _first(lambda x: (x > place) & ~may(x), place),
        _first(lambda x: (x > place) | must(x), place),
        _first(lambda x: (x > place) & ~must(x), place),
    ]


def _bisect(low: Tensor, last: int, goes_on: Condition) -> Tensor:
    """Find the first number up to ``last`` at which it does not go on, in a fixed number of steps.

    >>> _bisect(torch.tensor([0, 0]), 9, lambda middle: middle < torch.tensor([4, 20]))
    tensor([4, 9])
    """
    high = torch.full_like(low, last)
    for _ in range(last.bit_length()):
        middle = (low + high) // 2
        on = goes_on(middle) & (low < high)
        low, high = torch.where(on, middle + 1, low), torch.where(on, high, middle)
    return low


def _number(x: Tensor) -> Tensor:
    """Count floating-point numbers from zero, in their order.

    >>> _number(torch.tensor([0.0, 1e-45, -1e-45]))
    tensor([ 0,  1, -1])
    """
    bits = x.view(torch.int32).long()
    return bits.where(bits >= 0, -(bits + 2**31))


def _in_order(number: Tensor) -> Tensor:
    """Give the floating-point numbers of these places.

    >>> _in_order(_number(torch.tensor([-0.5, 3.0])))
    tensor([-0.5000,  3.0000])
    """
    return number.where(number >= 0, -number - 2**31).to(torch.int32).view(torch.float32)


def _first(is_beyond: Condition, like: Tensor) -> Tensor:
    """Find the first numbers of all at which conditions hold that hold from there on.

    >>> _first(lambda x: x * 3 >= 1, torch.zeros(1))
    tensor([0.3333])
    """
    largest = int(_number(torch.tensor([torch.finfo(torch.float32).max])))
    low = torch.full(like.shape, -largest)
    high = -low
    while bool((low < high).any()):
        middle = torch.div(low + high, 2, rounding_mode="floor")
        holds = is_beyond(_in_order(middle))
        high = torch.where(holds, middle, high)
        low = torch.where(holds, low, middle + 1).minimum(high)
    return _in_order(high)


def _widened(edges: Tensor, pieces: Tensor, off: float) -> tuple[Tensor, Tensor]:
    """Give every place the largest threshold within a distance.

    >>> widened = _widened(torch.tensor([0.0]), torch.tensor([[3.0], [1.0]]), 0.5)
    >>> [part.flatten().tolist() for part in widened]
    [[-0.5, 0.5], [3.0, 3.0, 1.0]]
    """
    begin, end = edges - off, edges + off  # of a piece, and of the one before it
    wider = torch.cat([begin, end]).unique()
    first = torch.searchsorted(end, wider, right=True)
    last = torch.searchsorted(begin, wider, right=True)
    behind = np.full((1, pieces.shape[1]), -np.inf)
    values = np.concatenate([pieces.numpy(), behind])
    spans = torch.stack([first, last + 1], dim=1).flatten().numpy()
    largest = torch.from_numpy(np.maximum.reduceat(values, spans, axis=0)[::2])
    return wider, torch.cat([pieces[:1], largest])


def _merged(edges: Tensor, pieces: Tensor) -> tuple[Tensor, Tensor]:
    """Leave out edges between equal pieces.

    >>> _merged(torch.tensor([1.0, 2.0]), torch.tensor([[5.0], [5.0], [6.0]]))[0]
    tensor([2.])
    """
    differ = (pieces[1:] != pieces[:-1]).any(dim=1)
    return edges[differ], torch.cat([pieces[:1], pieces[1:][differ]])
