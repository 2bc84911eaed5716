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

from ffcp import LabelSet
from ffcp.conformal.rank import exact_alpha, requested_alpha
from ffcp.online.monitor import Monitor
from ffcp.tables import cells, evaluation, seen, table_io, targets
from ffcp.tables import folder as folders
from ffcp.tables.columns import Columns
from ffcp.tables.errors import TableError
from ffcp.tables.evaluation import Measured
from ffcp.tables.targets import Target
from ffcp.tables.training import Training
from ffcp.warnings import FFCPWarning

#: Rows per pass: what 16 members compute of them fits into some ten megabytes.
BATCH = 1024
Array = np.ndarray[Any, Any]
_ENDS = ("lower", "upper")
_WATCHED = 10_000  # rows in no order: more take their time and tell little


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

    def __post_init__(self) -> None:
        """Refuse, by ValueError, what a fit cannot have written."""
        exact_alpha(self.alpha)
        low, high = self.support
        rises = low is None or high is None or low < high
        if not (rises and self.scale > 0 and len(self.classes) != 1 and self.folds != 1):
            raise ValueError("what it says of itself cannot be")

    def clipped(self, values: Array) -> Array:
        """Return values, or the end of the support that they lie beyond."""
        low, high = (np.nan if end is None else end for end in self.support)
        inside: Array = np.fmin(np.fmax(values, low), high)
        return inside


