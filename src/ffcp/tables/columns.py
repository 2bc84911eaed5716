"""The kind of each column of a table, learned from training rows, and its encoding as numbers.

Calibration and test rows are not used: which columns are numbers, which levels a category has and
how numbers are transformed is learned from the training rows only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ffcp import files
from ffcp.tables import cells
from ffcp.tables.errors import TableError

NUMBER, CATEGORY, DATE, LEFT_OUT = "number", "category", "date", "left out"
Array = np.ndarray[Any, Any]
MOST = 5_000  # columns
# Per column: knots of the curve that transforms numbers to a normal distribution, or levels of a
# category, of which the rarest are merged. Fewer if there are many columns.
_DETAIL, _IN_ALL, _LEAST = 100, 50_000, 10
_LEVELS, _LEAST_LEVELS = 10_000, 2  # in total, as the network has an input for each; per column
_RARE = 5  # rows; a level with fewer is rare
_WORDS = 0.05  # the largest share of words in a numeric column, which are read as missing
_REPEATS = 0.5  # a column of words with a larger share of distinct ones is left out
_DAY, _WEEK, _YEAR = 86_400.0, 7 * 86_400.0, 365.2425 * 86_400.0
_CYCLES = {"time of day": _DAY, "day of the week": _WEEK, "time of the year": _YEAR}


@dataclass(frozen=True)
class Column:
    """One column: its kind, the reason, and its encoding as numbers.

    Parameters
    ----------
    name, kind, why : str
        The name, the kind, and the reason for the kind in words.
    missing : bool, default=False
        Whether it has missing values in training rows.
    knots, places : tuple, default=()
        The curve that transforms numbers (for dates: seconds) to a normal distribution.
    words : tuple, default=()
        Words among the numbers that are read as missing.
    levels : tuple, default=()
        The levels of a category.
    other : bool, default=False
        Whether training rows have rarer levels besides.
    form : str, default=""
        The format of dates.
    cycles : tuple, default=()
        The cycles of dates that are encoded.
    """

    name: str
    kind: str
    why: str
    missing: bool = False
    knots: tuple[float, ...] = ()
    places: tuple[float, ...] = ()
    words: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    other: bool = False
    form: str = ""
    cycles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for values that :func:`learn` cannot return."""
        is_known = self.kind in (NUMBER, CATEGORY, DATE, LEFT_OUT)
        if not is_known or (np.diff(np.array([self.knots, self.places])) <= 0).any():
            raise ValueError(f"column {self.name!r} has an unknown kind or knots that do not rise")

    def values(self, series: pd.Series, decimal: str) -> tuple[Array, ...]:
        """Return cells as numbers (dates as seconds), which are missing, and which are bad."""
        if self.kind == DATE:
            return cells.dates(series, self.form)
        values, missing, bad = cells.numbers(series, decimal)
        if self.words and bad.any():
            is_word = bad.copy()
            is_word[bad] = np.isin(cells.words(series[bad]).astype(str), self.words)
            missing, bad = missing | is_word, bad & ~is_word
        return values, missing, bad

    def spread(self, values: Array) -> list[Array]:
        """Return values transformed to a normal distribution, with the cycles of dates."""
        inputs = [np.interp(values, self.knots, self.places)]
        for cycle in self.cycles:
            angle = 2 * math.pi * values / _CYCLES[cycle]
            inputs += [np.sin(angle), np.cos(angle)]
        return [np.nan_to_num(column, nan=0.0) for column in inputs]

    @property
    def numbers(self) -> int:
        """The number of real-valued inputs it is encoded as."""
        return {NUMBER: 1, DATE: 1 + 2 * len(self.cycles)}.get(self.kind, 0)

    @property
    def flags(self) -> int:
        """The number of binary inputs it is encoded as."""
        return len(self.levels) + self.other + self.missing


@dataclass
class Encoded:
    """Encoded rows: first the real-valued inputs, then the binary ones.

    ``reasons`` holds why a row cannot be predicted, ``""`` if it can; its bad cells are 0.
    ``remarks`` concern the table as a whole.
    """

    x: Tensor
    reasons: Array
    remarks: list[str]


