"""Coverage of intervals by groups of rows: given groups, slices of a feature, or lengths."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch

from ffcp.metrics.intervals import as_array, as_tensor, bounds_of, hits_of
from ffcp.metrics.shares import Coverage, GroupCoverage, by_label
from ffcp.notebooks import number


def group_coverage(
    interval: Sequence[Any],
    y: Any,
    groups: Any = None,
    *,
    feature: Any = None,
    slices: int = 3,
    joint: Any = False,
    missing: bool = False,
) -> GroupCoverage:
    """Return the coverage inside each group of rows.

    Parameters
    ----------
    interval : Interval or (lower, upper)
        Intervals, or their ends.
    y : array-like
        Targets, in the shape of the ends.
    groups : array-like, default=None
        A label for each row. Without groups and feature, rows are cut into thirds of y
        (:func:`tertiles`).
    feature : array-like, default=None
        Instead of labels: a number for each row, for example a column of the input. Rows are cut
        into ``slices`` of about equal size by this number (:func:`cut`).
    slices : int, default=3
        Number of slices of the feature.
    joint : bool, float, str or tuple, default=False
        Whether a row is covered only if all its outputs are, as in :func:`coverage`.
    missing : bool, default=False
        Whether NaN in ``y`` is a missing target.

    Examples
    --------
    >>> result = group_coverage(([0, 0, 0, 0], [1, 1, 1, 1]), [0, 1, 2, 3], groups=list("aabb"))
    >>> result.worst_group, result.worst, result.gap
    ('b', 0.000 [0.000, 0.887], 1.0)
    """
    hits = hits_of(interval, y, joint, missing)
    if groups is not None and feature is not None:
        raise ValueError("pass 'groups' or 'feature', not both")
    if feature is not None:
        labels = cut(feature, slices)
    else:
        labels = tertiles(y) if groups is None else np.asarray(as_array(groups))
    if labels.shape != (len(hits),):
        raise ValueError(f"'groups' has shape {labels.shape}, expected one per row: {len(hits)}")
    known = ~hits.isnan()
    return GroupCoverage(by_label(hits[known], labels[known.numpy()]))


def cut(values: Any, slices: int = 3) -> np.ndarray:
    """Return a label for each row: its slice of ``values``, of about equal numbers of rows.

    Equal values stay together, so there may be fewer than ``slices``.

    Parameters
    ----------
    values : array-like
        One number per row.
    slices : int, default=3
        Number of slices.

    Examples
    --------
    >>> cut([5.0, 1.0, 3.0, 4.0], slices=2).tolist()
    ['2: 4 to 5', '1: 1 to 3', '1: 1 to 3', '2: 4 to 5']
    """
    array = np.asarray(as_array(values), dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"'feature' must be one number per row, got shape {array.shape}")
    if np.isnan(array).any():
        raise ValueError("'feature' holds NaN: remove these rows")
    if slices < 1:
        raise ValueError(f"'slices' must be at least 1, got {slices}")
    ends = np.unique(np.quantile(array, np.arange(1, slices) / slices, method="lower"))
    codes = np.searchsorted(ends, array)
    names = {}
    for i, code in enumerate(np.unique(codes), start=1):
        members = array[codes == code]
        names[code] = f"{i}: {number(members.min())} to {number(members.max())}"
    return np.array([names[code] for code in codes])


def tertiles(y: Any) -> np.ndarray:
    """Return "low", "middle" or "high" for each row, by thirds of y, or of its row mean.

    If more than half of y is zero, thirds cannot be cut: the zeros are one group, and the rest
    is halved, as in the published code.

    Parameters
    ----------
    y : array-like
        Targets, (n,) or (n, m).

    Examples
    --------
    >>> tertiles([1, 2, 3, 4, 5, 6]).tolist()
    ['low', 'low', 'middle', 'middle', 'high', 'high']
    >>> tertiles([0, 0, 0, 0, 1, 2]).tolist()
    ['zero', 'zero', 'zero', 'zero', 'low', 'high']
    """
    values = as_tensor(y).reshape(len(y), -1).nanmean(dim=1).numpy()
    if np.isnan(values).all():
        raise ValueError("all targets in 'y' are NaN: expected at least one known target")
    zeros = values == 0
    if zeros.mean() > 0.5:
        rest = values[~zeros]
        median = np.nanquantile(rest, 0.5, method="lower") if len(rest) else 0.0
        return np.where(zeros, "zero", np.where(values <= median, "low", "high"))
    low, high = np.nanquantile(values, [1 / 3, 2 / 3], method="lower")
    return np.where(values <= low, "low", np.where(values <= high, "middle", "high"))


def size_stratified_coverage(
    interval: Sequence[Any], y: Any, bins: int = 5, *, joint: Any = False, missing: bool = False
) -> GroupCoverage:
    """Return the coverage among rows of similar interval length, from short to long.

    It reveals methods whose short intervals are too short. Rows of equal length stay in one
    stratum, so split CP, with one length for all, has a single one.

    Parameters
    ----------
    interval : Interval or (lower, upper)
        Intervals, or their ends.
    y : array-like
        Targets, in the shape of the ends.
    bins : int, default=5
        Number of strata.
    joint : bool, float, str or tuple, default=False
        Whether a row with several outputs counts by all of them, by a share, or by those known.
    missing : bool, default=False
        Whether NaN in ``y`` is a missing target, which does not count.

    Examples
    --------
    >>> result = size_stratified_coverage(([0, 0, 0, 0], [1, 1, 9, 9]), [2, 2, 5, 5], bins=2)
    >>> [float(share) for share in result.groups.values()]
    [0.0, 1.0]
    """
    if bins < 1:
        raise ValueError(f"'bins' must be at least 1, got {bins}")
    lower, upper = bounds_of(interval)
    lengths = (upper - lower).reshape(len(lower), -1).mean(dim=1)
    # Lengths that differ by rounding, by less than one in 100,000, are counted as equal.
    finite = lengths[lengths.isfinite() & (lengths > 0)]
    unit = finite.max() if len(finite) else 1.0
    rounded = ((lengths / unit).log() * 1e5).round()
    ordered = rounded.sort().values
    cuts = ordered[[len(ordered) * i // bins for i in range(1, bins)]].unique()
    strata = torch.bucketize(rounded, cuts, right=True)
    hits = hits_of(interval, y, joint, missing)
    known = ~hits.isnan()
    lengths, strata, hits = lengths[known], strata[known], hits[known]
    groups: dict[Hashable, Coverage] = {}
    for place, stratum in enumerate(strata.unique(), 1):
        members = strata == stratum
        shortest, longest = float(lengths[members].min()), float(lengths[members].max())
        share = float(hits[members].mean())
        groups[f"{place}: {shortest:.4g} to {longest:.4g}"] = Coverage(share, int(members.sum()))
    return GroupCoverage(groups)
