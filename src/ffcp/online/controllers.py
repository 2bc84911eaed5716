"""How thresholds follow a stream: adaptive levels (ACI, DtACI) and quantile control (PID).

Each controls one stream of scores. ``ask(past)`` is called when a point is predicted, with the
scores so far; ``learn(score, asked, past)`` is told the point's score when its truth comes, and
what was asked then. A point is missed if its score is above its threshold.

A calibration that has a threshold for every input takes the place of the scores so far: it is
looked up at the levels that are ``wanted()``, and ``placed(thresholds)`` says what the point is
asked with.

N counts the truths that have come, E the misses among them, D the most predictions that were ever
waiting for their truth when another one was made (0 if every truth comes before the next row).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

from ffcp import files
from ffcp.online.windows import Window

State = dict[str, Any]


class Asked(NamedTuple):
    """What a point was predicted with: its threshold, and levels of several step sizes.

    ``reached`` are the thresholds of these levels, where they are those of this input alone.
    """

    threshold: float
    levels: tuple[float, ...] = ()
    reached: tuple[float, ...] = ()

    def beta(self, score: float) -> float:
        """Give the largest of the levels that covers a score, 0 if none does.

        >>> Asked(3.0, (0.1, 0.2, -0.1), (5.0, 2.0, math.inf)).beta(4.0)
        0.1
        """
        pairs = zip(self.levels, self.reached, strict=True)
        return max([0.0, *(level for level, threshold in pairs if score <= threshold)])


class Control(Protocol):
    """Follows one stream of scores."""

    def ask(self, past: Window) -> Asked:
        """Give the threshold of the next point."""

    def learn(self, score: float, asked: Asked, past: Window) -> None:
        """Learn the score of a point that was predicted; ``past`` does not hold it yet."""

    def state(self) -> State:
        """Give all that changes, in plain numbers."""

    def restore(self, state: State) -> None:
        """Take over what :meth:`state` gave; what cannot have been given is a ValueError."""


class Plain:
    """The level stays as it is; only the window of scores moves (Barber and others, 2023)."""

    def __init__(self, alpha: Fraction) -> None:
        self.alpha = alpha

    def ask(self, past: Window) -> Asked:
        """Give the quantile of the window at the level asked for."""
        return Asked(past.quantile(self.alpha))

    def learn(self, score: float, asked: Asked, past: Window) -> None:
        """Learn nothing: the window does."""

    def state(self) -> State:
        """Give nothing."""
        return {}

    def restore(self, state: State) -> None:
        """Take nothing."""
        _only(state)


class Aci:
    """Adaptive conformal inference (Gibbs and Candes, 2021).

    The level after N truths and E misses is alpha + gamma (alpha N - E), in fractions, without
    any drift. At a level of 0 or less the band is the whole line, at 1 or more it covers nothing.
    So, on any sequence, |E / N - alpha| <= (max(alpha, 1 - alpha) + gamma (D + 1)) / (gamma N).
    """

    def __init__(self, alpha: Fraction, gamma: Fraction) -> None:
        self.alpha, self.gamma = alpha, gamma
        self.observed = self.misses = 0

    @property
    def level(self) -> Fraction:
        """The level of the next point."""
        return self.alpha + self.gamma * (self.alpha * self.observed - self.misses)

    def ask(self, past: Window) -> Asked:
        """Give the quantile of the window at the level reached."""
        return Asked(past.quantile(self.level))

    def wanted(self) -> list[Fraction]:
        """Want the level reached."""
        return [self.level]

    def placed(self, thresholds: Sequence[float]) -> Asked:
        """Take the threshold there."""
        return Asked(thresholds[0])

    def learn(self, score: float, asked: Asked, past: Window) -> None:
        """Count the truth, and the miss if it is one."""
        self.observed += 1
        self.misses += score > asked.threshold

    def bound(self, delay: int) -> float:
        """Say how far the share of misses can be from alpha by now."""
        far = max(self.alpha, 1 - self.alpha) + self.gamma * (delay + 1)
        return float(far / (self.gamma * max(1, self.observed)))

    def state(self) -> State:
        """Give the two counts."""
        return {"observed": self.observed, "misses": self.misses}

    def restore(self, state: State) -> None:
        """Take the two counts."""
        _only(state, "observed", "misses")
        self.observed, self.misses = _counts(state)


class DtAci:
    """ACI with several step sizes, weighed by how they do (Gibbs and Candes, 2024).

    The level is the mean of the experts' levels. Over any ``horizon`` rows whose truths come in
    order its pinball loss is at most that of the best of k step sizes, plus
    (log(k / sigma) + 2 sigma horizon) / eta + eta times the sum of the mean squared losses.
    Long-run coverage is not promised, except roughly, by the experts that have it.

    The loss of a level is that at beta, the largest level that covers. Of a calibration with a
    threshold for every input only the experts' own thresholds are looked up: beta is the largest of
    their levels that covers. Whether an expert misses is the same, and what the experts' losses
    differ by depends on where beta lies among them alone; the bound is about any beta.
    """

    gammas = tuple(Fraction(one, 1000) for one in (1, 2, 4, 8, 16, 32, 64, 128))

    def __init__(self, alpha: Fraction, horizon: int = 500) -> None:
        self.alpha, self.horizon = alpha, horizon
        self.observed = 0
        k = len(self.gammas)
        self.misses = [0] * k
        self.weights = [1 / k] * k
        self.sigma = 1 / (2 * horizon)
        a = float(alpha)
        squares = ((1 - a) ** 2 * a**3 + a**2 * (1 - a) ** 3) / 3  # of the loss, p uniform
        self.eta = math.sqrt((math.log(2 * k * horizon) + 1) / (horizon * squares))

    def levels(self) -> list[Fraction]:
        """Give the level of each expert."""
        return [
            self.alpha + gamma * (self.alpha * self.observed - misses)
            for gamma, misses in zip(self.gammas, self.misses, strict=True)
        ]

    def mean(self) -> Fraction:
        """Give the mean of the experts' levels."""
        pairs = zip(self.weights, self.levels(), strict=True)
        return Fraction(math.fsum(weight * float(level) for weight, level in pairs))

    def ask(self, past: Window) -> Asked:
        """Give the quantile of the window at the mean of the experts' levels."""
        return Asked(past.quantile(self.mean()), tuple(map(float, self.levels())))

    def wanted(self) -> list[Fraction]:
        """Want the mean level, and that of each expert."""
        return [self.mean(), *self.levels()]

    def placed(self, thresholds: Sequence[float]) -> Asked:
        """Take the threshold of the mean level, and remember those of the experts."""
        return Asked(thresholds[0], tuple(map(float, self.levels())), tuple(thresholds[1:]))

    def learn(self, score: float, asked: Asked, past: Window) -> None:
        """Weigh the experts by their losses, and move each by its own step."""
        beta = asked.beta(score) if asked.reached else past.largest_level(score)
        losses = [pinball(beta, level, float(self.alpha)) for level in asked.levels]
        least = min(losses)
        weights = [
            w * math.exp(-self.eta * (loss - least))
            for w, loss in zip(self.weights, losses, strict=True)
        ]
        total = math.fsum(weights)
        even = self.sigma / len(weights)
        self.weights = [(1 - self.sigma) * w / total + even for w in weights]
        self.observed += 1
        for i, level in enumerate(asked.levels):
            self.misses[i] += level > beta

    def state(self) -> State:
        """Give the counts and weights."""
        return {
            "observed": self.observed,
            "misses": list(self.misses),
            "weights": list(self.weights),
        }

    def restore(self, state: State) -> None:
        """Take the counts and weights."""
        _only(state, "observed", "misses", "weights")
        observed = files.count(state["observed"])
        misses = [files.count(one) for one in files.rebuilt(list, state["misses"])]
        weights = [float(one) for one in files.rebuilt(tuple[float, ...], state["weights"])]
        if len(misses) != len(self.gammas) or max(misses) > observed:
            raise ValueError("the misses of its step sizes are not counts of them")
        is_share = all(0 < weight <= 1 for weight in weights)
        if len(weights) != len(misses) or not is_share or abs(math.fsum(weights) - 1) > 1e-6:
            raise ValueError("the weights of its step sizes are no shares")
        self.observed, self.misses, self.weights = observed, misses, weights


