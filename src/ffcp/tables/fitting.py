"""From a table to bands: decide, divide, train, calibrate, test."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

import ffcp
from ffcp.conformal.coverage_level import requested_alpha
from ffcp.conformal.rank import exact_alpha
from ffcp.regression.cross_conformal import CrossConformal
from ffcp.tables import cells, labels, report, seen, splitting, table_io, targets
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
        Time limit of the training.
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
    decisions: list[str] = list(frame.attrs.get("decisions", ()))
    goal = targets.learn(frame, target, classify, decisions)
    if goal.classes and (side != BOTH or support != (None, None)):
        raise TableError("side and support are for targets of numbers; this one is words")
    for name, option in ((group, "--group"), (time, "--time")):
        if name is not None:
            targets.column(frame, name, option)
        if name == target:
            raise TableError(f"{option} {name!r} is the target, which new rows do not have")
    known = frame[goal.known].reset_index(drop=True)
    known.attrs.update(frame.attrs)
    goal = Target(goal.values[goal.known], goal.classes)
    _check_support(goal, support, target)
    order = None if time is None else np.argsort(targets.times(known, time), kind="stable")
    crossing = not goal.classes and group is None and time is None and side != "each"
    known = cells.read_once(known, but=group)  # groups are words, "007" and "7" two of them
    most = splitting.most_rows(known.shape[1])
    division = splitting.divide(len(known), alpha, seed, crossing=crossing, order=order, most=most)
    if goal.classes:
        goal = labels.of_training(goal, division, target)
    work = _Work(known, goal, division, target, support, alpha, seed, minutes * 60, progress)
    with _own_random_numbers(seed):
        made = work.cross(side) if division.folds is not None else work.split(group, side)
    predictor = made.predictor
    groups = None if group is None else targets.groups(known, group)
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
        centre=made.centre,
        scale=made.scale,
        rows=_counts(division, predictor),
        folds=0 if division.folds is None else len(made.networks),
        method=_method(predictor),
        guarantee=_guarantee(predictor, alpha, group, time, division),
        training=tuple(made.training),
        decisions=(),
        tested=None,
    )
    fitted = FittedTable(about, made.columns, made.networks, predictor)
    taught = np.concatenate([division.train, division.stop, division.calibrate])
    fitted.seen = seen.keep(fitted.hashes(known, goal.values), taught)
    return _tested(fitted, known, goal, division, groups, decisions, progress)


def _read(table: Any) -> tuple[pd.DataFrame, str]:
    if isinstance(table, pd.DataFrame):
        _must_not_be_too_wide(table)
        return table_io.named(table).reset_index(drop=True), "a frame"
    _must_not_be_too_wide(next(table_io.parts(table, rows=1))[0])  # reading all would take long
    return table_io.read(table), Path(table).name


def _must_not_be_too_wide(frame: pd.DataFrame) -> None:
    if frame.shape[1] > table_columns.MOST:
        raise TableError(
            f"the table has {frame.shape[1]:,} columns, and at most {table_columns.MOST:,} can be "
            "fitted: leave out those that tell least of the target"
        )


def _check_options(side: str, support: Any, minutes: float, seed: int) -> None:
    if side not in _SIDES:
        raise TableError(f"side must be one of {', '.join(_SIDES)}, got {side!r}")
    low, high = support
    if not all(end is None or np.isfinite(end) for end in support):
        raise TableError(f"the support must have ends that are numbers, got {low} and {high}")
    if low is not None and high is not None and not low < high:
        raise TableError(f"the support must rise: {low} to {high} does not")
    if not 0 <= seed < 2**63:
        raise TableError(f"seed must be from 0 to 2**63 - 1, got {seed}")
    if not minutes > 0:
        raise TableError(f"minutes must be more than 0, got {minutes}")


def _check_support(goal: Target, support: Any, name: str) -> None:
    low, high = support
    if goal.classes:
        return
    outside = np.zeros(len(goal.values), dtype=bool)
    outside |= False if low is None else goal.values < low
    outside |= False if high is None else goal.values > high
    if outside.any():
        raise TableError(
            f"{int(outside.sum())} targets {name!r} lie outside the support, the first is "
            f"{goal.values[outside][0]:g}: correct them, or the support"
        )


@contextlib.contextmanager
def _own_random_numbers(seed: int) -> Iterator[None]:
    """Seed what has no generator of its own, and leave the caller's random numbers alone."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(seed)
        warnings.simplefilter("ignore", FFCPWarning)  # the decisions and the report say it
        yield


@dataclass(frozen=True)
class _Found:
    """What the rows became: for each network its columns, and one predictor of them."""

    columns: list[Columns]
    networks: list[nn.Module]
    training: list[Training]
    predictor: Any
    centre: float
    scale: float


