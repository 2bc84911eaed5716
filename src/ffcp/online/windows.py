"""The scores that thresholds are looked up in: the last ones, the oldest of which may count less.

With fixed weights, 1 for the newest score and less for older ones, the weighted quantile with the
new point's weight at infinity covers with probability at least 1 - alpha less the sum over scores
of their share of the weight times the distance in total variation between the sequence and the one
with that score and the new one exchanged (Barber, Candes, Ramdas and Tibshirani, 2023).
"""

from __future__ import annotations

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
        self.scores: deque[float] = deque(scores, maxlen=size)  # the oldest first
        # Of ages 0, 1, ...: constants, so that weights depend on no data.
        self._weights = np.floor(_ONE * np.power(forget, np.arange(size))).astype(np.int64)

    def add(self, score: float) -> None:
        """Add a score; the oldest goes if there are too many."""
        self.scores.append(score)

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
