"""What every column of a table is, decided on training rows, and rows as numbers for a network.

Nothing here looks at the rows that calibrate or test: which columns are numbers, which levels
a category has and how numbers are spread are learned from the training rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
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
# Of a column: knots of the curve that spreads numbers like a normal distribution, or levels of a
# category, whose rarer ones are one level together. Fewer where columns are many.
_DETAIL, _IN_ALL, _LEAST = 100, 50_000, 10
_LEVELS, _LEAST_LEVELS = 10_000, 2  # in all, since the network has an input for each; of a column
_RARE = 5  # rows; a level with fewer is rare
_WORDS = 0.05  # the share of words among numbers that may stand for missing ones
_REPEATS = 0.5  # words of which more than this share are different hardly repeat
_DAY, _WEEK, _YEAR = 86_400.0, 7 * 86_400.0, 365.2425 * 86_400.0
_CYCLES = {"time of day": _DAY, "day of the week": _WEEK, "time of the year": _YEAR}


@dataclass(frozen=True)
class Column:
    """One column: its kind, why, and what is needed to turn its cells into numbers.

    Parameters
    ----------
    name, kind, why
        What it is called, what it is taken for, and the reason in plain words.
    missing
        Whether training rows lacked it.
    knots, places
        The curve that spreads numbers (of dates: seconds) like a normal distribution.
    words
        Words among the numbers that stand for missing ones.
    levels, other
        The levels of a category, and whether training rows had rarer ones besides.
    form, cycles
        How dates are written, and which of their cycles are told apart.
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
        """Refuse what :func:`learn` cannot have made."""
        is_known = self.kind in (NUMBER, CATEGORY, DATE, LEFT_OUT)
        if not is_known or (np.diff(np.array([self.knots, self.places])) <= 0).any():
            raise ValueError(f"what it says of column {self.name!r} cannot be")

    def values(self, series: pd.Series, decimal: str) -> tuple[Array, ...]:
        """Read cells as numbers, of dates seconds; which are missing (some words are); bad."""
        if self.kind == DATE:
            return cells.dates(series, self.form)
        values, missing, bad = cells.numbers(series, decimal)
        if self.words and bad.any():
            known = bad.copy()
            known[bad] = np.isin(cells.words(series[bad]).astype(str), self.words)
            missing, bad = missing | known, bad & ~known
        return values, missing, bad

    def spread(self, values: Array) -> list[Array]:
        """Spread values like a normal distribution, and tell the cycles of dates; 0 if missing."""
        given = [np.interp(values, self.knots, self.places)]
        for cycle in self.cycles:
            turn = 2 * math.pi * values / _CYCLES[cycle]
            given += [np.sin(turn), np.cos(turn)]
        return [np.nan_to_num(one, nan=0.0) for one in given]

    @property
    def numbers(self) -> int:
        """How many numbers that are not only 0 and 1 it gives."""
        return {NUMBER: 1, DATE: 1 + 2 * len(self.cycles)}.get(self.kind, 0)

    @property
    def flags(self) -> int:
        """How many numbers that are 0 or 1 it gives."""
        return len(self.levels) + self.other + self.missing


