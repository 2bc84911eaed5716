"""Intervals of other libraries, crepes and MAPIE, on the same network; and retrained models.

crepes and MAPIE, used as their manuals do, are not needed by ffcp or its tests: install them
beside it to have them measured (``pip install crepes==0.9.1 mapie==1.6.0``).
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.intervals.opponents import Predict, boosted_quantile, numbers, threshold
from ffcp_paper.data.datasets import Split

Array = NDArray[np.float64]


def version(library: str) -> str | None:
    """Return the installed version of a library; ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


class Regressor:
    """The network as scikit-learn sees a fitted regressor."""

    _estimator_type = "regressor"

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def fit(self, x: Array, y: Array) -> Regressor:
        return self

    def predict(self, x: Array) -> Array:
        with torch.no_grad():
            return numbers(self.model(torch.from_numpy(np.asarray(x)).float()))

    def __sklearn_is_fitted__(self) -> bool:
        return True


def crepes(model: nn.Module, parts: Split, alpha: float, by: str) -> Predict:
    """Normalise by a difficulty: the spread of 25 neighbours' targets, or their residuals."""
    from crepes import ConformalRegressor
    from crepes.extras import DifficultyEstimator

    network = Regressor(model)
    x, y = parts.x_train.numpy(), numbers(parts.y_train)
    known = {"y": y} if by == "targets" else {"residuals": y - network.predict(x)}
    difficulty = DifficultyEstimator().fit(x, **known)
    x = parts.x_cal.numpy()
    residuals = numbers(parts.y_cal) - network.predict(x)
    made = ConformalRegressor().fit(residuals, sigmas=difficulty.apply(x))

    def predict(x: Tensor) -> tuple[Array, Array]:
        rows = x.numpy()
        ends = made.predict_int(
            network.predict(rows), sigmas=difficulty.apply(rows), confidence=1 - alpha
        )
        return ends[:, 0], ends[:, 1]

    return predict


def mapie(model: nn.Module, parts: Split, alpha: float, residuals: Any, seed: int) -> Predict:
    """Normalise by a model of the residual's size, learned on a quarter of the calibration rows.

    ``residuals`` is that model; ``None``: the linear default of MAPIE.
    """
    from mapie.conformity_scores import ResidualNormalisedScore
    from mapie.regression import SplitConformalRegressor

    score = ResidualNormalisedScore(residual_estimator=residuals, random_state=seed)
    made = SplitConformalRegressor(
        Regressor(model), confidence_level=1 - alpha, conformity_score=score, prefit=True
    ).conformalize(parts.x_cal.numpy(), numbers(parts.y_cal))

    def predict(x: Tensor) -> tuple[Array, Array]:
        _, ends = made.predict_interval(x.numpy())
        return ends[:, 0, 0], ends[:, 1, 0]

    return predict


def boosted_cqr(parts: Split, alpha: float) -> Predict:
    """Learn two quantiles of the target with LightGBM, and calibrate them by CQR."""
    x, y = parts.x_train.double().numpy(), numbers(parts.y_train)
    low, high = (boosted_quantile(x, y, level) for level in (alpha / 2, 1 - alpha / 2))
    x, y = parts.x_cal.double().numpy(), numbers(parts.y_cal)
    by = threshold(np.maximum(low(x) - y, y - high(x)), alpha)

    def predict(x: Tensor) -> tuple[Array, Array]:
        rows = x.double().numpy()
        return low(rows) - by, high(rows) + by

    return predict
