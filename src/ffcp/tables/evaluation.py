"""Coverage and size of intervals and prediction sets on rows with known targets."""

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
_LEVELS = 6  # levels of a category that are reported
_SMALLEST = 20  # rows; smaller slices are not reported
_CLASSIFIED = 200  # rows; with fewer the excess risk is not computed


@dataclass(frozen=True)
class Part:
    """Coverage of some rows, with a confidence interval, and their mean length or set size.

    ``size`` is that of finite intervals, ``None`` if there are none.
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
    """The results on rows with a target.

    ``size`` is the mean length of finite intervals, or the mean number of labels; ``score`` the
    mean interval score, ``None`` if there is none. ``of_groups`` are the numbers of rows of the
    groups with their own thresholds, in order. ``seen`` is the share of rows that were used for
    training or calibration, 0 if unknown. ``excess`` is the excess risk of the target coverage
    with its confidence interval (:func:`ffcp.metrics.excess_risk`), ``None`` for fewer than 200
    rows, or without LightGBM.
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
    r"""Return labels as one cell, separated by ``|``, which is escaped by a backslash in labels.

    >>> print(joined(["dear", "a|b"]), labels_of(joined(["dear", "a|b"])))
    dear|a\|b ['dear', 'a|b']
    """
    return "|".join(re.sub(r"([|\\])", r"\\\1", label) for label in labels)


def labels_of(text: str) -> list[str]:
    """Return the labels of a cell that :func:`joined` wrote."""
    escaped = re.findall(r"(?:\\.|[^|\\])+", text, re.DOTALL)
    return [re.sub(r"\\(.)", r"\1", label, flags=re.DOTALL) for label in escaped]


def covered(predictions: pd.DataFrame, y: Array, classes: Sequence[str]) -> Array:
    """Return which rows are covered by the predictions of a fitted table.

    A label that is none of the classes is in the sets that hold "another label".
    """
    if "labels" not in predictions:
        lower, upper = predictions["lower"].to_numpy(), predictions["upper"].to_numpy()
        inside: Array = (lower <= y) & (y <= upper)
        return inside
    names = set(classes)
    labels = [label if label in names else LabelSet.OTHER for label in y]
    pairs = zip(labels, predictions["labels"], strict=True)
    return np.array([label in labels_of(text) for label, text in pairs], dtype=bool)


def measure(
    fitted: Any,
    predictions: pd.DataFrame,
    y: Array,
    frame: pd.DataFrame,
    alpha: Any,
    group: str | None = None,
) -> Measured:
    """Return coverage and size of the predictions for rows of a frame with targets ``y``.

    Rows without a prediction are counted separately.
    """
    about, columns = fitted.about, fitted.columns[0]
    predicted = predictions["prediction"].notna().to_numpy()
    if not predicted.any():
        raise TableError(f"no row can be predicted; the first: {predictions['reason'].iloc[0]}")
    predictions, y, frame = predictions[predicted], y[predicted], frame[predicted]
    hits = covered(predictions, y, about.classes).astype(np.float64)
    sizes = predictions["size"] if about.classes else predictions["upper"] - predictions["lower"]
    size = sizes.to_numpy(np.float64)
    coverage = metrics.Coverage(float(hits.mean()), len(hits))
    finite = np.isfinite(size)
    infinite = ~finite
    if not about.classes:  # one-sided intervals are infinite on the other side
        promised = [end for end in ("lower", "upper") if about.side in (end, "both", "each")]
        infinite = np.isinf(predictions[promised]).any(axis=1).to_numpy()
    by_group: list[tuple[str, str, Array]] = []
    of_groups: tuple[int, ...] = ()
    group = group or about.group
    if group is not None:
        groups = targets.groups(frame, group)
        by_group = [(group, name, groups == name) for name in sorted(set(groups))]
    if about.group is not None:
        groups = targets.groups(frame, about.group)
        of_groups = tuple(int((groups == name).sum()) for name in about.groups)
    by_column = [(c, v, rows) for c, v, rows in _slices(frame, columns) if rows.sum() >= _SMALLEST]
    score = None
    if not about.classes and finite.all():
        ends = predictions["lower"].to_numpy(), predictions["upper"].to_numpy()
        score = float(metrics.interval_score(ends, y, alpha))
    return Measured(
        rows=len(hits),
        without=int((~predicted).sum()),
        coverage=float(coverage),
        low=coverage.low,
        high=coverage.high,
        size=_mean(size),
        score=score,
        infinite=int(infinite.sum()),
        groups=_parts(by_group, hits, size),
        columns=_parts(by_column, hits, size),
        of_groups=of_groups,
        excess=_excess(hits, columns, frame, alpha),
    )


