"""How many times faster one method is than another, with an interval.

A run time is distorted by whatever else a machine does, so two methods are timed in turn, round
by round, until the median of the rounds' ratios is known well enough. The interval of a median
needs no assumption about the noise: it is that of a sign test.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

ERROR = 0.05  # how often the interval of a row may miss the ratio
_NARROW = 0.1  # of the median: a ratio is stable if its interval is no wider


@dataclass(frozen=True)
class Ratio:
    """A ratio of run times: the median over rounds, and an interval that holds the true one."""

    middle: float
    low: float
    high: float

    @property
    def is_stable(self) -> bool:
        """Whether more rounds would change little."""
        return self.high - self.low <= _NARROW * self.middle


def rounds_needed(error: float) -> int:
    """Give the smallest number of rounds whose shortest and longest enclose the median.

    >>> rounds_needed(0.05), rounds_needed(0.01)
    (6, 8)
    """
    return math.ceil(1 - math.log2(error))


def ratio(values: Sequence[float], error: float) -> Ratio:
    """Give the median of independent values and its interval, from two order statistics.

    The k-th smallest lies above the true median if fewer than k values lie below it, which has
    the probability of fewer than k heads in as many tosses of a coin.

    Examples
    --------
    >>> ratio([5.0, 1.0, 2.0, 3.0, 4.0, 100.0], 0.05)
    Ratio(middle=3.5, low=1.0, high=100.0)
    """
    n = len(values)
    if n < rounds_needed(error):
        raise ValueError(f"{n} rounds are too few for an error of {error:g}")
    listed, k, tail = sorted(values), 0, 1.0 / 2**n
    while 2 * tail <= error:
        k += 1
        tail += math.comb(n, k) / 2**n
    return Ratio(statistics.median(listed), listed[k - 1], listed[n - k])


def repeated(
    one_round: Callable[[], Mapping[str, float]], slow: str, fast: str, error: float, most: int
) -> dict[str, list[float]]:
    """Time rounds until the ratio of two methods is stable, or there were ``most`` of them.

    Returns
    -------
    dict
        For each method its seconds in every round.
    """
    rounds: list[Mapping[str, float]] = []
    least = rounds_needed(error)
    while len(rounds) < max(least, most):
        rounds.append(one_round())
        ratios = [one[slow] / one[fast] for one in rounds]
        if len(rounds) >= least and ratio(ratios, error).is_stable:
            break
    return {name: [one[name] for one in rounds] for name in rounds[0]}


def of_seeds(
    seeds: Sequence[Mapping[str, Sequence[float]]], slow: str, fast: str
) -> tuple[list[Ratio], Ratio]:
    """Give the ratio of every seed, and their mean with an interval for it.

    Each seed has an interval that misses its ratio with the error divided by their number, so all
    of them hold at once, and so does their mean. What is left is the noise of the machine: the
    networks of the seeds are what they are.
    """
    each = [
        ratio([a / b for a, b in zip(one[slow], one[fast], strict=True)], ERROR / len(seeds))
        for one in seeds
    ]
    ends = ("middle", "low", "high")
    return each, Ratio(*(statistics.fmean(getattr(one, end) for one in each) for end in ends))
