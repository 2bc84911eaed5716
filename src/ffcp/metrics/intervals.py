"""Coverage, length and scores of prediction intervals, quantiles and distributions."""

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

_SWAPPED = "expected intervals first, then 'y', got a vector: are the arguments swapped?"


def coverage(interval: Sequence[Any], y: Any, *, joint: Any = False, missing: bool = False) -> Any:
    """Return the share of targets inside their interval; for several levels a list.

    With ``missing=True`` a NaN in ``y`` is a missing target, and does not count. With
    ``joint=True``, or a share, rows with a missing target do not count either; with
    ``joint="known"``, or ``(0.9, "known")``, they count by their known outputs.

    Parameters
    ----------
    interval : Interval or (lower, upper)
        Intervals, or their ends.
    y : array-like
        Targets, in the shape of the ends.
    joint : bool, float, str or tuple, default=False
        Whether a row with several outputs counts by all of them, by a share, or by those known.
    missing : bool, default=False
        Whether NaN in ``y`` is a missing target, which does not count.

    Examples
    --------
    >>> coverage(([0.0, 0.0], [1.0, 1.0]), [0.5, 2.0])
    0.500 [0.095, 0.905]
    >>> box = [[0.0, 0.0]], [[1.0, 1.0]]  # one row, two outputs, of which one is covered
    >>> [float(coverage(box, [[0.5, 2.0]], joint=joint)) for joint in (False, True, 0.5)]
    [0.5, 0.0, 1.0]
    """
    levels, are_many = levels_of(interval, y)
    hits = [hits_of(level, y, joint, missing) for level in levels]
    shares = [Coverage(float(h.nanmean()), int((~h.isnan()).sum())) for h in hits]
    return shares if are_many else shares[0]


def mean_length(interval: Sequence[Any]) -> float:
    """Return the mean of upper - lower over rows and outputs, the paper's band length.

    Parameters
    ----------
    interval : Interval or (lower, upper)
        Intervals, or their ends.

    Examples
    --------
    >>> mean_length(([0.0, 0.0], [1.0, 3.0]))
    2.0
    """
    lower, upper = bounds_of(interval)
    return float((upper - lower).mean())


def interval_score(
    interval: Sequence[Any], y: Any, alpha: Any = None, *, missing: bool = False
) -> Any:
    """Return the mean interval score (Winkler): length plus 2 / alpha times the distance of a miss.

    Smaller is better; the true conditional quantiles minimise it. ``alpha`` is by default the
    attribute of the intervals, or 0.1; for several levels the result is a list.

    Parameters
    ----------
    interval : Interval or (lower, upper)
        Intervals, or their ends.
    y : array-like
        Targets, in the shape of the ends.
    alpha : float or sequence of float, default=None
        Miscoverage level of the intervals.
    missing : bool, default=False
        Whether NaN in ``y`` is a missing target, which does not count.

    Examples
    --------
    >>> interval_score(([0.0], [1.0]), [1.5], alpha=0.1)
    11.0
    >>> interval_score(([[0.0], [0.0]], [[1.0], [2.0]]), [1.5], alpha=(0.1, 0.05))
    [11.0, 2.0]
    """
    level = (getattr(interval, "alpha", None) or 0.1) if alpha is None else alpha
    (alphas, are_many), (levels, have_many) = exact_alphas(level), levels_of(interval, y)
    if (len(alphas), are_many) != (len(levels), have_many):
        raise ValueError(
            f"'alpha' has {len(alphas)} levels, the intervals have {len(levels)}: expected as many"
        )
    scores = []
    for level, exact in zip(levels, alphas, strict=True):
        lower, upper = bounds_of(level)
        target = target_of(y, lower, missing)
        miss = (lower - target).clamp_min(0) + (target - upper).clamp_min(0)
        scores.append(float((upper - lower + 2 / float(exact) * miss).nanmean()))
    return scores if are_many else scores[0]


