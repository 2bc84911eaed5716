"""Conditional calibration compared with MAPIE: ``python -m benchmarks.conditional``.

Seconds for 1,000 new rows, including the quantile regression of 500 to 2,000 calibration rows with
4 features, and how far the interval ends differ. Requires
``pip install 'mapie[conditional]'``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ffcp
from benchmarks.oracles import Fitted
from benchmarks.timing import best_of, show, table

NEW, FEATURES, ALPHA, ROUNDS = 1000, 4, 0.1, 3
KINDS: dict[str, Callable[[Any], Any]] = {
    "4 numbers": lambda x: x,
    "4 overlapping groups": lambda x: x > 0.5,
}


class Zero(nn.Module):
    """A model that predicts 0 for every row."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), dtype=x.dtype)


def drawn(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw inputs and targets whose noise grows with the first column."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, FEATURES))
    return x, np.exp(x[:, 0] / 2) * random.standard_normal(rows)


def main() -> None:
    from mapie.conditional_conformal_prediction import ConditionalSplitConformalRegressor

    shown = table("Conditional calibration", "features", "rows", "ffcp", "MAPIE", "ratio", "differ")
    for kind, features in KINDS.items():
        for rows in (500, 1000, 2000):
            (x, y), (new, _) = drawn(rows, seed=0), drawn(NEW, seed=1)

            def ours(
                features: Any = features, x: Any = x, y: Any = y, new: Any = new
            ) -> np.ndarray:
                calibration = ffcp.calibrations.Conditional(features)
                predictor = ffcp.CP(Zero(), calibration=calibration)
                return predictor.calibrate(x, y).predict_interval(new, ALPHA).upper.numpy()

            def theirs(
                features: Any = features, x: Any = x, y: Any = y, new: Any = new
            ) -> np.ndarray:
                peer = ConditionalSplitConformalRegressor(
                    lambda x: np.column_stack([np.ones(len(x)), features(x)]),
                    Fitted(lambda x: np.zeros(len(x))),
                    1 - ALPHA,
                )
                upper: np.ndarray = peer.conformalize(x, y).predict_interval(new)[1][:, 1, 0]
                return upper

            # For a negative threshold ffcp returns a point, MAPIE an interval with swapped ends.
            gap = np.abs(ours() - np.maximum(theirs(), 0))
            best = best_of({"ffcp": ours, "MAPIE": theirs}, ROUNDS)
            shown.add_row(
                kind,
                f"{rows:,}",
                *(f"{best[name]:.3f}" for name in ("ffcp", "MAPIE")),
                f"{best['ffcp'] / best['MAPIE']:.3f}",
                f"{int((gap > 1e-9).sum())} rows, at most {gap.max():.1g}",
            )
    show(shown)


if __name__ == "__main__":
    main()
