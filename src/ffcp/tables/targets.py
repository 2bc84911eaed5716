"""The target of a table: numbers or names of classes, and the rows that have one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ffcp.tables import cells
from ffcp.tables.errors import TableError

_WORDS = 0.05  # the share of words among numbers up to which a target is numbers
_CLASSES = 1000


@dataclass(frozen=True)
class Target:
    """Values (n,), NaN or ``""`` where there is none; and the classes, none for numbers."""

    values: np.ndarray[Any, Any]
    classes: tuple[str, ...]

    @property
    def known(self) -> np.ndarray[Any, Any]:
        """Which rows have a target."""
        known: np.ndarray[Any, Any] = self.values != "" if self.classes else ~np.isnan(self.values)
        return known


def column(frame: pd.DataFrame, name: str, option: str) -> pd.Series:
    """Take a column by its name; where there is none, say which there are."""
    if name not in frame.columns:
        listed = ", ".join(map(repr, frame.columns[:30]))
        raise TableError(f"the table has no column {name!r} ({option}); it has {listed}")
    return frame[name]


def learn(frame: pd.DataFrame, name: str, classify: bool, decisions: list[str]) -> Target:
    """Decide what the target is, by all rows, and read it."""
    series = column(frame, name, "--target")
    if not len(series):
        raise TableError("the table has no rows, only the names of its columns")
    values, missing, bad = cells.numbers(series, frame.attrs.get("decimal", "."))
    if missing.all():
        raise TableError(f"the target {name!r} is empty in every row")
    if not classify and bad.sum() > _WORDS * (~missing).sum():
        if cells.date_format(series) is not None:
            raise TableError(f"the target {name!r} is dates: give a column of numbers or of words")
        decisions.append(f"the target {name!r} is words: label sets, as by --classify")
        classify = True
    target = _classes(series, name) if classify else _numbers(values, missing, bad, name, decisions)
    left_out = int((~target.known).sum())
    if left_out:
        decisions.append(f"{left_out} rows have no target {name!r}: they are left out")
    return target


def _classes(series: pd.Series, name: str) -> Target:
    values = cells.words(series)
    known = values[values != ""]
    classes = sorted(set(known.tolist()))
    if len(classes) < 2:
        value = cells.quoted(classes[0])
        raise TableError(f"the target {name!r} is always {value}: nothing is to be told")
    if len(classes) > _CLASSES or (len(classes) > len(known) / 2 and len(known) > 3):
        raise TableError(
            f"the target {name!r} has {len(classes)} different words in {len(known)} rows: too "
            "many for classes"
        )
    return Target(values, tuple(classes))


def _numbers(
    values: np.ndarray[Any, Any],
    missing: np.ndarray[Any, Any],
    bad: np.ndarray[Any, Any],
    name: str,
    decisions: list[str],
) -> Target:
    if bad.any():
        decisions.append(
            f"the target {name!r} is no number in {int(bad.sum())} rows: read as missing there"
        )
    distinct = np.unique(values[~np.isnan(values)])
    if len(distinct) == 1:
        raise TableError(f"the target {name!r} is always {distinct[0]:g}: nothing is to be told")
    if len(distinct) == 2:
        decisions.append(
            f"the target {name!r} has two values only: taken as numbers; --classify gives label "
            "sets"
        )
    return Target(values, ())


def read(frame: pd.DataFrame, name: str, classes: tuple[str, ...]) -> Target:
    """Read the target of a table that is to be checked, as it was learned."""
    series = column(frame, name, "the target")
    if classes:
        return Target(cells.words(series), classes)
    values, _, _ = cells.numbers(series, frame.attrs.get("decimal", "."))
    return Target(values, ())


def times(frame: pd.DataFrame, name: str) -> np.ndarray[Any, Any]:
    """Read the column that orders rows: numbers, or dates as seconds."""
    series, decimal = column(frame, name, "--time"), frame.attrs.get("decimal", ".")
    values, missing, bad = cells.numbers(series, decimal)
    if not (missing | bad).any():
        return cells.exact(series, decimal)
    if bad.any():
        form = cells.date_format(series)
        if form is None:
            cell = cells.quoted(series[bad].iloc[0])
            raise TableError(f"--time {name!r}: {cell} is neither a number nor a date")
        values, missing, _ = cells.dates(series, form)
    if missing.any():
        raise TableError(f"--time {name!r} is missing in {int(missing.sum())} rows")
    return values


def groups(frame: pd.DataFrame, name: str) -> np.ndarray[Any, Any]:
    """Read the column of groups; rows without one are a group of their own."""
    names = cells.words(column(frame, name, "--group"))
    names[names == ""] = "(missing)"
    return names