@dataclass
class Predicted:
    """New columns for the rows of a table, with their index, and remarks about all of it."""

    bands: pd.DataFrame
    remarks: list[str]

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.bands)

    @property
    def empty(self) -> int:
        """How many of them could not be predicted."""
        return int(self.bands["prediction"].isna().sum())


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
        seen: Tensor,
    ) -> None:
        self.about, self.columns = about, columns
        self.networks, self.predictor = networks, predictor
        self.seen = seen  # hashes of rows of the fit
        self.report: str | None = None  # the page, where one was just made

    def __repr__(self) -> str:
        about = self.about
        return (
            f"FittedTable({self.kind} of {about.target!r} from {len(self.columns[0].used)} columns)"
        )

    @property
    def kind(self) -> str:
        """What files of predictions are called after: ``"sets"`` or ``"intervals"``."""
        return "sets" if self.about.classes else "intervals"

    # -- predicting -------------------------------------------------------------------------

    def predict(
        self, table: Any, alpha: Any = None, *, confidence_level: Any = None, **unknown: NoReturn
    ) -> pd.DataFrame:
        """Return ``prediction``, ``lower`` and ``upper`` of every row, or ``labels`` and ``size``.

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
            With the index of the table. A prediction lies in its interval: where the network's
            mean does not, as that of a long tail may, it is the nearer end. A row that cannot be
            predicted has empty cells, and its ``reason`` says why.
        """
        alpha = self._level(alpha, confidence_level, **unknown)
        made = self.predicted(_frame(table), alpha)
        for remark in made.remarks:
            warnings.warn(remark, FFCPWarning, stacklevel=2)
        return made.bands

    def predicted(self, frame: pd.DataFrame, alpha: Any = None, first_row: int = 0) -> Predicted:
        """Predict the rows of a frame, which are these rows of a larger table.

        Where there is a reason, other cells are empty; an infinite end that was not asked for has
        a reason, too.
        """
        about = self.about
        x, groups, reasons, remarks = self._encode(frame, is_first=first_row == 0)
        usable = reasons == ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FFCPWarning)
            made = {}
            if usable.any():
                given = {} if groups is None else {"groups": groups[usable]}
                rows = x[torch.from_numpy(usable)]
                made = self._columns(rows, self._level(alpha), given, first_row)
        said = [str(warning.message) for warning in caught if warning.category is FFCPWarning]
        names = ("prediction", "labels", "size") if about.classes else ("prediction", *_ENDS)
        numbers = {"size": "Int64"} if about.classes else dict.fromkeys(names, float)
        table = pd.DataFrame(made, np.flatnonzero(usable), names)
        table = table.reindex(range(len(frame))).astype(numbers).set_axis(frame.index)
        table["reason"] = reasons
        wanted = [end for end in _ENDS if end in made and about.side in (end, "both", "each")]
        why = next((one for one in said if "infinite" in one), "too few calibration rows")
        table.loc[usable & np.isinf(table[wanted]).any(axis=1), "reason"] = why
        return Predicted(table, remarks + said)

    def _columns(
        self, x: Tensor, alpha: Fraction, given: dict[str, Any], first_row: int
    ) -> dict[str, Any]:
        about = self.about
        if about.classes:
            sets = self.predictor.predict_set(x, alpha, first_row=first_row, **given)
            labels = sets.labels
            words = [evaluation.joined(row) for row in labels]
            return {"prediction": [row[0] for row in labels], "labels": words, "size": sets.sizes}
        band = self.predictor.predict_interval(x, alpha, **given)
        made: dict[str, Any] = {}
        for name in ("prediction", *_ENDS):
            units = getattr(band, name).double().flatten().numpy()
            made[name] = about.clipped(units * about.scale + about.centre)
        # The mean of a long tail, or of a short training, may lie beyond the quantiles at the ends.
        made["prediction"] = np.clip(made["prediction"], made["lower"], made["upper"])
        return made

    def _level(self, alpha: Any, confidence_level: Any = None, **unknown: Any) -> Fraction:
        """Return the share of misses asked for; by default that of the fit."""
        return requested_alpha(alpha, confidence_level, unknown, exact_alpha(self.about.alpha))

    def _encode(
        self, frame: pd.DataFrame, is_first: bool = True
    ) -> tuple[Tensor, Array | None, Array, list[str]]:
        """Return rows as every network needs them, side by side, and their groups.

        Besides, why rows cannot be predicted, ``""`` of those that can, and remarks.
        """
        parts = [columns.encode(frame, is_first) for columns in self.columns]
        reasons = parts[0].reasons
        for part in parts[1:]:
            reasons = np.where(reasons == "", part.reasons, reasons)
        remarks = dict.fromkeys(remark for part in parts for remark in part.remarks)
        groups = None
        if self.about.group is not None:
            groups = targets.groups(frame, self.about.group)
            unknown = ~np.isin(groups.astype(str), np.array(self.about.groups))
            for row in np.flatnonzero(unknown & (reasons == "")):
                name = cells.quoted(groups[row])
                reasons[row] = f"{self.about.group}: no row of group {name} calibrated"
        return torch.cat([part.x for part in parts], dim=1), groups, reasons, list(remarks)

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
        known, target, remarks = self._labelled(table)
        made = self.predicted(known, alpha)
        x = self._encode(known, is_first=False)[0]
        share = seen.share(self.seen, seen.hashes(x, self._in_units(target)))
        if share >= seen.MOST_OF_THEM:
            of_fit = f"about {100 * share:.0f} % of these rows trained or calibrated this fit"
            remarks.append(f"{of_fit}: how it covers them says little of new rows")
        for remark in remarks + made.remarks:
            warnings.warn(remark, FFCPWarning, stacklevel=2)
        measured = evaluation.measure(self, made.bands, target.values, known, alpha, group)
        return replace(measured, seen=share)

    def _in_units(self, target: Target) -> Tensor:
        """Return targets as they calibrated; what no target could be is at an end."""
        about = self.about
        if not about.classes:
            target = replace(target, values=about.clipped(target.values))
        return target.tensor(about.centre, about.scale)

    def _labelled(self, table: Any) -> tuple[pd.DataFrame, Target, list[str]]:
        """Return the rows of a table whose target is known, their targets, and remarks."""
        frame, name = _frame(table), self.about.target
        target = targets.read(frame, name, self.about.classes)
        has = target.known
        if not has.any():
            given = [word for word in cells.words(frame[name]) if word]
            first = f": {cells.quoted(given[0])} is no number" if given else ""
            raise TableError(f"no row has a target {name!r} to check against{first}")
        remarks = []
        if not has.all():
            remarks.append(f"{int((~has).sum())} rows have no target {name!r}: left out")
        known = target.some(has)
        others = known.values[~np.isin(known.values.astype(str), self.about.classes)]
        if self.about.classes and len(others):
            new = f"{len(others)} rows have a label that no training row had, as {others[0]!r}"
            remarks.append(f"{new}: only sets that hold {LabelSet.OTHER!r} cover them")
        return frame[has], known, remarks

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
        frame, target, _ = self._labelled(table)
        x, groups, reasons, _ = self._encode(frame)
        if time is None:
            order = np.random.default_rng(about.seed).permutation(len(x))[:_WATCHED]
        else:
            order = np.argsort(targets.times(frame, time), kind="stable")
        order = order[reasons[order] == ""]
        if not len(order):
            raise TableError("no row could be predicted, so none can be watched")
        monitor = Monitor(self.predictor, self._level(alpha), seed=about.seed)
        rows = torch.from_numpy(order)
        of_each = None if groups is None else groups[order]
        return monitor.update(x[rows], self._in_units(target)[rows], groups=of_each)

    def still_covers(self, made: Measured, alpha: Any = None) -> float:
        """Return the chance of coverage this low, had nothing changed since calibration."""
        alpha = self._level(alpha)
        hits = round(made.coverage * made.rows)
        if self.about.folds:  # the theorem of the folds has no law: the promise is taken as exact
            alpha = min(0.999, 1 - self.predictor.guarantee(alpha))
            return evaluation.chance_of_fewer(hits, [(made.rows, 10**9)], alpha)
        groups = [(made.rows, self.calibrated)]
        if made.of_groups:
            counts = self.predictor.calibration.groups
            calibrated = [counts[name] for name in self.about.groups]
            groups = list(zip(made.of_groups, calibrated, strict=True))
        return evaluation.chance_of_fewer(hits, groups, alpha)

    @property
    def calibrated(self) -> int:
        """How many rows calibrated; those that chose the method are not among them."""
        return len(self.predictor.scores if self.about.folds else self.predictor.calibration)

    # -- files ------------------------------------------------------------------------------

    def save(self, folder: str | Path, *, force: bool = False) -> Path:
        """Write the folder, see :mod:`ffcp.tables.folder`."""
        return folders.save(self, folder, force=force)


def _frame(table: Any) -> pd.DataFrame:
    return table_io.named(table) if isinstance(table, pd.DataFrame) else table_io.read(table)


def _free(name: str, taken: Any) -> str:
    """Return a name that no column has.

    >>> _free("lower", ["a"]), _free("lower", ["lower"])
    ('lower', 'ffcp_lower')
    """
    while name in taken:
        name = f"ffcp_{name}"
    return name


__all__ = ["About", "FittedTable", "Predicted"]
