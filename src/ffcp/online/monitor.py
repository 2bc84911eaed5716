"""Drift detection on a stream, by conformal test martingales and by coverage."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ffcp import plots
from ffcp.batch import BatchOutput, Requires
from ffcp.classification.set_predictor import SetPredictor
from ffcp.conformal.compressed import is_summary
from ffcp.conformal.mondrian import labels_of
from ffcp.conformal.random_numbers import checked_seed
from ffcp.conformal.rank import requested_alpha
from ffcp.metrics import clopper_pearson
from ffcp.metrics.intervals import row_hits
from ffcp.network import forward
from ffcp.network.arrays import target_tensor
from ffcp.network.features import OUTPUT, resolve
from ffcp.online.martingales import Average, OnlineRanks
from ffcp.online.online import check_counts, is_number
from ffcp.online.saving import Resumable
from ffcp.predictor import Predictor
from ffcp.regression.joint import BONFERRONI
from ffcp.regression.regression_predictor import RegressionPredictor

TARGET = "target"  # the test of scores, which needs targets
PREDICTION, NORM, VALUES = "prediction", "gradient norm", "layer values"
_NAMES = ("what", "rows", "value", "most", "limit", "says")  # the columns of the report


class Test:
    """The test of one stream of numbers: online ranks and a martingale.

    ``wealth`` holds the logarithm of the wealth after each number.
    """

    def __init__(self, start: Any = (), seed: int | None = None) -> None:
        self.ranks, self.martingale = OnlineRanks(start, seed), Average()
        self.wealth: list[float] = []
        self.alarm_row: int | None = None  # counted from 0

    @property
    def rows(self) -> int:
        """The number of values so far."""
        return len(self.wealth)

    def add(self, values: Any, log_threshold: float) -> None:
        """Add the next numbers, one by one."""
        for value in values:
            self.martingale.bet(self.ranks.p_value(float(value)))
            self.wealth.append(float(self.martingale.log_wealth))
            if self.alarm_row is None and self.wealth[-1] >= log_threshold:
                self.alarm_row = self.rows - 1

    def state(self) -> list[Any]:
        """Return the changing attributes as plain data."""
        return [self.ranks.state(), self.martingale.state(), self.wealth, self.alarm_row]

    @classmethod
    def from_state(cls, state: list[Any]) -> Test:
        """Return the test of a state."""
        test = cls()
        ranks, martingale, test.wealth, test.alarm_row = state
        test.ranks.restore(ranks)
        test.martingale.restore(martingale)
        return test


class Monitor(Resumable):
    """Drift detection: tests whether new rows are exchangeable with the calibration rows.

    Parameters
    ----------
    predictor : Predictor
        A calibrated predictor of intervals or prediction sets.
    alpha : float, default=None
        Allowed share of misses, for the report of coverage; 0.1 if neither is given.
    confidence_level : float, default=None
        Instead of ``alpha``: the required coverage, 1 - alpha.
    threshold : float, default=100.0
        An alarm is raised when the wealth of a test reaches it. Without drift this ever happens
        with probability at most 1 / threshold, for the test of targets and for those of inputs
        each, on streams of any length.
    window : int, default=500
        Number of last rows, of each group, over which coverage is reported.
    feature : str, default=None
        The layer whose gradient norms and values the tests of inputs use; by default that of the
        predictor, if it has one.
    seed : int, default=None
        Seed of the random numbers that break ties.

    Notes
    -----
    The test of targets (``"target"``) ranks the score of each row among the calibration scores and
    all earlier ones. Tests of inputs, which need no targets, use the prediction, the gradient norm
    and the distance of layer values from their centre; :meth:`start` provides reference inputs.
    Assumption: without drift, calibration and stream are exchangeable, so a stream of dependent
    rows (the hours of a day) counts as drift. The absence of an alarm proves nothing.

    Examples
    --------
    >>> import ffcp
    >>> _ = torch.manual_seed(0)
    >>> model, x = torch.nn.Linear(2, 1), torch.randn(300, 2)  # yours is trained
    >>> y = model(x).detach()[:, 0] + torch.randn(300)
    >>> monitor = Monitor(ffcp.CP(model).calibrate(x[:200], y[:200]), seed=0)
    >>> monitor.update(x[200:], y[200:]).alarm
    False
    >>> monitor.update(x, y + 3).alarm
    True
    """

    changing = ("tests", "rows", "_centre", "_hits")

    def __init__(
        self,
        predictor: Predictor,
        alpha: Any = None,
        *,
        confidence_level: Any = None,
        threshold: float = 100.0,
        window: int = 500,
        feature: str | None = None,
        seed: int | None = None,
        **unknown: NoReturn,
    ) -> None:
        super().__init__()
        self.alpha = requested_alpha(alpha, confidence_level, unknown)
        if not isinstance(predictor, (RegressionPredictor, SetPredictor)):
            raise TypeError(
                "'predictor' must return intervals or prediction sets, got "
                f"{type(predictor).__name__!r}"
            )
        if not is_number(threshold) or not 1 < threshold < math.inf:
            raise ValueError(
                f"'threshold' must be above 1, got {threshold!r}: with 100 the probability of a "
                "false alarm is at most 1 in 100"
            )
        check_counts(window=window)
        predictor.calibrated()
        if is_summary(predictor.calibration):
            raise ValueError("Monitor needs all scores: calibrate without rank_error or compress")
        self.predictor = predictor.snapshot()  # not a later calibration, with other scores
        self.threshold, self.window, self.seed = float(threshold), window, checked_seed(seed)
        feature = feature if feature is not None else getattr(predictor, "feature", None)
        self.feature = None if feature == OUTPUT else feature
        if self.feature is not None:
            resolve(predictor.model, self.feature)
        self.settings = {
            "alpha": str(self.alpha),
            "threshold": self.threshold,
            "window": window,
            "feature": self.feature,
        }
        scores = predictor.calibration.scores
        # Scores of several outputs are sorted separately, so rows cannot be recovered; and scores
        # randomised only in the calibration are not comparable: the test then starts empty.
        comparable = not getattr(predictor, "draws_to_calibrate_only", False)
        usable = comparable and scores.shape[1] == 1
        start = scores[~scores.isnan()].tolist() if usable else []
        self.tests = {TARGET: Test(start, self._seed(0)), PREDICTION: Test((), self._seed(1))}
        if self.feature:
            self.tests[NORM] = Test((), self._seed(2))
        self._centre: tuple[Tensor, Tensor] | None = None  # of the layer's values, and their spread
        self._hits: dict[Any, deque[float]] = {}
        self.rows = 0

    def _seed(self, number: int) -> int | None:
        return None if self.seed is None else self.seed + number

    # -- adding rows ------------------------------------------------------------------------

    def start(self, x: Any) -> Monitor:
        """Start the tests of inputs from reference inputs, for example the calibration rows.

        The first half determines the centre of the layer's values, the other half starts the
        ranks. Call it before the first :meth:`update`.

        Parameters
        ----------
        x : array-like
            Reference inputs, at least two rows.
        """
        with self._lock:
            if self.rows:
                raise RuntimeError("call start(x) before the first update(x, y), not after it")
            table = self._read(x)
            half = len(table[PREDICTION]) // 2
            if not half:
                raise ValueError("'x' must have at least two rows to start with")
            if VALUES in table:
                first = table[VALUES][:half]
                spread = first.std(dim=0, correction=0)
                self._centre = first.mean(dim=0), torch.where(spread > 0, spread, 1.0)
                table[VALUES] = table[VALUES][half:]
            for number, (name, values) in enumerate(self._distances(table).items(), 1):
                self.tests[name] = Test(values.tolist(), self._seed(number))
        return self

    def update(self, x: Any, y: Any = None, *, groups: Any = None, weights: Any = None) -> Monitor:
        """Test the next rows, in their order in time.

        If an error is raised, nothing has changed.

        Parameters
        ----------
        x : array-like or loader
            Inputs, as the model takes them.
        y : array-like, default=None
            Their targets; without them only the tests of inputs continue. With a predictor with
            ``missing=True``, NaN is a missing target: of several outputs the others count.
        groups : array-like, default=None
            The group of each row: coverage is then reported for each, and a predictor with groups
            needs them.
        weights : array-like, default=None
            The weight of each row, if the predictor needs weights.
        """
        with self._lock:
            features = self.features(x)
            rows = len(features[PREDICTION])
            if y is not None:
                scores = self.predictor.score(x, y)  # type: ignore[operator]
                self._record_hits(x, y, groups, weights, rows)
                worst = scores.reshape(rows, -1).nan_to_num(-math.inf, math.inf, -math.inf)
                worst = worst.amax(dim=1)
                known = worst[worst > -math.inf]  # rows with a missing target have no score
                self.tests[TARGET].add(known.tolist(), math.log(self.threshold))
            # Each is fair only given its own past, so they are combined by a union bound.
            limit = math.log(self.threshold * len(features))
            for name, values in features.items():
                self.tests[name].add(values.tolist(), limit)
            self.rows += rows
        return self

    def features(self, x: Any) -> dict[str, Tensor]:
        """Return the numbers that the tests of inputs use, by name, one for each row."""
        return self._distances(self._read(x))

    def _distances(self, table: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the table with a layer's values replaced by their distance from the centre."""
        values = table.pop(VALUES, None)
        if values is None or self._centre is None:
            return table
        centre, spread = self._centre
        return {**table, VALUES: ((values - centre) / spread).square().mean(dim=1).sqrt()}

    def _read(self, x: Any) -> dict[str, Tensor]:
        """Return the tested quantities of inputs: one number per row, and the layer's values."""
        predictor, feature = self.predictor, self.feature
        predictor.check_weights()  # other weights would make all earlier numbers incomparable
        requires = Requires() if feature is None else Requires((feature,), (feature,))
        parts, row = [], 0
        for batch in predictor.rows(x):
            out = forward.run_batch(predictor.model, batch, requires, row)
            row += len(out.rows)
            parts.append(self._quantities(out))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _quantities(self, out: BatchOutput) -> dict[str, Tensor]:
        rows = len(out.rows)
        output = out.output.double().reshape(rows, -1).cpu()
        if isinstance(self.predictor, SetPredictor):
            output = output.softmax(dim=1).amax(dim=1, keepdim=True)
        quantities = {PREDICTION: output.mean(dim=1)}
        if self.feature is not None:
            norms, values = out.norms[self.feature], out.values[self.feature]
            quantities[NORM] = norms.double().reshape(rows, -1).mean(dim=1).cpu()
            quantities[VALUES] = values.double().reshape(rows, -1).cpu()
        return quantities

    def _record_hits(self, x: Any, y: Any, groups: Any, weights: Any, rows: int) -> None:
        """Record which rows were covered."""
        predictor: Any = self.predictor
        traits, options = predictor.calibration.traits, {}
        if traits.groups:
            options["groups"] = groups
        if traits.weights:
            options["weights"] = weights
        if isinstance(predictor, RegressionPredictor):
            joint = True if predictor.joint == BONFERRONI else predictor.joint
            interval = predictor.predict_interval(x, self.alpha, **options)
            target = target_tensor(y).reshape(interval.lower.shape)
            if bool(target.isnan().all()):
                return  # all targets are missing
            hits = row_hits(interval, target, joint, predictor.missing)
        else:
            mask = predictor.predict_set(x, self.alpha, **options).mask
            labels = predictor.read_target(y).to(mask.device)
            hits = mask[torch.arange(rows, device=mask.device), labels].double()
        names: Any = [None] * rows
        if groups is not None:
            names = labels_of(groups(x) if callable(groups) else groups, rows)
        for name, hit in zip(names, hits.tolist(), strict=True):
            if math.isnan(hit):  # the target is missing
                continue
            for key in dict.fromkeys((None, name)):  # all rows, and the row's group
                self._hits.setdefault(key, deque(maxlen=self.window)).append(hit)

    # -- reports ----------------------------------------------------------------------------

    @property
    def alarms(self) -> dict[str, int | None]:
        """The row at which each test raised its alarm, or ``None``.

        Rows are counted from 0, for the test of targets those with a target.
        """
        with self._lock:
            return {name: test.alarm_row for name, test in self.tests.items()}

    @property
    def alarm(self) -> bool:
        """Whether any test has raised an alarm."""
        return any(row is not None for row in self.alarms.values())

    def coverage(self) -> dict[Any, tuple[float, float, float, int]]:
        """Return (share, low, high, rows) over the last rows, by group; ``None`` is all rows.

        The confidence interval is exact (Clopper and Pearson), at 95 %; if rows count by the share
        of their outputs that are covered, the number of covered rows is rounded down.
        """
        coverage = {}
        with self._lock:
            for name, hits in self._hits.items():
                low, high = clopper_pearson(math.floor(sum(hits) + 1e-9), len(hits))
                coverage[name] = (float(np.mean(hits)), low, high, len(hits))
        return coverage

    def table(self) -> list[dict[str, Any]]:
        """Return the report as rows of a table."""
        with self._lock:
            rows = [self._test_row(name, test) for name, test in self.tests.items()]
            covered = self.coverage()
        target = float(1 - self.alpha)
        for group, (share, low, high, count) in covered.items():
            what = "coverage" if group is None else f"coverage of group {group!r}"
            verdict = "too low" if high < target else "as expected"
            rows.append((what, count, share, high, target, f"{low:.3f} to {high:.3f}, {verdict}"))
        return [dict(zip(_NAMES, row, strict=True)) for row in rows]

    def _test_row(self, name: str, test: Test) -> tuple[Any, ...]:
        """Return the row of a test in the report."""
        verdict = "no drift detected" if test.rows else "no rows yet"
        if test.alarm_row is not None:
            verdict = f"drift: alarm at row {test.alarm_row}"
        wealth = np.exp(np.minimum([0.0, *test.wealth], 700.0))
        largest = float(wealth.max())
        return f"test of {name}", test.rows, float(wealth[-1]), largest, self._limit(name), verdict

    def _limit(self, name: str) -> float:
        """Return the wealth at which a test raises its alarm."""
        return self.threshold * (1 if name == TARGET else len(self.tests) - 1)

    def plot(self, ax: Any = None) -> Any:
        """Plot the wealth of every test over the rows, and the limit at which it raises an alarm.

        Needs matplotlib. Wealth is that of fair bets against online conformal p-values: without
        drift it rarely becomes large.

        Parameters
        ----------
        ax : Axes, default=None
            The axes to draw into; by default those of a new figure.

        Returns
        -------
        Axes
        """
        with self._lock:
            curves = {
                name: (list(test.wealth), self._limit(name))
                for name, test in self.tests.items()
                if test.rows
            }
        return plots.wealth(curves, ax)

    def __str__(self) -> str:
        table = self.table()
        rows = [list(table[0]), *([cell(value) for value in row.values()] for row in table)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, COLUMNS])

    __repr__ = __str__

    # -- files ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the changing attributes as plain data."""
        return {
            "tests": {name: test.state() for name, test in self.tests.items()},
            "rows": self.rows,
            "centre": self._centre and [part.tolist() for part in self._centre],
            "hits": [[name, list(hits)] for name, hits in self._hits.items()],
        }

    def from_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the changing attributes from plain data."""
        centre = state["centre"]
        return {
            "tests": {name: Test.from_state(saved) for name, saved in state["tests"].items()},
            "rows": state["rows"],
            "_centre": centre and tuple(torch.tensor(part, dtype=torch.float64) for part in centre),
            "_hits": {name: deque(hits, maxlen=self.window) for name, hits in state["hits"]},
        }


COLUMNS = """
value: current evidence of drift (1 is none), or the share of rows covered
most:  the largest evidence so far, or the upper confidence limit of coverage
limit: the evidence at which an alarm is raised, or the target coverage"""


def cell(value: Any) -> str:
    """Return a value of the report as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
