"""A fitted table: networks, calibration and decisions, with predictions for new rows."""

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
from ffcp.tables import cells, evaluation, fit_rows, table_io, targets
from ffcp.tables import folder as folders
from ffcp.tables.columns import Columns
from ffcp.tables.errors import TableError
from ffcp.tables.evaluation import Measured
from ffcp.tables.targets import Target
from ffcp.tables.training import Training
from ffcp.warnings import FFCPWarning

#: Rows per pass: the activations of 16 members fit into about ten megabytes.
BATCH = 1024
Array = np.ndarray[Any, Any]
_ENDS = ("lower", "upper")
_WATCHED = 10_000  # unordered rows in the drift test: more are slow and add little


@dataclass(frozen=True)
class About:
    """The description of a fit as plain data, the content of its JSON file."""

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
        """Raise ValueError for values that a fit cannot have written."""
        exact_alpha(self.alpha)
        low, high = self.support
        rises = low is None or high is None or low < high
        if not (rises and self.scale > 0 and len(self.classes) != 1 and self.folds != 1):
            raise ValueError("'about' has an impossible support, scale, classes or folds")

    def clipped(self, values: Array) -> Array:
        """Return values, clipped to the support."""
        low, high = (np.nan if end is None else end for end in self.support)
        inside: Array = np.fmin(np.fmax(values, low), high)
        return inside


@dataclass
class Predicted:
    """The new columns for the rows of a table, with their index, and remarks."""

    columns: pd.DataFrame
    remarks: list[str]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.columns)

    @property
    def empty(self) -> int:
        """The number of rows that could not be predicted."""
        return int(self.columns["prediction"].isna().sum())


