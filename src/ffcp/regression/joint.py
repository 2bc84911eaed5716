"""How several outputs of a row are covered: each on its own, all at once, or a share of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ffcp.conformal.rank import exact_alpha

BONFERRONI = "bonferroni"
# Each on its own (False), all at once (True), at least a share of them at once (a number), or all
# at once by a union bound ("bonferroni").
Joint = bool | float | str


def checked_joint(joint: Any) -> Joint:
    """Refuse what is no way to cover several outputs; the share 1 is all.

    >>> checked_joint(1.0)
    True
    """
    if isinstance(joint, bool) or (isinstance(joint, str) and joint == BONFERRONI):
        return joint
    if isinstance(joint, float) and 0 < joint <= 1:
        return joint == 1 or joint
    raise ValueError(
        "joint must be False, True, a share of the outputs between 0 and 1, or 'bonferroni', "
        f"got {joint!r}"
    )


def has_own_thresholds(joint: Joint) -> bool:
    """Say whether every output has a threshold of its own."""
    return joint is False or joint == BONFERRONI


def reduced(scores: Tensor, joint: Joint) -> Tensor:
    """Turn the scores (n, m) of all outputs into those that are kept: (n, 1) if joint."""
    return scores if has_own_thresholds(joint) else covering(scores, joint)


def covering(scores: Tensor, share: Any) -> Tensor:
    """Give for each row the smallest threshold that covers this share of its known outputs.

    >>> scores = torch.tensor([[1.0, 4.0, 2.0, 3.0], [5.0, torch.nan, 6.0, torch.nan]])
    >>> covering(scores, 0.75)[:, 0], covering(scores, 1)[:, 0]
    (tensor([3., 6.]), tensor([4., 6.]))
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
    return largest.masked_fill(known == 0, math.nan)[:, None]