def _excess(
    hits: Array, columns: Columns, frame: pd.DataFrame, alpha: Any
) -> tuple[float, ...] | None:
    """Return the excess risk with its confidence interval; None if it cannot be computed."""
    if len(hits) < _CLASSIFIED or find_spec("lightgbm") is None:
        return None
    excess = excess_of(hits, columns.encode(frame).x.numpy(), alpha)
    return float(excess), excess.low, excess.high


def _parts(slices: list[tuple[str, str, Array]], hits: Array, size: Array) -> tuple[Part, ...]:
    """Return the coverage of slices, with simultaneous confidence intervals.

    Slices share rows, so the correction is Bonferroni's, and each interval is exact: at error
    probabilities this small, approximate intervals fail several times too often.
    """
    parts = []
    interval = functools.cache(metrics.clopper_pearson)  # many slices have equal counts
    for column, value, rows in slices:
        covered_rows, count = int(hits[rows].sum()), int(rows.sum())
        low, high = interval(covered_rows, count, 1 - 0.05 / len(slices))
        coverage = covered_rows / count
        parts.append(Part(column, value, count, coverage, low, high, _mean(size[rows])))
    return tuple(parts)


def _mean(size: Array) -> float | None:
    """Return the mean of finite sizes, if there are any."""
    finite = size[np.isfinite(size)]
    return float(finite.mean()) if len(finite) else None


def _slices(frame: pd.DataFrame, columns: Columns) -> Iterator[tuple[str, str, Array]]:
    """Yield slices of the rows by every column: thirds of numbers and dates, and levels."""
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
            rows = np.zeros(len(values), dtype=bool)
            rows[known[labels == label]] = True
            is_number = column.kind == NUMBER
            value = str(label).split(": ", 1)[1] if is_number else _days(values[rows])
            yield column.name, value, rows


def _days(seconds: Array) -> str:
    """Return the first and the last day.

    >>> _days(np.array([86_400.0, 0.0]))
    '1970-01-01 to 1970-01-02'
    """
    ends = np.array([seconds.min(), seconds.max()]).astype("datetime64[s]").astype("datetime64[D]")
    return f"{ends[0]} to {ends[1]}"


def chance_of_fewer(covered_rows: int, groups: Sequence[tuple[int, int]], alpha: Any) -> float:
    """Return the probability of at most this many covered rows without drift: a p-value.

    With n calibration scores, the coverage of split conformal prediction follows
    Beta(k, n + 1 - k), so that the number of covered rows is beta-binomial; with groups that
    have their own thresholds, it is a sum of beta-binomial numbers.

    Parameters
    ----------
    covered_rows : int
        Number of covered rows, over all groups.
    groups : sequence of (int, int)
        For each group the number of its rows here, and of its calibration rows.
    alpha : float
        Allowed share of misses.

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
    spectra = torch.stack([torch.fft.rfft(law, size) for law in laws])  # the product convolves
    law = torch.fft.irfft(spectra.prod(dim=0), size).clamp(min=1e-18)  # rounding is about 1e-17
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


def _log_beta(a: Any, b: Any) -> Tensor:
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
