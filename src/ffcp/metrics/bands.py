"""Coverage, length and interval score of bands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.conformal.rank import exact_alpha
from ffcp.metrics.shares import Coverage


def coverage(band: Sequence[Any], y: Any, *, joint: bool | float = False) -> Coverage:
    """Measure the share of targets inside their band.

    >>> coverage(([0.0, 0.0], [1.0, 1.0]), [0.5, 2.0])
    0.500 [0.095, 0.905]
    >>> box = [[0.0, 0.0]], [[1.0, 1.0]]  # one row, two outputs, of which one is covered
    >>> [float(coverage(box, [[0.5, 2.0]], joint=joint)) for joint in (False, True, 0.5)]
    [0.5, 0.0, 1.0]
    """
    hits = hits_of(band, y, joint)
    return Coverage(float(hits.mean()), len(hits))


def mean_length(band: Sequence[Any]) -> float:
    """Average upper - lower over rows and outputs, the band length of the paper.

    >>> mean_length(([0.0, 0.0], [1.0, 3.0]))
    2.0
    """
    lower, upper = bounds_of(band)
    return float((upper - lower).mean())


def interval_score(band: Sequence[Any], y: Any, alpha: Any = 0.1) -> float:
    """Average Winkler's interval score: length plus 2 / alpha times every miss distance.

    Smaller is better; the true conditional quantiles minimise it.

    >>> interval_score(([0.0], [1.0]), [1.5], alpha=0.1)
    11.0
    """
    lower, upper = bounds_of(band)
    target = target_of(y, lower)
    miss = (lower - target).clamp_min(0) + (target - upper).clamp_min(0)
    return float((upper - lower + 2 / float(exact_alpha(alpha)) * miss).mean())


# -- reading bands and targets -----------------------------------------------------------------


def hits_of(band: Sequence[Any], y: Any, joint: bool | float) -> Tensor:
    """Give the covered share of each row, in [0, 1]."""
    lower, upper = bounds_of(band)
    target = target_of(y, lower)
    inside = ((lower <= target) & (target <= upper)).double().reshape(len(target), -1)
    if joint is False:
        return inside.mean(dim=1)
    if not 0 < joint <= 1:
        raise ValueError(f"joint must be False, True or a share between 0 and 1, got {joint}")
    wanted = math.ceil(Fraction(str(float(joint))) * inside.shape[1])
    return (inside.sum(dim=1) >= wanted).double()


def bounds_of(band: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Read the ends of a band; refuse NaN, and ends that do not belong together."""
    lower, upper = as_tensor(band[0]), as_tensor(band[1])
    if lower.shape != upper.shape or not lower.numel():
        raise ValueError(
            f"lower has shape {tuple(lower.shape)}, upper {tuple(upper.shape)}: "
            "they must be equal and not empty"
        )
    if bool(lower.isnan().any() or upper.isnan().any()):
        raise ValueError("the band holds NaN")
    return lower, upper


def target_of(y: Any, lower: Tensor) -> Tensor:
    """Read targets in the shape of a band; a target (n,) fits a band (n, 1)."""
    target = as_tensor(y)
    if target.dim() == 1 and lower.shape == (len(target), 1):
        target = target[:, None]
    if target.shape != lower.shape:
        raise ValueError(f"target has shape {tuple(target.shape)}, band {tuple(lower.shape)}")
    if bool(target.isnan().any()):
        raise ValueError("the target holds NaN")
    return target


def as_array(values: Any) -> Any:
    """Turn tensors into arrays, and leave everything else as it is."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def as_tensor(values: Any) -> Tensor:
    """Turn numbers into a tensor in float64."""
    if isinstance(values, Tensor):
        return values.detach().cpu().double()
    return torch.from_numpy(np.array(values, dtype=np.float64))
