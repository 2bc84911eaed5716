"""What users of other libraries would pick, on given rows; run by :mod:`benchmarks.tables`.

It runs in an environment of its own, which has MAPIE and crepes and not ffcp: arguments are a
file of arrays and the one to write, ends of bands by the name of the method.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np


def mapie_cqr(data: Any, alpha: float, seed: int) -> Any:
    from mapie.regression import ConformalizedQuantileRegressor
    from sklearn.ensemble import HistGradientBoostingRegressor

    model = ConformalizedQuantileRegressor(
        HistGradientBoostingRegressor(loss="quantile", quantile=0.5, random_state=seed),
        confidence_level=1 - alpha,
    )
    model.fit(data["x_train"], data["y_train"]).conformalize(data["x_cal"], data["y_cal"])
    return model.predict_interval(data["x_test"])[1][:, :, 0]


def mapie_normalised(data: Any, alpha: float, seed: int) -> Any:
    from mapie.conformity_scores import ResidualNormalisedScore
    from mapie.regression import SplitConformalRegressor
    from sklearn.ensemble import HistGradientBoostingRegressor

    score = ResidualNormalisedScore(
        residual_estimator=HistGradientBoostingRegressor(random_state=seed), random_state=seed
    )
    model = SplitConformalRegressor(
        HistGradientBoostingRegressor(random_state=seed),
        confidence_level=1 - alpha,
        conformity_score=score,
        prefit=False,
    )
    model.fit(data["x_train"], data["y_train"]).conformalize(data["x_cal"], data["y_cal"])
    return model.predict_interval(data["x_test"])[1][:, :, 0]


def _forest(data: Any, seed: int) -> tuple[Any, Any]:
    from crepes import WrapRegressor
    from crepes.extras import DifficultyEstimator
    from sklearn.ensemble import RandomForestRegressor

    model = WrapRegressor(RandomForestRegressor(500, oob_score=True, random_state=seed))
    model.fit(data["x_train"], data["y_train"])
    # Difficulty by out-of-bag residuals of near training rows: crepes' own recommendation.
    difficulty = DifficultyEstimator()
    residuals = data["y_train"] - model.learner.oob_prediction_
    difficulty.fit(data["x_train"], residuals=residuals, scaler=True)
    return model, difficulty


def crepes_normalised(data: Any, alpha: float, seed: int) -> Any:
    model, difficulty = _forest(data, seed)
    model.calibrate(data["x_cal"], data["y_cal"], de=difficulty)
    return model.predict_int(data["x_test"], confidence=1 - alpha)


def crepes_system(data: Any, alpha: float, seed: int) -> Any:
    model, difficulty = _forest(data, seed)
    model.calibrate(data["x_cal"], data["y_cal"], de=difficulty, cps=True, seed=seed)
    return model.predict_int(data["x_test"], confidence=1 - alpha, seed=seed)


METHODS = {
    "MAPIE, boosting, CQR": mapie_cqr,
    "MAPIE, boosting, normalised": mapie_normalised,
    "crepes, forest, normalised": crepes_normalised,
    "crepes, forest, predictive system": crepes_system,
}


def main(source: str, out: str, alpha: float, seed: int) -> None:
    with np.load(source) as arrays:
        data = dict(arrays)
    result: dict[str, Any] = {}
    for name, method in METHODS.items():
        start = time.perf_counter()
        result[name] = np.asarray(method(data, alpha, seed), dtype=np.float64)
        result[f"seconds {name}"] = np.float64(time.perf_counter() - start)
    np.savez(out, **result)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
