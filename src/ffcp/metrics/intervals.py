"""Coverage, length and scores of bands, of quantiles and of distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.conformal.rank import exact_alphas
from ffcp.metrics.shares import Coverage

KNOWN = "known"


def coverage(band: Sequence[Any], y: Any, *, joint: Any = False, missing: bool = False) -> Any:
    """Measure the share of targets inside their band; of several levels, one after the other.

    With ``missing=True`` a NaN in ``y`` is a target that is not known, and does not count. With
    ``joint=True``, or a share, rows with such a target do not count either; with
    ``joint="known"``, or ``(0.9, "known")``, they count by their known outputs.

    >>> coverage(([0.0, 0.0], [1.0, 1.0]), [0.5, 2.0])
    0.500 [0.095, 0.905]
    >>> box = [[0.0, 0.0]], [[1.0, 1.0]]  # one row, two outputs, of which one is covered
    >>> [float(coverage(box, [[0.5, 2.0]], joint=joint)) for joint in (False, True, 0.5)]
    [0.5, 0.0, 1.0]
    """
    levels, are_many = levels_of(band, y)
    hits = [hits_of(level, y, joint, missing) for level in levels]
    shares = [Coverage(float(one.nanmean()), int((~one.isnan()).sum())) for one in hits]
    return shares if are_many else shares[0]


SWAPPED = "intervals come first, then the targets: give (interval, y)"


def mean_length(band: Sequence[Any]) -> float:
    """Average upper - lower over rows and outputs, the band length of the paper.

    >>> mean_length(([0.0, 0.0], [1.0, 3.0]))
    2.0
    """
    lower, upper = bounds_of(band)
    return float((upper - lower).mean())


def interval_score(band: Sequence[Any], y: Any, alpha: Any = None, *, missing: bool = False) -> Any:
    """Average Winkler's interval score: length plus 2 / alpha times every miss distance.

    Smaller is better; the true conditional quantiles minimise it. ``alpha`` is that of the band if
    it knows it, else 0.1; of several levels there is a score for each.

    >>> interval_score(([0.0], [1.0]), [1.5], alpha=0.1)
    11.0
    >>> interval_score(([[0.0], [0.0]], [[1.0], [2.0]]), [1.5], alpha=(0.1, 0.05))
    [11.0, 2.0]
    """
    asked = (getattr(band, "alpha", None) or 0.1) if alpha is None else alpha
    (alphas, are_many), (levels, have_many) = exact_alphas(asked), levels_of(band, y)
    if (len(alphas), are_many) != (len(levels), have_many):
        raise ValueError(f"got {len(levels)} levels of intervals and {len(alphas)} of alpha")
    scores = []
    for level, exact in zip(levels, alphas, strict=True):
        lower, upper = bounds_of(level)
        target = target_of(y, lower, missing)
        miss = (lower - target).clamp_min(0) + (target - upper).clamp_min(0)
        scores.append(float((upper - lower + 2 / float(exact) * miss).nanmean()))
    return scores if are_many else scores[0]


def pinball_loss(quantiles: Any, y: Any, levels: Any, *, missing: bool = False) -> Any:
    """Average the pinball loss of quantiles; of several levels, in a first dimension, for each.

    Smaller is better; the true conditional quantile of the level minimises it.

    >>> pinball_loss([1.0, 1.0], [2.0, 0.0], 0.75)
    0.5
    >>> pinball_loss([[1.0, 1.0], [2.0, 2.0]], [2.0, 0.0], (0.25, 0.75))
    [0.5, 0.25]
    """
    asked, are_many = exact_alphas(levels)
    given = as_tensor(quantiles)
    given = given if are_many else given[None]
    if len(given) != len(asked):
        raise ValueError(f"there are {len(given)} quantiles and {len(asked)} levels")
    losses = []
    for guess, level in zip(given, map(float, asked), strict=True):
        miss = target_of(y, guess, missing) - guess
        losses.append(float(torch.maximum(level * miss, (level - 1) * miss).nanmean()))
    return losses if are_many else losses[0]


def crps(distribution: Any, y: Any, *, missing: bool = False) -> float:
    """Average the continuous ranked probability score of predictive distributions.

    >>> class Sure:  # of the value 1
    ...     prediction = torch.ones(2)
    ...
    ...     def crps(self, y):
    ...         return (y - 1).abs()
    >>> crps(Sure(), [1.0, 4.0])
    1.5
    """
    target = target_of(y, as_tensor(distribution.prediction), missing)
    scores = distribution.crps(target.nan_to_num(0.0))
    return float(scores.masked_fill(target.isnan(), math.nan).nanmean())


# -- reading bands and targets -----------------------------------------------------------------


def levels_of(band: Sequence[Any], y: Any) -> tuple[list[Sequence[Any]], bool]:
    """Return the intervals of each level, and whether there is a first dimension of levels."""
    if hasattr(y, "prediction") and not hasattr(band, "prediction"):
        raise TypeError(SWAPPED)
    if len(band) < 2:
        raise TypeError(f"expected the ends (lower, upper) of intervals, got {type(band).__name__}")
    lower, target = as_tensor(band[0]), as_tensor(y)
    prediction = getattr(band, "prediction", None)
    if prediction is not None:  # which has none; ends alone leave it to the targets
        are_many = lower.dim() > as_tensor(prediction).dim()
    else:
        one = lower.shape[1:]
        are_many = lower.shape != target.shape and one == _like(target, one).shape
    if not are_many:
        return [band], False
    return getattr(band, "levels", None) or list(zip(band[0], band[1], strict=True)), True


def share_of(joint: Any) -> tuple[Any, bool]:
    """Return which share of a row's outputs ``joint`` asks for, and whether of known ones only.

    >>> share_of(True), share_of((0.9, "known"))
    ((1, False), (0.9, True))
    """
    share, of_known = (1 if joint is True else joint), False
    if joint == KNOWN:
        share, of_known = 1, True
    elif isinstance(joint, (list, tuple)) and len(joint) == 2 and joint[1] == KNOWN:
        share, of_known = joint[0], True
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"joint={joint!r}: expected a bool, a share, 'known' or (share, 'known')")
    return share, of_known


def hits_of(band: Sequence[Any], y: Any, joint: Any, missing: bool = False) -> Tensor:
    """Return the covered share of each row, as :func:`row_hits`; some row must count."""
    hits = row_hits(band, y, joint, missing)
    if bool(hits.isnan().all()):
        raise ValueError("in every row a target is missing: measure joint='known' outputs")
    return hits


def row_hits(band: Sequence[Any], y: Any, joint: Any, missing: bool = False) -> Tensor:
    """Return the covered share of each row, in [0, 1]; NaN where a row does not count."""
    lower, upper = as_tensor(band[0]), as_tensor(band[1])
    target = target_of(y, lower, missing)
    known = (~target.isnan()).reshape(len(target), -1).sum(dim=1)
    if not getattr(band, "is_box", True):  # an ellipsoid holds a row, or its known outputs
        fewest = 1 if joint == KNOWN else target[0].numel()
        holds: Tensor = band.contains(target)  # type: ignore[attr-defined]
        return holds.cpu().double().masked_fill(known < fewest, math.nan)
    lower, upper = bounds_of(band)
    inside = ((lower <= target) & (target <= upper)).double().reshape(len(target), -1).sum(dim=1)
    if joint is False:
        return inside / known
    share, of_known = share_of(joint)
    exact = Fraction(str(float(share)))
    wanted = torch.tensor([math.ceil(exact * count) for count in known.tolist()])
    fewest = 1 if of_known else target[0].numel()
    return (inside >= wanted).double().masked_fill(known < fewest, math.nan)


def bounds_of(band: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Read the ends of a band; refuse NaN, and ends that do not belong together."""
    if not getattr(band, "is_box", True):
        raise ValueError(
            "an ellipsoid has no lengths: compare its volume, or give (lower, upper) of its box"
        )
    lower, upper = as_tensor(band[0]), as_tensor(band[1])
    if lower.shape != upper.shape or not lower.numel():
        shapes = f"{tuple(lower.shape)} and {tuple(upper.shape)}"
        raise ValueError(f"lower and upper have shapes {shapes}: expected equal ones, not empty")
    if bool(lower.isnan().any() or upper.isnan().any()):
        raise ValueError("the band holds NaN")
    return lower, upper


