"""Bands for a stream: predict, then learn the truth when it comes, late, in any order, or never."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp import files
from ffcp.conformal.rank import exact_alpha
from ffcp.network import checks, inputs
from ffcp.network.arrays import target_tensor
from ffcp.online.levels import Aci, Asked, Control, DtAci, Pid, Plain
from ffcp.online.windows import Window
from ffcp.regression.bands import Interval
from ffcp.regression.predictor import BandPredictor
from ffcp.regression.sides import EACH

METHODS = ("aci", "dtaci", "pid", "plain")


@dataclass
class Waiting:
    """A point that was predicted and waits for its truth: what was asked for each output."""

    row: int
    asked: list[Asked | None]  # None: that truth has come


class Online:
    """Bands for a stream, whose level or threshold follows what the stream says of it.

    Parameters
    ----------
    predictor
        A calibrated predictor of bands with one threshold for all inputs (CP, FFCP, CQR, ...). Its
        calibration scores, in a random order, are the stream's past.
    method
        ``"aci"``: a level that goes down with every miss and up otherwise. ``"dtaci"``: the same
        with several step sizes, weighed by how they do. ``"pid"``: a threshold that is controlled
        itself. ``"plain"``: the level stays, only the window moves.
    alpha
        Share of misses asked for; it cannot be changed later.
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
        window; and how late its integrator takes over, see :class:`ffcp.online.levels.Pid`.
    waiting
        How many predictions wait for their truth at most; beyond, the oldest are given up.
    path
        A file that holds the state after every call: whole or as it was before, never a part. If
        it exists, the stream goes on from there.

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
    each has a level of its own; NaN in ``y`` stands for a truth that has not come yet.

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
    >>> online.truths, online.misses
    ([100], [12])
    """

    def __init__(
        self,
        predictor: BandPredictor,
        method: str = "aci",
        alpha: Any = 0.1,
        *,
        gamma: float = 0.01,
        window: int = 1000,
        forget: float = 1.0,
        horizon: int = 500,
        step: float = 0.05,
        saturation: float = 0.5,
        waiting: int = 10_000,
        path: str | Path | None = None,
    ) -> None:
        _check_predictor(predictor)
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
        if not 0 < gamma < math.inf or not 0 < step < math.inf or not 0 < saturation < math.inf:
            raise ValueError("gamma, step and saturation must be positive numbers")
        if min(window, horizon, waiting) < 1:
            raise ValueError("window, horizon and waiting must be at least 1")
        if not 0 < forget <= 1:
            raise ValueError(f"forget must lie above 0 and be at most 1, got {forget}")
        self.predictor, self.method, self.alpha = predictor, method, alpha
        self.settings = {
            "method": method,
            "alpha": str(exact_alpha(alpha)),
            "gamma": gamma,
            "window": window,
            "forget": forget,
            "horizon": horizon,
            "step": step,
            "saturation": saturation,
            "waiting": waiting,
            **predictor.settings(),
        }
        scores = predictor.calibration.scores
        exact = predictor.alpha_of_each(alpha, scores.shape[1])
        self._windows = [_started(column, window, forget) for column in scores.T]
        self._controls = [self._control(exact, past) for past in self._windows]
        self._waiting: OrderedDict[int, tuple[str, Waiting]] = OrderedDict()
        self._by_input: dict[str, deque[Waiting]] = {}
        self.rows = 0
        self.truths = [0] * len(self._windows)
        self.misses = [0] * len(self._windows)
        self.delay = 0
        self.path = None if path is None else Path(path)
        if self.path is not None and self.path.exists():
            self.load(self.path)

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

    def predict_interval(self, x: Any) -> Interval:
        """Give bands for the next rows, at the level of now, and remember them.

        A level of 0 or less gives the whole line; one of 1 or more the prediction alone, which
        counts as a miss.
        """
        self.predictor._check_weights()
        asked = [control.ask(past) for control, past in self._both()]
        thresholds = torch.tensor([one.threshold for one in asked], dtype=torch.float64)
        nothing = thresholds == -math.inf
        parts, keys = [], []
        for seen in self.predictor._seen(self._given(x)):
            levels = thresholds.masked_fill(nothing, 0.0)[None, None]  # one level, all rows alike
            lower, upper, prediction = self.predictor._band(seen, levels)
            parts.append(self._emptied(Interval(lower[0], upper[0], prediction), nothing))
            keys += _keys(seen.x, len(seen.rows))
        for key in keys:
            self._remember(key, Waiting(self.rows, list(asked)))
            self.rows += 1
        self._saved()
        lower, upper, prediction = (torch.cat([part[i] for part in parts]) for i in range(3))
        return Interval(lower, upper, prediction, float(exact_alpha(self.alpha)))

    def _emptied(self, band: Interval, nothing: Tensor) -> Interval:
        """Shrink bands that cover nothing to the prediction."""
        if not bool(nothing.any()):
            return band
        shape = band.prediction.shape
        empty = nothing.to(band.lower.device).expand(len(band.lower), -1)
        outputs = band.prediction.reshape(shape[0], -1)
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

    def _forget(self, row: int) -> None:
        key, point = self._waiting.pop(row)
        same = self._by_input[key]
        same.remove(point)
        if not same:
            del self._by_input[key]

    # -- learning ---------------------------------------------------------------------------

    def update(self, x: Any, y: Any) -> None:
        """Learn the truths of rows that were predicted, in any order, whenever they come.

        Rows are known again by their inputs; of equal inputs the one that was predicted first is
        meant. NaN in ``y``, of several outputs, is a truth that has not come yet: come again.
        """
        self.predictor._check_weights()
        target = target_tensor(y)
        checks.finite(target.masked_fill(target.isnan(), 0.0), "y", 0)
        parts, keys = [], []
        for seen in self.predictor._seen(self._given(x)):
            start, stop = seen.rows.start, seen.rows.stop
            if len(target) < stop:
                raise ValueError(f"y has {len(target)} rows, fewer than x")
            family = self.predictor._scorer
            own = family.target(seen, target[start:stop].to(seen.output.device))
            if bool(own.isnan().any()) and len(self._windows) == 1:
                raise ValueError("y holds NaN: leave out rows whose truth has not come yet")
            parts.append(family.score(seen, own).cpu())
            keys += _keys(seen.x, len(seen.rows))
        scores = torch.cat(parts)
        if len(target) != len(keys):
            raise ValueError(f"y has {len(target)} rows, x has {len(keys)}")
        for point, row in zip(self._found(keys, scores), scores.tolist(), strict=True):
            self._learn(point, row)
        self._saved()

    def _found(self, keys: list[str], scores: Tensor) -> list[Waiting]:
        """Find the predictions of all rows, or refuse them all."""
        found: list[Waiting] = []
        taken: dict[str, list[Waiting]] = {}
        for row, (key, known) in enumerate(zip(keys, (~scores.isnan()).tolist(), strict=True)):
            used = taken.setdefault(key, [])
            for point in self._by_input.get(key, ()):
                fits = all(point.asked[i] is not None for i, has in enumerate(known) if has)
                if fits and not any(point is one for one in used):
                    used.append(point)
                    found.append(point)
                    break
            else:
                raise ValueError(
                    f"row {row} of x was not predicted, or its truth has come already: call "
                    "predict_interval(x) first, and update once for each row"
                )
        return found

    def _learn(self, point: Waiting, scores: list[float]) -> None:
        for i, (score, (control, past)) in enumerate(zip(scores, self._both(), strict=True)):
            asked = point.asked[i]
            if math.isnan(score) or asked is None:
                continue
            self.truths[i] += 1
            self.misses[i] += score > asked.threshold
            control.learn(score, asked, past)
            past.add(score)
            point.asked[i] = None
        if all(one is None for one in point.asked):
            self._forget(point.row)

    def _both(self) -> Iterator[tuple[Control, Window]]:
        return zip(self._controls, self._windows, strict=True)

    def _given(self, x: Any) -> inputs.Rows:
        return self.predictor._rows(x)

    @property
    def bounds(self) -> list[float] | None:
        """How far the share of misses of each output can be from alpha by now, if promised."""
        if self.method not in ("aci", "pid"):
            return None
        return [c.bound(self.delay) for c in self._controls if isinstance(c, (Aci, Pid))]

    # -- being stopped ----------------------------------------------------------------------

    def _saved(self) -> None:
        if self.path is not None:
            self.save(self.path)

    def save(self, path: str | Path) -> None:
        """Write the state to a file, whole or not at all."""
        scores = {
            f"window.{i}": torch.tensor(past.scores(), dtype=torch.float64)
            for i, past in enumerate(self._windows)
        }
        state = {
            "settings": self.settings,
            "fingerprint": self._fingerprint(),
            "controls": [control.state() for control in self._controls],
            "waiting": [[key, point.row, point.asked] for key, point in self._waiting.values()],
            "counts": [self.rows, self.delay, self.truths, self.misses],
        }
        files.write(path, {**scores, "online": files.seal(state, scores)})

    def load(self, path: str | Path) -> None:
        """Go on where a stream was saved; of other settings or weights it is refused."""
        tensors = files.read(path)
        try:
            sealed = tensors.pop("online")
            state = files.unseal(sealed, tensors)
            if state["settings"] != files.unpack(files.pack(self.settings)):
                raise ValueError("it was saved with other settings")
            if state["fingerprint"] != self._fingerprint():
                raise ValueError("it was saved with other weights of the model")
            past = [tensors[f"window.{i}"].tolist() for i in range(len(self._windows))]
            waiting = [
                (
                    key,
                    Waiting(row, [None if a is None else Asked(a[0], tuple(a[1])) for a in asked]),
                )
                for key, row, asked in state["waiting"]
            ]
        except (KeyError, ValueError) as error:
            raise files.CalibrationFileError(
                f"{path} cannot be used: {error}. Nothing was changed; make the stream as it was "
                "made then, or give another path"
            ) from error
        size, forget = self.settings["window"], self.settings["forget"]
        self._windows = [Window(size, forget, scores) for scores in past]
        for control, saved in zip(self._controls, state["controls"], strict=True):
            control.restore(saved)
        self.rows, self.delay, self.truths, self.misses = state["counts"]
        self._waiting, self._by_input = OrderedDict(), {}
        for key, point in waiting:
            self._waiting[point.row] = (key, point)
            self._by_input.setdefault(key, deque()).append(point)

    def _fingerprint(self) -> str:
        assert self.predictor._identity is not None
        return self.predictor._identity.fingerprint


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


def _check_predictor(predictor: Any) -> None:
    if not isinstance(predictor, BandPredictor):
        raise TypeError(f"a stream needs a predictor of bands, got {type(predictor).__name__}")
    predictor._must_be_calibrated()
    if predictor.side == EACH:
        raise ValueError(
            "a stream keeps one threshold for each output, and side='each' has two: give a "
            "predictor of another side"
        )
    if predictor.calibration.is_local or predictor.calibration.takes_groups:
        raise ValueError(
            "a stream keeps one threshold for all inputs: give a predictor without groups and "
            "without a localized or weighted calibration, as CP, FFCP or CQR"
        )
