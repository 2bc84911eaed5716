"""Time of intervals from stored predictions: ``python -m benchmarks.stored``.

100,000 calibration and 100,000 test rows, one thread. crepes, puncc and MAPIE are compared if they
are installed, in a separate virtual environment (see :mod:`benchmarks.sets`; here also with
``crepes`` and ``puncc``):

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
PREDICTOR = "ffcp, predictor"  # keeps its scores for further calls
Ends = tuple[np.ndarray, np.ndarray]
_random = np.random.default_rng(0)
Y, Y_NEW = _random.standard_normal((2, ROWS))
POINT, POINT_NEW = Y + _random.standard_normal(ROWS), Y_NEW + _random.standard_normal(ROWS)
ENDS = np.stack([POINT - 1, POINT + 1.2], axis=1)
ENDS_NEW = np.stack([POINT_NEW - 1, POINT_NEW + 1.2], axis=1)


def ours(predicted: np.ndarray, new: np.ndarray) -> Ends:
    interval = ffcp.intervals_from(predicted, Y, new, ALPHA, quantiles=predicted.ndim > 1)
    return interval.lower.numpy(), interval.upper.numpy()


def predictor_cp() -> Ends:
    predictor = ffcp.CP(ffcp.Stored()).calibrate(POINT, Y)
    interval = predictor.predict_interval(POINT_NEW, ALPHA)
    return interval.lower.numpy(), interval.upper.numpy()


def predictor_cqr() -> Ends:
    predictor = ffcp.CQR(ffcp.Stored()).calibrate(ENDS, Y)
    interval = predictor.predict_interval(ENDS_NEW, ALPHA)
    return interval.lower.numpy(), interval.upper.numpy()


def crepes_cp() -> Ends:
    from crepes import ConformalRegressor

    regressor = ConformalRegressor().fit(Y - POINT)
    lower, upper = regressor.predict_int(POINT_NEW, confidence=1 - ALPHA).T
    return lower, upper


def _puncc(score: str, sets: str, predicted: np.ndarray, new: np.ndarray) -> Ends:
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


def mapie_cqr() -> Ends:
    from mapie.regression import ConformalizedQuantileRegressor

    regressor = ConformalizedQuantileRegressor(
        estimator=[_Known(0), _Known(1), _Known(-1)], confidence_level=1 - ALPHA, prefit=True
    ).conformalize(ENDS, Y)
    _, ends = regressor.predict_interval(ENDS_NEW, symmetric_correction=True)
    return ends[:, 0, 0], ends[:, 1, 0]


def mapie_cp() -> Ends:
    from mapie.regression import SplitConformalRegressor

    regressor = SplitConformalRegressor(
        estimator=_Known(0), confidence_level=1 - ALPHA, prefit=True
    ).conformalize(POINT[:, None], Y)
    _, ends = regressor.predict_interval(POINT_NEW[:, None])
    return ends[:, 0, 0], ends[:, 1, 0]


METHODS: dict[str, dict[str, Callable[[], Ends]]] = {
    "CP": {
        "ffcp": lambda: ours(POINT, POINT_NEW),
        PREDICTOR: predictor_cp,
        "crepes": crepes_cp,
        "deel": lambda: _puncc("absolute_difference", "constant_interval", POINT, POINT_NEW),
        "mapie": mapie_cp,
    },
    "CQR": {
        "ffcp": lambda: ours(ENDS, ENDS_NEW),
        PREDICTOR: predictor_cqr,
        "deel": lambda: _puncc("cqr_score", "cqr_interval", ENDS, ENDS_NEW),
        "mapie": mapie_cqr,
    },
}


def stored(rounds: int = 100) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter(
        "ignore"
    )  # MAPIE warns in every call that its estimator may not be fitted
    report = table(
        f"{ROWS:,} calibration and {ROWS:,} test rows, one thread",
        "method", "library", "ms", "ours against it", "limit", "",
    )  # fmt: skip
    for method, libraries in METHODS.items():
        present = {
            n: run for n, run in libraries.items() if n == PREDICTOR or importlib.util.find_spec(n)
        }
        intervals = {name: run() for name, run in present.items()}
        times = best_of(present, rounds)
        for name, seconds in times.items():
            # All have the same guarantee, so results must nearly agree.
            assert np.allclose(intervals[name], intervals["ffcp"], atol=0.02), name
            ratio = times["ffcp"] / seconds
            last = (
                () if name in ("ffcp", PREDICTOR) else (f"{ratio:.2f}", "2.00", verdict(ratio, 2.0))
            )
            report.add_row(
                method, "puncc" if name == "deel" else name, f"{seconds * 1e3:.2f}", *last
            )
    show(report)


def main() -> None:
    stored()


if __name__ == "__main__":
    main()
