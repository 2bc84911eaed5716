"""Which side of a band is promised: both ends at once, one of them, or each on its own.

A family of nested bands scores a target by how far it lies below the lower and above the upper end
(``sides``), and moves each end by a threshold of its own (``reach``). What is kept of these scores
and which thresholds move which end is decided here, once for all families.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ffcp.conformal.rank import exact_alpha
from ffcp.regression.intervals import Ends
from ffcp.regression.joint import BONFERRONI, Joint, has_own_thresholds, is_share, reduced

BOTH, LOWER, UPPER, EACH = "both", "lower", "upper", "each"
SIDES = (BOTH, LOWER, UPPER, EACH)


def checked_side(side: Any, joint: Joint = False) -> str:
    """Refuse what is no side, and a threshold for each side of a share of the outputs.

    >>> checked_side("lower")
    'lower'
    """
    if side not in SIDES:
        raise ValueError(f"side must be one of {', '.join(map(repr, SIDES))}, got {side!r}")
    if side == EACH and is_share(joint):
        raise ValueError(
            f"side='each' does not go with a share of the outputs, joint={joint!r}: outputs may "
            "then be missed on either side. Take side='both', or joint=True"
        )
    return str(side)


def extent(side: str) -> str:
    """Name what says how far bands go: their length, or the reach of the one end that is promised.

    >>> extent("both"), extent("lower")
    ('length', 'reach')
    """
    return "reach" if side in (LOWER, UPPER) else "length"


def what_reach_is(side: str) -> str:
    """Say what a reach is, to those who see one: it may be negative, as no length is.

    >>> what_reach_is("upper")
    '; reach: how far the upper limit lies above the prediction, negative if below'
    """
    if side not in (LOWER, UPPER):
        return ""
    there, back = ("below", "above") if side == LOWER else ("above", "below")
    return f"; reach: how far the {side} limit lies {there} the prediction, negative if {back}"


def reduced_sides(scores: Tensor, side: str, joint: Joint) -> Tensor:
    """Turn the scores of all outputs, those below before those above, into those to keep."""
    if side != EACH:
        return reduced(scores, joint)
    return torch.cat([reduced(part, joint) for part in scores.chunk(2, dim=1)], dim=1)


def two_sided(scores: Tensor, side: str) -> Tensor:
    """Turn the scores of all outputs into one for each, whichever end it lies beyond."""
    return torch.maximum(*scores.chunk(2, dim=1)) if side == EACH else scores


def columns_of(side: str, joint: Joint, outputs: int) -> int:
    """Say how many scores are kept of a row.

    >>> columns_of("each", False, outputs=3), columns_of("each", True, outputs=3)
    (6, 2)
    """
    return (outputs if has_own_thresholds(joint) else 1) * (2 if side == EACH else 1)


def shared_out(total: Any, side: str, joint: Joint, columns: int) -> Fraction:
    """Give each threshold its share of the misses, or of the doubt, that all of them may have.

    >>> shared_out(0.1, "each", False, columns=6), shared_out(0.1, "each", "bonferroni", columns=6)
    (Fraction(1, 20), Fraction(1, 60))
    """
    exact = exact_alpha(total)
    if joint == BONFERRONI:
        return exact / columns
    return exact / 2 if side == EACH else exact


def growth(ends: Ends, side: str) -> tuple[Tensor, Tensor]:
    """Give the width of the base band, and how much the promised side grows with a threshold.

    Half of the width belongs to each end where each has a threshold; an open side has none.
    """
    shape = torch.broadcast_shapes(ends.lo.shape, ends.scale_lo.shape)
    low, high = ends.scale_lo.expand(shape), ends.scale_hi.expand(shape)
    width = (ends.hi - ends.lo).expand(shape)
    if side == BOTH:
        return width, low + high
    if side == EACH:
        return torch.cat([width, width], dim=1) / 2, torch.cat([low, high], dim=1)
    return torch.zeros_like(width), low if side == LOWER else high
