"""Bands for a stream: predict, then learn the truth when it comes, late, in any order, or never."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ffcp.batch import BatchOutput
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import take
from ffcp.conformal.coverage_level import requested_alpha
from ffcp.conformal.mondrian import Label, rows_of_groups
from ffcp.locks import lock
from ffcp.network import checks, inputs
from ffcp.network.arrays import target_tensor
from ffcp.online.controllers import Aci, Asked, Control, DtAci, Pid, Plain
from ffcp.online.lanes import Lane, Progress, is_number
from ffcp.online.state import StreamState, Waiting
from ffcp.online.windows import Window
from ffcp.regression.intervals import Interval
from ffcp.regression.regression_predictor import RegressionPredictor
from ffcp.regression.sides import kept_scores, two_sided

METHODS = ("aci", "dtaci", "pid", "plain")
# From groups, notes and random numbers of rows to what each score of each row is asked with.
Ask = Callable[[Sequence[Any], Any, Any], list[list[Asked]]]


class Online(StreamState):
    """Bands for a stream, whose level or threshold follows what the stream says of it.

    Parameters
    ----------
    predictor
        A calibrated predictor of bands. Its calibration scores, in a random order, are the
        stream's past. With groups each of them is a stream of its own. Localized and weighted
        calibrations, whose thresholds differ from input to input, stay as they are: their level
        moves, and with ``"pid"`` what is added to their thresholds.
    method
        ``"aci"``: a level that goes down with every miss and up otherwise. ``"dtaci"``: the same
        with several step sizes, weighed by how they do. ``"pid"``: a threshold that is controlled
        itself. ``"plain"``: the level stays, only the window moves.
    alpha
        Share of misses asked for, 0.1 if nothing is given; it cannot be changed later.
    confidence_level
        In place of ``alpha``: the coverage asked for, 1 - alpha.
    gamma
        The step of ``"aci"``.
    window
        How many of the last scores count.
    forget
        A score counts so many times as much as the one after it; 1: all alike.
    horizon
        Of ``"dtaci"``: over how many rows it competes with the best step size.
    step, saturation
        Of ``"pid"``: the step of its tracker, as a share of the spread of the scores in the
        window; and how late its integrator takes over, see :class:`ffcp.online.controllers.Pid`.
    waiting
        How many predictions wait for their truth at most; beyond, the oldest are given up.

    Notes
    -----
    What is promised, with N truths come, E of them missed, and at most D predictions waiting when
    another is made (rows of one batch wait for each other):

    * ``"aci"``: on any sequence, abs(E / N - alpha) <= (max(alpha, 1 - alpha) + gamma (D + 1)) /
      (gamma N).
    * ``"pid"``: on any sequence, abs(E / N - alpha) <= ((pi / 2) saturation u / log(u) + 1 + D) / N
      with u = N + e.
    * ``"dtaci"``: a pinball loss close to that of the best step size; no coverage.
    * ``"plain"``: coverage of 1 - alpha less what the distribution drifts inside the window.

    These are about averages over the stream, met also by bands that are infinite or empty in
    turn, and about rows whose truth comes. Rows whose truth never comes are covered by none of it.

    With several outputs that are covered each on its own, forecasts for several horizons, say,
    each has a level of its own; NaN in ``y`` stands for a truth that has not come yet. So has each
    end of a band with ``side="each"``, where a row is missed by one end or the other.

    It may be called from several threads, one of which works at a time. :meth:`save` writes the
    state whenever it is called, and :meth:`load` of a stream made alike goes on from there.

    Examples
    --------
    >>> import ffcp
    >>> _ = torch.manual_seed(0)
    >>> model, x = torch.nn.Linear(2, 1), torch.randn(300, 2)  # yours is trained
    >>> y = model(x).detach()[:, 0] + torch.randn(300)
    >>> online = Online(ffcp.CP(model).calibrate(x[:200], y[:200]), "aci", alpha=0.1)
    >>> for i in range(200, 300):
    ...     band = online.predict_interval(x[i : i + 1])
    ...     online.update(x[i : i + 1], y[i : i + 1])
    >>> online.observed, online.misses
    ([100], [12])
    """

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
        horizon: int = 500,
        step: float = 0.05,
        saturation: float = 0.5,
        waiting: int = 10_000,
        **unknown: NoReturn,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
        for name, value in (("gamma", gamma), ("step", step), ("saturation", saturation)):
            if not is_number(value) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        for name, value in (("window", window), ("horizon", horizon), ("waiting", waiting)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not is_number(forget) or not 0 < forget <= 1:
            raise ValueError(f"forget must lie above 0 and be at most 1, got {forget!r}")
        _check_predictor(predictor, method, forget)
        self.method, self.alpha = method, requested_alpha(alpha, confidence_level, unknown)
        # As it is now: the stream's past are the scores of this calibration and no other.
        self.predictor = predictor.snapshot()
        self.settings = {
            "method": method,
            "alpha": str(self.alpha),
            "gamma": gamma,
            "window": window,
            "forget": forget,
            "horizon": horizon,
            "step": step,
            "saturation": saturation,
            "waiting": waiting,
            **predictor.settings(),
        }
        self._lanes = self._new_lanes()
        self._waiting: OrderedDict[int, tuple[str, Waiting]] = OrderedDict()
        self._by_input: dict[str, deque[Waiting]] = {}
        self.rows = self.delay = 0
        self._lock = lock(again=True)

    def _parts(self) -> Mapping[Any, Calibration]:
        """Give the calibration of each group; that of all rows as the group ``None``."""
        calibration = self.predictor.calibration
        parts: Mapping[Any, Calibration] = getattr(
            calibration, "parts", lambda: {None: calibration}
        )()
        return parts

    def _new_lanes(self) -> dict[Label | None, Lane]:
        size, forget = self.settings["window"], self.settings["forget"]
        lanes = {}
        for label, part in self._parts().items():
            exact = self.predictor.alpha_of_each(self.alpha, part.coordinates)
            windows = [_started(column, size, forget) for column in part.scores.T]
            lanes[label] = Lane(windows, [self._control(exact, past) for past in windows])
        return lanes

    def _control(self, alpha: Fraction, past: Window) -> Control:
        said = self.settings
        if self.method == "aci":
            return Aci(alpha, Fraction(str(said["gamma"])))
        if self.method == "dtaci":
            return DtAci(alpha, said["horizon"])
        if self.method == "pid":
            return Pid(alpha, said["step"], said["saturation"], past.spread())
        return Plain(alpha)

    # -- predicting -------------------------------------------------------------------------

    def predict_interval(self, x: Any, *, groups: Any = None, weights: Any = None) -> Interval:
        """Give bands for the next rows, at the level of now, and remember them.

        A level of 0 or less gives the whole line; one of 1 or more the prediction alone, which
        counts as a miss. ``groups`` and ``weights`` are those of the predictor's own
        ``predict_interval``.
        """
        with self._lock:
            predictor = self.predictor
            predictor.check_weights()
            parts: list[Interval] = []
            points: list[tuple[str, list[Asked], Any]] = []
            ask = self._looked_up if self._stands else self._asked()
            rows = inputs.Rows(x, inputs.Reader(predictor.model, predictor.layout))
            for out, metadata, draws in predictor.with_metadata(rows, groups, None, weights):
                labels = metadata.get("group", [None] * len(out.rows))
                self._must_know(labels)
                asked = ask(labels, metadata, draws)
                thresholds = [[one.threshold for one in row] for row in asked]
                parts.append(self._band(out, torch.tensor(thresholds, dtype=torch.float64)))
                points += zip(_keys(out.x, len(out.rows)), asked, labels, strict=True)
            predictor.check_weights()
            for key, row, label in points:
                self._remember(key, Waiting(self.rows, [*row], label))
                self.rows += 1
        lower, upper, prediction = (torch.cat([part[i] for part in parts]) for i in range(3))
        return Interval(lower, upper, prediction, float(self.alpha))

    def _must_know(self, labels: Sequence[Any]) -> None:
        unseen = [label for label in dict.fromkeys(labels) if label not in self._lanes]
        if unseen:
            raise ValueError(
                f"no calibration point belongs to group {', '.join(map(repr, unseen[:8]))}: "
                "calibrate with points of that group, or merge it into another"
            )

    def _asked(self) -> Ask:
        """Ask for thresholds, which are those of all rows of a group."""
        now = {label: lane.ask() for label, lane in self._lanes.items()}
        return lambda labels, metadata, draws: [now[label] for label in labels]

    def _looked_up(self, labels: Sequence[Any], metadata: Any, draws: Any) -> list[list[Asked]]:
        """Look up what each row is asked with, by the calibration of its group."""
        parts, rows_asked = self._parts(), [list[Asked]()] * len(labels)
        own = {name: column for name, column in metadata.items() if name != "group"}
        for label, rows in rows_of_groups(labels).items():
            lane = self._lanes[label]
            table = _at_levels(parts[label], lane.wanted(), take(own, rows), draws, len(rows))
            for row, *thresholds in zip(rows.tolist(), *table, strict=True):
                rows_asked[row] = lane.placed(thresholds)
        return rows_asked

    @property
    def _stands(self) -> bool:
        """Whether thresholds are those of a calibration that stays, at levels that move."""
        return self.predictor.calibration.is_local

    def _band(self, out: BatchOutput, thresholds: Tensor) -> Interval:
        """Give bands; where a threshold covers nothing, the prediction alone."""
        predictor = self.predictor
        nothing = (thresholds == -math.inf) | (thresholds < predictor.calibrated().scorer.lowest)
        points = predictor.interval_at(out, thresholds.masked_fill(nothing, 0.0)[None])
        band = Interval(points.lower[0], points.upper[0], points.prediction)
        if not bool(nothing.any()):
            return band
        shape = band.prediction.shape
        outputs = band.prediction.reshape(shape[0], -1)
        empty = two_sided(nothing.double(), predictor.side).bool().to(outputs.device)
        empty = empty if empty.shape == outputs.shape else empty.expand_as(outputs)
        ends = (end.reshape(outputs.shape).where(~empty, outputs) for end in band[:2])
        lower, upper = (end.reshape(shape) for end in ends)
        return Interval(lower, upper, band.prediction)

    def _remember(self, key: str, point: Waiting) -> None:
        self.delay = max(self.delay, len(self._waiting))
        self._waiting[point.row] = (key, point)
        self._by_input.setdefault(key, deque()).append(point)
        if len(self._waiting) > self.settings["waiting"]:
            self._forget(next(iter(self._waiting)))

    # -- learning ---------------------------------------------------------------------------

    def update(self, x: Any, y: Any) -> None:
        """Learn the truths of rows that were predicted, in any order, whenever they come.

        Rows are known again by their inputs; of equal inputs the one that was predicted first is
        meant. NaN in ``y``, of several outputs, is a truth that has not come yet: come again.
        """
        with self._lock:
            keys, scores = self._scored(x, target_tensor(y))
            points = self._found(keys, scores)
            for point, row in zip(points, scores.tolist(), strict=True):
                self._learn(point, row)

    def _scored(self, x: Any, target: Tensor) -> tuple[list[str], Tensor]:
        """Give the names and scores of rows."""
        predictor = self.predictor
        predictor.check_weights()
        checks.finite(target.masked_fill(target.isnan(), 0.0), "y", 0)
        parts, keys = [], []
        rows = inputs.Rows(x, inputs.Reader(predictor.model, predictor.layout))
        for out in predictor.batch_outputs(rows):
            start, stop = out.rows.start, out.rows.stop
            if len(target) < stop:
                raise ValueError(f"y has {len(target)} rows, fewer than x")
            family: Any = predictor.calibrated().scorer
            own = family.target(out, target[start:stop].to(out.output.device))
            parts.append(kept_scores(family, out, own).cpu())
            has_own = parts[-1].shape[1] >= own.shape[1] > 1  # outputs have scores of their own
            if bool(own.isnan().any()) and not has_own:
                raise ValueError("y holds NaN: leave out rows whose truth has not come yet")
            keys += _keys(out.x, len(out.rows))
        predictor.check_weights()
        if len(target) != len(keys):
            raise ValueError(f"y has {len(target)} rows, x has {len(keys)}")
        return keys, torch.cat(parts)

    def is_waiting(self, x: Any) -> list[bool]:
        """Say which rows were predicted and wait for a truth: what is left of a batch, say."""
        with self._lock:
            predictor = self.predictor
            rows = inputs.Rows(x, inputs.Reader(predictor.model, predictor.layout))
            batches = (one for whole in rows for one in predictor.cut(whole))
            keys = [key for one in batches for key in _keys(one, inputs.row_count(one))]
            return [key in self._by_input for key in keys]

    def _found(self, keys: list[str], scores: Tensor) -> list[Waiting]:
        """Find the predictions of all rows, or refuse them all."""
        points: list[Waiting] = []
        taken: dict[str, list[Waiting]] = {}
        for row, (key, known) in enumerate(zip(keys, (~scores.isnan()).tolist(), strict=True)):
            used = taken.setdefault(key, [])
            for point in self._by_input.get(key, ()):
                fits = all(point.asked[i] is not None for i, has in enumerate(known) if has)
                if fits and not any(point is one for one in used):
                    used.append(point)
                    points.append(point)
                    break
            else:
                raise ValueError(
                    f"row {row} of x was not predicted, or its truth has come already: call "
                    "predict_interval(x) first, and update once for each row"
                )
        return points

    # -- what came of it --------------------------------------------------------------------

    @property
    def observed(self) -> list[int]:
        """How many truths have come, of each score; of all groups together."""
        return _summed([lane.observed for lane in self._lanes.values()])

    @property
    def misses(self) -> list[int]:
        """How many of them were missed."""
        return _summed([lane.misses for lane in self._lanes.values()])

    @property
    def bounds(self) -> list[float] | None:
        """How far the share of misses of each score can be from alpha by now, if promised.

        With groups, the largest of all groups: :attr:`groups` has each.
        """
        each = [lane.progress(self.delay).bounds for lane in self._lanes.values()]
        if None in each:
            return None
        return [max(column) for column in zip(*(one for one in each if one), strict=True)]

    @property
    def groups(self) -> dict[Label, Progress]:
        """How far the stream of each group has come."""
        known = {label: lane for label, lane in self._lanes.items() if label is not None}
        return {label: lane.progress(self.delay) for label, lane in known.items()}


def _at_levels(
    calibration: Calibration,
    levels: Sequence[Sequence[Fraction]],
    metadata: Any,
    draws: Any,
    rows: int,
) -> list[list[list[float]]]:
    """Give for each score, and each row, the thresholds of a calibration at that score's levels."""
    inside = sorted({level for own in levels for level in own if 0 < level < 1})
    table = calibration.thresholds(inside, metadata, draws) if inside else torch.empty(0)
    result = []
    for i, own in enumerate(levels):
        thresholds = torch.full((rows, len(own)), math.inf, dtype=torch.float64)
        for place, level in enumerate(own):
            if 0 < level < 1:
                thresholds[:, place] = table[inside.index(level), :, i]
            elif level >= 1:
                thresholds[:, place] = -math.inf
        result.append(thresholds.tolist())
    return result


