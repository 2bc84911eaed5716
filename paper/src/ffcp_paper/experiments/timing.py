"""Ratios of run times, with confidence intervals.

Other processes distort run times, so two methods are timed in turn, round by round, until the
median of the ratios is known well enough. The confidence interval of a median needs no assumption
about the noise: it is that of a sign test.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

ERROR = 0.05  # probability that the interval of a row misses the ratio
#: How often the interval is checked for stability. Stopping early adds up the errors of all checks,
#: so they are few.
LOOKS = 3
_NARROW = 0.1  # of the median: a ratio is stable if its interval is no wider


@dataclass(frozen=True)
class Ratio:
    """A ratio of run times: the median over rounds, and its confidence interval."""

    middle: float
    low: float
    high: float

    @property
    def is_stable(self) -> bool:
        """Whether more rounds would change little."""
        return self.high - self.low <= _NARROW * self.middle


def rounds_needed(error: float) -> int:
    """Return the smallest number of rounds whose extremes enclose the median.

    >>> rounds_needed(0.05), rounds_needed(0.01)
    (6, 8)
    """
    return math.ceil(1 - math.log2(error))


def error_of_look(seeds: int) -> float:
    """Return the error of one interval, so that all of a row hold simultaneously.

    >>> round(error_of_look(5), 5)
    0.00333
    """
    return ERROR / (seeds * LOOKS)


def ratio(values: Sequence[float], error: float) -> Ratio:
    """Return the median of independent values and its interval, from two order statistics.

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

    Stability is checked :data:`LOOKS` times: as soon as there is an interval with this ``error``,
    halfway from there, and at the end.

    Returns
    -------
    dict
        For each method its seconds in every round.
    """
    rounds: list[Mapping[str, float]] = []
    least = rounds_needed(error)
    most = max(least, most)
    for look in range(LOOKS):
        wanted = least + (most - least) * look // (LOOKS - 1)
        rounds += [one_round() for _ in range(wanted - len(rounds))]
        if ratio([one[slow] / one[fast] for one in rounds], error).is_stable:
            break
    return {name: [one[name] for one in rounds] for name in rounds[0]}


def of_seeds(
    seeds: Sequence[Mapping[str, Sequence[float]]], slow: str, fast: str
) -> tuple[list[Ratio], Ratio]:
    """Return the ratio of every seed, and their mean with its interval.

    The error is divided by the number of seeds and of checks, so that all intervals hold
    simultaneously, and with them that of the mean. They are about the noise of the machine; the
    networks of the seeds are taken as fixed.
    """
    each = [
        ratio([a / b for a, b in zip(one[slow], one[fast], strict=True)], error_of_look(len(seeds)))
        for one in seeds
    ]
    ends = ("middle", "low", "high")
    return each, Ratio(*(statistics.fmean(getattr(one, end) for one in each) for end in ends))
