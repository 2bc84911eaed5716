"""A fitted table: networks, their calibration, and all that was decided; bands for new rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from ffcp import LabelSet, files
from ffcp.conformal.coverage_level import requested_alpha
from ffcp.conformal.rank import exact_alpha
from ffcp.online.monitor import Monitor
from ffcp.regression.learned.training_rows import row_hashes
from ffcp.tables import cells, evaluation, seen, table_io, targets
from ffcp.tables import folder as folders
from ffcp.tables.columns import Columns
from ffcp.tables.errors import TableError
from ffcp.tables.evaluation import Measured
from ffcp.tables.training import Training
from ffcp.warnings import FFCPWarning

#: Rows per pass: what 16 members compute of them fits into some ten megabytes.
BATCH = 1024
_WATCHED = 10_000  # rows in no order: more take their time and tell little
_CURVE = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class About:
    """What a fit is and how it was made, in plain values: the content of its JSON file."""

    version: str
    source: str
    target: str
    classes: tuple[str, ...]
    alpha: float
    side: str
    support: tuple[float | None, ...]
    group: str | None
    groups: tuple[str, ...]
    time: str | None
    seed: int
    centre: float
    scale: float
    rows: dict[str, int]
    folds: int
    method: str
    guarantee: str
    training: tuple[Training, ...]
    decisions: tuple[str, ...]
    tested: Measured | None

    def check(self) -> None:
        """Refuse, by ValueError, what a fit cannot have written."""
        exact_alpha(self.alpha)
        if not (np.isfinite(self.centre) and np.isfinite(self.scale) and self.scale > 0):
            raise ValueError("it has a scale that is none")
        ends = [end for end in self.support if end is not None]
        if len(self.support) != 2 or not np.isfinite(ends).all() or ends != sorted(set(ends)):
            raise ValueError("its support has not two ends, the second above the first")
        if len(self.classes) == 1 or len(set(self.classes)) != len(self.classes):
            raise ValueError("it has classes that are none")
        if (self.group is None) == bool(self.groups):
            raise ValueError("its groups do not fit its column of groups")
        if self.folds == 1 or self.folds < 0:
            raise ValueError(f"it has {self.folds} folds")


@dataclass
class Predicted:
    """New columns for the rows of a table, with their index, and remarks about all of it."""

    bands: pd.DataFrame
    remarks: list[str]


class FittedTable:
    """Bands or label sets for the rows of a table; what :func:`ffcp.tables.fit` returns.

    ``about`` says what it is and how it did on its test rows, ``columns`` what every column is
    taken for (one list for every network: folds learn their own).
    """

    def __init__(
        self,
        about: About,
        columns: list[Columns],
        networks: list[nn.Module],
        predictor: Any,
        report: str | None = None,
        seen: Tensor | None = None,
    ) -> None:
        self.about, self.columns = about, columns
        self.networks, self.predictor = networks, predictor
        self.report = report  # the page, where one was just made
        self.seen = seen  # hashes of rows of the fit; older folders have none

    def __repr__(self) -> str:
        about = self.about
        what = "label sets" if about.classes else "bands"
        return f"FittedTable({what} of {about.target!r} from {len(self.columns[0].used)} columns)"

    # -- predicting -------------------------------------------------------------------------

    def predict(
        self, table: Any, alpha: Any = None, *, confidence_level: Any = None, **unknown: NoReturn
    ) -> pd.DataFrame:
        """Give ``prediction``, ``lower`` and ``upper`` of every row, or ``labels`` and ``size``.

        Parameters
        ----------
        table
            A frame, or the path of a table.
        alpha
            Share of misses allowed; by default that of the fit.
        confidence_level
            In place of ``alpha``: the coverage asked for, 1 - alpha.

        Returns
        -------
        DataFrame
            With the index of the table. A row that cannot be predicted has empty cells, and its
            ``reason`` says why.
        """
        alpha = self._level(alpha, confidence_level, **unknown)
        frame = _frame(table)
        made = self.predicted(frame, alpha)
        for remark in made.remarks:
            warnings.warn(remark, FFCPWarning, stacklevel=2)
        return made.bands

    def predicted(self, frame: pd.DataFrame, alpha: Any = None, first_row: int = 0) -> Predicted:
        """Predict the rows of a frame, which are these rows of a larger table."""
        alpha = self._level(alpha)
        x, groups, reasons, remarks = self._ready(frame, is_first=first_row == 0)
        usable = reasons == ""
        empty = self._empty(frame.index, reasons)
        if not usable.any():
            return Predicted(empty, remarks)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FFCPWarning)
            if self.about.classes:
                made = self._sets(x, alpha, groups, first_row)
            else:
                made = self._bands(x, alpha, groups)
        said = [str(warning.message) for warning in caught if warning.category is FFCPWarning]
        remarks += said
        for name, values in made.items():
            empty.loc[usable, name] = values
        if "upper" in made:
            self._say_infinite(empty, said)
        return Predicted(empty, remarks)

    def _level(self, alpha: Any, confidence_level: Any = None, **unknown: Any) -> Fraction:
        """Return the share of misses asked for; by default that of the fit."""
        return requested_alpha(alpha, confidence_level, unknown, exact_alpha(self.about.alpha))

    def _ready(
        self, frame: pd.DataFrame, is_first: bool = True
    ) -> tuple[Tensor, Any, np.ndarray[Any, Any], list[str]]:
        """Give the rows that can be predicted, with their groups; of all rows why they cannot."""
        x, reasons, remarks = self._encode(frame, is_first)
        groups = self._groups(frame, reasons)
        usable = reasons == ""
        return (
            x[torch.from_numpy(usable)],
            None if groups is None else groups[usable],
            reasons,
            remarks,
        )

    def _encode(
        self, frame: pd.DataFrame, is_first: bool = True
    ) -> tuple[Tensor, np.ndarray[Any, Any], list[str]]:
        """Encode rows as every network needs them, side by side."""
        parts = [columns.encode(frame, is_first) for columns in self.columns]
        reasons = parts[0].reasons
        for part in parts[1:]:
            reasons = np.where(reasons == "", part.reasons, reasons)
        remarks = dict.fromkeys(remark for part in parts for remark in part.remarks)
        return torch.cat([part.x for part in parts], dim=1), reasons, list(remarks)

    def _empty(self, index: pd.Index, reasons: np.ndarray[Any, Any]) -> pd.DataFrame:
        number = np.full(len(index), np.nan)
        word = np.full(len(index), None, dtype=object)
        if self.about.classes:
            made = {"prediction": word, "labels": word, "size": number}
        else:
            made = {"prediction": number, "lower": number, "upper": number}
        return pd.DataFrame({**made, "reason": reasons}, index=index)

    def _groups(self, frame: pd.DataFrame, reasons: np.ndarray[Any, Any]) -> Any:
        if self.about.group is None:
            return None
        made = targets.groups(frame, self.about.group)
        unknown = ~np.isin(made.astype(str), np.array(self.about.groups))
        for row in np.flatnonzero(unknown & (reasons == "")):
            name = cells.quoted(made[row])
            reasons[row] = f"{self.about.group}: no row of group {name} calibrated"
        return made

    def _bands(self, x: Tensor, alpha: Any, groups: Any) -> dict[str, Any]:
        about = self.about
        given = {} if groups is None else {"groups": groups}
        band = self.predictor.predict_interval(x, alpha, **given)
        ends = {
            name: _by_level(getattr(band, name), len(x)) * about.scale + about.centre
            for name in ("prediction", "lower", "upper")
        }
        low, high = (np.nan if end is None else end for end in about.support)
        return {name: np.fmin(np.fmax(values, low), high) for name, values in ends.items()}

    def _sets(self, x: Tensor, alpha: Any, groups: Any, first_row: int) -> dict[str, Any]:
        made = self.predictor.predict_set(x, alpha, groups=groups, first_row=first_row)
        labels = made.labels
        return {
            "prediction": [row[0] for row in labels],
            "labels": [evaluation.joined(row) for row in labels],
            "size": made.sizes.numpy().astype(np.float64),
        }

    def _say_infinite(self, bands: pd.DataFrame, said: list[str]) -> None:
        """Say of every infinite end that is not asked for, and not cut off, why it is infinite."""
        infinite = pd.Series(False, index=bands.index)
        for end, other in (("lower", "upper"), ("upper", "lower")):
            if self.about.side != other:
                infinite |= np.isinf(bands[end])
        why = next((one for one in said if "infinite" in one), "too few calibration rows")
        bands.loc[infinite & (bands["reason"] == ""), "reason"] = why

    def predict_file(
        self, table: str | Path, out: str | Path, alpha: Any = None, rows: int = table_io.CHUNK
    ) -> Iterator[Predicted]:
        """Predict a table that may be larger than memory, part by part, into a new file.

        Yields every part when it is written; the file is there when all of them are.
        """
        folders.must_be_outside(out)
        with table_io.writer(out) as add:
            row = 0
            for frame, original in table_io.parts(table, rows):
                made = self.predicted(frame, alpha, first_row=row)
                taken = {name: _free(name, frame.columns) for name in made.bands}
                add(frame, made.bands.rename(columns=taken), original)
                row += len(frame)
                yield made

    # -- checking ---------------------------------------------------------------------------

    def check(
        self,
        table: Any,
        alpha: Any = None,
        group: str | None = None,
        *,
        confidence_level: Any = None,
        **unknown: NoReturn,
    ) -> Measured:
        """Measure on rows whose target is known whether bands still cover, and in every group.

        Parameters
        ----------
        table
            A frame or the path of a table, with the target.
        alpha
            Share of misses allowed; by default that of the fit.
        confidence_level
            In place of ``alpha``: the coverage asked for, 1 - alpha.
        group
            A column by which coverage is told apart; by default that of the fit.
        """
        alpha = self._level(alpha, confidence_level, **unknown)
        known, y, without = self._labelled(table)
        made_bands = self.predicted(known, alpha)
        bands, remarks = made_bands.bands, made_bands.remarks
        if without:
            remarks.insert(0, f"{without} rows have no target {self.about.target!r}: left out")
        remarks += self._said_of_others(y)
        share = seen.share(self.seen, self.hashes(known, y))
        if share >= seen.MOST_OF_THEM:
            remarks.insert(
                0,
                f"most of these rows (about {100 * share:.0f} %) trained or calibrated this fit: "
                "how it covers them says little of new rows",
            )
        for remark in remarks:
            warnings.warn(remark, FFCPWarning, stacklevel=2)
        made = self.measured(bands, y, known, alpha, group)
        if not made.rows:
            raise TableError(f"no row could be predicted: {bands['reason'].iloc[0]}")
        return made

    def measured(
        self,
        bands: pd.DataFrame,
        y: np.ndarray[Any, Any],
        frame: pd.DataFrame,
        alpha: Any = None,
        group: str | None = None,
    ) -> Measured:
        """Measure bands that were predicted for rows of a frame, whose targets are ``y``."""
        about, name = self.about, group or self.about.group
        groups = None if name is None else targets.groups(frame, name)
        level = float(about.alpha if alpha is None else alpha)
        made = evaluation.measure(
            bands, y, level, frame, self.columns[0], groups, name, about.classes
        )
        if about.group is None:
            return made
        own = targets.groups(frame, about.group)[bands["prediction"].notna()]
        return replace(made, of_groups=tuple(int((own == one).sum()) for one in about.groups))

    def _said_of_others(self, y: np.ndarray[Any, Any]) -> list[str]:
        """Say how many rows have a label that no training row had."""
        others = y[~np.isin(y.astype(str), self.about.classes)] if self.about.classes else y[:0]
        if not len(others):
            return []
        return [
            f"{len(others)} rows have a label that no training row had, the first is "
            f"{others[0]!r}: they are covered only by sets that hold {LabelSet.OTHER!r}"
        ]

    def seen_share(self, table: Any) -> float:
        """Give the share of rows with a target that trained or calibrated this fit.

        0 where nobody can tell: the folder is older than the hashes of its rows, or they repeat.
        """
        known, y, _ = self._labelled(table)
        return seen.share(self.seen, self.hashes(known, y))

    def hashes(self, frame: pd.DataFrame, y: np.ndarray[Any, Any]) -> Tensor:
        """Hash what the networks see of each row, and its target."""
        classes = self.about.classes
        numbers = pd.Index(classes).get_indexer(y) if classes else y.astype(np.float32)
        made = []
        for start in range(0, len(frame), table_io.CHUNK):  # all at once would need much memory
            part = frame.iloc[start : start + table_io.CHUNK].copy()
            part.attrs.update(frame.attrs)
            x, _, _ = self._encode(part, is_first=False)
            made.append(row_hashes(x, torch.from_numpy(numbers[start : start + table_io.CHUNK])))
        return torch.cat(made)

    def _labelled(self, table: Any) -> tuple[pd.DataFrame, np.ndarray[Any, Any], int]:
        """Give the rows of a table whose target is known, their targets, and how many lack it."""
        frame = _frame(table)
        target = targets.read(frame, self.about.target, self.about.classes)
        if not target.known.any():
            raise TableError(_why_none(frame[self.about.target], self.about.target))
        known = frame[target.known].copy()
        known.attrs.update(frame.attrs)
        return known, target.values[target.known], len(frame) - len(known)

    def watch(self, table: Any, alpha: Any = None, time: str | None = None) -> Monitor | None:
        """Test whether rows whose target is known are still like those that calibrated.

        Parameters
        ----------
        table
            A frame or the path of a table, with the target.
        alpha
            The level at which coverage is watched; by default that of the fit.
        time
            A column that orders the rows: a change on the way is then found as well. Without it
            at most 10,000 come, in a random order, since a sorted file would look like change.

        Returns
        -------
        Monitor or None
            ``alarm`` says whether they have moved, ``table()`` by what. ``None`` where calibration
            left no scores to compare with: folds, and unordered rows of a fit of ``each`` side.
            Rows that cannot be predicted have no part.
        """
        about = self.about
        compared = not about.folds and (time is not None or about.side != "each")
        if not compared:
            return None
        frame, y, _ = self._labelled(table)
        x, reasons, _ = self._encode(frame)
        groups = self._groups(frame, reasons)
        if about.classes:
            codes = pd.Index(about.classes).get_indexer(y)
            y = np.where(codes < 0, len(about.classes), codes)
        else:  # in the units and the type that calibrated; what no target could be is at an end
            low, high = (np.nan if end is None else end for end in about.support)
            y = ((np.fmin(np.fmax(y, low), high) - about.centre) / about.scale).astype(np.float32)
        if time is None:
            order = np.random.default_rng(about.seed).permutation(len(y))[:_WATCHED]
        else:
            order = np.argsort(targets.times(frame, time), kind="stable")
        order = order[reasons[order] == ""]
        if not len(order):
            raise TableError("no row could be predicted, so none can be watched")
        monitor = Monitor(self.predictor, self._level(alpha), seed=about.seed)
        of_each = None if groups is None else groups[order]
        return monitor.update(x[torch.from_numpy(order)], y[order], groups=of_each)

    def still_covers(self, made: Measured, alpha: Any = None) -> float:
        """Give the chance of coverage this low or lower, had nothing changed since calibration."""
        alpha = self._level(alpha)
        hits = round(made.coverage * made.rows)
        if self.about.folds:  # the theorem of the folds has no law: the promise is taken as exact
            alpha = min(0.999, 1 - self.predictor.guarantee(alpha))
            return evaluation.chance_of_fewer(hits, [(made.rows, 10**9)], alpha)
        if not made.of_groups:  # no groups, or the test of a fit of 0.2.0
            return evaluation.chance_of_fewer(hits, [(made.rows, self.calibrated)], alpha)
        counts = self.predictor.calibration.groups
        calibrated = [counts[name] for name in self.about.groups]
        groups = list(zip(made.of_groups, calibrated, strict=True))
        return evaluation.chance_of_fewer(hits, groups, alpha)

    @property
    def calibrated(self) -> int:
        """How many rows calibrated; those that chose the method are not among them."""
        return len(self.predictor.scores if self.about.folds else self.predictor.calibration)

    def curve(self, frame: pd.DataFrame, y: np.ndarray[Any, Any]) -> tuple[float, ...]:
        """Give promised and found coverage at many levels, one pair after the other."""
        x, groups, reasons, _ = self._ready(frame)
        y = y[reasons == ""]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FFCPWarning)
            if self.about.classes:
                levels = [self._sets(x, alpha, groups, 0) for alpha in _CURVE]
            else:  # one pass serves them all
                ends = self._bands(x, _CURVE, groups)
                names = ("lower", "upper")
                levels = [{name: ends[name][i] for name in names} for i in range(len(_CURVE))]
        pairs: list[float] = []
        for alpha, bands in zip(_CURVE, levels, strict=True):
            hits = evaluation.covered(pd.DataFrame(bands), y, self.about.classes)
            pairs += [1 - alpha, float(hits.mean())]
        return tuple(pairs)

    # -- files ------------------------------------------------------------------------------

    def save(self, folder: str | Path, *, force: bool = False) -> Path:
        """Write the folder, see :mod:`ffcp.tables.folder`."""
        return folders.save(self, folder, force=force)


def _by_level(values: Tensor, rows: int) -> np.ndarray[Any, Any]:
    """Return one number for each row, shape (rows,), or (levels, rows) of several levels.

    >>> _by_level(torch.zeros(3), 3).shape, _by_level(torch.zeros(2, 3, 1), 3).shape
    ((3,), (2, 3))
    """
    levels: np.ndarray[Any, Any] = values.double().reshape(-1, rows).numpy()
    return levels[0] if len(levels) == 1 else levels


def _frame(table: Any) -> pd.DataFrame:
    return table_io.named(table) if isinstance(table, pd.DataFrame) else table_io.read(table)


def _why_none(column: pd.Series, name: str) -> str:
    """Say why no row has a target: all cells are empty, or none of them is a number."""
    given = [word for word in cells.words(column) if word]
    if not given:
        return f"no row has a target {name!r} to check against"
    return (
        f"the target {name!r} is a number in no row, the first is {cells.quoted(given[0])}: write "
        "numbers without units, with one decimal sign in the whole table"
    )


def _free(name: str, taken: Any) -> str:
    """Give a name that no column has.

    >>> _free("lower", ["a"]), _free("lower", ["lower"]), _free("lower", ["lower", "ffcp_lower"])
    ('lower', 'ffcp_lower', 'ffcp_lower_2')
    """
    made, number = name, 1
    while made in taken:
        made = f"ffcp_{name}" + (f"_{number}" if number > 1 else "")
        number += 1
    return made


def rebuilt(saved: Any) -> About:
    """Read what was written of an :class:`About`; anything else is a ValueError."""
    about: About = files.rebuilt(About, saved)
    about.check()
    return about


__all__ = ["About", "FittedTable", "Predicted"]