@dataclass(frozen=True)
class Columns:
    """The columns of a table, in its order."""

    all: tuple[Column, ...]

    def __iter__(self) -> Iterator[Column]:
        return iter(self.all)

    @property
    def used(self) -> tuple[Column, ...]:
        """The columns that the network uses."""
        return tuple(column for column in self.all if column.kind != LEFT_OUT)

    @property
    def numbers(self) -> int:
        """The number of real-valued inputs of a row."""
        return sum(column.numbers for column in self.all)

    @property
    def flags(self) -> int:
        """The number of binary inputs of a row."""
        return sum(column.flags for column in self.all)

    def to_json(self) -> list[dict[str, Any]]:
        """Return all columns as plain data."""
        return [dict(vars(column)) for column in self.all]  # asdict copies every number

    @classmethod
    def from_json(cls, saved: Any) -> Columns:
        """Return the columns that :meth:`to_json` wrote; raise ValueError for anything else."""
        columns: tuple[Column, ...] = files.rebuilt(tuple[Column, ...], saved)
        if len({column.name for column in columns}) != len(columns):
            raise ValueError("expected different names of columns, got one twice")
        return cls(columns)

    def encode(self, frame: pd.DataFrame, is_first: bool = True) -> Encoded:
        """Return rows encoded as numbers, with the reasons of rows that cannot be.

        If all cells of a column are bad, it is the wrong column, and an error is raised; but not in
        later parts of a table (``is_first=False``), whose first rows were right.
        """
        absent = [column.name for column in self.used if column.name not in frame.columns]
        if absent:
            present = ", ".join(map(repr, frame.columns[:20]))
            names = ", ".join(map(repr, absent))
            raise TableError(f"the table has no column {names}; it has {present}")
        reasons = np.full(len(frame), "", dtype=object)
        numbers: list[Array] = []
        flags: list[Array] = []
        remarks: list[str] = []
        for column in self.used:
            series = frame[column.name]
            if column.kind == CATEGORY:
                flags += _flags(column, cells.words(series), remarks)
                continue
            values, missing, bad = column.values(series, frame.attrs.get("decimal", "."))
            if bad.any():
                _add_reasons(column, series, bad, reasons, is_first)
            if missing.any() and not column.missing:
                rows = f"{int(missing.sum())} rows, but in no training row"
                remarks.append(f"{column.name!r} is missing in {rows}: its median is used")
            numbers += column.spread(values)
            if column.missing:
                flags.append(missing | bad)
        x = np.zeros((len(frame), self.numbers + self.flags), dtype=np.float32)
        for i, values in enumerate([*numbers, *flags]):
            x[:, i] = values
        return Encoded(torch.from_numpy(x), reasons, remarks)


def _add_reasons(
    column: Column, series: pd.Series, bad: Array, reasons: Array, is_first: bool
) -> None:
    """Add a reason for every row with a bad cell that has none yet."""
    if is_first and bad.all() and len(series) > 1:
        first = cells.quoted(series.iloc[0])
        raise TableError(f"column {column.name!r} must hold {column.kind}s, the first is {first}")
    expected = "a number" if column.kind == NUMBER else f"a date written as {column.form}"
    for row in np.flatnonzero(bad & (reasons == "")):
        reasons[row] = f"{column.name}: {cells.quoted(series.iloc[row])} is not {expected}"


def _flags(column: Column, cell_words: Array, remarks: list[str]) -> list[Array]:
    """Return the binary inputs of a category: one for each level, for others, and if missing."""
    if {level.lower() for level in column.levels} == {"true", "false"}:
        cell_words = _as_spelled(cell_words, column.levels)
    codes = pd.Index(column.levels).get_indexer(cell_words)
    missing = cell_words == ""
    unseen = (codes < 0) & ~missing
    flags = [codes == level for level in range(len(column.levels))]
    if column.other:
        flags.append(unseen)
    elif unseen.any():
        new = sorted(set(cell_words[unseen].tolist()))
        rows = f"in {int(unseen.sum())} row(s): {cells.listed(new)}"
        remarks.append(f"{column.name!r} has levels that are in no training row, {rows}")
    return [*flags, missing] if column.missing else flags


def _as_spelled(cell_words: Array, levels: tuple[str, ...]) -> Array:
    """Return booleans in the spelling of the training rows: TRUE, true and 1 are True.

    >>> _as_spelled(np.array(["TRUE", "0", "", "maybe"], dtype=object), ("True", "False")).tolist()
    ['True', 'False', '', 'maybe']
    """
    spelled = {level.lower(): level for level in levels}
    spelled |= {"1": spelled["true"], "0": spelled["false"]} | {level: level for level in levels}
    words = [spelled.get(word, spelled.get(word.lower(), word)) for word in cell_words]
    return np.array(words, dtype=object)


