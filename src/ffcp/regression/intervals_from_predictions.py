"""Bands around predictions that are there already, in one call and without a predictor."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np
import torch

from ffcp.conformal.coverage_level import requested_alphas
from ffcp.conformal.rank import conformal_quantile
from ffcp.network.stored import Stored
from ffcp.regression import intervals
from ffcp.regression.bases import Base, Point, Quantiles
from ffcp.regression.interval_predictor import IntervalPredictor
from ffcp.regression.intervals import Interval


def intervals_from(
    prediction: Any,
    y: Any,
    new: Any,
    alpha: Any = None,
    *,
    confidence_level: Any = None,
    quantiles: bool = False,
    **unknown: NoReturn,
) -> Interval:
    """Give bands around new predictions, by how far others were from their targets.

    What ``CP(Stored())`` or ``CQR(Stored())`` give, to the last bit, for those who need bands once:
    nothing is kept, so that it takes less time. Other scales, sides, groups and levels that are
    asked for later need a predictor: :class:`ffcp.Stored`.

    Parameters
    ----------
    prediction, y
        Predictions of a model for rows that did not train it, and their targets; of one output
        with the shape (n,) each.
    new
        Predictions for the rows whose bands are wanted.
    alpha
        Share of misses allowed, or a sequence of such shares; 0.1 if nothing is given.
    confidence_level
        In place of ``alpha``: the coverage asked for, 1 - alpha.
    quantiles
        Whether predictions are two quantiles, lower and upper, in a last dimension of two.

    Returns
    -------
    Interval
        ``(lower, upper, prediction)``, as :meth:`ffcp.CP.predict_interval` gives them.

    Examples
    --------
    >>> y = np.random.default_rng(0).normal(size=1000)
    >>> band = intervals_from(np.zeros(1000), y, np.array([0.0, 5.0]), alpha=0.1)
    >>> [round(float(end), 2) for end in (band.upper - band.lower)]
    [3.11, 3.11]
    """
    base: Base = Quantiles() if quantiles else Point()
    band = None
    asked, are_many = requested_alphas(alpha, confidence_level, unknown)
    are_plain = all(_is_plain(given) for given in (prediction, y, new))
    if are_plain and prediction.ndim == 1 + quantiles and not are_many:
        with np.errstate(over="ignore", invalid="ignore"):
            band = _at_once(base, prediction, y, new, asked[0])
    if band is None:  # whatever is unusual, or wrong, is dealt with in one place
        predictor = IntervalPredictor(Stored(), base).calibrate(prediction, y)
        band = predictor.predict_interval(new, asked if are_many else asked[0])
    return band


def _is_plain(values: Any) -> bool:
    """Say whether these are numbers that need no conversion, some rows of them."""
    return (
        type(values) is np.ndarray
        and values.dtype == np.float64
        and values.flags.carray
        and values.size > 0
    )


def _at_once(
    base: Base, prediction: np.ndarray, y: np.ndarray, new: np.ndarray, alpha: Fraction
) -> Interval | None:
    """Take all steps on arrays; ``None`` where one of them is not as usual."""
    if prediction.shape[:1] != y.shape or prediction.shape[1:] != new.shape[1:]:
        return None
    scores = _scores(prediction, y)
    if scores is None or not math.isfinite(scores.sum()):  # a sum keeps NaN and infinity
        return None
    quantile = float(conformal_quantile(torch.from_numpy(scores), alpha))
    if not 0 <= quantile < math.inf or not _is_usual(new):
        return None
    lo, hi = (new, new) if new.ndim == 1 else (new[:, 0], new[:, 1])
    ends = intervals.even_reach(lo, hi, quantile, quantile, torch.float64)
    # Of a point a copy: the caller may write to the array.
    shown = base.prediction(torch.from_numpy(new.copy() if lo is hi else new))
    lower, upper = (torch.from_numpy(end) for end in ends)
    return Interval(lower, upper, shown, float(alpha))


def _scores(prediction: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """Say how far targets are from points, or outside of quantiles, where those are as usual."""
    if prediction.ndim == 1:
        scores: np.ndarray = y - prediction
        np.abs(scores, out=scores)
        return scores
    if not _is_usual(prediction):
        return None
    scores, above = prediction[:, 0] - y, y - prediction[:, 1]
    np.maximum(scores, above, out=scores)
    return scores


def _is_usual(prediction: np.ndarray) -> bool:
    """Say whether all numbers are finite, and quantiles in order."""
    if prediction.ndim == 1:
        return math.isfinite(prediction.sum())
    if prediction.shape[1] != 2:
        return False
    width = prediction[:, 1] - prediction[:, 0]
    return bool(width.min() >= 0 and width.max() < math.inf)
