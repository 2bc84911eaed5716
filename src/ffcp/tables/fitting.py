"""The function ``fit``: from a table to tested prediction intervals or sets."""

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
from ffcp.tables import cells, decisions, evaluation, fit_rows, report, splitting, table_io, targets
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
Progress = Callable[[str, float], None]  # the current step, and the share of it that is done
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
    progress: Progress = lambda what, share: None,
    **unknown: NoReturn,
) -> FittedTable:
    """Train a network on a table, calibrate its prediction intervals, and test them.

    Parameters
    ----------
    table : DataFrame, path or pandas-like
        A frame, or the path of a CSV or Parquet file.
    target : str
        The column to predict.
    alpha : float, default=None
        Allowed share of misses; 0.1, for 90 % coverage, if neither is given.
    confidence_level : float, default=None
        Instead of ``alpha``: the required coverage, 1 - alpha.
    classify : bool, default=False
        Treat a numeric target as class labels. A target of words always is.
    group : str, default=None
        A column of groups: the guarantee then holds in each group.
    time : str, default=None
        A column that orders the rows: training on the first, then calibration, test on the last.
    side : str, default="both"
        ``"both"``; ``"lower"`` or ``"upper"`` for one-sided intervals; ``"each"`` for alpha / 2 on
        either side.
    support : tuple, default=(None, None)
        The smallest and the largest possible value of the target; ``None`` if there is none.
    minutes : float, default=3.0
        Time limit of the training. With a short limit fewer rows are used, so that the rest of the
        work, except for a few seconds and reading the file, takes about as long on one core.
    seed : int, default=0
        Seed of the split, the training and the calibration.
    progress : callable, optional
        Called with the current step and the share of it that is done.

    Returns
    -------
    FittedTable
        With ``predict``, ``check`` and ``save``; its ``about`` lists all decisions.
    """
    alpha = float(requested_alpha(alpha, confidence_level, unknown))
    frame, source = _read(table)
    low, high = support
    support = (None if low == -np.inf else low, None if high == np.inf else high)
    _check_options(side, support, minutes, seed)
    notes: list[str] = list(frame.attrs.get("decisions", ()))
    goal = targets.learn(frame, target, classify, notes)
    for name, option in ((group, "--group"), (time, "--time")):
        if name is not None:
            targets.column(frame, name, option)
        if name == target:
            raise TableError(f"{option} {name!r} is the target, which new rows do not have")
    _check_support(goal, side, support)
    groups = None if group is None else targets.groups(frame, group)
    rows, order = _rows(frame, goal, groups, time, minutes * 60, alpha, seed, notes)
    goal = goal.take(rows)
    frame = frame.iloc[rows].reset_index(drop=True)
    frame = cells.read_once(frame, but=group)  # groups are strings: "007" and "7" differ
    crossing = not goal.classes and group is None and time is None and side != "each"
    most = splitting.most_rows(frame.shape[1], minutes * 60)
    groups = None if groups is None else groups[rows]
    split = splitting.divide(
        len(frame), alpha, seed, crossing=crossing, order=order, most=most, groups=groups
    )
    goal = goal.with_classes_of(np.concatenate([split.train, split.stop]))
    run = _FitRun(frame, goal, split, support, side, alpha, seed, minutes * 60, progress)
    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(seed)  # for code without its own generator
        warnings.simplefilter("ignore", FFCPWarning)  # see the decisions and the report
        predictor = run.fit_parts(groups) if split.folds is None else run.fit_folds(split.folds)
    split = run.split
    notes += decisions.decided(run.columns[0], goal, split, predictor, alpha, groups)
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
        centre=run.centre,
        scale=run.scale,
        rows=split.counts(None if split.folds is not None else len(predictor.calibration)),
        folds=0 if split.folds is None else len(run.networks),
        method=decisions.method(predictor, run.scale),
        guarantee=decisions.guarantee(predictor, alpha, group, time, split.folds),
        training=tuple(run.training),
        decisions=tuple(notes),
        tested=None,
    )
    used = np.concatenate([split.train, split.stop, split.calibrate])
    hashes = fit_rows.hashes(torch.cat(run.inputs, dim=1), goal.tensor(run.centre, run.scale))
    hashes = fit_rows.keep(hashes, used)
    fitted = FittedTable(about, run.columns, run.networks, predictor, hashes)
    progress("testing", 1.0)
    _test(fitted, frame, goal, split.test)
    return fitted


