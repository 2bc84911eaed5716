"""Bands of other libraries on the same network: crepes and MAPIE, as their manuals use them.

Neither is needed by ffcp or its tests: install them beside it to have them measured
(``pip install crepes==0.9.1 mapie==1.6.0``).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ffcp_paper.datasets import Split

Array = NDArray[np.float64]
IntervalPredictor = Callable[[Tensor], tuple[Array, Array]]


def version(library: str) -> str | None:
    """Say which version of a library is installed; ``None`` if it is not."""
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
            return _flat(self.model(torch.from_numpy(np.asarray(x)).float()))

    def __sklearn_is_fitted__(self) -> bool:
        return True


def crepes(model: nn.Module, parts: Split, alpha: float, by: str) -> IntervalPredictor:
    """Normalise by a difficulty: the spread of 25 neighbours' targets, or their residuals."""
    from crepes import ConformalRegressor
    from crepes.extras import DifficultyEstimator

    network = Regressor(model)
    x, y = parts.x_train.numpy(), _flat(parts.y_train)
    known = {"y": y} if by == "targets" else {"residuals": y - network.predict(x)}
    difficulty = DifficultyEstimator().fit(x, **known)
    x = parts.x_cal.numpy()
    residuals = _flat(parts.y_cal) - network.predict(x)
    made = ConformalRegressor().fit(residuals, sigmas=difficulty.apply(x))

    def bands(x: Tensor) -> tuple[Array, Array]:
        rows = x.numpy()
        ends = made.predict_int(
            network.predict(rows), sigmas=difficulty.apply(rows), confidence=1 - alpha
        )
        return ends[:, 0], ends[:, 1]

    return bands


def mapie(
    model: nn.Module, parts: Split, alpha: float, residuals: Any, seed: int
) -> IntervalPredictor:
    """Normalise by a model of the residual's size, learned on a quarter of the calibration rows.

    ``residuals`` is that model; ``None``: the linear one that MAPIE takes by itself.
    """
    from mapie.conformity_scores import ResidualNormalisedScore
    from mapie.regression import SplitConformalRegressor

    score = ResidualNormalisedScore(residual_estimator=residuals, random_state=seed)
    made = SplitConformalRegressor(
        Regressor(model), confidence_level=1 - alpha, conformity_score=score, prefit=True
    ).conformalize(parts.x_cal.numpy(), _flat(parts.y_cal))

    def bands(x: Tensor) -> tuple[Array, Array]:
        _, ends = made.predict_interval(x.numpy())
        return ends[:, 0, 0], ends[:, 1, 0]

    return bands


def _flat(values: Tensor) -> Array:
    return values.detach().double().reshape(-1).numpy()
