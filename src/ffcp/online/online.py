"""Prediction intervals for a stream, whose targets may arrive late, in any order, or never."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from ffcp.batch import BatchOutput
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import take
from ffcp.conformal.compressed import is_summary
from ffcp.conformal.mondrian import Label, rows_of_groups
from ffcp.conformal.rank import requested_alpha, rows_needed
from ffcp.network import arrays, forward, inputs
from ffcp.network.arrays import target_tensor
from ffcp.online.controllers import Aci, Applied, Control, DtAci, Pid, Window
from ffcp.online.saving import Resumable
from ffcp.regression.intervals import Interval
from ffcp.regression.joint import two_sided
from ffcp.regression.regression_predictor import RegressionPredictor
from ffcp.warnings import warn

METHODS = ("aci", "dtaci", "pid", "plain")


class Progress(NamedTuple):
    """The progress of a stream: the number of targets and misses of each score, and bounds.

    ``bounds`` are guaranteed bounds on the distance of the share of misses from alpha; ``None``
    if there is no guarantee.
    """

    observed: list[int]
    misses: list[int]
    bounds: list[float] | None


@dataclass
class Waiting:
    """A predicted row that waits for its target, and the thresholds applied to its scores."""

    key: str  # of its input
    group: Label | None
    applied: list[Applied | None]  # None: this target has arrived


class Online(Resumable):
    """Prediction intervals for a stream, with a level or threshold that adapts to it.

    Parameters
    ----------
    predictor : RegressionPredictor
        A calibrated predictor of intervals. Its calibration scores, in random order, are the
        stream's past. With groups each group is a separate stream. Localized and weighted
        calibrations, whose thresholds depend on the input, are not changed: their level is
        adapted, or, with ``"pid"``, an amount added to their thresholds.
    method : str, default="aci"
        ``"aci"``: a level that decreases with every miss and increases otherwise. ``"dtaci"``: the
        same with several step sizes, weighted by their losses. ``"pid"``: the threshold itself is
        controlled. ``"plain"``: a fixed level, only the window moves.
    alpha : float, default=None
        Target share of misses, 0.1 if neither is given; it cannot be changed later.
    confidence_level : float, default=None
        Instead of ``alpha``: the required coverage, 1 - alpha.
    gamma : float, default=0.01
        Step size of ``"aci"``.
    window : int, default=1000
        Number of last scores that are used.
    forget : float, default=1.0
        The weight of a score relative to the next newer one; 1 means equal weights.
    saturation : float, default=0.5
        Saturation constant of ``"pid"``: the larger, the later its integrator takes effect, see
        :class:`ffcp.online.controllers.Pid`.
    waiting : int, default=10000
        Largest number of predictions that wait for their target; beyond it the oldest are dropped.

    Notes
    -----
    Guarantees, for N targets that have arrived, E of them missed, and at most D predictions waiting
    when another is made (rows of one batch wait for each other):

    * ``"aci"``: on any sequence, abs(E / N - alpha) <= (max(alpha, 1 - alpha) + gamma (D + 1)) /
      (gamma N).
    * ``"pid"``: on any sequence, abs(E / N - alpha) <= ((pi / 2) saturation u / log(u) + 1 + D) / N
      with u = N + e.
    * ``"dtaci"``: a pinball loss close to that of the best step size; no coverage.
    * ``"plain"``: coverage of 1 - alpha minus the drift of the distribution inside the window.

    These are averages over the stream, which alternating infinite and empty intervals would
    satisfy too, and they concern rows whose target arrives. There is no guarantee for rows whose
    target never arrives.

    If several outputs are covered separately, like forecasts for several horizons, each has its
    own level; NaN in ``y`` is a target that has not arrived yet. With ``side="each"`` each end of
    an interval has its own level, and a row is missed by one end or the other.

    It may be called from several threads, which run one at a time. :meth:`save` writes the state at
    any time, and :meth:`load` of a stream with the same settings continues from there.

    Examples
    --------
    >>> import ffcp
    >>> _ = torch.manual_seed(0)
    >>> model, x = torch.nn.Linear(2, 1), torch.randn(300, 2)  # yours is trained
    >>> y = model(x).detach()[:, 0] + torch.randn(300)
    >>> online = Online(ffcp.CP(model).calibrate(x[:200], y[:200]), "aci", alpha=0.1)
    >>> for i in range(200, 300):
    ...     interval = online.predict_interval(x[i : i + 1])
    ...     online.update(x[i : i + 1], y[i : i + 1])
    >>> online.observed, online.misses
    ([100], [12])
    """

    changing = ("rows", "delay", "_controls", "_waiting")
    predictor: RegressionPredictor

    def __init__(
        self,
        predictor: RegressionPredictor,
        method: str = "aci",
        alpha: Any = None,
        *,
        confidence_level: Any = None,
        gamma: float = 0.01,
        window: int = 1000,
        forget: float = 1.0,
        saturation: float = 0.5,
        waiting: int = 10_000,
        **unknown: NoReturn,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
        for name, value in (("gamma", gamma), ("saturation", saturation)):
            if not is_number(value) or not 0 < value < math.inf:
                raise ValueError(f"{name!r} must be a positive number, got {value!r}")
        check_counts(window=window, waiting=waiting)
        if not is_number(forget) or not 0 < forget <= 1:
            raise ValueError(f"'forget' must lie in (0, 1], got {forget!r}")
        _check_predictor(predictor, method, forget)
        super().__init__()
        self.method, self.alpha = method, requested_alpha(alpha, confidence_level, unknown)
        # A snapshot: the stream's past are the scores of this calibration, not of a later one.
        self.predictor = predictor.snapshot()
        self.settings = {
            "method": method,
            "alpha": str(self.alpha),
            "gamma": gamma,
            "window": window,
            "forget": forget,
            "saturation": saturation,
            "waiting": waiting,
        }
        self.rows = self.delay = 0  # delay: the most rows that waited when another was predicted
        self._controls = self._new_controls()
        self._warn_of_few_rows()
        self._waiting: dict[int, Waiting] = {}  # by the number of the row

    def __repr__(self) -> str:
        """Return a summary of the stream: method, number of targets and coverage.

        >>> import ffcp
        >>> predictor = ffcp.CP(torch.nn.Linear(2, 1)).calibrate(torch.ones(50, 2), torch.ones(50))
        >>> Online(predictor, "aci", alpha=0.1)
        Online: 'aci' of CP, target coverage 90 %
          0 rows predicted, 0 wait for their target
        """
        target = f"target coverage {100 * float(1 - self.alpha):g} %"
        head = f"Online: {self.method!r} of {type(self.predictor).__name__}, {target}"
        waiting = f"{self.rows:,} rows predicted, {len(self._waiting):,} wait for their target"
        lines = [head, waiting]
        for place, (observed, misses) in enumerate(zip(self.observed, self.misses, strict=True)):
            name = f"threshold {place}: " if len(self.observed) > 1 else ""
            if observed:
                covered = f"{1 - misses / observed:.1%} of them covered"
                lines.append(f"{name}{observed:,} targets, {covered}")
        return "\n  ".join(lines)

    def _parts(self) -> Mapping[Any, Calibration]:
        """Return the calibration of each group; without groups one, with the key ``None``."""
        calibration = self.predictor.calibration
        parts: Mapping[Any, Calibration] = getattr(calibration, "parts", {None: calibration})
        return parts

    def _new_controls(self) -> dict[Label | None, list[Control]]:
        """Return a controller for each score of each group, started from calibration scores."""
        controls = {}
        for label, part in self._parts().items():
            alpha = self.predictor.alpha_of_each(self.alpha, part.scores.shape[1])
            controls[label] = [self._control(alpha, column) for column in part.scores.T]
        return controls

    def _warn_of_few_rows(self) -> None:
        """Warn if intervals are infinite until many more targets have arrived."""
        few = min((part.scores for part in self._parts().values()), key=len)
        needed = rows_needed(self.predictor.alpha_of_each(self.alpha, few.shape[1]))
        if self.method != "pid" and min(len(few), self.settings["window"]) < needed:
            warn(
                f"alpha={float(self.alpha):g} needs {needed} scores in the window, which has "
                f"{len(few)} of at most {self.settings['window']}: most intervals will be infinite "
                "until then. Use a larger 'alpha' or 'window', or calibrate on more rows"
            )

    def _control(self, alpha: Fraction, scores: Tensor) -> Control:
        """Return a controller whose past are these calibration scores, in random order."""
        settings = self.settings
        known = scores[~scores.isnan()].numpy()
        order = np.random.default_rng(0).permutation(len(known))  # independent of the scores
        past = Window(settings["window"], settings["forget"], known[order].tolist())
        if self.method == "aci":
            return Aci(alpha, past, Fraction(str(settings["gamma"])))
        if self.method == "dtaci":
            return DtAci(alpha, past)
        if self.method == "pid":
            return Pid(alpha, past, settings["saturation"])
        return Control(alpha, past)

    # -- predicting -------------------------------------------------------------------------

    def predict_interval(self, x: Any, *, groups: Any = None, weights: Any = None) -> Interval:
        """Return intervals for the next rows, at the current level, and remember the rows.

        A level of 0 or less returns the whole line; one of 1 or more only the prediction, which
        counts as a miss. ``groups`` and ``weights`` are as in the predictor's
        ``predict_interval``.

        Parameters
        ----------
        x : array-like
            Inputs of the next rows.
        groups : array-like, default=None
            Group of each row.
        weights : array-like, default=None
            Weight of each row.
        """
        with self._lock:
            predictor = self.predictor
            predictor.check_weights()
            intervals: list[Interval] = []
            predicted: list[Waiting] = []
            outputs = predictor.batch_outputs(predictor.rows(x), groups, None, weights)
            for out, metadata, draws, _ in outputs:
                labels = metadata.get("group", [None] * len(out.output))
                applied = self._applied(labels, metadata, draws)
                thresholds = [[score.threshold for score in row] for row in applied]
                intervals.append(self._interval(out, torch.tensor(thresholds, dtype=torch.float64)))
                predicted += map(Waiting, _keys(out.x, len(out.output)), labels, applied)
            predictor.check_weights()
            for row in predicted:
                self.delay = max(self.delay, len(self._waiting))
                self._waiting[self.rows] = row
                self.rows += 1
                if len(self._waiting) > self.settings["waiting"]:
                    del self._waiting[next(iter(self._waiting))]
        lower = torch.cat([interval.lower for interval in intervals])
        upper = torch.cat([interval.upper for interval in intervals])
        prediction = torch.cat([interval.prediction for interval in intervals])
        return Interval(lower, upper, prediction, float(self.alpha))

    def _applied(self, labels: Sequence[Any], metadata: Any, draws: Any) -> list[list[Any]]:
        """Return the thresholds applied to each score of each row."""
        applied: list[list[Any]] = [[]] * len(labels)
        metadata = {name: column for name, column in metadata.items() if name != "group"}
        for label, rows in rows_of_groups(labels).items():
            if label not in self._controls:
                raise ValueError(
                    f"group {label!r} has no calibration rows: calibrate with rows of this group"
                )
            if has_own_thresholds(self.predictor):
                of_rows = self._looked_up(label, take(metadata, rows), draws, len(rows))
            else:
                of_all = [control.next_threshold() for control in self._controls[label]]
                of_rows = [[*of_all] for _ in rows]
            for row, thresholds in zip(rows.tolist(), of_rows, strict=True):
                applied[row] = thresholds
        return applied

    def _looked_up(self, label: Any, metadata: Any, draws: Any, rows: int) -> list[list[Any]]:
        """Return the thresholds applied to rows of a group, where they depend on the input."""
        controls = self._controls[label]
        levels = {level for control in controls for level in control.levels()}
        tables = {}  # the thresholds of each row, by level
        for level in levels:
            tables[level] = [[math.inf if level <= 0 else -math.inf] * len(controls)] * rows
        inside = sorted(level for level in levels if 0 < level < 1)
        if inside:
            quantiles = self._parts()[label].quantiles(inside, metadata, draws)
            quantiles = quantiles.expand(len(inside), rows, -1)
            tables.update(zip(inside, quantiles.tolist(), strict=True))
        return [
            [
                control.applied([tables[level][row][i] for level in control.levels()])
                for i, control in enumerate(controls)
            ]
            for row in range(rows)
        ]

    def _interval(self, out: BatchOutput, thresholds: Tensor) -> Interval:
        """Return intervals; only the prediction where a threshold covers nothing."""
        predictor = self.predictor
        nothing = (thresholds == -math.inf) | (thresholds < predictor.calibrated().score.lowest)
        interval = predictor.interval_at(out, thresholds.masked_fill(nothing, 0.0)[None])
        prediction = interval.prediction
        empty = two_sided(nothing.double(), predictor.side).bool().to(prediction.device)
        empty = empty.expand(len(prediction), prediction[0].numel()).reshape(prediction.shape)
        lower = interval.lower[0].where(~empty, prediction)
        upper = interval.upper[0].where(~empty, prediction)
        return Interval(lower, upper, prediction)

    # -- learning ---------------------------------------------------------------------------

    def update(self, x: Any, y: Any) -> None:
        """Update the levels with the targets of predicted rows, in any order, at any time.

        Rows are identified by their inputs; of equal inputs the first predicted one is meant. NaN
        in ``y``, with several outputs, is a target that has not arrived yet: pass it later.

        Parameters
        ----------
        x : array-like
            Inputs of rows that were predicted.
        y : array-like
            Their targets.
        """
        with self._lock:
            keys, scores = self._scored(x, target_tensor(y))
            numbers = self._numbers(keys, (~scores.isnan()).tolist())
            for number, row_scores in zip(numbers, scores.tolist(), strict=True):
                row = self._waiting[number]
                for i, score in enumerate(row_scores):
                    applied = row.applied[i]
                    if applied is not None and not math.isnan(score):
                        self._controls[row.group][i].learn(score, applied)
                        row.applied[i] = None
                if not any(row.applied):
                    del self._waiting[number]

    def _scored(self, x: Any, target: Tensor) -> tuple[list[str], Tensor]:
        """Return the keys and scores of rows."""
        predictor = self.predictor
        predictor.check_weights()
        arrays.check_finite(target.masked_fill(target.isnan(), 0.0), "y", 0)
        batches: list[Tensor] = []
        keys: list[str] = []
        state = predictor.calibrated()
        score: Any = state.score
        for batch in predictor.rows(x):
            out = forward.run_batch(predictor.model, batch, state.requires, len(keys))
            if len(target) <= out.rows[-1]:
                raise ValueError(f"'y' has {len(target)} rows, fewer than 'x'")
            y = target[out.rows[0] : out.rows[-1] + 1].to(out.output.device)
            outputs, scores = score.target(out, y), score.score(out, y).cpu()
            is_by_output = scores.shape[1] >= outputs.shape[1] > 1  # each output has its own score
            if bool(outputs.isnan().any()) and not is_by_output:
                raise ValueError("'y' holds NaN: leave out rows whose target has not arrived yet")
            batches.append(scores)
            keys += _keys(out.x, len(out.output))
        predictor.check_weights()
        if len(target) != len(keys):
            raise ValueError(f"'y' has {len(target)} rows, 'x' has {len(keys)}")
        return keys, torch.cat(batches)

    def _numbers(self, keys: list[str], arrived: list[list[bool]]) -> list[int]:
        """Return the numbers of the waiting rows; raise if any row is not waiting.

        ``arrived`` is which scores of each row are known.
        """
        waiting: dict[str, list[int]] = {}
        for number, row in self._waiting.items():
            waiting.setdefault(row.key, []).append(number)
        numbers = []
        for i, key in enumerate(keys):
            scores = [score for score, is_known in enumerate(arrived[i]) if is_known]
            for number in waiting.get(key, []):
                applied = self._waiting[number].applied
                if all(applied[score] is not None for score in scores):
                    waiting[key].remove(number)
                    numbers.append(number)
                    break
            else:
                raise ValueError(
                    f"row {i} of 'x' was not predicted, or its target has already been passed: "
                    "call predict_interval(x) before update(x, y), once for each row"
                )
        return numbers

    def is_waiting(self, x: Any) -> list[bool]:
        """Return which rows were predicted and wait for a target.

        Parameters
        ----------
        x : array-like
            Inputs, a row each.
        """
        with self._lock:
            waiting = {row.key for row in self._waiting.values()}
            keys: list[str] = []
            for batch in self.predictor.rows(x):
                keys += _keys(batch, inputs.row_count(batch))
            return [key in waiting for key in keys]

    # -- results ----------------------------------------------------------------------------

    @property
    def observed(self) -> list[int]:
        """The number of targets that have arrived, for each score, over all groups."""
        by_score = zip(*self._controls.values(), strict=True)
        return [sum(control.observed for control in controls) for controls in by_score]

    @property
    def misses(self) -> list[int]:
        """The number of missed targets, for each score, over all groups."""
        by_score = zip(*self._controls.values(), strict=True)
        return [sum(control.misses for control in controls) for controls in by_score]

    @property
    def bounds(self) -> list[float] | None:
        """Guaranteed bounds on the distance of the share of misses from alpha, for each score.

        ``None`` without a guarantee. With groups, the largest of all: :attr:`groups` has each.
        """
        by_group = [self._bounds(controls) for controls in self._controls.values()]
        return [max(bounds) for bounds in zip(*by_group, strict=True)] or None

    @property
    def groups(self) -> dict[Label, Progress]:
        """The progress of the stream of each group."""
        return {
            label: Progress(
                [control.observed for control in controls],
                [control.misses for control in controls],
                self._bounds(controls) or None,
            )
            for label, controls in self._controls.items()
            if label is not None
        }

    def _bounds(self, controls: Sequence[Control]) -> list[float]:
        bounds = [control.bound(self.delay) for control in controls]
        return [bound for bound in bounds if bound is not None]

    # -- files ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the changing attributes as plain data."""
        return {
            "rows": self.rows,
            "delay": self.delay,
            "controls": [
                [group, [control.state() for control in controls]]
                for group, controls in self._controls.items()
            ],
            "waiting": [
                [number, row.key, row.group, row.applied] for number, row in self._waiting.items()
            ],
        }

    def from_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the changing attributes from plain data."""
        controls, saved = self._new_controls(), dict(state["controls"])
        for group in controls:
            for control, control_state in zip(controls[group], saved[group], strict=True):
                control.restore(control_state)
        waiting = {
            number: Waiting(key, group, [score and Applied(*score) for score in applied])
            for number, key, group, applied in state["waiting"]
        }
        return {
            "rows": state["rows"],
            "delay": state["delay"],
            "_controls": controls,
            "_waiting": waiting,
        }


def is_number(value: Any) -> bool:
    """Whether a value is a number, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_counts(**counts: Any) -> None:
    """Raise ValueError unless all values are integers >= 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name!r} must be an integer >= 1, got {value!r}")


def _keys(x: Any, rows: int) -> list[str]:
    """Return a hash of the input of each row."""
    leaves = [leaf.detach().cpu().contiguous() for _, leaf in inputs.leaves(x)]
    flat = [leaf.reshape(rows, -1).view(torch.uint8).numpy() for leaf in leaves]
    return [
        hashlib.blake2b(b"".join(leaf[i].tobytes() for leaf in flat), digest_size=16).hexdigest()
        for i in range(rows)
    ]


def has_own_thresholds(predictor: Any) -> bool:
    """Whether thresholds depend on the input, not only on its group."""
    calibration = predictor.calibration
    return bool(getattr(calibration, "inner", calibration).traits.rows)


def _check_predictor(predictor: Any, method: str, forget: float) -> None:
    if not isinstance(predictor, RegressionPredictor):
        raise TypeError(
            "'predictor' must return prediction intervals, as CP does, got "
            f"{type(predictor).__name__!r}"
        )
    predictor.calibrated()
    if has_own_thresholds(predictor) and (method == "plain" or forget != 1):
        raise ValueError(
            f"method={method!r} with forget={forget:g} needs a window of scores, which a localized "
            "or weighted calibration does not have: use 'aci', 'dtaci' or 'pid' without 'forget'"
        )
    if is_summary(predictor.calibration):
        raise ValueError("Online needs all scores: calibrate without rank_error or compress")