def _read(table: Any) -> tuple[pd.DataFrame, str]:
    """Return a table as a frame, and the name of its source."""
    table = table_io.as_given(table)
    is_frame = isinstance(table, pd.DataFrame)
    # One row is enough, and reading all of a table that is too wide would take long.
    columns = (table if is_frame else next(table_io.parts(table, rows=1))[0]).shape[1]
    if columns > table_columns.MOST:
        limit = f"at most {table_columns.MOST:,}: leave out some"
        raise TableError(f"the table has {columns:,} columns, expected {limit}")
    if is_frame:
        return table_io.named(table).reset_index(drop=True), "a frame"
    return table_io.read(table), Path(table).name


def _check_options(side: str, support: Any, minutes: Any, seed: int) -> None:
    low, high = (0.0 if end is None else end for end in support)
    if side not in _SIDES:
        raise TableError(f"'side' must be one of {', '.join(_SIDES)}, got {side!r}")
    if not np.isfinite([low, high]).all() or (None not in support and low >= high):
        raise TableError(f"'support' must be two ascending numbers, got {support}")
    if not 0 <= seed < 2**63:
        raise TableError(f"'seed' must be from 0 to 2**63 - 1, got {seed}")
    if isinstance(minutes, str) or not minutes > 0:
        raise TableError(f"'minutes' must be a positive number, got {minutes!r}")


def _check_support(goal: Target, side: str, support: Any) -> None:
    if goal.classes and (side != BOTH or support != (None, None)):
        raise TableError(
            f"'side' and 'support' need a numeric target, {goal.name!r} is class labels"
        )
    low, high = (np.nan if end is None else end for end in support)
    values = goal.values[:0].astype(float) if goal.classes else goal.values
    outside = values[(values < low) | (values > high)]
    if len(outside):
        first = f"{goal.name!r} lie outside 'support', the first is {outside[0]:g}"
        raise TableError(f"{len(outside)} targets {first}: correct them, or 'support'")


def _rows(
    frame: pd.DataFrame,
    goal: Target,
    groups: Array | None,
    time: str | None,
    seconds: float,
    alpha: float,
    seed: int,
    notes: list[str],
) -> tuple[Array, Array | None]:
    """Return the rows to use, and their order in time, if they have one.

    If there are too many for the time limit, a random part is used, or the last; of a random part
    every group has at least as many as it needs.
    """
    rows = np.flatnonzero(goal.known)
    order = None if time is None else targets.times(frame.iloc[rows], time).argsort(kind="stable")
    most = splitting.rows_in_time(frame.shape[1], seconds, alpha)
    if len(rows) > most:
        is_used = np.arange(len(rows)) >= len(rows) - most  # the last rows of an order
        if order is None:
            how = "drawn at random"
            shuffled = np.random.default_rng(seed).permutation(len(rows))
            if groups is not None:
                is_used |= splitting.first_of_groups(groups[rows][shuffled][::-1], alpha)[::-1]
            used = np.sort(shuffled[is_used])
        else:
            how = f"the last in order of {time!r}"
            used = np.sort(order[is_used])
            order = np.searchsorted(used, order[is_used])
        limit = f"{seconds / 60:g} minutes allow no more"
        notes.append(f"{len(used):,} of {len(rows):,} rows are used, {how}: {limit}")
        rows = rows[used]
    return rows, order


