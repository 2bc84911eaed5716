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


def symmetric(prediction: Tensor, slack: Tensor) -> Base:
    """Make the base band of a point prediction: both ends are it, one slack serves both."""
    center, slack = as_float64(prediction), as_float64(slack)
    return Base(center, center, slack, slack)


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
    if base.lo is base.hi and base.slack_lo is base.slack_hi:
        return (y - base.lo).abs_().div_(base.slack_lo)
    return torch.maximum((base.lo - y) / base.slack_lo, (y - base.hi) / base.slack_hi)


def interval(base: Base, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """All y whose score is at most ``threshold``, as float64 bounds.

    The bounds are rounded outward by a few units in the last place: computing the score and
    then the bound rounds four times, and a target with exactly the threshold's score, the
    one the guarantee counts on when scores tie, must not fall out.

    >>> base = symmetric(torch.tensor([1.0]), torch.tensor([2.0]))
    >>> lower, upper = interval(base, torch.tensor(2.0, dtype=torch.float64))
    >>> bool(lower <= -3) and bool(upper >= 5)
    True
    """
    threshold = threshold.to(base.lo.device)
    reach_lo, reach_hi = threshold * base.slack_lo, threshold * base.slack_hi
    guard = 4 * torch.finfo(torch.float64).eps
    lower = base.lo - reach_lo
    upper = base.hi + reach_hi
    lower -= guard * torch.maximum(base.lo.abs(), reach_lo.abs())
    upper += guard * torch.maximum(base.hi.abs(), reach_hi.abs())
    return lower, upper


def round_outward(lower: Tensor, upper: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Bring float64 bounds to the type and device of ``like`` without making the band smaller."""
    if like.dtype == torch.float64:
        return lower.to(like.device), upper.to(like.device)
    down, up = lower.to(like.dtype), upper.to(like.dtype)
    limit = torch.tensor(torch.inf, dtype=like.dtype, device=down.device)
    down = torch.where(down.double() > lower, torch.nextafter(down, -limit), down)
    up = torch.where(up.double() < upper, torch.nextafter(up, limit), up)
    return down.to(like.device), up.to(like.device)


def as_float64(values: Tensor) -> Tensor:
    """Convert to float64, on the CPU for devices that have no such type."""
    values = values.cpu() if values.device.type == "mps" else values
    return values.double()