class FittedTable:
    """Prediction intervals or sets for the rows of a table, by :func:`ffcp.tables.fit`.

    ``about`` describes the fit and its test results, ``columns`` the columns as each network
    encodes them (folds learn their own).

    Parameters
    ----------
    about : About
        The fit and its test results.
    columns : list of Columns
        The columns as each network encodes them; folds learn their own.
    networks : list of nn.Module
        One network, or one for each fold.
    predictor : Predictor or CrossConformal
        The calibrated predictor.
    row_hashes : Tensor
        Hashes of the rows of the fit.
    """

    def __init__(
        self,
        about: About,
        columns: list[Columns],
        networks: list[nn.Module],
        predictor: Any,
        row_hashes: Tensor,
    ) -> None:
        self.about, self.columns = about, columns
        self.networks, self.predictor = networks, predictor
        self.row_hashes = row_hashes  # of training and calibration rows
        self.report: str | None = None  # the HTML report, right after fitting

    def __repr__(self) -> str:
        about = self.about
        return (
            f"FittedTable({self.kind} of {about.target!r} from {len(self.columns[0].used)} columns)"
        )

    @property
    def kind(self) -> str:
        """The kind of predictions, which names their files: ``"sets"`` or ``"intervals"``."""
        return "sets" if self.about.classes else "intervals"

    # -- predicting -------------------------------------------------------------------------

    def predict(
        self, table: Any, alpha: Any = None, *, confidence_level: Any = None, **unknown: NoReturn
    ) -> pd.DataFrame:
        """Return ``prediction``, ``lower`` and ``upper`` of every row, or ``labels`` and ``size``.

        Parameters
        ----------
        table : DataFrame, path or pandas-like
            A frame, or the path of a table.
        alpha : float, default=None
            Allowed share of misses; by default that of the fit.
        confidence_level : float, default=None
            Instead of ``alpha``: the required coverage, 1 - alpha.

        Returns
        -------
        DataFrame
            With the index of the table. A prediction lies in its interval: if the network's mean
            does not, as can happen with a long tail, it is the nearer end. A row that cannot be
            predicted has empty cells and a ``reason``.
        """
        alpha = self._level(alpha, confidence_level, **unknown)
        predicted = self.predicted(_frame(table), alpha)
        for remark in predicted.remarks:
            warnings.warn(remark, FFCPWarning, stacklevel=2)
        return predicted.columns

    def predicted(self, frame: pd.DataFrame, alpha: Any = None, first_row: int = 0) -> Predicted:
        """Return predictions for the rows of a frame, from ``first_row`` of a larger table.

        Rows with a reason have empty cells otherwise; but an infinite end that ``side`` does not
        explain has a reason, too.
        """
        about = self.about
        x, groups, reasons, remarks = self._encode(frame, is_first=first_row == 0)
        usable = reasons == ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FFCPWarning)
            columns = {}
            if usable.any():
                groups = None if groups is None else groups[usable]
                rows = x[torch.from_numpy(usable)]
                columns = self._columns(rows, self._level(alpha), groups, first_row)
        messages = [str(warning.message) for warning in caught if warning.category is FFCPWarning]
        names = ("prediction", "labels", "size") if about.classes else ("prediction", *_ENDS)
        numbers = {"size": "Int64"} if about.classes else dict.fromkeys(names, float)
        table = pd.DataFrame(columns, np.flatnonzero(usable), names)
        table = table.reindex(range(len(frame))).astype(numbers).set_axis(frame.index)
        table["reason"] = reasons
        finite = [end for end in _ENDS if end in columns and about.side in (end, "both", "each")]
        infinite = usable & np.isinf(table[finite]).any(axis=1)
        why = [message for message in messages if "infinite" in message]
        table.loc[infinite, "reason"] = why[0] if why else "too few calibration rows"
        return Predicted(table, remarks + messages)

    def _columns(
        self, x: Tensor, alpha: Fraction, groups: Array | None, first_row: int
    ) -> dict[str, Any]:
        """Return the new columns of rows that can be predicted."""
        about = self.about
        options = {} if groups is None else {"groups": groups}
        if about.classes:
            sets = self.predictor.predict_set(x, alpha, first_row=first_row, **options)
            labels = sets.labels
            words = [evaluation.joined(row) for row in labels]
            return {"prediction": [row[0] for row in labels], "labels": words, "size": sets.sizes}
        interval = self.predictor.predict_interval(x, alpha, **options)
        columns: dict[str, Any] = {}
        for name in ("prediction", *_ENDS):
            units = getattr(interval, name).double().flatten().numpy()
            columns[name] = about.clipped(units * about.scale + about.centre)
        # With a long tail, or after a short training, the mean may lie outside the interval.
        columns["prediction"] = np.clip(columns["prediction"], columns["lower"], columns["upper"])
        return columns

    def _level(self, alpha: Any, confidence_level: Any = None, **unknown: Any) -> Fraction:
        """Return the requested alpha; by default that of the fit."""
        return requested_alpha(alpha, confidence_level, unknown, exact_alpha(self.about.alpha))

    def _encode(
        self, frame: pd.DataFrame, is_first: bool = True
    ) -> tuple[Tensor, Array | None, Array, list[str]]:
        """Return the inputs of all networks, concatenated, and the groups of rows.

        Then the reasons why rows cannot be predicted, ``""`` for those that can, and remarks.
        """
        encoded = [columns.encode(frame, is_first) for columns in self.columns]
        reasons = encoded[0].reasons
        for other in encoded[1:]:
            reasons = np.where(reasons == "", other.reasons, reasons)
        remarks = dict.fromkeys(remark for rows in encoded for remark in rows.remarks)
        groups = None
        if self.about.group is not None:
            groups = targets.groups(frame, self.about.group)
            unknown = ~np.isin(groups.astype(str), np.array(self.about.groups))
            for row in np.flatnonzero(unknown & (reasons == "")):
                name = cells.quoted(groups[row])
                reasons[row] = f"{self.about.group}: group {name} has no calibration rows"
        return torch.cat([rows.x for rows in encoded], dim=1), groups, reasons, list(remarks)

    def predict_file(
        self, table: str | Path, out: str | Path, alpha: Any = None, rows: int = table_io.CHUNK
    ) -> Iterator[Predicted]:
        """Predict a table that may be larger than memory into a new file, in parts.

        Yields every part when it is written; the file appears when all of them are.

        Parameters
        ----------
        table : str or Path
            The table to predict.
        out : str or Path
            The file to write.
        alpha : float, default=None
            Miscoverage level; that of the fit by default.
        rows : int, default=CHUNK
            Rows per part.
        """
        folders.must_be_outside(out)
        with table_io.writer(out) as add:
            row = 0
            for frame, original in table_io.parts(table, rows):
                predicted = self.predicted(frame, alpha, first_row=row)
                names = {name: _free(name, frame.columns) for name in predicted.columns}
                add(frame, predicted.columns.rename(columns=names), original)
                row += len(frame)
                yield predicted

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
        """Return coverage and size on rows whose target is known, overall and by groups.

        Parameters
        ----------
        table : DataFrame, path or pandas-like
            A frame or the path of a table, with the target.
        alpha : float, default=None
            Allowed share of misses; by default that of the fit.
        confidence_level : float, default=None
            Instead of ``alpha``: the required coverage, 1 - alpha.
        group : str, default=None
            A column of groups to report by; by default that of the fit.
        """
        alpha = self._level(alpha, confidence_level, **unknown)
        frame, target, remarks = self._labelled(table)
        predicted = self.predicted(frame, alpha)
        x = self._encode(frame, is_first=False)[0]
        share = fit_rows.share(self.row_hashes, fit_rows.hashes(x, self._in_units(target)))
        if share >= fit_rows.MOST_OF_THEM:
            of_fit = f"about {100 * share:.0f} % of these rows trained or calibrated this fit"
            remarks.append(f"{of_fit}: their coverage says little about new rows")
        for remark in remarks + predicted.remarks:
            warnings.warn(remark, FFCPWarning, stacklevel=2)
        measured = evaluation.measure(self, predicted.columns, target.values, frame, alpha, group)
        return replace(measured, seen=share)

    def _in_units(self, target: Target) -> Tensor:
        """Return targets in the units of the network, clipped to the support."""
        about = self.about
        if not about.classes:
            target = replace(target, values=about.clipped(target.values))
        return target.tensor(about.centre, about.scale)

    def _labelled(self, table: Any) -> tuple[pd.DataFrame, Target, list[str]]:
        """Return the rows of a table whose target is known, their targets, and remarks."""
        frame, name = _frame(table), self.about.target
        target = targets.read(frame, name, self.about.classes)
        known = target.known
        if not known.any():
            words = [word for word in cells.words(frame[name]) if word]
            first = f": {cells.quoted(words[0])} is not a number" if words else ""
            raise TableError(f"no row has a target {name!r} to check against{first}")
        remarks = []
        if not known.all():
            remarks.append(f"{int((~known).sum())} rows have no target {name!r}: left out")
        target = target.take(known)
        others = target.values[~np.isin(target.values.astype(str), self.about.classes)]
        if self.about.classes and len(others):
            new = f"{len(others)} rows have a label that no training row has, like {others[0]!r}"
            remarks.append(f"{new}: only sets that hold {LabelSet.OTHER!r} cover them")
        return frame[known], target, remarks

    def watch(self, table: Any, alpha: Any = None, time: str | None = None) -> Monitor | None:
        """Test for drift: whether rows with known targets are like the calibration rows.

        Parameters
        ----------
        table : DataFrame, path or pandas-like
            A frame or the path of a table, with the target.
        alpha : float, default=None
            The level at which coverage is reported; by default that of the fit.
        time : str, default=None
            A column that orders the rows: changes between them are then detected too. Without it
            at most 10,000 rows are used, in random order, since a sorted file would look like
            drift.

        Returns
        -------
        Monitor or None
            ``alarm`` is whether drift was detected, ``table()`` has the tests. ``None`` if there
            are no calibration scores to compare with: with folds, and for unordered rows with
            ``side="each"``. Rows that cannot be predicted are left out.
        """
        about = self.about
        if about.folds or (time is None and about.side == "each"):
            return None
        frame, target, _ = self._labelled(table)
        x, groups, reasons, _ = self._encode(frame)
        if time is None:
            order = np.random.default_rng(about.seed).permutation(len(x))[:_WATCHED]
        else:
            order = np.argsort(targets.times(frame, time), kind="stable")
        order = order[reasons[order] == ""]
        if not len(order):
            first = reasons[0] if len(reasons) else "there are no rows"
            raise TableError(f"no row can be predicted, to test for drift; the first: {first}")
        monitor = Monitor(self.predictor, self._level(alpha), seed=about.seed)
        rows = torch.from_numpy(order)
        groups = None if groups is None else groups[order]
        return monitor.update(x[rows], self._in_units(target)[rows], groups=groups)

    def still_covers(self, measured: Measured, alpha: Any = None) -> float:
        """Return the probability of coverage this low without drift: a p-value.

        Parameters
        ----------
        measured : Measured
            The result of :meth:`check`.
        alpha : float, default=None
            Miscoverage level; that of the fit by default.
        """
        alpha = self._level(alpha)
        hits = round(measured.coverage * measured.rows)
        if self.about.folds:  # no exact distribution: test against the guaranteed coverage
            alpha = min(0.999, 1 - self.predictor.guarantee(alpha))
            return evaluation.chance_of_fewer(hits, [(measured.rows, 10**9)], alpha)
        groups = [(measured.rows, self.calibrated)]
        if measured.of_groups:
            counts = self.predictor.calibration.groups
            calibrated = [counts[name] for name in self.about.groups]
            groups = list(zip(measured.of_groups, calibrated, strict=True))
        return evaluation.chance_of_fewer(hits, groups, alpha)

    @property
    def calibrated(self) -> int:
        """The number of calibration rows, without those used for the selection of the method."""
        return len(self.predictor.scores if self.about.folds else self.predictor.calibration)

    # -- files ------------------------------------------------------------------------------

    def save(self, folder: str | Path, *, force: bool = False) -> Path:
        """Write the fit to a folder, see :mod:`ffcp.tables.folder`, and return its path.

        Parameters
        ----------
        folder : str or Path
            The folder to write.
        force : bool, default=False
            Whether a fit in this folder is replaced.
        """
        return folders.save(self, folder, force=force)


def _frame(table: Any) -> pd.DataFrame:
    """Return a whole table as a frame, read if it is a file."""
    table = table_io.as_given(table)
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
