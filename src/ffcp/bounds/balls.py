"""Balls around rows: validation of the arguments, and work on a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ffcp.bounds.rules import Bounds

# Number of elements in a working tensor: small enough for the caches, large enough that the
# cost of calling torch does not show. `python -m benchmarks.bounds` is fastest around it.
ELEMENTS = 2**18


class Ball(NamedTuple):
    """One ball per row: centers (n, ...), radii (n,), and the norm, inf or 2."""

    center: Tensor
    radius: Tensor
    norm: float


def checked_ball(center: Tensor, radius: float | Tensor, norm: float | str) -> Ball:
    """Return a validated ball; an error names the value or row that is wrong."""
    if float(norm) not in (math.inf, 2.0):
        raise ValueError(f"'norm' must be math.inf or 2, got {norm!r}")
    if center.ndim == 0 or not center.is_floating_point():
        raise ValueError(f"center: expected floating-point rows, got {center.dtype} {center.shape}")
    if not math.isfinite(center.sum()):
        bad = (~center.isfinite()).reshape(len(center), -1).any(1)
        if bad.any():
            raise ValueError(f"center is not finite in row {int(bad.nonzero()[0])}")
    radii = torch.as_tensor(radius).to(center)
    if radii.ndim > 0 and radii.shape != center.shape[:1]:
        raise ValueError(
            f"'radius' has shape {tuple(radii.shape)}, expected one radius per row: {len(center)}"
        )
    radii = radii.expand(len(center))
    bad = ~(radii >= 0)  # NaN too
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ValueError(f"radius is {radii[row].item()} in row {row}; it must be at least 0")
    return Ball(center, radii, float(norm))


def by_rows(bound: Callable[[Ball], Bounds], ball: Ball, rows: int) -> Bounds:
    """Bound a few rows at a time, so that intermediates stay small."""
    center, radius, norm = ball
    rows = max(rows, 1)
    if len(center) <= rows:
        return bound(ball)
    parts = [
        bound(Ball(c, r, norm))
        for c, r in zip(torch.split(center, rows), torch.split(radius, rows), strict=True)
    ]
    return Bounds(*(torch.cat(ends) for ends in zip(*parts, strict=True)))


def column(radius: Tensor, like: Tensor) -> Tensor:
    """Lay out one number per row so that it multiplies all values of the row."""
    return radius.view(-1, *[1] * (like.ndim - 1))


def box_of(value: Ball | Bounds) -> Bounds:
    """Return the smallest box around a ball."""
    if isinstance(value, Bounds):
        return value
    radius = column(value.radius, value.center)
    return Bounds(value.center - radius, value.center + radius)