def pinball_loss(quantiles: Any, y: Any, levels: Any, *, missing: bool = False) -> Any:
    """Return the mean pinball loss of quantiles; for several levels (first dimension) a list.

    Smaller is better; the true conditional quantile of the level minimises it.

    Parameters
    ----------
    quantiles : array-like
        Predicted quantiles; of several levels along the first dimension.
    y : array-like
        Targets, in the shape of the quantiles.
    levels : float or sequence of float
        Levels of the quantiles, between 0 and 1.
    missing : bool, default=False
        Whether NaN in ``y`` is a missing target, which does not count.

    Examples
    --------
    >>> pinball_loss([1.0, 1.0], [2.0, 0.0], 0.75)
    0.5
    >>> pinball_loss([[1.0, 1.0], [2.0, 2.0]], [2.0, 0.0], (0.25, 0.75))
    [0.5, 0.25]
    """
    exact, are_many = exact_alphas(levels)
    tensor = as_tensor(quantiles)
    tensor = tensor if are_many else tensor[None]
    if len(tensor) != len(exact):
        raise ValueError(
            f"'levels' has {len(exact)} entries, 'quantiles' {len(tensor)}: pass one per quantile"
        )
    losses = []
    for quantile, level in zip(tensor, map(float, exact), strict=True):
        error = target_of(y, quantile, missing) - quantile
        losses.append(float(torch.maximum(level * error, (level - 1) * error).nanmean()))
    return losses if are_many else losses[0]


def crps(distribution: Any, y: Any, *, missing: bool = False) -> float:
    """Return the mean continuous ranked probability score of predictive distributions.

    Parameters
    ----------
    distribution : Distribution
        Predictive distributions, from ``predict_distribution``.
    y : array-like
        Targets, in the shape of the predictions.
    missing : bool, default=False
        Whether NaN in ``y`` is a missing target, which does not count.

    Examples
    --------
    >>> class PointMass:  # at 1
    ...     prediction = torch.ones(2)
    ...
    ...     def crps(self, y):
    ...         return (y - 1).abs()
    >>> crps(PointMass(), [1.0, 4.0])
    1.5
    """
    target = target_of(y, as_tensor(distribution.prediction), missing)
    scores = distribution.crps(target.nan_to_num(0.0))
    return float(scores.masked_fill(target.isnan(), math.nan).nanmean())


# -- reading intervals and targets -------------------------------------------------------------


def levels_of(interval: Sequence[Any], y: Any) -> tuple[list[Sequence[Any]], bool]:
    """Return the intervals of each level, and whether there is a first dimension of levels."""
    if hasattr(y, "prediction") and not hasattr(interval, "prediction"):
        raise TypeError(_SWAPPED)
    if hasattr(interval, "other_labels") or hasattr(y, "other_labels"):
        raise TypeError(
            "expected intervals, got prediction sets: use ffcp.metrics.set_coverage(sets, y)"
        )
    if len(interval) < 2:
        name = type(interval).__name__
        raise TypeError(f"expected the ends (lower, upper) of intervals, got {name!r}")
    lower, target = as_tensor(interval[0]), as_tensor(y)
    prediction = getattr(interval, "prediction", None)
    if prediction is not None:  # it has no dimension of levels; else compare with the targets
        are_many = lower.dim() > as_tensor(prediction).dim()
    else:
        shape = lower.shape[1:]  # of one level, if there are levels
        are_many = lower.shape != target.shape and shape == _like(target, shape).shape
    if not are_many:
        return [interval], False
    levels = getattr(interval, "levels", None) or list(zip(*interval[:2], strict=True))
    return levels, True


def share_of(joint: Any) -> tuple[Any, bool]:
    """Return the share of a row's outputs that ``joint`` requires, and whether of known ones only.

    >>> share_of(True), share_of((0.9, "known"))
    ((1, False), (0.9, True))
    """
    share, of_known = (1 if joint is True else joint), False
    if joint == KNOWN:
        share, of_known = 1, True
    elif isinstance(joint, (list, tuple)) and len(joint) == 2 and joint[1] == KNOWN:
        share, of_known = joint[0], True
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(
            f"'joint' must be a bool, a share, 'known' or (share, 'known'), got {joint!r}"
        )
    return share, of_known


