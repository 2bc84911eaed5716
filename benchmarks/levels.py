"""Time of 19 levels in one call compared with one level: ``python -m benchmarks.levels``."""

from __future__ import annotations

from functools import partial

import torch

import ffcp
from benchmarks.timing import best_of
from ffcp_paper.networks.regression import SPLIT_POINTS, mlp

ROWS, COLUMNS, ROUNDS = 100_000, 100, 15
LEVELS = tuple(step / 20 for step in range(1, 20))


def main() -> None:
    torch.manual_seed(0)
    model, x, y = mlp(COLUMNS), torch.randn(ROWS, COLUMNS), torch.randn(ROWS)
    for predictor in (ffcp.CP(model), ffcp.FFCP(model, SPLIT_POINTS[2])):
        predictor.calibrate(x[:20_000], y[:20_000])
        asked = {"1 level": 0.1, "19 levels": LEVELS}
        calls = {n: partial(predictor.predict_interval, x, alpha) for n, alpha in asked.items()}
        best = best_of(calls, ROUNDS)
        ratio = best["19 levels"] / best["1 level"]
        print(f"{type(predictor).__name__}, {ROWS} rows: 19 levels take {ratio:.2f} times one")


if __name__ == "__main__":
    main()