@dataclass
class _Work:
    """The rows of one fit, and how they become networks and predictors."""

    frame: pd.DataFrame
    goal: Target
    division: RowSplit
    target: str
    support: tuple[float | None, float | None]
    alpha: Any
    seed: int
    seconds: float
    progress: Said

    def some(self, rows: Array) -> pd.DataFrame:
        """Give some rows, in the order of the file."""
        part = self.frame.iloc[np.sort(rows)].copy()
        part.attrs.update(self.frame.attrs)
        return part

    def split(self, group: str | None, side: str) -> _Found:
        """Train on some rows and calibrate on others."""
        parts = self.division
        learned = np.concatenate([parts.train, parts.stop])
        columns = table_columns.learn(self.some(learned), self.target)
        centre, scale = self._units(learned)
        y = self._as_tensor(centre, scale)
        encoded = columns.encode(self.frame)
        x = encoded.x
        network, trained = self._train(columns, x, y, parts.train, parts.stop)
        groups = None if group is None else targets.groups(self.frame, group)[parts.calibrate]
        self.progress("calibrating", 1.0)
        predictor = self._predictor(network, side, centre, scale)
        if hasattr(predictor, "fit"):  # what the training rows can teach
            some = np.random.default_rng(self.seed).permutation(parts.train)
            some = some[: splitting.most_rows(self.frame.shape[1])]
            predictor.fit(x[some], y[some], disjoint=True)
        predictor.calibrate(x[parts.calibrate], y[parts.calibrate], groups=groups)
        return _Found([columns], [network], [trained], predictor, centre, scale)

    def cross(self, side: str) -> _Found:
        """Train a network without each fold, whose rows nothing that it is made of has seen."""
        folds = self.division.folds
        assert folds is not None
        count = int(folds.max()) + 1
        columns: list[Columns] = []
        networks: list[nn.Module] = []
        training: list[Training] = []
        parts: list[Tensor] = []
        for fold in range(count):
            rows = np.flatnonzero(folds != fold)
            # The columns and the units are learned anew, too; and other rows stop the training.
            own = table_columns.learn(self.some(rows), self.target)
            shuffled = np.random.default_rng([self.seed, fold]).permutation(rows)
            stop, train_rows = np.split(shuffled, [max(2, len(rows) // 6)])
            centre, scale = self._units(rows)
            x, y = own.encode(self.frame).x, self._as_tensor(centre, scale)
            network, trained = self._train(own, x, y, train_rows, stop, fold, count)
            start = sum(part.shape[1] for part in parts)
            networks.append(Placed(network, start, centre, scale).eval())
            columns.append(own)
            training.append(trained)
            parts.append(x)
        predictor = CrossConformal(networks, folds, side=side, batch_size=BATCH)
        predictor.calibrate(torch.cat(parts, dim=1), self.goal.values)
        return _Found(columns, networks, training, predictor, 0.0, 1.0)

    def _train(
        self,
        columns: Columns,
        x: Tensor,
        y: Tensor,
        rows: Array,
        stop: Array,
        number: int = 0,
        count: int = 1,
    ) -> tuple[TableNetwork, Training]:
        """Train the ``number``-th of several networks, in its share of the time."""
        outputs = max(1, len(self.goal.classes))
        what = "training" if count == 1 else f"training network {number + 1} of {count}"
        gives_quantiles = count == 1 and not self.goal.classes  # folds have no use for them
        targets_ = y[rows] if gives_quantiles else None
        network = TableNetwork.for_rows(x[rows], columns.numbers, outputs, targets_)
        trained = train(
            network,
            x[rows],
            y[rows],
            x[stop],
            y[stop],
            seconds=self.seconds / count,
            seed=self.seed + number,
            progress=lambda share: self.progress(what, share),
        )
        return network, trained

    def _units(self, rows: Array) -> tuple[float, float]:
        """Give the centre and the scale of the target among rows."""
        if self.goal.classes:
            return 0.0, 1.0
        values = self.goal.values[rows]
        with np.errstate(over="ignore", invalid="ignore"):
            centre, scale = float(values.mean()), float(values.std())
        if not np.isfinite(scale) or (scale == 0 and np.ptp(values) > 0):
            raise TableError(
                f"the target {self.target!r} is too large or too small to be computed with, "
                f"{values[0]:g} in its first row: give it in other units"
            )
        return centre, scale or 1.0

    def _as_tensor(self, centre: float, scale: float) -> Tensor:
        """Give targets in these units, or the numbers of the classes; behind the last of others."""
        if self.goal.classes:
            place = {name: number for number, name in enumerate(self.goal.classes)}
            return torch.tensor([place.get(name, len(place)) for name in self.goal.values])
        return torch.from_numpy((self.goal.values - centre) / scale).float()

    def _predictor(self, network: nn.Module, side: str, centre: float, scale: float) -> Any:
        if self.goal.classes:
            return labels.sets(network, self.goal.classes, self.alpha, self.seed)
        # Rounded as targets are, so that one at the end of the support does not lie outside.
        units = [None if end is None else (end - centre) / scale for end in self.support]
        ends = tuple(None if end is None else float(np.float32(end)) for end in units)
        return _bands(network, side, ends, self.alpha, self.seed)


def _bands(network: nn.Module, side: str, support: Any, alpha: Any, seed: int) -> Any:
    """Choose the predictor of bands: the one place that does."""
    given = {"side": side, "support": support, "selection_alpha": alpha, "seed": seed}
    return ffcp.Auto(network, batch_size=BATCH, quantiles=QUANTILES, **given)


def _tested(
    fitted: FittedTable,
    frame: pd.DataFrame,
    goal: Target,
    division: RowSplit,
    groups: Array | None,
    decisions: list[str],
    progress: Said,
) -> FittedTable:
    """Test on rows that nothing has seen, and write down all that was decided."""
    about, rows = fitted.about, division.test
    decisions += [
        f"column {column.name!r} is left out: {column.why}"
        for column in fitted.columns[0]
        if column.kind == table_columns.LEFT_OUT
    ]
    decisions += _thin_groups(fitted, groups)
    decisions += labels.decisions(goal, division, fitted.predictor, about.alpha)
    bands = tested = None
    if len(rows):
        progress("testing", 1.0)
        some, y = frame.iloc[rows].copy(), goal.values[rows]
        some.attrs.update(frame.attrs)
        bands = fitted.predicted(some).bands
        if not bands["prediction"].notna().any():
            raise TableError(f"no test row can be predicted; the first: {bands['reason'].iloc[0]}")
        tested = replace(fitted.measured(bands, y, some), curve=fitted.curve(some, y))
    else:
        decisions.append("no rows are kept for a test: all of them train")
        left_out = about.rows.get("train only", 0)
        if left_out:
            decisions.append(f"{left_out} rows calibrate nothing, so that folds have one size")
    fitted.about = replace(about, decisions=tuple(decisions), tested=tested)
    fitted.report = report.page(fitted, bands, goal.values[rows])
    return fitted


def _thin_groups(fitted: FittedTable, groups: Array | None) -> list[str]:
    """Say where too few rows calibrate for a finite band, or for a set that leaves labels out."""
    about = fitted.about
    least = -(-1 // exact_alpha(about.alpha)) - 1
    all_is = "every set holds all labels" if about.classes else "every band is infinite"
    if groups is None:
        count = fitted.calibrated
        needed = f"alpha = {about.alpha:g} needs {least}: {all_is}"
        thin_table = not about.folds and count < least
        return [f"{count} rows calibrate, and {needed}"] if thin_table else []
    counts = fitted.predictor.calibration.groups
    thin = [name for name in about.groups if counts[name] < least]
    none = sorted(set(groups.tolist()) - set(about.groups))
    said = []
    if thin:
        few = f"fewer than {least} rows calibrate, so that everything is possible there"
        said.append(f"in {len(thin)} groups {few}: {_listed(thin)}")
    if none:
        cannot = "none of their rows calibrates, so that they cannot be predicted"
        said.append(f"{len(none)} groups have no bands, for {cannot}: {_listed(none)}")
    return said


def _listed(names: list[str]) -> str:
    return _first([cells.quoted(name) for name in names])


def _first(words: list[str]) -> str:
    return ", ".join(words[:10]) + (" and others" if len(words) > 10 else "")


def _counts(division: RowSplit, predictor: Any) -> dict[str, int]:
    """Count what rows do; of those to calibrate, the predictor has set some aside to choose."""
    counts = division.counts()
    if division.folds is not None:
        return counts
    given, calibrated = counts.pop("calibrate"), len(predictor.calibration)
    last = {"calibrate": calibrated, "test": counts.pop("test")}
    aside = {"choose the method": given - calibrated} if given > calibrated else {}
    return {**counts, **aside, **last}


def _method(predictor: Any) -> str:
    choice = getattr(predictor, "choice", None)
    name = type(predictor).__name__
    return name if choice is None else f"{name}: {choice}"


def _guarantee(
    predictor: Any, alpha: Any, group: str | None, time: str | None, division: RowSplit
) -> str:
    """Say what is promised, and on what condition."""
    exact = exact_alpha(alpha)
    share = f"{float(1 - exact):.4g}"
    if division.folds is not None:
        count = len(predictor.models)
        name = "jackknife+" if count == len(division.folds) else f"CV+ with {count} folds"
        return (
            f"Few rows: {name}. Rows drawn like those of the table are covered with probability "
            f"at least {predictor.guarantee(exact):.3f} (Barber et al., 2021); about {share} is "
            "usual, and not promised."
        )
    where = f" in every group of {group!r}" if group is not None else ""
    words = (
        f"Rows drawn like those that calibrated are covered with probability at least {share}"
        f"{where}, on average over calibrations."
    )
    if getattr(predictor, "other_labels", False):
        words += (
            " A label that no training row has counts as covered where the set holds "
            f"{ffcp.LabelSet.OTHER!r}."
        )
    if time is not None:
        words += (
            " With rows in order of time this holds as far as the future is like the time that "
            "calibrated: the test is on the last rows, and says how far it was."
        )
    return words
