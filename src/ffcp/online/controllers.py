"""How thresholds follow a stream: adaptive levels (ACI, DtACI) and quantile control (PID).

Each controls one stream of scores. ``ask()`` returns what the next point is predicted with;
``learn(score, asked)`` is told the point's score when its truth comes, and what was asked then. A
point is missed if its score is above its threshold.

Thresholds are looked up at ``levels()``: in the window of the last scores, or, where a calibration
has a threshold for every input, in that calibration; ``asked(thresholds)`` makes of them what the
point is asked with.

N counts the truths that have come, E the misses among them, D the most predictions that were ever
waiting for their truth when another one was made (0 if every truth comes before the next row).

Scores are looked up in a window of the last ones, the oldest of which may count less. With fixed
weights, 1 for the newest score and less for older ones, the weighted quantile with the new point's
weight at infinity covers with probability at least 1 - alpha less the sum over scores of their
share of the weight times the distance in total variation between the sequence and the one with
that score and the new one exchanged (Barber, Candes, Ramdas and Tibshirani, 2023).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

_ONE = 2**23  # the weight 1, in whole numbers


class Window:
    """The last ``size`` scores.

    Parameters
    ----------
    size
        How many scores count.
    forget
        A score counts ``forget`` times as much as the one after it; 1: all alike.

    Examples
    --------
    >>> window = Window(4, scores=[9.0, 1.0, 2.0, 3.0, 4.0])
    >>> window.quantile(Fraction(1, 5)), window.quantile(Fraction(1, 10))
    (4.0, inf)
    """

    def __init__(self, size: int, forget: float = 1.0, scores: Iterable[float] = ()) -> None:
        self.scores: deque[float] = deque(scores, maxlen=size)  # the oldest first
        # Of ages 0, 1, ...: constants, so that weights depend on no data.
        self._weights = np.floor(_ONE * np.power(forget, np.arange(size))).astype(np.int64)

    def quantile(self, alpha: Fraction) -> float:
        """Return the 1 - alpha quantile with the new point at infinity.

        A level of 0 or less gives infinity, one of 1 or more minus infinity: nothing is covered.
        """
        if alpha <= 0 or alpha >= 1:
            return math.inf if alpha <= 0 else -math.inf
        scores, sums = self._sorted()
        place = int(np.searchsorted(sums, math.ceil((int(sums[-1]) + _ONE) * (1 - alpha)))) - 1
        return float(scores[place]) if place < len(scores) else math.inf

    def largest_level(self, score: float) -> float:
        """Return the largest alpha whose threshold covers a score."""
        scores, sums = self._sorted()
        return 1 - int(sums[np.searchsorted(scores, score)]) / (int(sums[-1]) + _ONE)

    @property
    def largest(self) -> float:
        """The largest score there is, 0 if there are none."""
        return max(self.scores, default=0.0)

    @property
    def spread(self) -> float:
        """The distance from the smallest score to the largest, 1 if there is none."""
        spread = self.largest - min(self.scores, default=0.0)
        return spread if 0 < spread < math.inf else 1.0

    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores in order, and the sums of weights before each of them and of all."""
        scores = np.array(self.scores)
        order = np.argsort(scores, kind="stable")
        weights = self._weights[: len(scores)][::-1]  # the newest is the last
        return scores[order], np.concatenate([[0], np.cumsum(weights[order])])


class Asked(NamedTuple):
    """What a point was predicted with: its threshold, and levels of several step sizes.

    ``reached`` are the thresholds of these levels, where they are those of this input alone.
    """

    threshold: float
    levels: Sequence[float] = ()
    reached: Sequence[float] = ()

    def beta(self, score: float) -> float:
        """Return the largest of the levels that covers a score, 0 if none does.

        >>> Asked(3.0, (0.1, 0.2, -0.1), (5.0, 2.0, math.inf)).beta(4.0)
        0.1
        """
        pairs = zip(self.levels, self.reached, strict=True)
        return max([0.0, *(level for level, threshold in pairs if score <= threshold)])