@dataclass
class Encoded:
    """Rows as numbers: first those of any size, then those that are 0 or 1.

    ``reasons`` says of each row why it cannot be predicted, ``""`` if it can; its numbers are 0.
    ``remarks`` are about the table as a whole.
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
        """Those that the network sees."""
        return tuple(column for column in self.all if column.kind != LEFT_OUT)

    @property
    def numbers(self) -> int:
        """How many of the numbers of a row may be of any size."""
        return sum(column.numbers for column in self.all)

    @property
    def flags(self) -> int:
        """How many of the numbers of a row are 0 or 1."""
        return sum(column.flags for column in self.all)

    def to_json(self) -> list[dict[str, Any]]:
        """Return all of it in plain values."""
        return [dict(vars(column)) for column in self.all]  # asdict copies every number

    @classmethod
    def from_json(cls, saved: Any) -> Columns:
        """Read what :meth:`to_json` gave; anything else is a ValueError."""
        columns: tuple[Column, ...] = files.rebuilt(tuple[Column, ...], saved)
        if len({column.name for column in columns}) != len(columns):
            raise ValueError("a column is there twice")
        return cls(columns)

    def encode(self, frame: pd.DataFrame, is_first: bool = True) -> Encoded:
        """Turn rows into numbers; of a row that cannot be, say why.

        Where no row of a column can be, it is the wrong one, and an error; not so in later parts
        of a table (``is_first=False``), whose first rows were right.
        """
        absent = [column.name for column in self.used if column.name not in frame.columns]
        if absent:
            there = ", ".join(map(repr, frame.columns[:20]))
            raise TableError(f"the table has no column {', '.join(absent)}; it has {there}")
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
                _say_bad(column, series, bad, reasons, is_first)
            if missing.any() and not column.missing:
                never = f"{int(missing.sum())} rows, and never was in training rows"
                remarks.append(f"{column.name!r} is missing in {never}: its median is taken")
            numbers += column.spread(values)
            flags += [missing | bad] if column.missing else []
        x = np.zeros((len(frame), self.numbers + self.flags), dtype=np.float32)
        for place, given in enumerate([*numbers, *flags]):
            x[:, place] = given
        return Encoded(torch.from_numpy(x), reasons, remarks)


def _say_bad(column: Column, series: pd.Series, bad: Array, reasons: Array, is_first: bool) -> None:
    """Write down of every row with a bad cell what is wrong, unless something else is."""
    if is_first and bad.all() and len(series) > 1:
        first = cells.quoted(series.iloc[0])
        raise TableError(f"column {column.name!r} must be {column.kind}s, the first is {first}")
    what = "a number" if column.kind == NUMBER else f"a date written as {column.form}"
    for row in np.flatnonzero(bad & (reasons == "")):
        reasons[row] = f"{column.name}: {cells.quoted(series.iloc[row])} is not {what}"


def _flags(column: Column, cell_words: Array, remarks: list[str]) -> list[Array]:
    if {level.lower() for level in column.levels} == {"true", "false"}:
        cell_words = _as_spelled(cell_words, column.levels)
    codes = pd.Index(column.levels).get_indexer(cell_words)
    missing = cell_words == ""
    unseen = (codes < 0) & ~missing
    given = [codes == level for level in range(len(column.levels))]
    if column.other:
        given.append(unseen)
    elif unseen.any():
        new = sorted(set(cell_words[unseen].tolist()))
        rows = f"in {int(unseen.sum())} rows: {cells.listed(new)}"
        remarks.append(f"{column.name!r} has levels that no training row had, {rows}")
    return [*given, missing] if column.missing else given


def _as_spelled(cell_words: Array, levels: tuple[str, ...]) -> Array:
    """Spell truth values as training rows did: TRUE, true and 1 are True.

    >>> _as_spelled(np.array(["TRUE", "0", "", "maybe"], dtype=object), ("True", "False")).tolist()
    ['True', 'False', '', 'maybe']
    """
    spelled = {level.lower(): level for level in levels}
    spelled |= {"1": spelled["true"], "0": spelled["false"]} | {level: level for level in levels}
    made = [spelled.get(word, spelled.get(word.lower(), word)) for word in cell_words]
    return np.array(made, dtype=object)


def learn(frame: pd.DataFrame, target: str) -> Columns:
    """Decide on training rows, in the order of the file, what every column is."""
    many = max(1, frame.shape[1])
    detail = max(_LEAST, min(_DETAIL, _IN_ALL // many))
    levels = max(_LEAST_LEVELS, min(_DETAIL, _LEVELS // many))
    decided = [
        _learn(str(name), frame[name], frame.attrs.get("decimal", "."), detail, levels)
        for name in frame.columns
        if name != target
    ]
    if not any(column.kind != LEFT_OUT for column in decided):
        reasons = "; ".join(f"{column.name!r}: {column.why}" for column in decided)
        raise TableError(f"no column is left to predict from. {reasons or 'There is no other'}")
    return Columns(tuple(decided))


def _learn(name: str, series: pd.Series, decimal: str, detail: int, levels: int) -> Column:
    values, missing, bad = cells.numbers(series, decimal)
    present = int((~missing).sum())
    if not present:
        return Column(name, LEFT_OUT, "empty")
    if bad.sum() <= _WORDS * present:
        unknown = tuple(sorted(set(cells.words(series[bad]).tolist()))[:20]) if bad.any() else ()
        return _learn_number(name, values[~(missing | bad)], len(values), unknown, detail)
    form = cells.date_format(series)
    if form is not None:
        return _learn_date(name, series, form, detail)
    return _learn_category(name, cells.words(series), missing, levels)


def _learn_number(
    name: str, known: Array, rows: int, unknown: tuple[str, ...], detail: int
) -> Column:
    some = len(known) < rows  # are missing
    if (known == known[0]).all():
        if not some:
            return Column(name, LEFT_OUT, f"always {known[0]:g}")
        level = cells.spelled(known[0])
        return Column(name, CATEGORY, f"{known[0]:g} or missing", True, levels=(level,))
    if not some and _counts_rows(known):
        return Column(name, LEFT_OUT, "counts the rows")
    listed = ", ".join(map(cells.quoted, unknown))
    why = "numbers" + (f"; {listed} read as missing" if unknown else "")
    return Column(name, NUMBER, why, some, *_curve(known, detail), words=unknown)


def _counts_rows(known: Array) -> bool:
    """Whether numbers are those of the rows: whole, each greater than the one before.

    Rows that train are some of all, so that there are gaps; the numbers of two rows that follow
    each other still differ little.
    """
    steps = np.diff(known)
    whole = bool((known == np.round(known)).all())
    return whole and len(known) >= 20 and bool((steps > 0).all()) and float(steps.mean()) < 5


def _learn_date(name: str, series: pd.Series, form: str, detail: int) -> Column:
    seconds, missing, _ = cells.dates(series, form)
    known = seconds[~missing]
    if np.ptp(known) == 0:
        return Column(name, LEFT_OUT, "always the same date")
    is_told = {
        "time of day": len(np.unique(known % _DAY)) > 1,
        "day of the week": len(np.unique(known // _DAY % 7)) > 1 and np.ptp(known) > _WEEK,
        "time of the year": np.ptp(known) > _YEAR / 2,
    }
    cycles = tuple(cycle for cycle, told in is_told.items() if told)
    why = f"dates written as {form}"
    if form.startswith("%m/%d") and not cells.dates(series, "%d/%m" + form[5:])[2].any():
        why += ": taken with the month first, though every one could have the day first"
    curve = _curve(known, detail)
    return Column(name, DATE, why, bool(missing.any()), *curve, form=form, cycles=cycles)


def _learn_category(name: str, cell_words: Array, missing: Array, levels: int) -> Column:
    known = cell_words[~missing]
    counts = pd.Series(known, dtype=object).value_counts()
    if len(counts) == 1 and not missing.any():
        return Column(name, LEFT_OUT, f"always {cells.quoted(counts.index[0])}")
    if len(counts) == len(known) and len(known) >= 10:
        return Column(name, LEFT_OUT, "a different word in every row")
    if len(known) >= 20 and len(counts) > max(_REPEATS * len(known), 10):
        return Column(name, LEFT_OUT, f"words that hardly repeat ({len(counts)} different ones)")
    rare = min(_RARE, max(1, len(known) // 50))
    kept = [str(level) for level, count in counts.items() if count >= rare][:levels]
    left = len(counts) - len(kept)
    why = f"{len(counts)} levels" + (f", the {left} rarest taken together" if left else "")
    return Column(name, CATEGORY, why, bool(missing.any()), levels=tuple(kept), other=left > 0)


def _curve(known: Array, detail: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the curve that spreads values like a normal distribution: its knots and places."""
    ordered = np.sort(known)
    steps = np.linspace(0, len(ordered) - 1, detail)
    knots = np.unique(ordered[np.rint(steps).astype(int)])
    if len(knots) < 2:  # nearly constant
        knots = np.array([ordered[0], ordered[-1]])
    # The middle of the ranks that equal values share.
    below, upto = (np.searchsorted(ordered, knots, side=side) for side in ("left", "right"))
    shares = torch.from_numpy((below + upto) / (2 * len(ordered)))
    places = torch.special.ndtri(shares).numpy()
    return tuple(knots.tolist()), tuple(places.tolist())
