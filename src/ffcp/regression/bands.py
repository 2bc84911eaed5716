"""The one formula of the regression family: base band and slack give score and interval.

    score(x, y)   = max( (lo - y) / s_lo , (y - hi) / s_hi )
    interval(x,q) = [ lo - q * s_lo , hi + q * s_hi ]

CP has lo = hi = f(x) and slack 1; FFCP has the gradient norm as slack; the quantile methods
have two quantiles as lo and hi. Arithmetic is in float64 whatever the model's type.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Interval(NamedTuple):
    """A prediction band, each part in the shape and type of the model's output.

    >>> band = Interval(torch.zeros(2), torch.ones(2), torch.full((2,), 0.5))
    >>> band.upper - band.lower
    tensor([1., 1.])
    """

    lower: Tensor
    upper: Tensor
    prediction: Tensor


class Ends(NamedTuple):
    """What a model says of a batch: a base band and a slack on each side, (n, m) each."""

    lo: Tensor
    hi: Tensor
    slack_lo: Tensor
    slack_hi: Tensor

    @property
    def is_symmetric(self) -> bool:
        """Whether one centre and one slack serve both sides, which halves the arithmetic."""
        return self.lo is self.hi and self.slack_lo is self.slack_hi


def score(ends: Ends, y: Tensor) -> Tensor:
    """How far ``y`` lies outside the base band, in units of the slack (negative inside).

    >>> one, two = torch.tensor([1.0]), torch.tensor([2.0])
    >>> ends = Ends(one, one, two, two)
    >>> score(ends, torch.tensor([5.0]))
    tensor([2.], dtype=torch.float64)
    """
    y = as_float64(y).to(ends.lo.device)
    if ends.is_symmetric:
        return (y - ends.lo).abs_().div_(ends.slack_lo)
    return torch.maximum((ends.lo - y) / ends.slack_lo, (y - ends.hi) / ends.slack_hi)


def interval(ends: Ends, threshold: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All y whose score is at most ``threshold``, as bounds of the given type.

    The bounds are rounded outward. A target with exactly the threshold's score, the one that
    the guarantee counts on when scores tie, must not fall out by rounding: score and bound
    round in float64, and the bound once more on its way to ``dtype``.

    >>> one, two = torch.tensor([1.0]), torch.tensor([2.0])
    >>> ends = Ends(one, one, two, two)
    >>> interval(ends, torch.tensor(2.0), torch.float32)
    (tensor([-3.0000]), tensor([5.0000]))
    """
    threshold = as_float64(threshold).to(ends.lo.device)
    below = above = _reach(ends.lo, threshold * ends.slack_lo, dtype)
    if not ends.is_symmetric:
        above = _reach(ends.hi, threshold * ends.slack_hi, dtype)
    if bool((threshold < 0).any()):
        # Quantile bands can shrink, a bound then pass the largest number of a short type, and
        # the cast turn it into infinity on the wrong side.
        largest = torch.finfo(dtype).max
        lower = (ends.lo - below).clamp_max(largest)
        upper = (ends.hi + above).clamp_min(-largest)
        # A band that shrank to nothing is a point, not a negative length.
        middle = (lower + upper) / 2
        lower, upper = torch.minimum(lower, middle), torch.maximum(upper, middle)
        return lower.to(dtype), upper.to(dtype)
    shape = torch.broadcast_shapes(ends.lo.shape, below.shape)
    lower, upper = (torch.empty(shape, dtype=dtype, device=ends.lo.device) for _ in range(2))
    torch.sub(ends.lo, below, out=lower)  # casts on the way, without another pass
    torch.add(ends.hi, above, out=upper)
    return lower, upper


def _reach(start: Tensor, reach: Tensor, dtype: torch.dtype) -> Tensor:
    """Lengthen a step from ``start`` by all that rounding can take from it."""
    limits = torch.finfo(dtype)
    unit = max(0.51 * limits.eps, 4 * torch.finfo(torch.float64).eps)
    guarded = torch.add(reach, reach.abs(), alpha=unit).add_(limits.tiny)
    return torch.add(guarded, start.abs(), alpha=unit)


def as_float64(values: Tensor) -> Tensor:
    """Convert to float64, on the CPU for devices that have no such type."""
    values = values.cpu() if values.device.type == "mps" else values
    return values.double()
