"""Weights of calibration rows around new ones, in whole numbers, and weighted quantiles.

Weights are multiples of 2**-23 counted in these units, so every sum of them is exact, whatever the
order or the blocks it was made in, and a weighted quantile falls on the right score even where the
running sum meets the level exactly. The distances behind the weights are matrix products, which
round by their shape: in many dimensions some weights differ by one unit between blocks of
different sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ffcp.conformal.kernels import Kernel

ONE = 2**23  # the weight 1, in whole numbers
_CACHE = 2**19  # weights computed at once: they fit into the cache
_ROWS = 2**16  # points converted at once
_CENTRED = 2**10  # points that determine the centre


class Surroundings(NamedTuple):
    """Sums of weights around some calibration rows, without a new row; one number for each.

    Attributes
    ----------
    smaller, all_rows : Tensor
        Weight of smaller scores, and of all, without the neighbour that a new row may replace.
    replaced : Tensor
        Weight of smaller scores that a new row replaces where it enters.
    squared_radius : Tensor
        Squared distance up to which a new row enters.
    """

    smaller: Tensor
    all_rows: Tensor
    replaced: Tensor
    squared_radius: Tensor


class Entry(NamedTuple):
    """The weights that new rows add to the sums around others, (m, b) or the same everywhere."""

    if_smaller: Tensor  # to the weight of smaller scores, if the new score is smaller
    if_not: Tensor | int  # and if it is not
    total: Tensor | int


class RunningSums:
    """Running sums down the columns of integer weights (n, b), kept at every 128th row.

    Column j holds the weights of n sorted scores at the j-th point, at most 2**23 each.

    >>> sums = RunningSums(torch.tensor([[1, 0], [2, 0], [3, 5]], dtype=torch.int32))
    >>> sums.total
    tensor([6, 5])
    >>> sums.position(torch.tensor([3, 6]))  # 1 + 2 = 3 at row 1; 6 is never reached
    tensor([1, 3])
    >>> sums.before(torch.tensor([2, 2]))
    tensor([3, 0])
    """

    step = 128  # 128 * 2**23 fits into 32 bits

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights
        n, columns = weights.shape
        full = n - n % self.step
        parts = weights[:full].view(-1, self.step, columns).sum(dim=1, dtype=torch.int32)
        if full < n:
            rest = weights[full:].sum(dim=0, keepdim=True, dtype=torch.int32)
            parts = torch.cat([parts, rest])
        start = torch.zeros(1, columns, dtype=torch.int64, device=weights.device)
        self._sums = torch.cat([start, parts.cumsum(dim=0, dtype=torch.int64)])

    @property
    def total(self) -> Tensor:
        """The sum of each column."""
        return self._sums[-1]

    def position(self, target: Tensor) -> Tensor:
        """First row at which the running sum, that row included, reaches ``target``, or n.

        Targets, one per column, are at least 1.
        """
        block = (self._sums[1:] < target).sum(dim=0)
        missing = target - self._sums.gather(0, block[None])[0]
        inside = (self._block(block).cumsum(dim=0) < missing).sum(dim=0)
        return (block * self.step + inside).clamp_max(len(self._weights))

    def before(self, row: Tensor) -> Tensor:
        """Sum of the weights above a row, one row number per column."""
        block = row // self.step
        above = torch.arange(self.step, device=row.device)[:, None] < row - block * self.step
        return self._sums.gather(0, block[None])[0] + (self._block(block) * above).sum(dim=0)

    def _block(self, block: Tensor) -> Tensor:
        """Weights (128, b) of one block of rows per column; zero beyond the last row."""
        rows = block * self.step + torch.arange(self.step, device=block.device)[:, None]
        weights = self._weights.gather(0, rows.clamp_max(len(self._weights) - 1)).long()
        return weights.where(rows < len(self._weights), 0)


class Places:
    """Embedded points to which distances are taken, in blocks.

    Parameters
    ----------
    embedding : Tensor
        The points (n, e).
    unit : float, default=1.0
        What distances are measured in.
    order : Tensor, default=None
        Rows in the order in which distances are wanted.
    fine : float, default=1.0
        Smallest distance that matters, in these units.
    """

    def __init__(
        self,
        embedding: Tensor,
        unit: float = 1.0,
        order: Tensor | None = None,
        fine: float = 1.0,
    ) -> None:
        self._unit = unit
        # Distances come from |a|^2 + |b|^2 - 2ab, which cancels; centring makes it harmless
        # unless distances of interest are tiny compared with the spread of the points. The centre
        # is the middle of two quartiles: a single distant point would move the mean.
        count = len(embedding)
        sample = torch.linspace(0, count - 1, min(count, _CENTRED), dtype=torch.float64).long()
        ordered = embedding[sample].double().sort(dim=0).values
        last = len(ordered) - 1
        self._centre = ordered[[last // 4, last - last // 4]].mean(dim=0)
        spread = max((float(p.abs().max()) for p in self._moved(embedding)), default=0.0)
        near = spread * math.sqrt(embedding.shape[1]) < 100 * fine
        self._type = torch.float32 if near else torch.float64
        order = torch.arange(len(embedding)) if order is None else order
        # Two more columns make one product of all three terms, in one pass.
        self._points = torch.ones(len(order), embedding.shape[1] + 2, dtype=self._type)
        for points, rows in zip(self._points.split(_ROWS), order.split(_ROWS), strict=True):
            points[:, :-2] = next(self._moved(embedding[rows]))
            points[:, -2] = points[:, :-2].square().sum(dim=1)

    def __len__(self) -> int:
        return len(self._points)

    def _moved(self, x: Tensor) -> Iterator[Tensor]:
        for part in x.split(_ROWS):
            yield (part.double() - self._centre) / self._unit

    def moved(self, x: Tensor) -> Tensor:
        """Return other points, centred and scaled like these."""
        return torch.cat(list(self._moved(x))).to(self._type)

    def from_each(self, x: Tensor) -> Tensor:
        """Return the squared distances (b, n) of all points from the moved points ``x``, (b, e)."""
        squared = torch.empty(len(x), len(self), dtype=self._type)
        # With ``out``, autocast leaves it alone.
        return torch.mm(_factors(x), self._points.T, out=squared).clamp_min_(0)

    def rounding(self, x: Tensor) -> Tensor:
        """Return a bound (b, n) on the rounding of squared distances in float64."""
        return 1e-14 * (x.square().sum(dim=1, keepdim=True) + self._points[:, -2])

    def squared_distances(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks (rows, b) of squared distances to the moved points ``x``, (b, e)."""
        transposed = _factors(x).T.contiguous()
        size = max(1, _CACHE // max(1, len(x)))
        block = torch.empty(min(size, len(self)), len(x), dtype=self._type)
        for start in range(0, len(self), size):
            rows = slice(start, min(start + size, len(self)))
            squared = block[: rows.stop - rows.start]
            torch.mm(self._points[rows], transposed, out=squared)
            yield rows, squared.clamp_min_(0)


def _factors(x: Tensor) -> Tensor:
    """Return the factors of the points, extended by two columns, for squared distances."""
    factors = torch.cat([-2 * x, x.new_ones(len(x), 2)], dim=1)
    factors[:, -1] = x.square().sum(dim=1)
    return factors


class Weighed(NamedTuple):
    """Weights (n, b) of all calibration rows around some points.

    Rows are in the order of the first output's scores; ``positions`` has, for every output, the
    positions of its ordered scores among them.
    """

    weights: Tensor
    positions: list[Tensor]

    def sums(self, output: int) -> RunningSums:
        """Return the weights in the order of one output's scores."""
        return RunningSums(self.weights if output == 0 else self.weights[self.positions[output]])


class KernelWeights:
    """Weighs calibration rows by a kernel of their distance.

    Parameters
    ----------
    embedding : Tensor
        Calibration points (n, e).
    orders : list of Tensor
        For each output the rows by ascending score.
    kernel : Kernel
    bandwidth : float
        The kernel, and its unit of distance.
    """

    def __init__(
        self, embedding: Tensor, orders: list[Tensor], kernel: Kernel, bandwidth: float
    ) -> None:
        self.kernel, self.bandwidth = kernel, bandwidth
        self.own = 1 if kernel.is_sharp else ONE  # the weight 1
        # A box is cut in the units that were given: a point on its edge is in.
        unit, fine = (1.0, bandwidth) if kernel.is_sharp else (bandwidth, 1.0)
        self._points = Places(embedding, unit, orders[0], fine)
        self._position = torch.empty_like(orders[0])  # of each row in the order of the first output
        self._position[orders[0]] = torch.arange(len(orders[0]))
        self._positions = [self._position[order] for order in orders]

    def around(self, x: Tensor) -> Weighed:
        """Weigh all points around each of ``x``, (b, e)."""
        return Weighed(self._weigh(self._points.moved(x)), self._positions)

    def around_calibration(
        self, x: Tensor, rows: Tensor, left: Tensor, output: int
    ) -> Surroundings:
        """Weigh all points around calibration rows ``x``: their sums, split at ``left``."""
        sums = self.around(x).sums(output)
        none = torch.zeros_like(left)
        return Surroundings(sums.before(left), sums.total, none, none.double())

    def entering(self, rows: Tensor, around: Surroundings) -> Callable[[Weighed, Tensor], Entry]:
        """Return what computes the effect of new rows on the sums around calibration ``rows``."""
        positions = self._position[rows]

        def enter(near: Weighed, x: Tensor) -> Entry:
            added = near.weights[positions].double()  # a kernel is symmetric
            return Entry(added, 0, added)

        return enter

    def _weigh(self, x: Tensor) -> Tensor:
        weights = torch.empty(len(self._points), len(x), dtype=torch.int32)
        for rows, squared in self._points.squared_distances(x):
            if self.kernel.is_sharp:
                weights[rows] = squared <= self.bandwidth**2
            else:
                weights[rows] = whole(self.kernel.log_weight(squared))
        return weights

    def around_random(self, x: Tensor, steps: Tensor) -> tuple[Weighed, Tensor]:
        """Weigh all points, and ``x`` itself, around the random neighbour ``steps`` from x."""
        moved = self._points.moved(x)
        step = steps.to(moved.dtype)
        if self.kernel.is_sharp:  # x is within reach of the neighbour
            weights = self._weigh(moved + self.bandwidth * step)
            own = torch.ones(len(x), dtype=torch.int64)
        else:
            weights, own = self._weigh_by_ratio(moved + step, step)
        return Weighed(weights, self._positions), own

    def _weigh_by_ratio(self, centre: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Weigh points, and those ``step`` away, relative to the largest weight of each column.

        Only ratios matter here, and in many dimensions the centre is far from everything.
        """
        own = largest = self.kernel.log_weight(step.square().sum(dim=1))
        logs = torch.empty(len(self._points), len(centre), dtype=centre.dtype)
        for rows, squared in self._points.squared_distances(centre):
            block = self.kernel.log_weight(squared)
            logs[rows] = block
            largest = torch.maximum(largest, block.amax(dim=0))  # while it is in the cache
        weights = torch.empty(logs.shape, dtype=torch.int32)
        size = max(1, _CACHE // max(1, len(centre)))
        for start in range(0, len(logs), size):
            rows = slice(start, start + size)
            weights[rows] = whole(logs[rows].sub_(largest))
        return weights, whole(own - largest).long()


def whole(log_weights: Tensor) -> Tensor:
    """Round weights, given by their logarithms, to multiples of 2**-23; overwrites them.

    The result is in these units, and still floating point: a copy to integers cuts it off.

    >>> whole(torch.tensor([0.0, -2.0, -100.0])).int()
    tensor([8388608, 1135275,       0], dtype=torch.int32)
    """
    # Below exp(-17) weights round to zero; exp() of less would give denormals, which are slow.
    weights = log_weights.clamp_(-17.0, 0.0).exp_()
    return torch.add(weights.new_tensor(0.5), weights, alpha=ONE, out=weights)
