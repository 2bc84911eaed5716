"""The page about a fit: one file that loads nothing, light or dark, narrow or wide."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ffcp.tables.fitted import FittedTable
from ffcp.tables.training import told

_SHOWN = 120  # test rows in the picture of bands
_WIDE, _HIGH, _LEFT = 760.0, 300.0, 92.0


def page(
    fitted: FittedTable, bands: pd.DataFrame | None = None, y: np.ndarray[Any, Any] | None = None
) -> str:
    """Write the page from the bands of the test rows and their targets, if there are any."""
    from jinja2 import Environment, FileSystemLoader, select_autoescape

    loader = FileSystemLoader(Path(__file__).parent)
    made = Environment(loader=loader, autoescape=select_autoescape(default=True))
    made.filters.update(number=_number, percent=lambda share: f"{share:.1%}")
    measured = {} if bands is None or y is None else _measured(fitted, bands, y)
    return made.get_template("report.html.j2").render(
        about=fitted.about,
        tested=fitted.about.tested,
        labels=bool(fitted.about.classes),
        columns=fitted.columns[0],
        training=told(fitted.about.training),
        **measured,
    )


def _measured(fitted: FittedTable, bands: pd.DataFrame, y: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Draw and list what the test found."""
    has = bands["prediction"].notna().to_numpy()
    bands, y = bands[has], y[has]
    tested, labels = fitted.about.tested, bool(fitted.about.classes)
    assert tested is not None
    return {
        "picture": _sizes(bands) if labels else _picture(bands, y),
        "curve": _curve(tested.curve),
        "by_column": sorted(tested.columns, key=lambda part: part.coverage),
        "size": "mean size" if labels else "mean length",
    }


def _number(value: Any) -> str:
    """Write a number with four digits, thousands apart.

    >>> _number(123456.789), _number(0.000123456), _number(math.inf), _number("red")
    ('123,457', '0.0001235', '∞', 'red')
    """
    if isinstance(value, str) or value is None:
        return value or ""
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _axis(low: float, high: float) -> list[float]:
    """Give round numbers between two ends."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 5)
    first = math.ceil(low / step)
    return [tick * step for tick in range(first, math.floor(high / step) + 1)]


def _picture(bands: pd.DataFrame, y: np.ndarray[Any, Any]) -> dict[str, Any] | None:
    """Draw the bands of some test rows, in the order of their prediction."""
    ends = bands[["lower", "prediction", "upper"]].to_numpy(np.float64)
    rows = np.argsort(ends[:, 1], kind="stable")
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(_SHOWN, len(rows))).astype(int))]
    ends, truth = ends[rows], y[rows].astype(np.float64)
    every = np.concatenate([ends[np.isfinite(ends)], truth])
    if not len(rows) or np.ptp(every) == 0:
        return None
    low, high = float(every.min()), float(every.max())
    margin = 0.04 * (high - low)
    low, high = low - margin, high + margin

    def place(values: Any) -> Any:
        clipped = np.clip(values, low, high)
        return np.round((high - clipped) / (high - low) * _HIGH, 1)

    across = _LEFT + (np.arange(len(rows)) + 0.5) * (_WIDE - _LEFT) / len(rows)
    inside = (ends[:, 0] <= truth) & (truth <= ends[:, 2])
    return {
        "rows": [
            {"x": round(float(x), 1), "lower": a, "middle": b, "upper": c, "y": t, "hit": bool(h)}
            for x, (a, b, c), t, h in zip(across, place(ends), place(truth), inside, strict=True)
        ],
        "ticks": [(place(tick), _number(tick)) for tick in _axis(low, high)],
        "width": _WIDE,
        "height": _HIGH,
        "left": _LEFT,
        "bar": round((_WIDE - _LEFT) / len(rows) * 0.6, 1),
        "count": len(rows),
    }


def _sizes(bands: pd.DataFrame) -> dict[str, Any]:
    """Count the sizes of label sets."""
    sizes, counts = np.unique(bands["size"].astype(int), return_counts=True)
    share = counts / counts.sum()
    return {"sizes": list(zip(sizes.tolist(), share.tolist(), counts.tolist(), strict=True))}


def _curve(pairs: tuple[float, ...]) -> dict[str, Any]:
    """Draw found against promised coverage, in a square of 260."""
    points = sorted(zip(pairs[::2], pairs[1::2], strict=True))
    places = [(round(40 + 220 * a, 1), round(230 - 220 * b, 1)) for a, b in points]
    return {"points": places, "line": " ".join(f"{x},{y}" for x, y in places), "pairs": points}
