"""Excess risk: how well a classifier of the inputs predicts which rows are covered."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffcp.conformal.rank import exact_alpha
from ffcp.extras import needed
from ffcp.metrics.intervals import as_tensor, hits_of

Array = NDArray[np.float64]
_TREES = 60  # few and small: an overfitted classifier would hide the dependence
_SETTINGS = {
    "objective": "binary", "learning_rate": 0.05, "num_leaves": 4, "min_data_in_leaf": 50,
    "verbose": -1,
}  # fmt: skip


class ExcessRisk(float):
    """A difference of Brier scores: a float with a confidence interval.

    Parameters
    ----------
    mean : float
        Mean difference of the Brier scores.
    standard_error : float
        Standard error of the mean.
    rows : int
        Number of rows it was measured on.
    confidence : float, default=0.95
        Confidence level of the interval.

    Examples
    --------
    >>> ExcessRisk(0.01, 0.004, rows=1000)
    0.0100 [0.0022, 0.0178]
    """

    low: float
    high: float
    rows: int
    _given: tuple[Any, ...]

    def __new__(
        cls, mean: float, standard_error: float, rows: int, confidence: float = 0.95
    ) -> ExcessRisk:
        """Return the difference with its confidence interval."""
        self = super().__new__(cls, mean)
        half = NormalDist().inv_cdf((1 + confidence) / 2) * standard_error
        self.low, self.high, self.rows = mean - half, mean + half, rows
        self._given = (mean, standard_error, rows, confidence)
        return self

    def __reduce__(self) -> Any:
        return ExcessRisk, self._given

    def __repr__(self) -> str:
        return f"{float(self):.4f} [{self.low:.4f}, {self.high:.4f}]"


def excess_risk(
    interval: Sequence[Any],
    y: Any,
    x: Any,
    alpha: Any = None,
    *,
    classifier: Any = None,
    folds: int = 5,
    seed: int = 0,
    joint: Any = False,
    missing: bool = False,
) -> ExcessRisk:
    """Return the excess risk, a measure of how far coverage depends on the input.

    The excess risk of the target coverage (ERT; Braun, Holzmüller, Jordan and Bach, 2025): the
    Brier score of the constant 1 - alpha minus that of a classifier which predicts from x whether
    a row is covered, by cross-validation. It is at most the mean squared deviation of the
    coverage given x from 1 - alpha (0.01: about 10 points), and, up to chance, not above 0 if
    coverage is 1 - alpha at every x; a classifier that learns nothing makes it negative.

    Parameters
    ----------
    interval : Interval or (lower, upper)
        Intervals, or their ends.
    y : array-like
        Targets, in the shape of the ends.
    x : array-like
        Inputs, (n, d).
    alpha : float, default=None
        The level; by default the attribute ``alpha`` of the intervals, or 0.1.
    classifier : estimator, default=None
        An object with ``fit(x, covered)`` and ``predict_proba(x)``, as in scikit-learn, copied for
        every fold; by default boosted trees of LightGBM (``pip install 'ffcp[trees]'``).
    folds : int, default=5
        Number of folds of the cross-validation.
    seed : int, default=0
        Seed of the split into folds.
    joint : bool, float, str or tuple, default=False
        As in :func:`coverage`.
    missing : bool, default=False
        As in :func:`coverage`.

    Returns
    -------
    ExcessRisk
        The mean, with a 95 % confidence interval ``low`` to ``high``.

    Examples
    --------
    >>> import torch
    >>> x = torch.linspace(-1, 1, 1000)[:, None]
    >>> upper = (x[:, 0] < 0.8).double()  # nothing is covered on the right
    >>> found = excess_risk((torch.zeros(1000), upper), torch.full((1000,), 0.5), x, alpha=0.1)
    >>> found.low > 0
    True
    """
    level = (getattr(interval, "alpha", None) or 0.1) if alpha is None else alpha
    hits = hits_of(interval, y, joint, missing)
    known = ~hits.isnan()
    rows = as_tensor(x).reshape(len(hits), -1)
    options: dict[str, Any] = {"classifier": classifier, "folds": folds, "seed": seed}
    return excess_of(hits[known].numpy(), rows[known].numpy(), level, **options)


def excess_of(
    covered: Any, x: Any, alpha: Any, *, classifier: Any = None, folds: int = 5, seed: int = 0
) -> ExcessRisk:
    """Return the excess risk, given for each row whether it is covered, 0 or 1."""
    hits, inputs = np.asarray(covered, dtype=np.float64), np.asarray(x)
    if not np.isin(hits, (0.0, 1.0)).all():
        raise ValueError("rows with several outputs are covered in part: pass joint=True")
    if not 2 <= folds <= len(hits):
        raise ValueError(f"'folds' must be 2 to {len(hits)}, the number of rows, got {folds}")
    predicted = np.empty(len(hits))
    for fold in np.array_split(np.random.default_rng(seed).permutation(len(hits)), folds):
        others = np.setdiff1d(np.arange(len(hits)), fold)
        predicted[fold] = _probability(classifier, inputs[others], hits[others], inputs[fold])
    target = 1 - float(exact_alpha(alpha))
    gains = (hits - target) ** 2 - (hits - predicted) ** 2
    error = float(gains.std(ddof=1)) / math.sqrt(len(gains))
    return ExcessRisk(float(gains.mean()), error, len(gains))


def _probability(classifier: Any, x: Array, covered: Array, new: Array) -> Array:
    """Return the probability that new rows are covered, learned from other rows."""
    if covered.min() == covered.max():
        return np.full(len(new), covered[0])
    if classifier is not None:
        fitted = copy.deepcopy(classifier).fit(x, covered)
        return np.asarray(fitted.predict_proba(new)[:, 1], dtype=np.float64)
    lightgbm = needed("lightgbm", "trees", "excess_risk() without a classifier")
    booster = lightgbm.train(_SETTINGS, lightgbm.Dataset(x, covered), _TREES)
    return np.asarray(booster.predict(new), dtype=np.float64)
