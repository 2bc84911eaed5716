"""Prediction intervals around predictions that exist already, as a function of arrays."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np  # noqa: F401 - for the example
import torch
from torch import Tensor

from ffcp.batch import BatchOutput
from ffcp.conformal.rank import conformal_quantile, requested_alphas, rows_needed
from ffcp.network import arrays, inputs
from ffcp.network.stored import Stored
from ffcp.regression import intervals
from ffcp.regression.intervals import Base, Ends, Interval, Point, Quantiles, columns
from ffcp.warnings import warn


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
    """Return split conformal prediction intervals around new predictions.

    They are those of ``CP(Stored())`` or ``CQR(Stored())``, computed once. For other scales,
    sides, groups, or levels later, use a predictor with :class:`ffcp.Stored`.

    Parameters
    ----------
    prediction, y : array-like
        Predictions of a model for rows that did not train it, and their targets; of one output
        with the shape (n,) each.
    new : array-like
        Predictions for the new rows.
    alpha : float or sequence of float, default=None
        The miscoverage level, or a sequence of them; 0.1 by default.
    confidence_level : float or sequence of float, default=None
        In place of ``alpha``: the coverage, 1 - alpha.
    quantiles : bool, default=False
        Whether predictions are two quantiles, lower and upper, in a last dimension of two.

    Returns
    -------
    Interval
        ``(lower, upper, prediction)``, as from :meth:`ffcp.CP.predict_interval`.

    Examples
    --------
    >>> y = np.random.default_rng(0).normal(size=1000)
    >>> interval = intervals_from(np.zeros(1000), y, np.array([0.0, 5.0]), alpha=0.1)
    >>> [round(float(end), 2) for end in interval.width]
    [3.11, 3.11]
    """
    levels, are_many = requested_alphas(alpha, confidence_level, unknown)
    base: Base = Quantiles() if quantiles else Point()
    old, new = _read(prediction, "prediction"), _read(new, "new")
    if old.shape[1:] != new.shape[1:]:
        raise ValueError(
            f"new predictions have shape {tuple(new.shape)}, the others {tuple(old.shape)}: "
            "both must have the same outputs"
        )
    y = arrays.target_tensor(y)
    target = arrays.target_like(y, base.prediction(old))
    arrays.check_finite(target, "y")
    scores = intervals.score(_ends(base, old), columns(target))
    thresholds = torch.stack([conformal_quantile(scores, level) for level in levels])[:, None]
    if bool(thresholds.isinf().any()):
        warn(
            f"the interval is infinite: alpha={float(min(levels)):g} needs at least "
            f"{rows_needed(min(levels))} calibration rows and there are {len(scores)}: give "
            "more, or a larger alpha"
        )
    ends = intervals.interval_ends(_ends(base, new), thresholds, thresholds, new.dtype)
    shape = (len(new), *y.shape[1:])
    lower, upper = (end.reshape(len(levels), *shape) for end in ends)
    centre = base.prediction(new).reshape(shape).clone()  # the caller may write to it
    if are_many:
        return Interval(lower, upper, centre, tuple(map(float, levels)))
    return Interval(lower[0], upper[0], centre, float(levels[0]))


def _read(values: Any, name: str) -> Tensor:
    """Return predictions as a tensor of finite numbers, a row per row."""
    predictions: Tensor = inputs.to_tensors(values, Stored())
    if not len(predictions):
        raise ValueError(f"{name} has no rows")
    arrays.check_finite(predictions, name)
    return predictions


def _ends(base: Base, output: Tensor) -> Ends:
    scale = torch.ones((), dtype=torch.float64)
    return base(BatchOutput(None, output, {}, {}, range(len(output))), scale)
