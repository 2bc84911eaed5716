"""How bands and label sets did on rows whose target is known."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ffcp import LabelSet, metrics
from ffcp.conformal.rank import conformal_rank
from ffcp.metrics.excess import excess_of
from ffcp.tables import cells, targets
from ffcp.tables.columns import CATEGORY, NUMBER, Columns
from ffcp.tables.errors import TableError

Array = np.ndarray[Any, Any]
_LEVELS = 6  # of a category that are shown
_SMALLEST = 20  # rows; a slice with fewer says nothing
_CLASSIFIED = 200  # rows; from fewer nothing is learned of where they are covered


@dataclass(frozen=True)
class Part:
    """Coverage among some rows, with an interval, and the mean size of their bands or sets.

    ``size`` is that of finite bands, ``None`` where there is none.
    """

    column: str
    value: str
    rows: int
    coverage: float
    low: float
    high: float
    size: float | None


@dataclass(frozen=True)
class Measured:
    """What was found on rows with a target.

    ``size`` is the mean length of finite bands, or the mean number of labels; ``score`` the mean
    interval score, ``None`` where there is none. ``of_groups`` counts the rows of each group that
    the fit has thresholds for, in their order. ``seen`` is the share of rows that trained or
    calibrated the fit, 0 where nobody can tell. ``excess`` is the excess risk of the target
    coverage with its interval (:func:`ffcp.metrics.excess_risk`), ``None`` for fewer than 200 rows,
    or without LightGBM.
    """

    rows: int
    without: int
    coverage: float
    low: float
    high: float
    size: float | None
    score: float | None
    infinite: int
    groups: tuple[Part, ...]
    columns: tuple[Part, ...]
    of_groups: tuple[int, ...] = ()
    seen: float = 0.0
    excess: tuple[float, ...] | None = None


def joined(labels: Sequence[str]) -> str:
    r"""Write labels in one cell, with bars between; a bar within a label gets a backslash.

    >>> print(joined(["dear", "a|b"]), labels_of(joined(["dear", "a|b"])))
    dear|a\|b ['dear', 'a|b']
    """
    return "|".join(re.sub(r"([|\\])", r"\\\1", label) for label in labels)


def labels_of(text: str) -> list[str]:
    """Read labels from the cell that :func:`joined` wrote."""
    escaped = re.findall(r"(?:\\.|[^|\\])+", text, re.DOTALL)
    return [re.sub(r"\\(.)", r"\1", label, flags=re.DOTALL) for label in escaped]


def covered(bands: pd.DataFrame, y: Array, classes: Sequence[str]) -> Array:
    """Return which rows are covered; ``bands`` is what a fitted table predicts.

    A label that is none of the classes is in the sets that hold another label.
    """
    if "labels" not in bands:
        inside: Array = (bands["lower"].to_numpy() <= y) & (y <= bands["upper"].to_numpy())
        return inside
    known = set(classes)
    truth = [label if label in known else LabelSet.OTHER for label in y]
    pairs = zip(truth, bands["labels"], strict=True)
    return np.array([label in labels_of(text) for label, text in pairs], dtype=bool)


def measure(
    fitted: Any,
    bands: pd.DataFrame,
    y: Array,
    frame: pd.DataFrame,
    alpha: Any,
    group: str | None = None,
) -> Measured:
    """Measure what a fitted table predicts for rows of a frame, whose targets are ``y``.

    Rows without a band are counted apart.
    """
    about, has = fitted.about, bands["prediction"].notna().to_numpy()
    if not has.any():
        raise TableError(f"no row can be predicted; the first: {bands['reason'].iloc[0]}")
    bands, y, frame = bands[has], y[has], frame[has]
    hits = covered(bands, y, about.classes).astype(np.float64)
    lengths = bands["size"] if about.classes else bands["upper"] - bands["lower"]
    size = lengths.to_numpy(np.float64)
    share = metrics.Coverage(float(hits.mean()), len(hits))
    finite = np.isfinite(size)
    groups, own = (
        np.empty(0) if name is None else targets.groups(frame, name)
        for name in (group or about.group, about.group)
    )
    by_group = [(group or about.group, name, groups == name) for name in sorted(set(groups))]
    by_column = [one for one in _slices(frame, fitted.columns[0]) if one[2].sum() >= _SMALLEST]
    score = None
    if not about.classes and finite.all():
        ends = bands["lower"].to_numpy(), bands["upper"].to_numpy()
        score = float(metrics.interval_score(ends, y, alpha))
    return Measured(
        rows=len(hits),
        without=int((~has).sum()),
        coverage=float(share),
        low=share.low,
        high=share.high,
        size=_mean(size),
        score=score,
        infinite=int((~finite).sum()),
        groups=_parts(by_group, hits, size),
        columns=_parts(by_column, hits, size),
        of_groups=tuple(int((own == name).sum()) for name in about.groups),
        excess=_excess(hits, fitted.columns[0], frame, alpha),
    )


def _excess(
    hits: Array, columns: Columns, frame: pd.DataFrame, alpha: Any
) -> tuple[float, ...] | None:
    """Measure how far coverage depends on the columns, where that can be."""
    if len(hits) < _CLASSIFIED or find_spec("lightgbm") is None:
        return None
    found = excess_of(hits, columns.encode(frame).x.numpy(), alpha)
    return float(found), found.low, found.high


def _parts(slices: list[tuple[str, str, Array]], hits: Array, size: Array) -> tuple[Part, ...]:
    """Measure slices of the rows, with intervals that hold for all of them at once.

    Slices share rows, so their errors are added up (Bonferroni), and each interval is exact: at
    such small errors approximate ones miss several times as often as they say.
    """
    made = []
    interval = functools.cache(metrics.clopper_pearson)  # many slices are alike
    for column, value, rows in slices:
        found, count = int(hits[rows].sum()), int(rows.sum())
        ends = interval(found, count, 1 - 0.05 / len(slices))
        made.append(Part(column, value, count, found / count, *ends, _mean(size[rows])))
    return tuple(made)


def _mean(size: Array) -> float | None:
    """Return the mean of finite sizes, if there are any."""
    finite = size[np.isfinite(size)]
    return float(finite.mean()) if len(finite) else None


def _slices(frame: pd.DataFrame, columns: Columns) -> Iterator[tuple[str, str, Array]]:
    """Cut rows by every column: numbers and dates in thirds, categories by their levels."""
    for column in columns.used:
        series = frame[column.name]
        if column.kind == CATEGORY:
            words = cells.words(series)
            yield from ((column.name, level, words == level) for level in column.levels[:_LEVELS])
            continue
        values = column.values(series, frame.attrs.get("decimal", "."))[0]
        known = np.flatnonzero(~np.isnan(values))
        if len(known) < 3:
            continue
        labels = metrics.cut(values[known])
        for label in sorted(set(labels)):
            some = known[labels == label]
            rows = np.zeros(len(values), dtype=bool)
            rows[some] = True
            if column.kind == NUMBER:
                yield column.name, str(label).split(": ", 1)[1], rows
            else:
                yield column.name, _days(values[some]), rows


def _days(seconds: Array) -> str:
    """Name the first and the last day of some.

    >>> _days(np.array([86_400.0, 0.0]))
    '1970-01-01 to 1970-01-02'
    """
    ends = np.array([seconds.min(), seconds.max()]).astype("datetime64[s]").astype("datetime64[D]")
    return f"{ends[0]} to {ends[1]}"


def chance_of_fewer(covered_rows: int, groups: Sequence[tuple[int, int]], alpha: Any) -> float:
    """Return the chance of at most so many covered rows, had nothing changed.

    With n calibration scores, the coverage of split conformal prediction follows
    Beta(k, n + 1 - k), so that the number of covered rows is beta-binomial; with groups that
    have thresholds of their own, it is a sum of such numbers.

    Parameters
    ----------
    covered_rows
        How many rows were covered, of all groups together.
    groups
        For each group how many of its rows were measured, and how many calibrated it.
    alpha
        Share of misses allowed.

    Examples
    --------
    >>> round(chance_of_fewer(80, [(100, 1000)], 0.1), 4)
    0.0032
    >>> chance_of_fewer(100, [(100, 1000)], 0.1)
    1.0
    """
    if covered_rows >= sum(rows for rows, _ in groups):
        return 1.0
    laws = [_law(rows, calibrated, alpha) for rows, calibrated in groups if rows]
    size = sum(len(law) - 1 for law in laws) + 1
    spectra = torch.stack([torch.fft.rfft(law, size) for law in laws])  # their product is of sums
    law = torch.fft.irfft(spectra.prod(dim=0), size).clamp(min=1e-18)  # it rounds at about 1e-17
    return min(1.0, float(law[: covered_rows + 1].sum()))


def _law(rows: int, calibrated: int, alpha: Any) -> Tensor:
    """Return the probabilities of 0 to ``rows`` covered rows."""
    k = conformal_rank(calibrated, alpha)
    covered = torch.arange(rows + 1, dtype=torch.float64)
    if k > calibrated:  # an infinite interval covers every row
        return (covered == rows).double()
    missed, b = rows - covered, calibrated + 1 - k
    choose = -math.log(rows + 1) - _log_beta(covered + 1, missed + 1)
    return (choose + _log_beta(covered + k, missed + b) - _log_beta(k, b)).exp()


def _log_beta(one: Any, other: Any) -> Tensor:
    one, other = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    return torch.lgamma(one) + torch.lgamma(other) - torch.lgamma(one + other)