def _summed(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*counts, strict=True)]


def _started(scores: Tensor, size: int, forget: float) -> Window:
    """Begin a window with calibration scores, in an order that does not look at them."""
    known = scores[~scores.isnan()].numpy()
    order = np.random.default_rng(0).permutation(len(known))
    return Window(size, forget, known[order][-size:].tolist())


def _keys(x: Any, rows: int) -> list[str]:
    """Name each row of a batch by its numbers."""
    parts = [leaf.detach().cpu().contiguous() for _, leaf in inputs.leaves(x)]
    flat = [part.reshape(rows, -1).view(torch.uint8).numpy() for part in parts]
    return [
        hashlib.blake2b(b"".join(part[i].tobytes() for part in flat), digest_size=16).hexdigest()
        for i in range(rows)
    ]


def _of_windows(method: str, forget: float) -> str | None:
    """Say what of these speaks of a window of scores, if anything does."""
    if method == "plain":
        return "method 'plain' moves the window of scores and nothing else"
    if forget != 1:
        return f"forget={forget:g} is about the window of scores"
    return None


def _check_predictor(predictor: Any, method: str, forget: float) -> None:
    if not isinstance(predictor, RegressionPredictor):
        raise TypeError(
            f"a stream needs a predictor of bands, as CP, FFCP or CQR, got "
            f"{type(predictor).__name__}: label sets have no stream"
        )
    predictor.calibrated()
    if predictor.calibration.is_local and (what := _of_windows(method, forget)):
        raise ValueError(
            f"{what}, and this predictor's calibration, which has a threshold for every input, "
            "stays as it is: use method 'aci', 'dtaci' or 'pid' without it, or a predictor whose "
            "calibration is neither localized nor weighted, as CP, FFCP or CQR"
        )
    if predictor.calibration.is_summary:
        raise ValueError(
            "a stream goes on from single scores, and these were compressed: give a predictor "
            "calibrated without compressing; the last few thousand points will do"
        )