def hits_of(interval: Sequence[Any], y: Any, joint: Any, missing: bool = False) -> Tensor:
    """Return the covered share of each row, as :func:`row_hits`; raise if no row counts."""
    hits = row_hits(interval, y, joint, missing)
    if bool(hits.isnan().all()):
        raise ValueError("a target is missing in every row: pass joint='known'")
    return hits


def row_hits(interval: Sequence[Any], y: Any, joint: Any, missing: bool = False) -> Tensor:
    """Return the covered share of each row, in [0, 1]; NaN where a row does not count."""
    lower, upper = as_tensor(interval[0]), as_tensor(interval[1])
    target = target_of(y, lower, missing)
    known = (~target.isnan()).reshape(len(target), -1).sum(dim=1)
    if not getattr(interval, "is_box", True):  # an ellipsoid contains a row, or its known outputs
        fewest = 1 if joint == KNOWN else target[0].numel()
        covered: Tensor = interval.contains(target)  # type: ignore[attr-defined]
        return covered.cpu().double().masked_fill(known < fewest, math.nan)
    lower, upper = bounds_of(interval)
    inside = ((lower <= target) & (target <= upper)).double().reshape(len(target), -1).sum(dim=1)
    if joint is False:
        return inside / known
    share, of_known = share_of(joint)
    exact = Fraction(str(float(share)))
    needed = torch.tensor([math.ceil(exact * count) for count in known.tolist()])
    fewest = 1 if of_known else target[0].numel()
    return (inside >= needed).double().masked_fill(known < fewest, math.nan)


def bounds_of(interval: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Return the ends of intervals in float64; raise for NaN or unequal shapes."""
    if not getattr(interval, "is_box", True):
        raise ValueError(
            "an ellipsoid has no lengths: compare its volume, or pass (lower, upper) of its box"
        )
    lower, upper = as_tensor(interval[0]), as_tensor(interval[1])
    if lower.shape != upper.shape or not lower.numel():
        shapes = f"{tuple(lower.shape)} and {tuple(upper.shape)}"
        raise ValueError(f"'lower' and 'upper' have shapes {shapes}: expected equal, not empty")
    if bool(lower.isnan().any() or upper.isnan().any()):
        raise ValueError("the interval holds NaN: remove these rows")
    return lower, upper


def target_of(y: Any, lower: Tensor, missing: bool = False) -> Tensor:
    """Return targets in the shape of the intervals, from (n,) or (n, 1)."""
    target = _like(as_tensor(y), lower.shape)
    if target.shape != lower.shape:
        if not lower.dim():  # a vector was taken for a pair of ends
            raise TypeError(_SWAPPED)
        raise ValueError(
            f"target 'y' has shape {tuple(target.shape)}, the interval {tuple(lower.shape)}"
        )
    if bool(target.isnan().any()) and not missing:
        raise ValueError("target 'y' holds NaN: pass missing=True if these are missing targets")
    if bool(target.isnan().all()):
        raise ValueError("all targets in 'y' are NaN: expected at least one known target")
    return target


def _like(target: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return targets (n,) as (n, 1), or (n, 1) as (n,), if ``shape`` is that; never broadcast."""
    if target.dim() == 1 and shape == (len(target), 1):
        return target[:, None]
    return target[:, 0] if target.shape == (*shape, 1) and len(shape) == 1 else target


def as_array(values: Any) -> Any:
    """Return tensors as arrays, and everything else unchanged."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def as_tensor(values: Any) -> Tensor:
    """Return numbers as a float64 tensor."""
    if isinstance(values, Tensor):
        return values.detach().cpu().double()
    return torch.from_numpy(np.array(values, dtype=np.float64))
