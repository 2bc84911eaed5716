"""The HTML report of a fit, a single file without external resources."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ffcp.notebooks import number
from ffcp.tables import decisions
from ffcp.tables.fitted import FittedTable
from ffcp.tables.training import training_summary

_SHOWN = 120  # test rows in the plot of intervals


def page(fitted: FittedTable, predictions: pd.DataFrame | None, y: np.ndarray[Any, Any]) -> str:
    """Return the report, with predictions for the test rows and their targets, if any."""
    from jinja2 import Environment, FileSystemLoader, select_autoescape

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=select_autoescape(default=True))
    environment.filters.update(
        number=lambda value: "" if value is None else number(value),
        percent=lambda share: f"{share:.1%}",
    )
    about = fitted.about
    results: dict[str, Any] = {}
    if predictions is not None and about.tested is not None:
        predicted = predictions["prediction"].notna().to_numpy()
        results = {
            "by_column": sorted(about.tested.columns, key=lambda part: part.coverage),
            "size": "mean size" if about.classes else "mean length",
        }
        if about.classes:
            sizes = predictions["size"][predicted].astype(int)
            results["sizes"] = sizes.value_counts().sort_index().items()
        else:
            results["picture"] = _picture(predictions[predicted], y[predicted])
    choice = decisions.chosen(fitted.predictor, about.scale)
    return environment.get_template("report.html.j2").render(
        about=about,
        columns=fitted.columns[0],
        training=training_summary(about.training),
        choice=None if choice is None else choice._repr_html_(),
        **results,
    )


def _picture(intervals: pd.DataFrame, y: np.ndarray[Any, Any]) -> dict[str, Any] | None:
    """Return the intervals of some test rows, by prediction, in units from 0, the top, to 1."""
    ends = intervals[["lower", "prediction", "upper"]].to_numpy(np.float64)
    rows = np.argsort(ends[:, 1], kind="stable")
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(_SHOWN, len(rows))).astype(int))]
    shown = np.column_stack([ends[rows], y[rows].astype(np.float64)])
    finite = shown[np.isfinite(shown)]
    margin = 0.04 * np.ptp(finite)
    if margin == 0:
        return None
    low, high = float(finite.min() - margin), float(finite.max() + margin)
    hits = (shown[:, 0] <= shown[:, 3]) & (shown[:, 3] <= shown[:, 2])
    places = (high - np.clip(shown, low, high)) / (high - low)
    ticks = [((high - tick) / (high - low), number(tick)) for tick in _axis(low, high)]
    return {"rows": list(zip(*places.T.tolist(), hits, strict=True)), "ticks": ticks}


def _axis(low: float, high: float) -> list[float]:
    """Return round numbers between two ends."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 5)
    return [tick * step for tick in range(math.ceil(low / step), math.floor(high / step) + 1)]