def learn(frame: pd.DataFrame, target: str) -> Columns:
    """Return the columns, learned from training rows in the order of the file."""
    count = max(1, frame.shape[1])
    detail = max(_LEAST, min(_DETAIL, _IN_ALL // count))
    levels = max(_LEAST_LEVELS, min(_DETAIL, _LEVELS // count))
    columns = [
        _learn(str(name), frame[name], frame.attrs.get("decimal", "."), detail, levels)
        for name in frame.columns
        if name != target
    ]
    if all(column.kind == LEFT_OUT for column in columns):
        reasons = "; ".join(f"{column.name!r}: {column.why}" for column in columns)
        raise TableError(f"no column is left to predict from. {reasons or 'There are no others'}")
    return Columns(tuple(columns))


def _learn(name: str, series: pd.Series, decimal: str, detail: int, levels: int) -> Column:
    values, missing, bad = cells.numbers(series, decimal)
    present = int((~missing).sum())
    if not present:
        return Column(name, LEFT_OUT, "empty")
    if bad.sum() <= _WORDS * present:
        words = tuple(sorted(set(cells.words(series[bad]).tolist()))[:20]) if bad.any() else ()
        has_missing = bool((missing | bad).any())
        return _learn_number(name, values[~(missing | bad)], has_missing, words, detail)
    form = cells.date_format(series)
    if form is not None:
        return _learn_date(name, series, form, detail)
    column = _learn_category(name, cells.words(series), missing, levels)
    cell = cells.decorated_number(cells.words(series[bad]))
    if cell is None:
        return column
    advice = f"{cell!r} is not read as a number: write plain numbers such as 1234.5"
    return replace(column, why=f"{column.why}; {advice}")


def _learn_number(
    name: str, values: Array, has_missing: bool, words: tuple[str, ...], detail: int
) -> Column:
    if (values == values[0]).all():
        if not has_missing:
            return Column(name, LEFT_OUT, f"always {values[0]:g}")
        value = float(values[0])
        width = max(1.0, abs(value))
        curve = (value - width, value + width), (-1.0, 1.0)
        return Column(name, NUMBER, f"{value:g} or missing", True, *curve, words=words)
    if not has_missing and _are_row_numbers(values):
        return Column(name, LEFT_OUT, "row numbers")
    why = "numbers"
    if words:
        why += f"; {', '.join(map(cells.quoted, words))} read as missing"
    return Column(name, NUMBER, why, has_missing, *_curve(values, detail), words=words)


def _are_row_numbers(values: Array) -> bool:
    """Whether numbers are row numbers: integers, each greater than the one before.

    Training rows are a part of all rows, so there are gaps; but numbers of consecutive rows differ
    little.
    """
    steps = np.diff(values)
    are_integers = bool((values == np.round(values)).all())
    rise = bool((steps > 0).all())
    return are_integers and rise and len(values) >= 20 and float(steps.mean()) < 5


def _learn_date(name: str, series: pd.Series, form: str, detail: int) -> Column:
    seconds, missing, _ = cells.dates(series, form)
    seconds = seconds[~missing]
    if np.ptp(seconds) == 0:
        return Column(name, LEFT_OUT, "always the same date")
    varies = {
        "time of day": len(np.unique(seconds % _DAY)) > 1,
        "day of the week": len(np.unique(seconds // _DAY % 7)) > 1 and np.ptp(seconds) > _WEEK,
        "time of the year": np.ptp(seconds) > _YEAR / 2,
    }
    cycles = tuple(cycle for cycle in varies if varies[cycle])
    why = f"dates in the format {form}"
    if form.startswith("%m/%d") and not cells.dates(series, "%d/%m" + form[5:])[2].any():
        why += ": read with the month first, though all could have the day first"
    curve = _curve(seconds, detail)
    return Column(name, DATE, why, bool(missing.any()), *curve, form=form, cycles=cycles)


def _learn_category(name: str, cell_words: Array, missing: Array, levels: int) -> Column:
    cell_words = cell_words[~missing]
    counts = pd.Series(cell_words, dtype=object).value_counts()
    if len(counts) == 1 and not missing.any():
        return Column(name, LEFT_OUT, f"always {cells.quoted(counts.index[0])}")
    rows = len(cell_words)
    if len(counts) == rows and rows >= 10:
        return Column(name, LEFT_OUT, "a different word in every row")
    if rows >= 20 and len(counts) > max(_REPEATS * rows, 10):
        return Column(name, LEFT_OUT, f"words that rarely repeat ({len(counts)} distinct)")
    rare = min(_RARE, max(1, rows // 50))
    kept = [str(level) for level, count in counts.items() if count >= rare][:levels]
    merged = len(counts) - len(kept)
    why = f"{len(counts)} levels" + (f", the {merged} rarest merged" if merged else "")
    return Column(name, CATEGORY, why, bool(missing.any()), levels=tuple(kept), other=merged > 0)


def _curve(values: Array, detail: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the curve that transforms values to a normal distribution: its knots and places."""
    ordered = np.sort(values)
    ranks = np.rint(np.linspace(0, len(ordered) - 1, detail)).astype(int)
    knots = np.unique(ordered[ranks])
    if len(knots) < 2:  # nearly constant
        knots = np.array([ordered[0], ordered[-1]])
    # The middle of the ranks that equal values share.
    below = np.searchsorted(ordered, knots, side="left")
    upto = np.searchsorted(ordered, knots, side="right")
    shares = torch.from_numpy((below + upto) / (2 * len(ordered)))
    places = torch.special.ndtri(shares).numpy()
    return tuple(knots.tolist()), tuple(places.tolist())