class Control:
    """The level stays as it is; only the window of scores moves (Barber and others, 2023)."""

    changing: tuple[str, ...] = ("observed", "misses")

    def __init__(self, alpha: Fraction, past: Window) -> None:
        self.alpha, self.past = alpha, past
        self.observed = self.misses = 0

    def levels(self) -> list[Fraction]:
        """Return the levels at which thresholds are looked up."""
        return [self.alpha]

    def asked(self, thresholds: Sequence[float]) -> Asked:
        """Return what a point is asked with, from the thresholds at the levels."""
        return Asked(thresholds[0])

    def ask(self) -> Asked:
        """Return what the next point is asked with, by the window of scores."""
        return self.asked([self.past.quantile(level) for level in self.levels()])

    def learn(self, score: float, asked: Asked) -> None:
        """Count the truth, and the miss if it is one."""
        self.observed += 1
        self.misses += score > asked.threshold
        self.past.scores.append(score)  # the oldest goes if there are too many

    def bound(self, delay: int) -> float | None:
        """Return how far the share of misses can be from alpha by now, if that is promised."""
        return None

    def state(self) -> dict[str, Any]:
        """Return all that changes as plain data."""
        own = {name: getattr(self, name) for name in self.changing}
        return {**own, "scores": list(self.past.scores)}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` returned."""
        self.past.scores.clear()
        self.past.scores.extend(state["scores"])
        self.__dict__.update({name: state[name] for name in self.changing})


class Aci(Control):
    """Adaptive conformal inference (Gibbs and Candes, 2021).

    The level after N truths and E misses is alpha + gamma (alpha N - E), in fractions, without
    any drift. At a level of 0 or less the band is the whole line, at 1 or more it covers nothing.
    So, on any sequence, |E / N - alpha| <= (max(alpha, 1 - alpha) + gamma (D + 1)) / (gamma N).
    """

    def __init__(self, alpha: Fraction, past: Window, gamma: Fraction) -> None:
        super().__init__(alpha, past)
        self.gamma = gamma

    def levels(self) -> list[Fraction]:
        """Return the level reached."""
        return [self.alpha + self.gamma * (self.alpha * self.observed - self.misses)]

    def bound(self, delay: int) -> float:
        """Return how far the share of misses can be from alpha by now."""
        far = max(self.alpha, 1 - self.alpha) + self.gamma * (delay + 1)
        return float(far / (self.gamma * max(1, self.observed)))


class DtAci(Control):
    """ACI with several step sizes, weighed by how they do (Gibbs and Candes, 2024).

    The level is the mean of the experts' levels. Over any ``horizon`` rows whose truths come in
    order its pinball loss is at most that of the best of k step sizes, plus
    (log(k / sigma) + 2 sigma horizon) / eta + eta times the sum of the mean squared losses.
    Long-run coverage is not promised, except roughly, by the experts that have it.

    The loss of a level is that at beta, the largest level that covers. Of a calibration with a
    threshold for every input only the experts' own thresholds are looked up: beta is the largest of
    their levels that covers. Whether an expert misses is the same, and the bound is about any beta.
    """

    changing = ("observed", "misses", "expert_misses", "weights")
    gammas = tuple(Fraction(one, 1000) for one in (1, 2, 4, 8, 16, 32, 64, 128))

    def __init__(self, alpha: Fraction, past: Window, horizon: int = 500) -> None:
        super().__init__(alpha, past)
        k = len(self.gammas)
        self.expert_misses, self.weights = [0] * k, [1 / k] * k
        self.sigma = 1 / (2 * horizon)
        a = float(alpha)
        squares = ((1 - a) ** 2 * a**3 + a**2 * (1 - a) ** 3) / 3  # of the loss, p uniform
        self.eta = math.sqrt((math.log(2 * k * horizon) + 1) / (horizon * squares))

    def levels(self) -> list[Fraction]:
        """Return the mean of the experts' levels, then the level of each."""
        levels = [
            self.alpha + gamma * (self.alpha * self.observed - misses)
            for gamma, misses in zip(self.gammas, self.expert_misses, strict=True)
        ]
        pairs = zip(self.weights, levels, strict=True)
        return [Fraction(math.fsum(weight * float(level) for weight, level in pairs)), *levels]

    def asked(self, thresholds: Sequence[float]) -> Asked:
        """Return the threshold of the mean level, with the experts' levels and thresholds."""
        _, *levels = map(float, self.levels())
        return Asked(thresholds[0], tuple(levels), tuple(thresholds[1:]))

    def ask(self) -> Asked:
        """Return the quantile of the window at the mean level."""
        return self.asked([self.past.quantile(self.levels()[0])])

    def learn(self, score: float, asked: Asked) -> None:
        """Weigh the experts by their losses, and move each by its own step."""
        beta = asked.beta(score) if asked.reached else self.past.largest_level(score)
        losses = [pinball(beta, level, float(self.alpha)) for level in asked.levels]
        least = min(losses)
        weights = [
            w * math.exp(-self.eta * (loss - least))
            for w, loss in zip(self.weights, losses, strict=True)
        ]
        total = math.fsum(weights)
        even = self.sigma / len(weights)
        self.weights = [(1 - self.sigma) * w / total + even for w in weights]
        for i, level in enumerate(asked.levels):
            self.expert_misses[i] += level > beta
        super().learn(score, asked)


def pinball(beta: float, level: float, alpha: float) -> float:
    """Return the loss of a level where beta was the largest that covers.

    >>> round(pinball(0.5, 0.1, alpha=0.1), 6), round(pinball(0.0, 0.1, alpha=0.1), 6)
    (0.04, 0.09)
    """
    return alpha * (beta - level) - min(0.0, beta - level)


class Pid(Control):
    """Conformal PID control of the threshold itself (Angelopoulos, Candes and Tibshirani, 2023).

    The threshold is a quantile tracker (P: it goes up by a step times 1 - alpha with every miss,
    and down by a step times alpha otherwise) plus an integrator (I): with x = E - alpha N and u =
    N + e, scale * tan(x log(u) / (u saturation)), which is infinite from |x| = (pi / 2) saturation
    u / log(u) on. So, on any sequence, of scores of any size, |E - alpha N| <= (pi / 2) saturation
    u / log(u) + 1 + D: the share of misses comes to alpha, slowly, as 1 / log(N). The threshold of
    a calibration that has one for every input is added.

    Parameters
    ----------
    alpha
        Share of misses asked for.
    past
        The scores so far; their spread is the scale.
    saturation
        Of the integrator.
    """

    changing = ("observed", "misses", "tracked")

    step = 0.05  # of the tracker, as a share of the spread of the scores

    def __init__(self, alpha: Fraction, past: Window, saturation: float) -> None:
        super().__init__(alpha, past)
        self.saturation, self.scale = saturation, past.spread
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

    def ask(self) -> Asked:
        """Return the sum of tracker and integrator."""
        if self.tracked is None:
            start = self.past.quantile(self.alpha)
            self.tracked = start if math.isfinite(start) else self.past.largest
        return self.asked([0.0])

    def asked(self, thresholds: Sequence[float]) -> Asked:
        """Return the threshold that was looked up plus tracker and integrator."""
        if self.tracked is None:
            self.tracked = 0.0
        excess, limit = self.excess, self.limit
        if abs(excess) >= limit:
            return Asked(math.copysign(math.inf, excess))
        integrated = self.scale * math.tan(math.pi / 2 * excess / limit)
        return Asked(thresholds[0] + self.tracked + integrated)

    def learn(self, score: float, asked: Asked) -> None:
        """Count the truth and the miss, and move the tracker."""
        is_miss = score > asked.threshold
        assert self.tracked is not None
        self.tracked += self.step * self.past.spread * (float(is_miss) - float(self.alpha))
        super().learn(score, asked)

    def bound(self, delay: int) -> float:
        """Return how far the share of misses can be from alpha by now."""
        return (self.limit + 1 + delay) / max(1, self.observed)