def pinball(beta: float, level: float, alpha: float) -> float:
    """Give the loss of a level where beta was the largest that covers.

    >>> round(pinball(0.5, 0.1, alpha=0.1), 6), round(pinball(0.0, 0.1, alpha=0.1), 6)
    (0.04, 0.09)
    """
    return alpha * (beta - level) - min(0.0, beta - level)


class Pid:
    """Conformal PID control of the threshold itself (Angelopoulos, Candes and Tibshirani, 2023).

    The threshold is a quantile tracker (P: it goes up by a step times 1 - alpha with every miss,
    and down by a step times alpha otherwise) plus an integrator (I): with x = E - alpha N and u =
    N + e, scale * tan(x log(u) / (u saturation)), which is infinite from |x| = (pi / 2) saturation
    u / log(u) on. So, on any sequence, of scores of any size, |E - alpha N| <= (pi / 2) saturation
    u / log(u) + 1 + D: the share of misses comes to alpha, slowly, as 1 / log(N).

    Parameters
    ----------
    alpha
        Share of misses asked for.
    step
        Of the tracker, as a share of the spread of the scores.
    saturation, scale
        Of the integrator.
    """

    def __init__(self, alpha: Fraction, step: float, saturation: float, scale: float) -> None:
        self.alpha, self.step = alpha, step
        self.saturation, self.scale = saturation, scale
        self.observed = self.misses = 0
        self.tracked: float | None = None

    @property
    def excess(self) -> float:
        """How many misses there were beyond alpha of the truths."""
        return float(self.misses - self.alpha * self.observed)

    @property
    def limit(self) -> float:
        """The excess from which on the integrator is infinite."""
        u = self.observed + math.e
        return math.pi / 2 * self.saturation * u / math.log(u)

    def ask(self, past: Window) -> Asked:
        """Return the sum of tracker and integrator."""
        if self.tracked is None:
            start = past.quantile(self.alpha)
            self.tracked = start if math.isfinite(start) else past.largest()
        return self._controlled(0.0, self.tracked)

    def wanted(self) -> list[Fraction]:
        """Want the level asked for: the threshold there is what is expected."""
        return [self.alpha]

    def placed(self, thresholds: Sequence[float]) -> Asked:
        """Add what tracker and integrator say to the threshold that was looked up."""
        if self.tracked is None:
            self.tracked = 0.0
        return self._controlled(thresholds[0], self.tracked)

    def _controlled(self, expected: float, tracked: float) -> Asked:
        excess, limit = self.excess, self.limit
        if abs(excess) >= limit:
            return Asked(math.copysign(math.inf, excess))
        return Asked(expected + tracked + self.scale * math.tan(math.pi / 2 * excess / limit))

    def learn(self, score: float, asked: Asked, past: Window) -> None:
        """Count the truth and the miss, and move the tracker."""
        is_miss = score > asked.threshold
        self.observed += 1
        self.misses += is_miss
        step = self.step * past.spread()
        assert self.tracked is not None
        self.tracked += step * (float(is_miss) - float(self.alpha))

    def bound(self, delay: int) -> float:
        """Say how far the share of misses can be from alpha by now."""
        return (self.limit + 1 + delay) / max(1, self.observed)

    def state(self) -> State:
        """Give the counts and the tracker."""
        return {"observed": self.observed, "misses": self.misses, "tracked": self.tracked}

    def restore(self, state: State) -> None:
        """Take the counts and the tracker."""
        _only(state, "observed", "misses", "tracked")
        tracked = files.rebuilt(float | None, state["tracked"])
        if not math.isfinite(tracked or 0.0):
            raise ValueError(f"its threshold is {tracked}")
        self.observed, self.misses = _counts(state)
        self.tracked = None if tracked is None else float(tracked)


def _only(state: State, *names: str) -> None:
    if set(state) != set(names):
        raise ValueError(f"it holds {sorted(state)} where {sorted(names)} were saved")


def _counts(state: State) -> tuple[int, int]:
    observed, misses = files.count(state["observed"]), files.count(state["misses"])
    if misses > observed:
        raise ValueError("more truths were missed than came")
    return observed, misses
