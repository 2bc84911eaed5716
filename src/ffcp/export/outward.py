"""Bands of a base and a scale in a graph: in the model's own type, and rounded outward.

The library works in float64 and rounds once. A graph has few operations to spare, so it stays in
the type of the model and moves both ends outward by more than that, and another machine, can round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ffcp.batch import BatchOutput
from ffcp.network.jacobian.norms import wide
from ffcp.regression.intervals import Ends
from ffcp.regression.scaled_score import RegressionScore, ScaledScore
from ffcp.regression.sides import BOTH, EACH

_UNITS = 8  # of rounding


def near(dtype: torch.dtype) -> float:
    """Return the share of a number that a few roundings can take from it."""
    return _UNITS * torch.finfo(dtype).eps


class Outward(RegressionScore):
    """Bands of a base and a scale, in a graph.

    Parameters
    ----------
    bands
        The family whose bands they are.
    seen
        What the pass saw.
    rounding
        By how much another machine's results differ, for each output.

    Examples
    --------
    >>> from ffcp.scales import Constant
    >>> from ffcp.scores import Point
    >>> out = BatchOutput(None, torch.tensor([[3.0]]), {}, {}, range(1))
    >>> outward = Outward(ScaledScore(Point(), Constant()), out, torch.zeros(1))
    >>> lower, upper = outward.interval(out, torch.tensor([2.0]))
    >>> bool(0.99999 < lower < 1) and bool(5 < upper < 5.00001)
    True
    """

    def __init__(self, bands: ScaledScore, out: BatchOutput, rounding: Tensor) -> None:
        self.joint, self.side = bands.joint, bands.side
        self._dtype, self._rounding = out.output.dtype, rounding.reshape(-1)
        self._ends = _in_type(bands.ends(out), wide(self._dtype))

    def interval_ends(
        self, out: BatchOutput, below: Tensor, above: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the ends (n, m) whose targets have at most these one-sided scores."""
        ends = self._ends
        if ends.is_symmetric and below is above:
            # In this order: where scales are constant, the first two terms are one number.
            step = self._larger(below) * ends.scale_lo + self._rounding + self._near(ends.lo)
            return (ends.lo - step).to(self._dtype), (ends.hi + step).to(self._dtype)
        down, up = (
            self._in_type(score) * scale
            for score, scale in ((below, ends.scale_lo), (above, ends.scale_hi))
        )
        under = self._near(ends.lo) + self._near(down) + self._rounding
        over = self._near(ends.hi) + self._near(up) + self._rounding
        # Bands can shrink: a bound beyond the largest number is not beyond all. Not by clamp_max,
        # which in onnxruntime ends at the smallest number, too, and leaves no infinity.
        largest = torch.tensor(torch.finfo(self._dtype).max, dtype=down.dtype)
        lower = torch.minimum(ends.lo - down, largest)
        upper = torch.maximum(ends.hi + up, -largest)
        if self.side in (BOTH, EACH):
            # What shrank to nothing is a point, and whether it did depends on both ends.
            is_empty, middle = lower > upper, lower / 2 + upper / 2
            lower, upper = lower.where(~is_empty, middle), upper.where(~is_empty, middle)
            under = over = under + over
        return (lower - under).to(self._dtype), (upper + over).to(self._dtype)

    def _in_type(self, threshold: Tensor) -> Tensor:
        """Bring thresholds to the type, none of them to less than it was by underflow."""
        dtype = wide(self._dtype)
        return threshold.to(dtype) + torch.finfo(dtype).tiny

    def _larger(self, threshold: Tensor) -> Tensor:
        """Lengthen thresholds, none of which is below zero, by all that rounding can take."""
        return self._in_type(threshold * (1 + near(self._dtype)))

    def _near(self, number: Tensor) -> Tensor:
        return number.abs() * near(self._dtype)


def _in_type(ends: Ends, dtype: torch.dtype) -> Ends:
    """Convert ends, and leave those one that are one."""
    lo, scale = ends.lo.to(dtype), ends.scale_lo.to(dtype)
    if ends.is_symmetric:
        return Ends(lo, lo, scale, scale)
    return Ends(lo, ends.hi.to(dtype), scale, ends.scale_hi.to(dtype))
