"""From predictions that are there already: ``python -m benchmarks.stored``.

100,000 calibration and 100,000 test rows, one thread. crepes, puncc and MAPIE take part if they
are installed, in a virtual environment of their own (see :mod:`benchmarks.sets`; here with
``crepes`` and ``puncc`` beside ``mapie``):

    PYTHONPATH=src /tmp/peers/bin/python -m benchmarks.stored
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import ffcp
from benchmarks.timing import best_of, show, table, verdict

ROWS, ALPHA = 100_000, 0.1
KEPT = "ffcp, kept"  # a predictor, which has its scores ready for more
IntervalPredictor = tuple[np.ndarray, np.ndarray]
_random = np.random.default_rng(0)
Y, Y_NEW = _random.standard_normal((2, ROWS))
POINT, POINT_NEW = Y + _random.standard_normal(ROWS), Y_NEW + _random.standard_normal(ROWS)
ENDS = np.stack([POINT - 1, POINT + 1.2], axis=1)
ENDS_NEW = np.stack([POINT_NEW - 1, POINT_NEW + 1.2], axis=1)


def ours(predicted: np.ndarray, new: np.ndarray) -> IntervalPredictor:
    band = ffcp.intervals_from(predicted, Y, new, ALPHA, quantiles=predicted.ndim > 1)
    return band.lower.numpy(), band.upper.numpy()


def kept_cp() -> IntervalPredictor:
    predictor = ffcp.CP(ffcp.Stored()).calibrate(POINT, Y)
    band = predictor.predict_interval(POINT_NEW, ALPHA)
    return band.lower.numpy(), band.upper.numpy()


def kept_cqr() -> IntervalPredictor:
    predictor = ffcp.CQR(ffcp.Stored()).calibrate(ENDS, Y)
    band = predictor.predict_interval(ENDS_NEW, ALPHA)
    return band.lower.numpy(), band.upper.numpy()


def crepes_cp() -> IntervalPredictor:
    from crepes import ConformalRegressor

    regressor = ConformalRegressor().fit(Y - POINT)
    lower, upper = regressor.predict_int(POINT_NEW, confidence=1 - ALPHA).T
    return lower, upper


def _puncc(score: str, sets: str, predicted: np.ndarray, new: np.ndarray) -> IntervalPredictor:
    from deel.puncc.api import nonconformity_scores, prediction_sets
    from deel.puncc.api.calibration import BaseCalibrator

    calibrator = BaseCalibrator(
        nonconf_score_func=getattr(nonconformity_scores, score),
        pred_set_func=getattr(prediction_sets, sets),
    )
    calibrator.fit(y_true=Y, y_pred=predicted)
    lower, upper = calibrator.calibrate(alpha=ALPHA, y_pred=new)
    return lower, upper


class _Known:
    """An estimator whose predictions are columns of its input."""

    __sklearn_is_fitted__ = staticmethod(lambda: True)

    def __init__(self, place: int = 0) -> None:
        self.place = place

    def fit(self, x: Any, y: Any) -> _Known:
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        values: np.ndarray = x[:, self.place] if self.place >= 0 else x.mean(axis=1)
        return values


def mapie_cqr() -> IntervalPredictor:
    from mapie.regression import ConformalizedQuantileRegressor

    regressor = ConformalizedQuantileRegressor(
        estimator=[_Known(0), _Known(1), _Known(-1)], confidence_level=1 - ALPHA, prefit=True
    ).conformalize(ENDS, Y)
    _, ends = regressor.predict_interval(ENDS_NEW, symmetric_correction=True)
    return ends[:, 0, 0], ends[:, 1, 0]


def mapie_cp() -> IntervalPredictor:
    from mapie.regression import SplitConformalRegressor

    regressor = SplitConformalRegressor(
        estimator=_Known(0), confidence_level=1 - ALPHA, prefit=True
    ).conformalize(POINT[:, None], Y)
    _, ends = regressor.predict_interval(POINT_NEW[:, None])
    return ends[:, 0, 0], ends[:, 1, 0]


METHODS: dict[str, dict[str, Callable[[], IntervalPredictor]]] = {
    "CP": {
        "ffcp": lambda: ours(POINT, POINT_NEW),
        KEPT: kept_cp,
        "crepes": crepes_cp,
        "deel": lambda: _puncc("absolute_difference", "constant_interval", POINT, POINT_NEW),
        "mapie": mapie_cp,
    },
    "CQR": {
        "ffcp": lambda: ours(ENDS, ENDS_NEW),
        KEPT: kept_cqr,
        "deel": lambda: _puncc("cqr_score", "cqr_interval", ENDS, ENDS_NEW),
        "mapie": mapie_cqr,
    },
}


def stored(rounds: int = 100) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # MAPIE doubts in every call that its estimator is fitted
    made = table(
        f"{ROWS:,} calibration and {ROWS:,} test rows, one thread",
        "method", "library", "ms", "ours against it", "limit", "",
    )  # fmt: skip
    for method, libraries in METHODS.items():
        present = {
            n: run for n, run in libraries.items() if n == KEPT or importlib.util.find_spec(n)
        }
        bands = {name: run() for name, run in present.items()}
        times = best_of(present, rounds)
        for name, seconds in times.items():
            # All of them promise the same, so they must say nearly the same.
            assert np.allclose(bands[name], bands["ffcp"], atol=0.02), name
            ratio = times["ffcp"] / seconds
            last = () if name in ("ffcp", KEPT) else (f"{ratio:.2f}", "2.00", verdict(ratio, 2.0))
            made.add_row(method, "puncc" if name == "deel" else name, f"{seconds * 1e3:.2f}", *last)
    show(made)


def main() -> None:
    stored()


if __name__ == "__main__":
    main()
