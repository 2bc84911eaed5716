"""What to beat without ffcp's bands: two boosted quantiles of the residual, widened to cover.

Somebody who has the network, its gradient norms and scikit-learn can have this in an afternoon.
Trees learn the 5 % and the 95 % quantile of the residual on the training rows; all calibration
rows then say by which share of its own length every band must grow or shrink.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import ffcp
from ffcp.conformal.rank import conformal_quantile

Array = NDArray[np.float64]
_LAYERS = ("input", "0", "3", "6")  # of the paper's network, where gradients are taken
_HIDDEN = 8  # its modules up to the last hidden layer, behind the ReLU
_TINY_PREDICTION, _TINY_NORM, _TINY_LENGTH = 1e-2, 1e-3, 1e-6


class Opponent:
    """Bands between two boosted quantiles of the residual of the paper's network.

    Parameters
    ----------
    model
        The trained network.
    alpha
        The level; another one means learning again.
    """

    def __init__(self, model: nn.Sequential, alpha: float = 0.1) -> None:
        self._model, self._alpha = model, alpha

    def fit(self, x: Tensor, y: Tensor) -> Opponent:
        """Learn both quantiles from the training rows."""
        from sklearn.ensemble import HistGradientBoostingRegressor

        prediction, norms = self._pass(x)
        self._smallest_norms = _TINY_NORM * np.median(norms, axis=0)
        table, residual = self._table(x, prediction, norms), _flat(y) - prediction
        self._trees = [
            HistGradientBoostingRegressor(
                loss="quantile",
                quantile=level,
                max_iter=150,
                learning_rate=0.05,
                max_leaf_nodes=8,
                min_samples_leaf=40,
                random_state=0,
            ).fit(table, residual)
            for level in (self._alpha / 2, 1 - self._alpha / 2)
        ]
        return self

    def calibrate(self, x: Tensor, y: Tensor) -> Opponent:
        """Find the share of their length by which bands must grow to cover."""
        lower, upper, length = self._raw(x)
        away = np.maximum(lower - _flat(y), _flat(y) - upper) / length
        self._share = float(conformal_quantile(torch.from_numpy(away), self._alpha))
        return self

    def predict(self, x: Tensor) -> tuple[Array, Array]:
        """Give the ends; where a band shrinks past its middle they change places."""
        lower, upper, length = self._raw(x)
        first, second = lower - self._share * length, upper + self._share * length
        return np.minimum(first, second), np.maximum(first, second)

    def _raw(self, x: Tensor) -> tuple[Array, Array, Array]:
        prediction, norms = self._pass(x)
        table = self._table(x, prediction, norms)
        low, high = (trees.predict(table) for trees in self._trees)
        return prediction + low, prediction + high, np.maximum(high - low, _TINY_LENGTH)

    def _pass(self, x: Tensor) -> tuple[Array, Array]:
        prediction, norms = ffcp.gradient_norms(self._model, x, features=list(_LAYERS))
        return _flat(prediction), np.stack([_flat(norms[name]) for name in _LAYERS], axis=1)

    def _table(self, x: Tensor, prediction: Array, norms: Array) -> Array:
        """Put together prediction, its logarithm, those of the norms, a hidden layer, the input."""
        with torch.no_grad():
            hidden = self._model[:_HIDDEN](x)
        return np.column_stack(
            [
                prediction,
                np.log(np.maximum(np.abs(prediction), _TINY_PREDICTION)),
                np.log(np.maximum(norms, self._smallest_norms)),
                hidden.double().numpy(),
                x.double().numpy(),
            ]
        )


def _flat(values: Tensor) -> Array:
    return values.detach().double().reshape(-1).numpy()
