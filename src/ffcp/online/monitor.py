"""Being told that the data has moved: p-values of what comes in, martingales, and coverage."""

from __future__ import annotations

import copy
import math
import threading
from collections import deque
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ffcp import files, plots
from ffcp.batch import BatchOutput, Requires
from ffcp.conformal.coverage_level import requested_alpha
from ffcp.conformal.mondrian import labels_of
from ffcp.conformal.random_numbers import checked_seed
from ffcp.metrics import clopper_pearson
from ffcp.metrics.intervals import row_hits
from ffcp.network import forward, inputs
from ffcp.network.arrays import target_tensor
from ffcp.network.features import OUTPUT, resolve
from ffcp.network.inputs import RowBuffer
from ffcp.online.lanes import is_number, number
from ffcp.online.martingales import Average
from ffcp.online.monitor_table import Trace, text
from ffcp.online.pvalues import OnlineRanks
from ffcp.online.state import told
from ffcp.predictor import Predictor
from ffcp.regression.joint import BONFERRONI

TRUTH = "truth"  # the test of scores, which needs targets
PREDICTION, NORM, VALUES = "prediction", "gradient norm", "layer values"
_TASKS = ("bands", "label sets")


class Test:
    """One stream of numbers: ranked among those before, and bet against."""

    def __init__(self, start: Any = (), seed: int | None = None) -> None:
        self.ranks, self.martingale = OnlineRanks(start, seed), Average()
        self.trace = Trace()
        self.rows = 0
        self.log_most = 0.0
        self.alarm_row: int | None = None  # counted from 0
        self.last_p = math.nan

    def take(self, values: Any, log_threshold: float) -> None:
        """Take the next numbers, one after the other."""
        for value in values:
            self.last_p = self.ranks.p_value(float(value))
            self.martingale.bet(self.last_p)
            wealth = float(self.martingale.log_wealth)
            self.log_most = max(self.log_most, wealth)
            if self.alarm_row is None and wealth >= log_threshold:
                self.alarm_row = self.rows
            self.trace.add(wealth)
            self.rows += 1

    def state(self) -> dict[str, Any]:
        """Give all that changes but the numbers that were ranked."""
        return {
            "random": self.ranks.state(),
            "martingale": self.martingale.state(),
            "trace": self.trace.state(),
            "rows": self.rows,
            "log_most": self.log_most,
            "alarm_row": self.alarm_row,
            "last_p": None if math.isnan(self.last_p) else self.last_p,
        }

    @classmethod
    def restored(cls, ranked: Tensor, state: dict[str, Any]) -> Test:
        """Go on where another was; what cannot be is a ValueError."""
        if ranked.dtype != torch.float64 or ranked.dim() != 1:
            raise ValueError("numbers that were ranked are no list of numbers")
        test = cls()
        test.ranks = OnlineRanks.restored(ranked.tolist(), files.rebuilt(dict, state["random"]))
        test.martingale.restore(state["martingale"])
        test.trace.restore(state["trace"])
        test.rows = files.count(state["rows"])
        if test.rows > len(ranked):
            raise ValueError(f"{test.rows} rows came and {len(ranked)} were ranked")
        test.log_most = number(state["log_most"])
        alarm, last = state["alarm_row"], state["last_p"]
        test.alarm_row = None if alarm is None else files.count(alarm)
        test.last_p = math.nan if last is None else number(last)
        if test.alarm_row is not None and test.alarm_row >= test.rows:
            raise ValueError("its alarm was raised by a row that has not come")
        if last is not None and not 0 < test.last_p <= 1:
            raise ValueError(f"{last} is no p-value")
        return test


