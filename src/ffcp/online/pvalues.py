"""Online conformal p-values: the rank of each score among all before it.

P-values against one fixed calibration set are uniform one by one, but depend on each other through
that set: if it happens to lie low, all of them are too small, and a martingale that bets on them
raises a false alarm in the end. So the set grows: each score is ranked among the calibration and
all that came before it, itself included, and joins them. These p-values are independent and
uniform as long as the data is exchangeable, calibration and stream together.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any

import numpy as np


class OnlineRanks:
    """Ranks scores among those before them, with ties broken at random.

    Parameters
    ----------
    start
        Scores that came before, in any order.
    seed
        Of the random numbers that break ties; by default the operating system's.

    Attributes
    ----------
    scores : list of float
        All scores so far, sorted.

    Examples
    --------
    >>> ranks = OnlineRanks([1.0, 2.0, 3.0], seed=0)
    >>> 0 < ranks.p_value(10.0) <= 0.25  # the largest of four
    True
    >>> len(ranks.scores)
    4
    """

    def __init__(self, start: Iterable[float] = (), seed: int | None = None) -> None:
        self.scores = sorted(float(one) for one in start)
        self._random = np.random.default_rng(seed)

    def p_value(self, score: float) -> float:
        """Return the share of scores, this one included, that are larger; ties by chance."""
        theta = 1.0 - self._random.random()  # in (0, 1]: a p-value is never 0
        first = bisect.bisect_left(self.scores, score)
        last = bisect.bisect_right(self.scores, score)
        larger, equal = len(self.scores) - last, last - first + 1
        self.scores.insert(last, score)
        return (larger + theta * equal) / len(self.scores)

    def state(self) -> dict[str, Any]:
        """Return the scores and the state of the random numbers."""
        return {"scores": self.scores, "random": self._random.bit_generator.state}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` returned."""
        self.scores = state["scores"]
        self._random.bit_generator.state = state["random"]
