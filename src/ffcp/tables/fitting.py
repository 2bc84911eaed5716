"""From a table to bands: decide, divide, train, calibrate, test."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

import ffcp
from ffcp.conformal.rank import requested_alpha
from ffcp.regression.cross_conformal import CrossConformal
from ffcp.tables import cells, decisions, evaluation, report, seen, splitting, table_io, targets
from ffcp.tables import columns as table_columns
from ffcp.tables.columns import Columns
from ffcp.tables.errors import TableError
from ffcp.tables.fitted import BATCH, About, FittedTable
from ffcp.tables.network import QUANTILES, Placed, TableNetwork
from ffcp.tables.splitting import RowSplit
from ffcp.tables.targets import Target
from ffcp.tables.training import Training, train
from ffcp.warnings import FFCPWarning

Array = np.ndarray[Any, Any]
Said = Callable[[str, float], None]  # what is being done, and how much of it is
BOTH = "both"
_SIDES = (BOTH, "lower", "upper", "each")


def fit(
    table: Any,
    target: str,
    *,
    alpha: Any = None,
    confidence_level: Any = None,
    classify: bool = False,
    group: str | None = None,
    time: str | None = None,
    side: str = BOTH,
    support: tuple[float | None, float | None] = (None, None),
    minutes: float = 3.0,
    seed: int = 0,
    progress: Said = lambda what, share: None,
    **unknown: NoReturn,
) -> FittedTable:
    """Train a network on a table, calibrate its bands, and test them.

    Parameters
    ----------
    table
        A frame, or the path of a CSV or Parquet file.
    target
        The column to predict.
    alpha
        Share of misses allowed; 0.1, which is meant if nothing is given, asks for 90 % coverage.
    confidence_level
        In place of ``alpha``: the coverage asked for, 1 - alpha.
    classify
        Predict sets of labels, though the target is numbers. A target of words always does.
    group
        A column: the guarantee then holds in each of its groups.
    time
        A column that orders the rows: the past trains, what follows calibrates, the last test.
    side
        ``"both"``; ``"lower"`` or ``"upper"`` for bands that end on that side only; ``"each"``
        for alpha / 2 on either side.
    support
        The least and the greatest value the target can have; ``None`` where there is none.
    minutes
        Time limit of the training. In a short time fewer rows are used, so that all else, but for
        reading the file once and a few seconds for any fit, takes about as long on one core.
    seed
        Of the division of rows, the training and whatever is random in the bands.
    progress
        Is told what is being done, and the share of it that is.

    Returns
    -------
    FittedTable
        ``predict``, ``check``, ``save``; its ``about`` lists everything that was decided.
    """
    alpha = float(requested_alpha(alpha, confidence_level, unknown))
    frame, source = _read(table)
    low, high = support
    support = (None if low == -np.inf else low, None if high == np.inf else high)
    _check_options(side, support, minutes, seed)
    said: list[str] = list(frame.attrs.get("decisions", ()))
    goal = targets.learn(frame, target, classify, said)
    for name, option in ((group, "--group"), (time, "--time")):
        if name is not None:
            targets.column(frame, name, option)
        if name == target:
            raise TableError(f"{option} {name!r} is the target, which new rows do not have")
    _check_support(goal, side, support)
    rows, order = _rows(frame, goal, time, minutes * 60, alpha, seed, said)
    goal = goal.some(rows)
    known = frame.iloc[rows].reset_index(drop=True)
    known = cells.read_once(known, but=group)  # groups are words, "007" and "7" two of them
    crossing = not goal.classes and group is None and time is None and side != "each"
    most = splitting.most_rows(known.shape[1], minutes * 60)
    division = splitting.divide(len(known), alpha, seed, crossing=crossing, order=order, most=most)
    goal = goal.with_classes_of(np.concatenate([division.train, division.stop]))
    groups = None if group is None else targets.groups(known, group)
    work = _Work(known, goal, division, support, side, alpha, seed, minutes * 60, progress)
    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(seed)  # of what has no generator of its own
        warnings.simplefilter("ignore", FFCPWarning)  # the decisions and the report say it
        predictor = work.split(groups) if division.folds is None else work.cross(division.folds)
    said += decisions.decided(work.columns[0], goal, division, predictor, alpha, groups)
    about = About(
        version=ffcp.__version__,
        source=source,
        target=target,
        classes=goal.classes,
        alpha=alpha,
        side=side,
        support=tuple(None if end is None else float(end) for end in support),
        group=group,
        groups=() if groups is None else tuple(sorted(predictor.calibration.groups)),
        time=time,
        seed=seed,
        centre=work.centre,
        scale=work.scale,
        rows=division.counts(None if division.folds is not None else len(predictor.calibration)),
        folds=0 if division.folds is None else len(work.networks),
        method=decisions.method(predictor, work.scale),
        guarantee=decisions.guarantee(predictor, alpha, group, time, division.folds),
        training=tuple(work.training),
        decisions=tuple(said),
        tested=None,
    )
    taught = np.concatenate([division.train, division.stop, division.calibrate])
    x = torch.cat(work.inputs, dim=1)
    hashes = seen.keep(seen.hashes(x, goal.tensor(work.centre, work.scale)), taught)
    fitted = FittedTable(about, work.columns, work.networks, predictor, hashes)
    progress("testing", 1.0)
    return _tested(fitted, known, goal, division.test)


def _read(table: Any) -> tuple[pd.DataFrame, str]:
    is_frame = isinstance(table, pd.DataFrame)
    # Some rows only, as reading all of a table that is too wide would take long.
    wide = (table if is_frame else next(table_io.parts(table, rows=1))[0]).shape[1]
    if wide > table_columns.MOST:
        raise TableError(f"the table has {wide:,} columns, the limit is {table_columns.MOST:,}")
    if is_frame:
        return table_io.named(table).reset_index(drop=True), "a frame"
    return table_io.read(table), Path(table).name


def _check_options(side: str, support: Any, minutes: float, seed: int) -> None:
    low, high = (0.0 if end is None else end for end in support)
    if side not in _SIDES:
        raise TableError(f"side must be one of {', '.join(_SIDES)}, got {side!r}")
    if not np.isfinite([low, high]).all() or (None not in support and low >= high):
        raise TableError(f"the support must be two numbers that rise, got {support}")
    if not (0 <= seed < 2**63 and minutes > 0):
        raise TableError(f"seed must be from 0 to 2**63 - 1 and minutes > 0, got {seed}, {minutes}")


def _check_support(goal: Target, side: str, support: Any) -> None:
    if goal.classes and (side != BOTH or support != (None, None)):
        raise TableError("side and support are for targets of numbers; this one is words")
    low, high = (np.nan if end is None else end for end in support)
    values = goal.values[:0].astype(float) if goal.classes else goal.values
    outside = values[(values < low) | (values > high)]
    if len(outside):
        first = f"{goal.name!r} lie outside the support, the first is {outside[0]:g}"
        raise TableError(f"{len(outside)} targets {first}: correct them, or the support")


def _rows(
    frame: pd.DataFrame,
    goal: Target,
    time: str | None,
    seconds: float,
    alpha: float,
    seed: int,
    said: list[str],
) -> tuple[Array, Array | None]:
    """Return the rows to use, and their order in time, if they have one.

    Of more rows than the training could see in its time some are taken by chance, or the last.
    """
    rows = np.flatnonzero(goal.known)
    order = None if time is None else targets.times(frame.iloc[rows], time).argsort(kind="stable")
    most = splitting.rows_in_time(frame.shape[1], seconds, alpha)
    if len(rows) > most:
        how = "by chance" if order is None else f"the last in order of {time!r}"
        limit = f"{seconds / 60:g} minutes allow no more"
        said.append(f"{most:,} of {len(rows):,} rows are used, {how}: {limit}")
        taken = np.random.default_rng(seed).permutation(len(rows)) if order is None else order
        taken = np.sort(taken[-most:])
        order = None if order is None else np.searchsorted(taken, order[-most:])
        rows = rows[taken]
    return rows, order


@dataclass
class _Work:
    """The rows of one fit, and what they become: networks, each with columns and inputs."""

    frame: pd.DataFrame
    goal: Target
    division: RowSplit
    support: tuple[float | None, float | None]
    side: str
    alpha: float
    seed: int
    seconds: float
    progress: Said
    columns: list[Columns] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    networks: list[nn.Module] = field(default_factory=list)
    training: list[Training] = field(default_factory=list)
    centre: float = 0.0
    scale: float = 1.0

    def split(self, groups: Array | None) -> Any:
        """Train on some rows and calibrate on others."""
        parts = self.division
        learned = np.concatenate([parts.train, parts.stop])
        self.centre, self.scale = self.goal.units(learned)
        y = self.goal.tensor(self.centre, self.scale)
        network = self._train("training", learned, parts.train, parts.stop, y)
        self.networks.append(network)
        self.progress("calibrating", 1.0)
        predictor = self._predictor(network)
        x, calibrate = self.inputs[0], parts.calibrate
        if hasattr(predictor, "fit"):  # what the training rows can teach
            most = splitting.most_rows(self.frame.shape[1], self.seconds)
            some = np.random.default_rng(self.seed).permutation(parts.train)[:most]
            predictor.fit(x[some], y[some], disjoint=True)
        of_each = None if groups is None else groups[calibrate]
        return predictor.calibrate(x[calibrate], y[calibrate], groups=of_each)

    def cross(self, folds: Array) -> Any:
        """Train a network without each fold, whose rows nothing that it is made of has seen."""
        count = int(folds.max()) + 1
        for fold in range(count):
            rows = np.flatnonzero(folds != fold)
            # The columns and the units are learned anew, too; and other rows stop the training.
            shuffled = np.random.default_rng([self.seed, fold]).permutation(rows)
            stop, train_rows = np.split(shuffled, [max(2, len(rows) // 6)])
            units = self.goal.units(rows)
            what = f"training network {fold + 1} of {count}"
            y = self.goal.tensor(*units)
            start = sum(x.shape[1] for x in self.inputs)
            network = self._train(what, rows, train_rows, stop, y, fold, count)
            self.networks.append(Placed(network, start, *units).eval())
        predictor = CrossConformal(self.networks, folds, side=self.side, batch_size=BATCH)
        return predictor.calibrate(torch.cat(self.inputs, dim=1), self.goal.values)

    def _train(
        self,
        what: str,
        learned: Array,
        rows: Array,
        stop: Array,
        y: Tensor,
        fold: int = 0,
        count: int = 1,
    ) -> TableNetwork:
        """Learn the columns and train one network, or that of a fold, in its share of the time."""
        columns = table_columns.learn(self.frame.iloc[np.sort(learned)], self.goal.name)
        x = columns.encode(self.frame).x
        has_quantiles = count == 1 and not self.goal.classes  # folds have no use for them
        network = TableNetwork.for_rows(
            x[rows],
            columns.numbers,
            outputs=max(1, len(self.goal.classes)),
            y=y[rows] if has_quantiles else None,
        )
        given = (network, x[rows], y[rows], x[stop], y[stop])
        seconds, seed = self.seconds / count, self.seed + fold
        progress = functools.partial(self.progress, what)
        self.training.append(train(*given, seconds=seconds, seed=seed, progress=progress))
        self.columns.append(columns)
        self.inputs.append(x)
        return network

    def _predictor(self, network: nn.Module) -> Any:
        """Return the predictor of bands or of label sets: the one place that chooses it."""
        given: Any = {"selection_alpha": self.alpha, "seed": self.seed, "batch_size": BATCH}
        if self.goal.classes:
            names = list(self.goal.classes)
            return ffcp.SetPredictor(network, "auto", names=names, other_labels=True, **given)
        # Rounded as targets are, so that one at the end of the support does not lie outside.
        units = [None if end is None else (end - self.centre) / self.scale for end in self.support]
        support = tuple(None if end is None else float(np.float32(end)) for end in units)
        return ffcp.Auto(network, quantiles=QUANTILES, side=self.side, support=support, **given)


def _tested(fitted: FittedTable, frame: pd.DataFrame, goal: Target, rows: Array) -> FittedTable:
    """Test on rows that nothing has seen, if there are any, and write the report."""
    bands, y = None, goal.values[rows]
    if len(rows):
        some = frame.iloc[rows]
        bands = fitted.predicted(some).bands
        tested = evaluation.measure(fitted, bands, y, some, fitted.about.alpha)
        fitted.about = replace(fitted.about, tested=tested)
    fitted.report = report.page(fitted, bands, y)
    return fitted
