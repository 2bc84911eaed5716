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


class Base(NamedTuple):
    """What a model says of a batch of inputs: a base band and a slack on each side."""

    lo: Tensor
    hi: Tensor
    slack_lo: Tensor
    slack_hi: Tensor

    @property
    def is_symmetric(self) -> bool:
        """Whether one centre and one slack serve both sides, which halves the arithmetic."""
        return self.lo is self.hi and self.slack_lo is self.slack_hi


def symmetric(prediction: Tensor, slack: Tensor) -> Base:
    """Make the base band of a point prediction: both ends are it, one slack serves both."""
    centre, slack = as_float64(prediction), as_float64(slack)
    return Base(centre, centre, slack, slack)


def two_sided(quantiles: Tensor, slack: Tensor) -> Base:
    """Make the base band of two quantiles in the last dimension, with a slack for each.

    Quantiles that cross are put in order, each with its own slack: a fixed function of the
    input, so it costs no coverage.

    >>> base = two_sided(torch.tensor([[2.0, 1.0]]), torch.tensor([[0.1, 0.2]]))
    >>> base.lo, base.slack_lo.float()
    (tensor([1.], dtype=torch.float64), tensor([0.2000]))
    """
    ends, order = as_float64(quantiles).sort(dim=-1)
    slack = as_float64(slack).expand_as(ends).gather(-1, order)
    return Base(ends[..., 0], ends[..., 1], slack[..., 0], slack[..., 1])


def floored(norms: Tensor, floor: float) -> Tensor:
    """Slack from gradient norms: a zero gradient is legal and gets the fixed ``floor``."""
    return as_float64(norms).clamp_min(floor)


def score(base: Base, y: Tensor) -> Tensor:
    """How far ``y`` lies outside the base band, in units of the slack (negative inside).

    >>> base = symmetric(torch.tensor([1.0]), torch.tensor([2.0]))
    >>> score(base, torch.tensor([5.0]))
    tensor([2.], dtype=torch.float64)
    """
    y = as_float64(y).to(base.lo.device)
    if base.is_symmetric:
        return (y - base.lo).abs_().div_(base.slack_lo)
    return torch.maximum((base.lo - y) / base.slack_lo, (y - base.hi) / base.slack_hi)


def interval(base: Base, threshold: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All y whose score is at most ``threshold``, as bounds of the given type.

    The bounds are rounded outward. A target with exactly the threshold's score, the one that
    the guarantee counts on when scores tie, must not fall out by rounding: score and bound
    round in float64, and the bound once more on its way to ``dtype``.

    >>> base = symmetric(torch.tensor([1.0]), torch.tensor([2.0]))
    >>> interval(base, torch.tensor(2.0), torch.float32)
    (tensor([-3.0000]), tensor([5.0000]))
    """
    threshold = as_float64(threshold).to(base.lo.device)
    below = above = _reach(base.lo, threshold * base.slack_lo, dtype)
    if not base.is_symmetric:
        above = _reach(base.hi, threshold * base.slack_hi, dtype)
    if bool((threshold < 0).any()):
        # Quantile bands can shrink, a bound then pass the largest number of a short type, and
        # the cast turn it into infinity on the wrong side.
        largest = torch.finfo(dtype).max
        lower = (base.lo - below).clamp_max(largest)
        upper = (base.hi + above).clamp_min(-largest)
        # A band that shrank to nothing is a point, not a negative length.
        middle = (lower + upper) / 2
        lower, upper = torch.minimum(lower, middle), torch.maximum(upper, middle)
        return lower.to(dtype), upper.to(dtype)
    shape = torch.broadcast_shapes(base.lo.shape, below.shape)
    lower, upper = (torch.empty(shape, dtype=dtype, device=base.lo.device) for _ in range(2))
    torch.sub(base.lo, below, out=lower)  # casts on the way, without another pass
    torch.add(base.hi, above, out=upper)
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
