"""The scores that thresholds are looked up in: the last ones, the oldest of which may count less.

With fixed weights, 1 for the newest score and less for older ones, the weighted quantile with the
new point's weight at infinity covers with probability at least 1 - alpha less the sum over scores
of their share of the weight times the distance in total variation between the sequence and the one
with that score and the new one exchanged (Barber, Candes, Ramdas and Tibshirani, 2023).
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable
from fractions import Fraction

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
    >>> window = Window(4)
    >>> for score in [9.0, 1.0, 2.0, 3.0, 4.0]:
    ...     window.add(score)
    >>> window.quantile(Fraction(1, 5)), window.quantile(Fraction(1, 10))
    (4.0, inf)
    """

    def __init__(self, size: int, forget: float = 1.0, scores: Iterable[float] = ()) -> None:
        self.size, self.forget = size, forget
        self._scores: deque[float] = deque()
        self._sorted: list[float] = []
        # Of ages 0, 1, ...: constants, so that weights depend on no data.
        ages = np.arange(size) if forget < 1 else np.zeros(size)
        self._weights = np.floor(_ONE * np.power(forget, ages)).astype(np.int64)
        for score in scores:
            self.add(score)

    def __len__(self) -> int:
        return len(self._scores)

    def scores(self) -> list[float]:
        """Give the scores, the oldest first."""
        return list(self._scores)

    def add(self, score: float) -> None:
        """Take a score; the oldest goes if there are too many."""
        if len(self._scores) == self.size:
            oldest = self._scores.popleft()
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]
        self._scores.append(score)
        bisect.insort(self._sorted, score)

    def quantile(self, alpha: Fraction) -> float:
        """Give the 1 - alpha quantile with the new point at infinity.

        A level of 0 or less gives infinity, one of 1 or more minus infinity: nothing is covered.
        """
        if alpha <= 0 or alpha >= 1:
            return math.inf if alpha <= 0 else -math.inf
        n = len(self._scores)
        if self.forget == 1:
            rank = math.ceil((n + 1) * (1 - alpha))
            return self._sorted[rank - 1] if rank <= n else math.inf
        scores, sums = self._ladder()
        total = (int(sums[-1]) if n else 0) + _ONE
        place = int(np.searchsorted(sums, math.ceil(total * (1 - alpha))))
        return float(scores[place]) if place < n else math.inf

    def largest_level(self, score: float) -> float:
        """Give the largest alpha whose threshold covers a score."""
        n = len(self._scores)
        if self.forget == 1:
            below = bisect.bisect_left(self._sorted, score)
            return 1 - below / (n + 1)
        scores, sums = self._ladder()
        place = int(np.searchsorted(scores, score))
        total = (int(sums[-1]) if n else 0) + _ONE
        return 1 - (int(sums[place - 1]) if place else 0) / total

    def largest(self) -> float:
        """Give the largest score there is, 0 if there are none."""
        return self._sorted[-1] if self._sorted else 0.0

    def spread(self) -> float:
        """Give the distance from the smallest score to the largest, 1 if there is none."""
        spread = self._sorted[-1] - self._sorted[0] if self._sorted else 0.0
        return spread if 0 < spread < math.inf else 1.0

    def _ladder(self) -> tuple[np.ndarray, np.ndarray]:
        """Sort scores, with running sums of what they count."""
        scores = np.array(self._scores)
        order = np.argsort(scores, kind="stable")
        weights = self._weights[: len(scores)][::-1]  # the newest is the last
        return scores[order], np.cumsum(weights[order])
