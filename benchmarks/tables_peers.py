"""Typical choices in MAPIE and crepes on given rows; run by :mod:`benchmarks.tables`.

Runs in a separate environment that has MAPIE and crepes but not ffcp: reads a file of arrays and
writes a file of interval ends by the name of the method.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np


class Asked(NamedTuple):
    """The level, the seed, how many trees a forest has, and how many threads grow it."""

    alpha: float
    seed: int
    trees: int
    threads: int


Methods = Iterator[tuple[str, Callable[[], Any]]]  # names, and functions that return intervals


def mapie(data: Any, asked: Asked) -> Methods:
    """Yield the methods of MAPIE on scikit-learn's boosted trees."""
    yield "MAPIE, boosting, CQR", lambda: _mapie_cqr(data, asked)
    symmetric = {"symmetric_correction": True}
    yield "MAPIE, boosting, CQR, symmetric", lambda: _mapie_cqr(data, asked, **symmetric)
    yield "MAPIE, boosting, normalised", lambda: _mapie_normalised(data, asked)


def _mapie_cqr(data: Any, asked: Asked, **correction: Any) -> Any:
    from mapie.regression import ConformalizedQuantileRegressor
    from sklearn.ensemble import HistGradientBoostingRegressor

    model = ConformalizedQuantileRegressor(
        HistGradientBoostingRegressor(loss="quantile", quantile=0.5, random_state=asked.seed),
        confidence_level=1 - asked.alpha,
    )
    model.fit(data["x_train"], data["y_train"]).conformalize(data["x_cal"], data["y_cal"])
    return model.predict_interval(data["x_test"], **correction)[1][:, :, 0]


def _mapie_normalised(data: Any, asked: Asked) -> Any:
    from mapie.conformity_scores import ResidualNormalisedScore
    from mapie.regression import SplitConformalRegressor
    from sklearn.ensemble import HistGradientBoostingRegressor

    score = ResidualNormalisedScore(
        residual_estimator=HistGradientBoostingRegressor(random_state=asked.seed),
        random_state=asked.seed,
    )
    model = SplitConformalRegressor(
        HistGradientBoostingRegressor(random_state=asked.seed),
        confidence_level=1 - asked.alpha,
        conformity_score=score,
        prefit=False,
    )
    model.fit(data["x_train"], data["y_train"]).conformalize(data["x_cal"], data["y_cal"])
    return model.predict_interval(data["x_test"])[1][:, :, 0]


def crepes(data: Any, asked: Asked) -> Methods:
    """Yield both methods of crepes on one random forest, whose time counts in both."""
    from crepes import WrapRegressor
    from crepes.extras import DifficultyEstimator
    from sklearn.ensemble import RandomForestRegressor

    forest = RandomForestRegressor(
        asked.trees, oob_score=True, random_state=asked.seed, n_jobs=asked.threads
    )
    model = WrapRegressor(forest)
    model.fit(data["x_train"], data["y_train"])
    # Difficulty by out-of-bag residuals of near training rows: crepes' own recommendation.
    difficulty = DifficultyEstimator()
    residuals = data["y_train"] - model.learner.oob_prediction_
    difficulty.fit(data["x_train"], residuals=residuals, scaler=True)

    def intervals(**given: Any) -> Any:
        model.calibrate(data["x_cal"], data["y_cal"], de=difficulty, **given)
        return model.predict_int(data["x_test"], confidence=1 - asked.alpha, seed=asked.seed)

    yield "crepes, forest, normalised", intervals
    yield "crepes, forest, predictive system", lambda: intervals(cps=True, seed=asked.seed)


LIBRARIES = {"mapie": mapie, "crepes": crepes}


def measured(intervals: Methods) -> dict[str, Any]:
    """Return the intervals and seconds of each method; shared work counts in each."""
    result: dict[str, Any] = {}
    shared, start = 0.0, time.process_time()
    for name, make in intervals:
        if not result:
            shared = time.process_time() - start
        start = time.process_time()
        result[name] = np.asarray(make(), dtype=np.float64)
        result[f"seconds {name}"] = np.float64(shared + time.process_time() - start)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--alpha", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--trees", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    asked = parser.parse_args()
    with np.load(asked.source) as arrays:
        data = dict(arrays)
    given = Asked(asked.alpha, asked.seed, asked.trees, asked.threads)
    np.savez(asked.out, **measured(LIBRARIES[asked.library](data, given)))


if __name__ == "__main__":
    main()
