"""Controllers that adapt thresholds to a stream: ACI, DtACI and quantile control (PID).

Each controls one stream of scores. ``next_threshold()`` returns the threshold of the next row;
``learn(score, applied)`` updates the controller with the row's score, when its target arrives, and
with what was applied to it. A row is missed if its score is above its threshold.

Thresholds are looked up at ``levels()``: in the window of the last scores, or, if a calibration
has a threshold for every input, in that calibration; ``applied(thresholds)`` makes the row's
threshold of them.

N is the number of targets that have arrived, E the number of misses among them, D the largest
number of predictions that were waiting for their target when another one was made (0 if every
target arrives before the next row).

Scores are looked up in a window of the last ones, the oldest of which may count less. With fixed
weights, 1 for the newest score and less for older ones, the weighted quantile with the new row's
weight at infinity covers with probability at least 1 - alpha minus the sum over scores of their
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

_ONE = 2**23  # the weight 1, as an integer


class Window:
    """The last ``size`` scores.

    Parameters
    ----------
    size : int
        Number of scores.
    forget : float, default=1.0
        The weight of a score relative to the next newer one; 1 means equal weights.

    Examples
    --------
    >>> window = Window(4, scores=[9.0, 1.0, 2.0, 3.0, 4.0])
    >>> window.quantile(Fraction(1, 5)), window.quantile(Fraction(1, 10))
    (4.0, inf)
    """

    def __init__(self, size: int, forget: float = 1.0, scores: Iterable[float] = ()) -> None:
        self.scores: deque[float] = deque(scores, maxlen=size)  # the oldest first
        # By age 0, 1, ...: constants, as the weights must not depend on the data.
        self._weights = np.floor(_ONE * np.power(forget, np.arange(size))).astype(np.int64)

    def quantile(self, alpha: Fraction) -> float:
        """Return the 1 - alpha quantile with the new row at infinity.

        A level of 0 or less returns infinity, one of 1 or more minus infinity: nothing is covered.
        """
        if alpha <= 0 or alpha >= 1:
            return math.inf if alpha <= 0 else -math.inf
        scores, sums = self._sorted()
        needed = math.ceil((int(sums[-1]) + _ONE) * (1 - alpha))  # weight, with the new row's
        position = int(np.searchsorted(sums, needed)) - 1
        return float(scores[position]) if position < len(scores) else math.inf

    def largest_level(self, score: float) -> float:
        """Return the largest alpha whose threshold covers a score."""
        scores, sums = self._sorted()
        return 1 - int(sums[np.searchsorted(scores, score)]) / (int(sums[-1]) + _ONE)

    @property
    def largest(self) -> float:
        """The largest score, 0 if there are none."""
        return max(self.scores, default=0.0)

    @property
    def spread(self) -> float:
        """The distance from the smallest score to the largest, 1 if that is 0 or infinite."""
        spread = self.largest - min(self.scores, default=0.0)
        return spread if 0 < spread < math.inf else 1.0

    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the sorted scores, and the cumulative weights before each of them and of all."""
        scores = np.array(self.scores)
        order = np.argsort(scores, kind="stable")
        weights = self._weights[: len(scores)][::-1]  # the newest is the last
        return scores[order], np.concatenate([[0], np.cumsum(weights[order])])


class Applied(NamedTuple):
    """The threshold that was applied to a row, and the levels of several step sizes.

    ``thresholds`` are those of the levels, if thresholds depend on the input.
    """

    threshold: float
    levels: Sequence[float] = ()
    thresholds: Sequence[float] = ()

    def beta(self, score: float) -> float:
        """Return the largest of the levels that covers a score, 0 if none does.

        >>> Applied(3.0, (0.1, 0.2, -0.1), (5.0, 2.0, math.inf)).beta(4.0)
        0.1
        """
        pairs = zip(self.levels, self.thresholds, strict=True)
        return max([0.0, *(level for level, threshold in pairs if score <= threshold)])


