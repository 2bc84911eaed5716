"""A small table of houses, drawn by a formula, and fits of it that tests share."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pandas as pd

from ffcp import tables
from ffcp.regression.learned import network


def houses(rows: int, seed: int = 0) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "size": draw.gamma(2, 50, rows).round(1) + 10,
            "rooms": draw.integers(1, 7, rows),
            "town": draw.choice(["Bern", "Basel", "Chur"], rows),
            "sold": pd.Timestamp("2020-01-01")
            + pd.to_timedelta(draw.integers(0, 1000, rows), unit="D"),
            "id": [f"house {number}" for number in range(rows)],
            "garden": draw.choice([True, False], rows),
            "country": "CH",
            "empty": [None] * rows,
        }
    )
    noise = frame["size"] * 0.3 * draw.standard_normal(rows)
    frame["price"] = (frame["size"] * 3 + 20 * frame["rooms"] + noise).clip(lower=1).round(2)
    frame.loc[::17, "size"] = np.nan
    return frame


def quick_fit(frame: pd.DataFrame, target: str, **options: Any) -> tables.FittedTable:
    """Fit as the library does, but let networks that learn about errors learn for a moment."""
    with mock.patch.object(network, "_EPOCHS", 8):
        return tables.fit(frame, target, **{"minutes": 0.005, **options})


def new(rows: int, seed: int = 1) -> Any:
    return houses(rows, seed).drop(columns="price")
