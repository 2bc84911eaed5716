"""How several outputs of a row are covered: each on its own, all at once, or a share of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ffcp.conformal.rank import exact_alpha, plain_quantile
from ffcp.metrics.intervals import KNOWN, share_of

BONFERRONI = "bonferroni"
# Each on its own (False), all at once (True), at least a share of them at once (a number), all at
# once by a union bound ("bonferroni"); all that are known ("known"), or a share of those.
Joint = bool | float | str | tuple[float, str]


def checked_joint(joint: Any) -> Joint:
    """Refuse what is no way to cover several outputs; the share 1 is all.

    >>> checked_joint(1.0), checked_joint((1.0, "known"))
    (True, 'known')
    """
    if has_own_thresholds(joint) or joint is True:
        return joint  # type: ignore[no-any-return]
    try:
        share, of_known = share_of(joint)
    except ValueError as error:
        raise ValueError(f"{error}; 'bonferroni' is another way") from None
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
    """Whether outputs whose target is missing are left out of what is covered at once."""
    return not has_own_thresholds(joint) and share_of(joint)[1]


def needs_whole_rows(joint: Joint) -> bool:
    """Whether a row in which any target is missing has no score."""
    return not has_own_thresholds(joint) and not share_of(joint)[1]


def reduced(scores: Tensor, joint: Joint) -> Tensor:
    """Turn the scores (n, m) of all outputs into those that are kept: (n, 1) if joint."""
    return scores if has_own_thresholds(joint) else covering(scores, *share_of(joint))


def covering(scores: Tensor, share: Any, of_known: bool = False) -> Tensor:
    """Return for each row the smallest threshold that covers this share of its outputs.

    A row in which a score is not known has none: the largest of the others says too little of
    all outputs. With ``of_known`` these alone are to be covered.

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


# -- scales: what makes outputs of different units comparable ----------------------------------

AUTO = "auto"
FEWEST_ROWS = 10  # below, scales would be more noise than help
OutputScales = tuple[float, ...]


def checked_output_scales(output_scales: Any, joint: Joint) -> OutputScales | str | None:
    """Read scales that are given: one positive number per output, ``"auto"`` or ``None``.

    >>> checked_output_scales([1, 0.5], joint=True)
    (1.0, 0.5)
    """
    if output_scales is None or (isinstance(output_scales, str) and output_scales == AUTO):
        return None if has_own_thresholds(joint) else output_scales
    if has_own_thresholds(joint):
        raise ValueError(
            "scales weigh outputs that share one threshold, and here every output has its own: "
            "leave out output_scales, or take joint=True"
        )
    try:
        numbers = torch.as_tensor(output_scales, dtype=torch.float64).flatten()
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.tensor([math.nan])
    if not len(numbers) or not bool((numbers.isfinite() & (numbers > 0)).all()):
        raise ValueError(
            f"output_scales must be one positive number per output, 'auto' or None, got "
            f"{output_scales!r}"
        )
    return tuple(numbers.tolist())


def learned_output_scales(scores: Tensor, alpha: Any) -> OutputScales | None:
    """Learn how large the scores (n, m) of each output are; None of too few rows.

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