class Control:
    """A fixed level; only the window of scores moves (Barber and others, 2023)."""

    changing: tuple[str, ...] = ("observed", "misses")

    def __init__(self, alpha: Fraction, past: Window) -> None:
        self.alpha, self.past = alpha, past
        self.observed = self.misses = 0

    def levels(self) -> list[Fraction]:
        """Return the levels at which thresholds are looked up."""
        return [self.alpha]

    def applied(self, thresholds: Sequence[float]) -> Applied:
        """Return the threshold applied to a row, given those at the levels."""
        return Applied(thresholds[0])

    def next_threshold(self) -> Applied:
        """Return the threshold applied to the next row, by the window of scores."""
        return self.applied([self.past.quantile(level) for level in self.levels()])

    def learn(self, score: float, applied: Applied) -> None:
        """Count the target, and whether it was missed."""
        self.observed += 1
        self.misses += score > applied.threshold
        self.past.scores.append(score)  # a full window drops the oldest

    def bound(self, delay: int) -> float | None:
        """Return a bound on the distance of the share of misses from alpha; None without one."""
        return None

    def state(self) -> dict[str, Any]:
        """Return the changing attributes as plain data."""
        state = {name: getattr(self, name) for name in self.changing}
        return {**state, "scores": list(self.past.scores)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self.past.scores.clear()
        self.past.scores.extend(state["scores"])
        self.__dict__.update({name: state[name] for name in self.changing})


class Aci(Control):
    """Adaptive conformal inference (Gibbs and Candes, 2021).

    The level after N targets and E misses is alpha + gamma (alpha N - E), in exact fractions. At a
    level of 0 or less the interval is the whole line, at 1 or more it covers nothing. So, on any
    sequence, |E / N - alpha| <= (max(alpha, 1 - alpha) + gamma (D + 1)) / (gamma N).
    """

    def __init__(self, alpha: Fraction, past: Window, gamma: Fraction) -> None:
        super().__init__(alpha, past)
        self.gamma = gamma

    def levels(self) -> list[Fraction]:
        """Return the current level."""
        return [self.alpha + self.gamma * (self.alpha * self.observed - self.misses)]

    def bound(self, delay: int) -> float:
        """Return a bound on the distance of the share of misses from alpha."""
        excess = max(self.alpha, 1 - self.alpha) + self.gamma * (delay + 1)
        return float(excess / (self.gamma * max(1, self.observed)))


class DtAci(Control):
    """ACI with several step sizes, weighted by their losses (Gibbs and Candes, 2024).

    The level is the mean of the experts' levels. Over any ``horizon`` rows whose targets arrive in
    order its pinball loss is at most that of the best of k step sizes, plus
    (log(k / sigma) + 2 sigma horizon) / eta + eta times the sum of the mean squared losses.
    Long-run coverage is not guaranteed, except approximately, by the experts that have it.

    The loss of a level is that at beta, the largest level that covers. If thresholds depend on the
    input, only the experts' own thresholds are looked up: beta is the largest of their levels that
    covers. Whether an expert misses does not change, and the bound holds for any beta.
    """

    changing = ("observed", "misses", "expert_misses", "weights")
    gammas = tuple(Fraction(2**i, 1000) for i in range(8))

    def __init__(self, alpha: Fraction, past: Window, horizon: int = 500) -> None:
        super().__init__(alpha, past)
        k, a = len(self.gammas), float(alpha)
        self.expert_misses, self.weights = [0] * k, [1 / k] * k
        self.sigma = 1 / (2 * horizon)
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

    def applied(self, thresholds: Sequence[float]) -> Applied:
        """Return the threshold of the mean level, with the experts' levels and thresholds."""
        _, *levels = map(float, self.levels())
        return Applied(thresholds[0], tuple(levels), tuple(thresholds[1:]))

    def next_threshold(self) -> Applied:
        """Return the quantile of the window at the mean level."""
        return self.applied([self.past.quantile(self.levels()[0])])

    def learn(self, score: float, applied: Applied) -> None:
        """Weight the experts by their losses, and move each by its own step."""
        beta = applied.beta(score) if applied.thresholds else self.past.largest_level(score)
        losses = [pinball(beta, level, float(self.alpha)) for level in applied.levels]
        least = min(losses)
        weights = [
            w * math.exp(-self.eta * (loss - least))
            for w, loss in zip(self.weights, losses, strict=True)
        ]
        total = math.fsum(weights)
        even = self.sigma / len(weights)
        self.weights = [(1 - self.sigma) * w / total + even for w in weights]
        for i, level in enumerate(applied.levels):
            self.expert_misses[i] += level > beta
        super().learn(score, applied)


def pinball(beta: float, level: float, alpha: float) -> float:
    """Return the pinball loss of a level, where beta is the largest level that covers.

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
    u / log(u) + 1 + D: the share of misses converges to alpha, slowly, as 1 / log(N). If a
    calibration has a threshold for every input, that is added.

    Parameters
    ----------
    alpha : Fraction
        Target share of misses.
    past : Window
        The scores so far; their spread is the scale.
    saturation : float
        Saturation constant of the integrator.
    """

    changing = ("observed", "misses", "tracked")

    step = 0.05  # of the tracker, as a share of the spread of the scores

    def __init__(self, alpha: Fraction, past: Window, saturation: float) -> None:
        super().__init__(alpha, past)
        self.saturation, self.scale = saturation, past.spread
        self.tracked: float | None = None

    @property
    def excess(self) -> float:
        """The number of misses minus alpha times the number of targets."""
        return float(self.misses - self.alpha * self.observed)

    @property
    def limit(self) -> float:
        """The excess at which the integrator becomes infinite."""
        u = self.observed + math.e
        return math.pi / 2 * self.saturation * u / math.log(u)

    def next_threshold(self) -> Applied:
        """Return the sum of tracker and integrator."""
        if self.tracked is None:
            start = self.past.quantile(self.alpha)
            self.tracked = start if math.isfinite(start) else self.past.largest
        return self.applied([0.0])

    def applied(self, thresholds: Sequence[float]) -> Applied:
        """Return the sum of the looked-up threshold, tracker and integrator."""
        if self.tracked is None:
            self.tracked = 0.0
        excess, limit = self.excess, self.limit
        if abs(excess) >= limit:
            return Applied(math.copysign(math.inf, excess))
        integrated = self.scale * math.tan(math.pi / 2 * excess / limit)
        return Applied(thresholds[0] + self.tracked + integrated)

    def learn(self, score: float, applied: Applied) -> None:
        """Count the target and the miss, and move the tracker."""
        is_miss = score > applied.threshold
        assert self.tracked is not None
        self.tracked += self.step * self.past.spread * (float(is_miss) - float(self.alpha))
        super().learn(score, applied)

    def bound(self, delay: int) -> float:
        """Return a bound on the distance of the share of misses from alpha."""
        return (self.limit + 1 + delay) / max(1, self.observed)
