"""The target column of a table, numbers or class labels, and the columns of time and groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import ffcp
from ffcp.tables import cells
from ffcp.tables.errors import TableError

Array = np.ndarray[Any, Any]
_WORDS = 0.05  # the largest share of words in a numeric target
_CLASSES = 1000


@dataclass(frozen=True)
class Target:
    """The values (n,), NaN or ``""`` if missing, and the classes, empty for numbers."""

    name: str
    values: Array
    classes: tuple[str, ...] = ()

    @property
    def known(self) -> Array:
        """A mask of the rows that have a target."""
        known: Array = self.values != "" if self.classes else ~np.isnan(self.values)
        return known

    def take(self, rows: Array) -> Target:
        """Return the target of some rows."""
        return replace(self, values=self.values[rows])

    def with_classes_of(self, rows: Array) -> Target:
        """Return the target with the classes of training rows only.

        Classes must not depend on calibration rows, which would then not be like new rows.
        """
        if not self.classes:
            return self
        classes = tuple(sorted(set(self.values[rows].tolist())))
        if len(classes) < 2:
            raise TableError(f"the target {self.name!r} is {classes[0]!r} in every training row")
        if ffcp.LabelSet.OTHER in classes:
            raise TableError(
                f"{self.name!r}: the label {ffcp.LabelSet.OTHER!r} is reserved: rename it"
            )
        return replace(self, classes=classes)

    def units(self, rows: Array) -> tuple[float, float]:
        """Return the centre and the scale of the target among rows; (0, 1) for classes."""
        if self.classes:
            return 0.0, 1.0
        values = self.values[rows]
        with np.errstate(over="ignore", invalid="ignore"):
            centre, scale = float(values.mean()), float(values.std())
        if not np.isfinite(scale) or (scale == 0 and np.ptp(values) > 0):
            raise TableError(f"the target {self.name!r} is too large or small: change its unit")
        return centre, scale or 1.0

    def tensor(self, centre: float, scale: float) -> Tensor:
        """Return targets in these units, or class numbers; other labels come after the last."""
        if self.classes:
            codes = pd.Index(self.classes).get_indexer(self.values)
            return torch.from_numpy(np.where(codes < 0, len(self.classes), codes))
        return torch.from_numpy((self.values - centre) / scale).float()


def column(frame: pd.DataFrame, name: Any, option: str) -> pd.Series:
    """Return a column by its name; raise if there is none, with the names of all."""
    if not isinstance(name, str):
        kind = type(name).__name__
        raise TableError(f"expected the name of a column ({option}) in quotes, got {kind!r}")
    if name not in frame.columns:
        listed = ", ".join(map(repr, frame.columns[:30]))
        raise TableError(f"the table has no column {name!r} ({option}); it has {listed}")
    return frame[name]


def learn(frame: pd.DataFrame, name: str, classify: bool, decisions: list[str]) -> Target:
    """Return the target, and add the decisions about its kind."""
    series = column(frame, name, "--target")
    if not len(series):
        raise TableError("the table has no rows, only names of columns")
    values, missing, bad = cells.numbers(series, frame.attrs.get("decimal", "."))
    if missing.all():
        raise TableError(f"the target {name!r} is empty in every row")
    if not classify and bad.sum() > _WORDS * (~missing).sum():
        if cells.date_format(series) is not None:
            raise TableError(f"the target {name!r} holds dates: expected numbers or class labels")
        cell = cells.decorated_number(cells.words(series[bad]))
        if cell is not None:
            raise TableError(
                f"the target {name!r} holds {cell!r}: write plain numbers such as 1234.5, or "
                "predict labels by --classify"
            )
        decisions.append(f"the target {name!r} is words: prediction sets, as with --classify")
        classify = True
    elif bad.any() and not classify:
        count = int(bad.sum())
        decisions.append(f"the target {name!r} is not a number in {count} rows: these are left out")
    target = Target(name, cells.words(series), ("any",)) if classify else Target(name, values)
    rows = int(target.known.sum())
    distinct = np.unique(target.values[target.known])
    if len(distinct) == 1:
        same = f"{distinct.tolist()[0]!r} in all of {rows} rows"
        raise TableError(f"the target {name!r} is {same}: there is nothing to predict")
    most = min(_CLASSES, rows / 2) if rows > 3 else _CLASSES
    if classify and len(distinct) > most:
        raise TableError(f"the target {name!r} has {len(distinct)} labels: too many for classes")
    if not classify and len(distinct) == 2:
        decisions.append(f"the target {name!r} has two values; --classify predicts prediction sets")
    if left_out := len(series) - rows:
        decisions.append(f"{left_out} rows have no target {name!r}: they are left out")
    return replace(target, classes=tuple(distinct.tolist())) if classify else target


def read(frame: pd.DataFrame, name: str, classes: tuple[str, ...]) -> Target:
    """Return the target of a new table, with the classes of the fit."""
    series = column(frame, name, "the target")
    if classes:
        return Target(name, cells.words(series), classes)
    return Target(name, cells.numbers(series, frame.attrs.get("decimal", "."))[0])


def times(frame: pd.DataFrame, name: str) -> Array:
    """Return the column that orders rows: numbers, or dates as seconds."""
    series, decimal = column(frame, name, "--time"), frame.attrs.get("decimal", ".")
    values, missing, bad = cells.numbers(series, decimal)
    if not (missing | bad).any():
        whole = pd.to_numeric(series.astype(object), errors="coerce").to_numpy()
        return whole if whole.dtype.kind in "iu" else values  # as floats, large integers may tie
    if bad.any():
        form = cells.date_format(series)
        if form is None:
            cell = cells.quoted(series[bad].iloc[0])
            raise TableError(f"--time {name!r}: {cell} is neither a number nor a date")
        values, missing, _ = cells.dates(series, form)
    if missing.any():
        raise TableError(f"--time {name!r} is missing in {int(missing.sum())} rows")
    return values


def groups(frame: pd.DataFrame, name: str) -> Array:
    """Return the column of groups; rows without one form a group."""
    names = cells.words(column(frame, name, "--group"))
    names[names == ""] = "(missing)"
    return names