def target_of(y: Any, lower: Tensor, missing: bool = False) -> Tensor:
    """Read targets in the shape of a band; (n,) and (n, 1) fit each other."""
    target = _like(as_tensor(y), lower.shape)
    if target.shape != lower.shape:
        if not lower.dim():  # a vector was taken for a pair of ends
            raise TypeError(SWAPPED)
        raise ValueError(f"target has shape {tuple(target.shape)}, band {tuple(lower.shape)}")
    if bool(target.isnan().any()) and not missing:
        raise ValueError("the target holds NaN: if that stands for unknown ones, say missing=True")
    if bool(target.isnan().all()):
        raise ValueError("no target is known")
    return target


def _like(target: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Bring targets (n,) to (n, 1), and (n, 1) to (n,), where the shape is that; never spread."""
    if target.dim() == 1 and shape == (len(target), 1):
        return target[:, None]
    return target[:, 0] if target.shape == (*shape, 1) and len(shape) == 1 else target


def as_array(values: Any) -> Any:
    """Turn tensors into arrays, and leave everything else as it is."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def as_tensor(values: Any) -> Tensor:
    """Turn numbers into a tensor in float64."""
    if isinstance(values, Tensor):
        return values.detach().cpu().double()
    return torch.from_numpy(np.array(values, dtype=np.float64))
