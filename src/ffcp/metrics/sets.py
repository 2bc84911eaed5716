"""Coverage and size of prediction sets.

All functions take a :class:`ffcp.LabelSet`, or a boolean mask of shape (rows, classes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.conformal.rank import exact_alpha
from ffcp.metrics.shares import Coverage, GroupCoverage, by_label

# The strata of RAPS (Angelopoulos et al., 2021), by the largest size each holds.
SIZE_STRATA = (1, 3, 6, 10, 100)


def set_coverage(sets: Any, y: Any) -> Coverage:
    """Return the share of rows whose true label is in the set.

    Parameters
    ----------
    sets : LabelSet or array-like
        Prediction sets, or a mask of shape (n, classes).
    y : array-like
        Labels, integers of shape (n,).

    Examples
    --------
    >>> set_coverage([[True, False], [True, True]], [1, 1])
    0.500 [0.095, 0.905]
    """
    hits = _set_hits(_mask(sets), y)
    return Coverage(float(hits.double().mean()), len(hits))


def mean_set_size(sets: Any) -> float:
    """Return the mean number of labels in a set.

    Parameters
    ----------
    sets : LabelSet or array-like
        Prediction sets, or a mask of shape (n, classes).

    Examples
    --------
    >>> mean_set_size([[True, False], [True, True]])
    1.5
    """
    return float(_mask(sets).sum(dim=1).double().mean())


def median_set_size(sets: Any) -> float:
    """Return the median number of labels in a set.

    Parameters
    ----------
    sets : LabelSet or array-like
        Prediction sets, or a mask of shape (n, classes).

    Examples
    --------
    >>> median_set_size([[True, False], [True, True]])
    1.5
    """
    return float(np.median(_mask(sets).sum(dim=1).numpy()))


def size_stratified_violation(
    sets: Any, y: Any, alpha: Any = 0.1, strata: Sequence[int] = SIZE_STRATA
) -> float:
    """Return how far coverage is from 1 - alpha in the worst stratum of set sizes.

    This is the SSCV of RAPS. It reveals small sets that cover too little, and large sets that
    cover too much.

    Parameters
    ----------
    sets : LabelSet or array-like
        Prediction sets, or a mask of shape (n, classes).
    y : array-like
        Labels, integers of shape (n,).
    alpha : float, default=0.1
        Allowed share of misses.
    strata : sequence of int, default=SIZE_STRATA
        The largest size in each stratum but the last, which holds all larger ones. By default
        0 to 1, 2 to 3, 4 to 6, 7 to 10, 11 to 100, and more. Empty strata do not count.

    Examples
    --------
    >>> size_stratified_violation([[True, False], [True, True]], [1, 1], alpha=0.1)
    0.9
    """
    mask = _mask(sets)
    return stratified_violation(mask.sum(dim=1), _set_hits(mask, y), alpha, strata)


def stratified_violation(
    sizes: Tensor, hits: Tensor, alpha: Any, strata: Sequence[int] = SIZE_STRATA
) -> float:
    """Return :func:`size_stratified_violation`, from each row's set size and coverage."""
    stratum = torch.bucketize(sizes, torch.tensor(list(strata)))
    counts = torch.bincount(stratum, minlength=len(strata) + 1)
    covered = torch.bincount(stratum[hits], minlength=len(strata) + 1)
    shares = (covered.double() / counts)[counts > 0]
    return float((shares - float(1 - exact_alpha(alpha))).abs().max())


def class_coverage(sets: Any, y: Any) -> GroupCoverage:
    """Return the coverage among the rows of each true label.

    Parameters
    ----------
    sets : LabelSet or array-like
        Prediction sets, or a mask of shape (n, classes).
    y : array-like
        Labels, integers of shape (n,).

    Examples
    --------
    >>> class_coverage([[True, False], [True, True]], [1, 1]).worst
    0.500 [0.095, 0.905]
    """
    mask = _mask(sets)
    hits = _set_hits(mask, y)
    return GroupCoverage(by_label(hits.double(), _class_labels(y, mask).numpy()))


def class_coverage_gap(sets: Any, y: Any, alpha: Any = 0.1) -> float:
    """Return the mean distance of the classes' coverage from 1 - alpha (Ding et al., 2023).

    Classes without a row do not count.

    Parameters
    ----------
    sets : LabelSet or array-like
        Prediction sets, or a mask of shape (n, classes).
    y : array-like
        Labels, integers of shape (n,).
    alpha : float, default=0.1
        Miscoverage level of the sets.

    Examples
    --------
    >>> round(class_coverage_gap([[True, False], [True, True]], [0, 1], alpha=0.1), 12)
    0.1
    """
    level = float(1 - exact_alpha(alpha))
    shares = class_coverage(sets, y).groups.values()
    return sum(abs(float(share) - level) for share in shares) / len(shares)


def singleton_hit_ratio(sets: Any, y: Any) -> Coverage:
    """Return the share of rows whose set holds only the true label.

    Parameters
    ----------
    sets : LabelSet or array-like
        Prediction sets, or a mask of shape (n, classes).
    y : array-like
        Labels, integers of shape (n,).

    Examples
    --------
    >>> singleton_hit_ratio([[False, True], [True, True]], [1, 1])
    0.500 [0.095, 0.905]
    """
    mask = _mask(sets)
    alone = _set_hits(mask, y) & (mask.sum(dim=1) == 1)
    return Coverage(float(alone.double().mean()), len(alone))


def _mask(sets: Any) -> Tensor:
    mask = getattr(sets, "mask", sets)
    mask = mask.detach().cpu() if isinstance(mask, Tensor) else torch.from_numpy(np.array(mask))
    if mask.dtype != torch.bool or mask.dim() != 2 or not len(mask):
        got = f"{mask.dtype} of shape {tuple(mask.shape)}"
        raise ValueError(f"expected a LabelSet or a mask (rows, classes), not empty, got {got}")
    return mask


def _set_hits(mask: Tensor, y: Any) -> Tensor:
    """Whether each row's set holds the true label."""
    return mask.gather(1, _class_labels(y, mask)[:, None])[:, 0]


def _class_labels(y: Any, mask: Tensor) -> Tensor:
    labels = y.detach().cpu() if isinstance(y, Tensor) else torch.from_numpy(np.array(y))
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"labels 'y' must be integers, got {labels.dtype}")
    if labels.shape != (len(mask),):
        raise ValueError(
            f"labels 'y' have shape {tuple(labels.shape)}, expected one per row: {len(mask)}"
        )
    labels = labels.long()
    if bool((labels < 0).any() or (labels >= mask.shape[1]).any()):
        raise ValueError(f"labels must be 0 to {mask.shape[1] - 1}, got {labels.unique().tolist()}")
    return labels