@dataclass
class _FitRun:
    """The state of one fit: its rows, and the networks, each with columns and inputs."""

    frame: pd.DataFrame
    goal: Target
    split: RowSplit
    support: tuple[float | None, float | None]
    side: str
    alpha: float
    seed: int
    seconds: float
    progress: Progress
    columns: list[Columns] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    networks: list[nn.Module] = field(default_factory=list)
    training: list[Training] = field(default_factory=list)
    centre: float = 0.0
    scale: float = 1.0

    def fit_parts(self, groups: Array | None) -> Any:
        """Return a predictor trained on some rows and calibrated on others."""
        rows = self.split
        self.centre, self.scale = self.goal.units(np.concatenate([rows.train, rows.stop]))
        y = self.goal.tensor(self.centre, self.scale)
        network = self._train("training", rows.train, rows.stop, y)
        self.networks.append(network)
        # Rows that could not be predicted do not calibrate: new ones will have no interval.
        calibrate = self.frame.iloc[rows.calibrate]
        readable = self.columns[0].encode(calibrate, is_first=False).reasons == ""
        self.split = rows = replace(rows, calibrate=rows.calibrate[readable])
        self.progress("calibrating", 1.0)
        predictor = self._predictor(network)
        x = self.inputs[0]
        if hasattr(predictor, "fit"):  # learns from training rows, too
            most = splitting.most_rows(self.frame.shape[1], self.seconds)
            drawn = np.random.default_rng(self.seed).permutation(rows.train)[:most]
            predictor.fit(x[drawn], y[drawn], disjoint=True)
        groups = None if groups is None else groups[rows.calibrate]
        return predictor.calibrate(x[rows.calibrate], y[rows.calibrate], groups=groups)

    def fit_folds(self, folds: Array) -> Any:
        """Return a cross-conformal predictor: each network is trained without one fold.

        Its columns, units and early stopping do not use the fold either.
        """
        count = int(folds.max()) + 1
        for fold in range(count):
            rows = np.flatnonzero(folds != fold)
            # Columns and units are learned again, and other rows are used for early stopping.
            shuffled = np.random.default_rng([self.seed, fold]).permutation(rows)
            stop, train_rows = np.split(shuffled, [max(2, len(rows) // 6)])
            units = self.goal.units(rows)
            step = f"training network {fold + 1} of {count}"
            y = self.goal.tensor(*units)
            start = sum(x.shape[1] for x in self.inputs)
            network = self._train(step, train_rows, stop, y, fold, count)
            self.networks.append(Placed(network, start, *units).eval())
        predictor = CrossConformal(self.networks, folds, side=self.side, batch_size=BATCH)
        return predictor.calibrate(torch.cat(self.inputs, dim=1), self.goal.values)

    def _train(
        self, step: str, rows: Array, stop: Array, y: Tensor, fold: int = 0, count: int = 1
    ) -> TableNetwork:
        """Return a network, trained in its share of the time, after learning the columns."""
        learned = np.sort(np.concatenate([rows, stop]))
        columns = table_columns.learn(self.frame.iloc[learned], self.goal.name)
        x = columns.encode(self.frame).x
        has_quantiles = count == 1 and not self.goal.classes  # folds do not use them
        network = TableNetwork.for_rows(
            x[rows],
            columns.numbers,
            outputs=max(1, len(self.goal.classes)),
            y=y[rows] if has_quantiles else None,
        )
        training = train(
            network, x[rows], y[rows], x[stop], y[stop], seconds=self.seconds / count,
            seed=self.seed + fold, progress=functools.partial(self.progress, step),
        )  # fmt: skip
        self.training.append(training)
        self.columns.append(columns)
        self.inputs.append(x)
        return network

    def _predictor(self, network: nn.Module) -> Any:
        """Return the uncalibrated predictor of intervals or of prediction sets."""
        options: Any = {"selection_alpha": self.alpha, "seed": self.seed, "batch_size": BATCH}
        if self.goal.classes:
            names = list(self.goal.classes)
            return ffcp.SetPredictor(network, "auto", names=names, other_labels=True, **options)
        # Targets are rounded to float32, perhaps outward; predictions are cut at the ends as given.
        low, high = self.support
        support = self._in_units(low, -np.inf), self._in_units(high, np.inf)
        return ffcp.Auto(network, quantiles=QUANTILES, side=self.side, support=support, **options)

    def _in_units(self, end: float | None, beyond: float) -> float | None:
        """Return an end of the support in the units of the network, and the next number beyond."""
        if end is None:
            return None
        units = np.float32((end - self.centre) / self.scale)
        return float(np.nextafter(units, np.float32(beyond)))


def _test(fitted: FittedTable, frame: pd.DataFrame, goal: Target, rows: Array) -> None:
    """Add the test results to the fit, if there are test rows, and its report."""
    predictions, y = None, goal.values[rows]
    if len(rows):
        test = frame.iloc[rows]
        predictions = fitted.predicted(test).columns
        tested = evaluation.measure(fitted, predictions, y, test, fitted.about.alpha)
        fitted.about = replace(fitted.about, tested=tested)
    fitted.report = report.page(fitted, predictions, y)