class Monitor:
    """Watches whether new points are still like those that calibrated a predictor.

    Parameters
    ----------
    predictor
        A calibrated predictor of bands or label sets.
    alpha
        The share of misses allowed where coverage is watched; 0.1 if nothing is given.
    confidence_level
        In place of ``alpha``: the coverage asked for, 1 - alpha.
    threshold
        An alarm is raised when the wealth of a test reaches it. Without change this ever happens
        with probability at most 1 / threshold, for the test of truths and for that of inputs
        each, however long the stream.
    window
        Coverage is told over the last so many rows, of each group.
    feature
        The layer whose gradient norms and values the tests of inputs look at; by default that of
        the predictor, if it has one.
    seed
        Of the random numbers that break ties.

    Notes
    -----
    The test of truths ranks the score of each point among the calibration scores and all before
    it. Tests of inputs, which go on where truth never comes, look at the prediction, the gradient
    norm and the distance of layer values from their centre; :meth:`start` gives them inputs to
    begin with. Assumed: calibration and stream are exchangeable as long as nothing changes, so a
    stream of dependent rows (the hours of a day) is a change by itself. A test that stays silent
    proves nothing.

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
        exact = requested_alpha(alpha, confidence_level, unknown)
        if not isinstance(predictor, Predictor) or predictor.task not in _TASKS:
            raise TypeError(
                f"a Monitor watches predictors of bands or label sets, got "
                f"{type(predictor).__name__}"
            )
        if not is_number(threshold) or not 1 < threshold < math.inf:
            raise ValueError(f"threshold must be above 1, got {threshold!r}: 100 is 1 in 100")
        if not isinstance(window, int) or isinstance(window, bool) or window < 1:
            raise ValueError(f"window must be a whole number of at least 1, got {window!r}")
        predictor.calibrated()
        if predictor.calibration.is_summary:
            raise ValueError(
                "a Monitor ranks new scores among single ones, and these were compressed: give a "
                "predictor calibrated without compressing; a few thousand points will do"
            )
        self.predictor, self.alpha = predictor, exact
        self.threshold, self.window, self.seed = float(threshold), window, checked_seed(seed)
        given = feature if feature is not None else getattr(predictor, "feature", None)
        self.feature = None if given == OUTPUT else given
        if self.feature is not None:
            resolve(predictor.model, self.feature)
        scores = predictor.calibration.scores
        # Several outputs are sorted one by one, so rows are lost; and scores that were randomised
        # to calibrate alone are not like those to come: the stream then starts from nothing.
        is_alike = scores.shape[1] == 1 and not getattr(predictor, "draws_to_calibrate_only", False)
        begin = scores[~scores.isnan()].tolist() if is_alike else []
        self.tests: dict[str, Test] = {TRUTH: Test(begin, self._seed(0))}
        names = [PREDICTION] + ([NORM] if self.feature else [])
        self.tests.update({name: Test((), self._seed(i)) for i, name in enumerate(names, 1)})
        self._centre: tuple[Tensor, Tensor] | None = None
        self._hits: dict[Any, deque[float]] = {}
        self.rows = 0
        self._lock = threading.RLock()

    def _seed(self, number: int) -> int | None:
        return None if self.seed is None else self.seed + number

    # -- taking rows ------------------------------------------------------------------------

    def start(self, x: Any) -> Monitor:
        """Give the tests of inputs what inputs were like: those of the calibration, say.

        The first half teaches where the centre of the layer's values is, the other half is where
        ranks begin. Call it before the first :meth:`update`.
        """
        with self._lock:
            return self._start(x)

    def _start(self, x: Any) -> Monitor:
        if self.rows:
            raise RuntimeError("rows have come already: start before the first update")
        table = self._features(x)
        half = len(table[PREDICTION]) // 2
        if not half:
            raise ValueError("give at least two rows to start with")
        if VALUES in table:
            first = table[VALUES][:half]
            spread = first.std(dim=0, correction=0)
            self._centre = first.mean(dim=0), torch.where(spread > 0, spread, 1.0)
            table[VALUES] = self._distance(table[VALUES][half:])
        else:
            table = dict(table)
        for place, (name, values) in enumerate(table.items(), 1):
            self.tests[name] = Test(values.tolist(), self._seed(place))
        return self

    def update(self, x: Any, y: Any = None, *, groups: Any = None, weights: Any = None) -> Monitor:
        """Take the next rows, in the order in which they came.

        Parameters
        ----------
        x
            Inputs, as the model takes them.
        y
            Their targets; without them only the tests of inputs go on. NaN, of a predictor with
            ``missing=True``, is a target that is not known: of several outputs the others count.
        groups
            The group of each row: coverage is then told for each, and a predictor with groups
            needs them.
        weights
            The weight of each row, for a predictor that takes them.

        Rows that cannot be taken, whatever is wrong with them, change nothing.
        """
        with self._lock:
            return self._update(x, y, groups, weights)

    def _update(self, x: Any, y: Any, groups: Any, weights: Any) -> Monitor:
        features = self._features(x)
        if VALUES in features:
            if self._centre is None:
                del features[VALUES]
            else:
                features[VALUES] = self._distance(features[VALUES])
        rows = len(features[PREDICTION])
        kinds = len(features)
        if y is not None:
            scores = self.predictor.score(x, y)  # type: ignore[operator]
            self._note_hits(x, y, groups, weights, rows)
            worst = scores.reshape(rows, -1).nan_to_num(-math.inf, math.inf, -math.inf).amax(dim=1)
            known = worst[worst > -math.inf]  # none of a row whose target is not known
            self.tests[TRUTH].take(known.tolist(), math.log(self.threshold))
        for name, values in features.items():
            # Each is fair given its own past only, so they are not averaged: a union bound.
            self.tests[name].take(values.tolist(), math.log(self.threshold * kinds))
        self.rows += rows
        return self

    def _features(self, x: Any) -> dict[str, Tensor]:
        """Say of inputs what their tests look at, one number per row; values as they are."""
        predictor, feature = self.predictor, self.feature
        predictor.check_weights()  # of others, nothing that was seen says anything
        requires = Requires() if feature is None else Requires((feature,), (feature,))
        buffer, row = RowBuffer(None), 0
        for whole in inputs.Rows(x, inputs.Reader(predictor.model, predictor.layout)):
            for batch in predictor.cut(whole):
                out = forward.see(predictor.model, batch, requires, row)
                row = out.rows.stop
                buffer.add(self._noted(out))
        if not row:
            raise ValueError("x has no rows")
        names = [PREDICTION] + ([NORM, VALUES] if feature else [])
        return {name: buffer[name] for name in names}

    def _noted(self, out: BatchOutput) -> dict[str, Tensor]:
        output = out.output.double().flatten(1).cpu()
        if self.predictor.task == "label sets":
            output = output.softmax(dim=1).amax(dim=1, keepdim=True)
        noted = {PREDICTION: output.mean(dim=1)}
        if self.feature is not None:
            norms, values = out.norms[self.feature], out.values[self.feature]
            noted[NORM] = norms.double().flatten(1).mean(dim=1).cpu()
            noted[VALUES] = values.double().flatten(1).cpu()
        return noted

    def _distance(self, values: Tensor) -> Tensor:
        assert self._centre is not None
        centre, spread = self._centre
        return ((values - centre) / spread).square().mean(dim=1).sqrt()

    def _note_hits(self, x: Any, y: Any, groups: Any, weights: Any, rows: int) -> None:
        """Note which rows were covered."""
        predictor: Any = self.predictor
        asked = {"groups": groups} if predictor.calibration.takes_groups else {}
        asked.update({"weights": weights} if predictor.calibration.takes_weights else {})
        if predictor.task == "bands":
            joint = True if predictor.joint == BONFERRONI else predictor.joint
            band = predictor.predict_interval(x, self.alpha, **asked)
            target = target_tensor(y).reshape(band.lower.shape)
            if bool(target.isnan().all()):
                return  # nothing is known of these rows
            hits = row_hits(band, target, joint, predictor.missing)
        else:
            mask = predictor.predict_set(x, self.alpha, **asked).mask
            labels = predictor.read_target(y).to(mask.device)
            hits = mask[torch.arange(rows, device=mask.device), labels].double()
        names: list[Any] = []
        if groups is not None:
            names = labels_of(groups(x) if callable(groups) else groups, rows)
        keys: list[list[Any]] = [[None, name] for name in names] or [[None]] * rows
        for own, hit in zip(keys, hits.tolist(), strict=True):
            for key in own if not math.isnan(hit) else ():  # its target is known
                self._hits.setdefault(key, deque(maxlen=self.window)).append(hit)

    # -- what is told -----------------------------------------------------------------------

    @property
    def alarms(self) -> dict[str, int | None]:
        """For each test the row, counted from 0, at which its alarm was raised, or ``None``."""
        with self._lock:
            return {name: test.alarm_row for name, test in self.tests.items()}

    @property
    def alarm(self) -> bool:
        """Whether any test has raised an alarm."""
        return any(row is not None for row in self.alarms.values())

    def coverage(self) -> dict[Any, tuple[float, float, float, int]]:
        """Return (share, low, high, rows) over the last rows, by group; ``None``: of all rows.

        The interval is exact (Clopper and Pearson), at 95 %; where a row counts by the share of
        its outputs that are covered, rows are rounded down to whole ones.
        """
        told = {}
        with self._lock:
            for name, hits in self._hits.items():
                low, high = clopper_pearson(math.floor(sum(hits) + 1e-9), len(hits))
                told[name] = (float(np.mean(hits)), low, high, len(hits))
        return told

    def table(self) -> list[dict[str, Any]]:
        """Return all that is told as rows of a table, in plain words and numbers."""
        with self._lock:
            return self._table()

    def _table(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        inputs_seen = len(self.tests) - 1
        for name, test in self.tests.items():
            limit = self.threshold * (1 if name == TRUTH else inputs_seen)
            rows.append(
                {
                    "what": f"test of {name}",
                    "rows": test.rows,
                    "value": _shown(float(test.martingale.log_wealth)),
                    "most": _shown(test.log_most),
                    "limit": limit,
                    "says": "no rows yet"
                    if not test.rows
                    else "no change found"
                    if test.alarm_row is None
                    else f"moved: alarm at row {test.alarm_row}",
                }
            )
        for group, (share, low, high, count) in self.coverage().items():
            asked = float(1 - self.alpha)
            rows.append(
                {
                    "what": "coverage" if group is None else f"coverage of group {group!r}",
                    "rows": count,
                    "value": share,
                    "most": high,
                    "limit": asked,
                    "says": f"between {low:.3f} and {high:.3f}, "
                    + ("below what was asked" if high < asked else "as asked"),
                }
            )
        return rows

    def plot(self, ax: Any = None) -> Any:
        """Draw the wealth of every test over the rows, and the limit at which it is an alarm.

        Needs matplotlib. Wealth is that of fair bets against online conformal p-values: without
        drift it hardly ever grows large.

        Parameters
        ----------
        ax
            The axes to draw into; by default those of a new figure.

        Returns
        -------
        Axes
        """
        with self._lock:
            curves = {
                name: (list(test.trace.values), test.trace.step, self._limit_of(name))
                for name, test in self.tests.items()
                if test.trace.values
            }
        return plots.wealth(curves, ax)

    def _limit_of(self, name: str) -> float:
        """Return the wealth at which a test raises its alarm."""
        return self.threshold * (1 if name == TRUTH else len(self.tests) - 1)

    def __str__(self) -> str:
        return text(self.table())

    # -- being stopped ----------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        return {
            "alpha": str(self.alpha),
            "threshold": self.threshold,
            "window": self.window,
            "feature": self.feature,
            "predictor": self.predictor.settings(),
        }

    def _fingerprint(self) -> str:
        return str(self.predictor.calibrated().fingerprint)

    def save(self, path: str | Path) -> None:
        """Write all that was seen to a file, whole or not at all."""
        with self._lock:
            tensors = {
                f"ranked.{name}": torch.tensor(test.ranks.sorted(), dtype=torch.float64)
                for name, test in self.tests.items()
            }
            if self._centre is not None:
                tensors["centre"], tensors["spread"] = self._centre
            state = {
                "settings": self._settings(),
                "fingerprint": self._fingerprint(),
                "tests": {name: test.state() for name, test in self.tests.items()},
                "hits": [[name, list(hits)] for name, hits in self._hits.items()],
                "rows": self.rows,
            }
            files.write(path, {**tensors, "monitor": files.seal(state, tensors)})

    def load(self, path: str | Path) -> Monitor:
        """Go on where a monitor of the same settings and weights was saved, or change nothing."""
        with self._lock, told(path):
            tensors = dict(files.read(path))
            if "monitor" not in tensors:
                raise ValueError("it holds no state of a monitor")
            state = files.unseal(tensors.pop("monitor"), tensors)
            if state["settings"] != files.unpack(files.pack(self._settings())):
                raise ValueError("it was saved with other settings")
            if state["fingerprint"] != self._fingerprint():
                raise ValueError("it was saved with other weights of the model")
            saved = files.rebuilt(dict, state["tests"])
            allowed = {TRUTH, PREDICTION} | ({NORM, VALUES} if self.feature else set())
            if not {TRUTH, PREDICTION} <= set(saved) <= allowed:
                raise ValueError(f"it holds tests of {', '.join(map(str, saved))}")
            tests = {
                name: Test.restored(tensors.pop(f"ranked.{name}"), files.rebuilt(dict, own))
                for name, own in saved.items()
            }
            centre = _centre_of(tensors, VALUES in tests)
            hits, rows = self._hits_of(state["hits"]), files.count(state["rows"])
            self.tests, self._centre, self._hits, self.rows = tests, centre, hits, rows
        return self

    def _hits_of(self, saved: Any) -> dict[Any, deque[float]]:
        hits: dict[Any, deque[float]] = {}
        for label, shares in files.rebuilt(list, saved):
            name = None if label is None else labels_of([label], 1)[0]
            own = [number(share) for share in files.rebuilt(list, shares)]
            if (
                name in hits
                or not 0 < len(own) <= self.window
                or not 0 <= min(own) <= max(own) <= 1
            ):
                raise ValueError(f"the hits of group {label!r} are no shares of rows")
            hits[name] = deque(own, maxlen=self.window)
        return hits

    def __getstate__(self) -> dict[str, Any]:
        # What changes is copied at one moment: pickling takes its time, and updates go on.
        with self._lock:
            changing = copy.deepcopy({"tests": self.tests, "_hits": self._hits})
            same = {name: value for name, value in self.__dict__.items() if name != "_lock"}
            return {**same, **changing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()


def _centre_of(tensors: dict[str, Tensor], has_values: bool) -> tuple[Tensor, Tensor] | None:
    """Read where the centre of a layer's values is, and that nothing else is left."""
    if set(tensors) != ({"centre", "spread"} if has_values else set()):
        raise ValueError(f"it holds {', '.join(sorted(tensors)) or 'no centre'}")
    if not has_values:
        return None
    centre, spread = tensors["centre"], tensors["spread"]
    if (
        centre.dim() != 1
        or centre.shape != spread.shape
        or {centre.dtype, spread.dtype} != {torch.float64}
    ):
        raise ValueError("its centre is no row of numbers")
    if not bool((centre.isfinite() & spread.isfinite() & (spread > 0)).all()):
        raise ValueError("its centre is no row of finite numbers")
    return centre, spread


def _shown(log_wealth: float) -> float:
    return math.exp(min(log_wealth, 700.0))
