"""What one threshold covers: one output, all of them or a share; both ends, or one."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ffcp.conformal.rank import exact_alpha, plain_quantile
from ffcp.metrics.intervals import KNOWN, share_of
from ffcp.regression.intervals import Ends, score, sides

BONFERRONI, ELLIPSOID = "bonferroni", "ellipsoid"
# Each on its own (False), all at once (True), at least a share of them at once (a number), all at
# once by a union bound ("bonferroni") or in an ellipsoid ("ellipsoid"); all that are known
# ("known"), or a share of those.
Joint = bool | float | str | tuple[float, str]


def checked_joint(joint: Any) -> Joint:
    """Return a valid ``joint``; the share 1 becomes True.

    >>> checked_joint(1.0), checked_joint((1.0, "known"))
    (True, 'known')
    """
    if has_own_thresholds(joint) or joint is True:
        return joint  # type: ignore[no-any-return]
    if joint == ELLIPSOID:
        raise ValueError(
            "joint='ellipsoid' needs a residual for each output and its scale: use CP, FFCP, LCP "
            "or FFLCP, or joint=True"
        )
    try:
        share, of_known = share_of(joint)
    except ValueError as error:
        raise ValueError(f"{error}; or 'ellipsoid', or 'bonferroni'") from None
    if of_known:
        return KNOWN if share == 1 else (share, KNOWN)
    return True if share == 1 else float(share)


def has_own_thresholds(joint: Joint) -> bool:
    """Whether every output has a threshold of its own."""
    return joint is False or joint == BONFERRONI


def is_share(joint: Joint) -> bool:
    """Whether fewer than all outputs of a row, or of the known ones, are covered at once."""
    return isinstance(joint, (float, tuple))


def is_of_known(joint: Joint) -> bool:
    """Whether outputs with missing targets are left out of joint coverage."""
    return not has_own_thresholds(joint) and joint != ELLIPSOID and share_of(joint)[1]


def needs_whole_rows(joint: Joint) -> bool:
    """Whether a row in which any target is missing has no score."""
    return not has_own_thresholds(joint) and not is_of_known(joint)


def reduced(scores: Tensor, joint: Joint) -> Tensor:
    """Return the scores to keep of those of all outputs (n, m): (n, 1) if joint."""
    return scores if has_own_thresholds(joint) else covering(scores, *share_of(joint))


def covering(scores: Tensor, share: Any, of_known: bool = False) -> Tensor:
    """Return for each row the smallest threshold that covers this share of its outputs.

    A row in which a score is unknown has none. With ``of_known`` only the known outputs are to be
    covered.

    >>> scores = torch.tensor([[1.0, 4.0, 2.0, 3.0], [5.0, torch.nan, 6.0, torch.nan]])
    >>> covering(scores, 0.75)[:, 0], covering(scores, 1, of_known=True)[:, 0]
    (tensor([3., nan]), tensor([4., 6.]))
    """
    known = (~scores.isnan()).sum(dim=1)
    if share == 1:
        largest = scores.nan_to_num(-math.inf, math.inf).amax(dim=1)
    else:
        exact = exact_alpha(share)
        ranks = {count: math.ceil(exact * count) for count in known.unique().tolist()}
        place = torch.tensor([ranks[count] for count in known.tolist()], device=scores.device)
        in_order = scores.sort(dim=1).values  # NaN comes last
        largest = in_order.gather(1, (place - 1).clamp_min(0)[:, None])[:, 0]
    fewest = 1 if of_known else scores.shape[1]
    return largest.masked_fill(known < fewest, math.nan)[:, None]


# -- sides: which ends are promised, both at once, one of them, or each on its own --------------
#
# Nested intervals score a target by how far it lies below the lower and above the upper end, and
# move each end by its threshold. Which scores are kept, and which thresholds move which end, is
# decided here for all methods.

BOTH, LOWER, UPPER, EACH = "both", "lower", "upper", "each"
SIDES = (BOTH, LOWER, UPPER, EACH)


def checked_side(side: Any, joint: Joint = False) -> str:
    """Return a valid ``side``; raise ValueError for 'each' with a share of the outputs.

    >>> checked_side("lower")
    'lower'
    """
    if side not in SIDES:
        raise ValueError(f"'side' must be one of {', '.join(map(repr, SIDES))}, got {side!r}")
    if side == EACH and is_share(joint):
        raise ValueError(
            f"side='each' does not go with a share of the outputs, joint={joint!r}: outputs may "
            "then be missed on either side. Take side='both', or joint=True"
        )
    return str(side)


def extent(side: str) -> str:
    """Return the word for the size of intervals: length, or reach if one end is promised.

    >>> extent("both"), extent("lower")
    ('length', 'reach')
    """
    return "reach" if side in (LOWER, UPPER) else "length"


def reach_explained(side: str) -> str:
    """Return the explanation of a reach, which may be negative; empty for lengths.

    >>> reach_explained("upper")
    '; reach: how far the upper limit lies above the prediction, negative if below'
    """
    if side not in (LOWER, UPPER):
        return ""
    outward, inward = ("below", "above") if side == LOWER else ("above", "below")
    return f"; reach: how far the {side} limit lies {outward} the prediction, negative if {inward}"


def kept_scores(ends: Ends, y: Tensor, side: str, joint: Joint) -> Tensor:
    """Return the scores to keep of targets (n, m), given the base interval and its scales."""
    if side == BOTH:
        return reduced(score(ends, y), joint)
    return reduced_sides(*sides(ends, y), side, joint)


def reduced_sides(below: Tensor, above: Tensor, side: str, joint: Joint) -> Tensor:
    """Return the scores to keep of those of both sides (n, m): with "each", below before above."""
    if side == EACH:
        return torch.cat([reduced(below, joint), reduced(above, joint)], dim=1)
    return reduced(below if side == LOWER else above, joint)


def two_sided(scores: Tensor, side: str) -> Tensor:
    """Return one score for each output, whichever end it lies beyond."""
    return torch.maximum(*scores.chunk(2, dim=1)) if side == EACH else scores


def columns_of(side: str, joint: Joint, outputs: int) -> int:
    """Return how many scores are kept of a row.

    >>> columns_of("each", False, outputs=3), columns_of("each", True, outputs=3)
    (6, 2)
    """
    return (outputs if has_own_thresholds(joint) else 1) * (2 if side == EACH else 1)


def shared_out(total: Any, side: str, joint: Joint, columns: int) -> Fraction:
    """Return the level of each threshold, given that of all together.

    >>> shared_out(0.1, "each", False, columns=6), shared_out(0.1, "each", "bonferroni", columns=6)
    (Fraction(1, 20), Fraction(1, 60))
    """
    exact = exact_alpha(total)
    if joint == BONFERRONI:
        return exact / columns
    return exact / 2 if side == EACH else exact


def growth(ends: Ends, side: str) -> tuple[Tensor, Tensor]:
    """Return the width of the base interval, and how fast the promised side grows.

    With a threshold for each end, half of the width belongs to each; an infinite side has none.
    """
    shape = torch.broadcast_shapes(ends.lo.shape, ends.scale_lo.shape)
    low, high = ends.scale_lo.expand(shape), ends.scale_hi.expand(shape)
    width = (ends.hi - ends.lo).expand(shape)
    if side == BOTH:
        return width, low + high
    if side == EACH:
        return torch.cat([width, width], dim=1) / 2, torch.cat([low, high], dim=1)
    return torch.zeros_like(width), low if side == LOWER else high


# -- scales: what makes outputs of different units comparable ----------------------------------

AUTO = "auto"
FEWEST_ROWS = 10  # with fewer, scales would be mostly noise
OutputScales = tuple[float, ...]


def checked_output_scales(output_scales: Any, joint: Joint) -> OutputScales | str | None:
    """Return valid output scales: one positive number per output, ``"auto"`` or ``None``.

    >>> checked_output_scales([1, 0.5], joint=True)
    (1.0, 0.5)
    """
    if output_scales is None or (isinstance(output_scales, str) and output_scales == AUTO):
        return None if has_own_thresholds(joint) else output_scales
    if has_own_thresholds(joint):
        raise ValueError(
            "'output_scales' needs outputs that share one threshold, and each has its own: leave "
            "it out, or pass joint=True"
        )
    try:
        numbers = torch.as_tensor(output_scales, dtype=torch.float64).flatten()
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.tensor([math.nan])
    if not len(numbers) or not bool((numbers.isfinite() & (numbers > 0)).all()):
        raise ValueError(
            f"'output_scales' must be one positive number per output, 'auto' or None, got "
            f"{output_scales!r}"
        )
    return tuple(numbers.tolist())


def learned_output_scales(scores: Tensor, alpha: Any) -> OutputScales | None:
    """Return a scale for each output, learned from scores (n, m); None for too few rows.

    The scale is the 1 - alpha quantile of their size: the threshold that each output would have
    alone. Where that is zero the largest counts, and an output without any error counts 1.

    >>> learned_output_scales(torch.tensor([[0.1, 100.0]]).repeat(20, 1).double(), alpha=0.1)
    (0.10000000149011612, 100.0)
    """
    if len(scores) < FEWEST_ROWS:
        return None
    sizes = scores.abs()
    output_scales = plain_quantile(sizes, alpha)
    largest = sizes.nan_to_num(0.0, posinf=0.0).amax(dim=0)
    output_scales = output_scales.where(output_scales.isfinite() & (output_scales > 0), largest)
    return tuple(output_scales.where(output_scales > 0, 1.0).tolist())


def with_output_scales(ends: Ends, output_scales: OutputScales) -> Ends:
    """Multiply the scales of a base interval by those of the outputs.

    >>> one = torch.ones(1, 2)
    >>> with_output_scales(Ends(one, one, one, one), (2.0, 3.0)).scale_hi
    tensor([[2., 3.]])
    """
    outputs = ends.lo.shape[1]
    if len(output_scales) != outputs:
        raise ValueError(
            f"'output_scales' has {len(output_scales)} numbers, but the model has {outputs} "
            "outputs: pass one per output"
        )
    factors = torch.tensor(output_scales, dtype=ends.lo.dtype, device=ends.lo.device)
    below = ends.scale_lo * factors
    above = below if ends.scale_hi is ends.scale_lo else ends.scale_hi * factors
    return Ends(ends.lo, ends.hi, below, above)
