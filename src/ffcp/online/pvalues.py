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
from itertools import pairwise
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

    Examples
    --------
    >>> ranks = OnlineRanks([1.0, 2.0, 3.0], seed=0)
    >>> 0 < ranks.p_value(10.0) <= 0.25  # the largest of four
    True
    >>> len(ranks)
    4
    """

    def __init__(self, start: Iterable[float] = (), seed: int | None = None) -> None:
        self._sorted = sorted(float(one) for one in start)
        self._random = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self._sorted)

    def p_value(self, score: float) -> float:
        """Give the share of scores, this one included, that are larger; ties by chance."""
        theta = 1.0 - self._random.random()  # in (0, 1]: a p-value is never 0
        first = bisect.bisect_left(self._sorted, score)
        last = bisect.bisect_right(self._sorted, score)
        larger, equal = len(self._sorted) - last, last - first + 1
        self._sorted.insert(last, score)
        return (larger + theta * equal) / len(self._sorted)

    def sorted(self) -> list[float]:
        """Give all scores so far, in order."""
        return list(self._sorted)

    def state(self) -> dict[str, Any]:
        """Give where the random numbers are."""
        return dict(self._random.bit_generator.state)

    @classmethod
    def restored(cls, scores: list[float], state: dict[str, Any]) -> OnlineRanks:
        """Go on where others were; what cannot be is a ValueError or a TypeError."""
        if any(not one <= two for one, two in pairwise(scores)):
            raise ValueError("scores that were ranked are not in order")
        ranks = cls()
        ranks._sorted = scores
        ranks._random.bit_generator.state = state
        return ranks
