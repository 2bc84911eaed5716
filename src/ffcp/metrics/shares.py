"""Shares of covered rows, with their uncertainty, alone and by groups."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from torch import Tensor


class Coverage(float):
    """The share of covered rows: a float with a confidence interval.

    ``low`` and ``high`` are Wilson's binomial interval for the true coverage, ``rows`` is the
    number of rows it was measured on.

    With ``among`` it is the coverage of the worst of that many groups, and the interval is wider:
    which group is worst depends on chance, and the interval of a single group would fail too
    often. It is then exact (Clopper and Pearson), at a confidence at which the intervals of all
    groups hold simultaneously (Sidak).

    Parameters
    ----------
    share : float
        Share of covered rows, from 0 to 1.
    rows : int
        Number of rows it was measured on.
    confidence : float, default=0.95
        Confidence level of the interval.
    among : int, default=1
        Number of groups of which this is the worst.

    Examples
    --------
    >>> measured = Coverage(0.9, rows=1000)
    >>> measured
    0.900 [0.880, 0.917]
    >>> measured > 0.89
    True
    >>> Coverage(0.9, rows=1000, among=20)
    0.900 [0.868, 0.926]
    """

    low: float
    high: float
    rows: int
    confidence: float
    among: int

    def __new__(cls, share: float, rows: int, confidence: float = 0.95, among: int = 1) -> Coverage:
        """Return the share with its confidence interval."""
        self = super().__new__(cls, share)
        if among == 1:
            self.low, self.high = wilson(share, rows, confidence)
        else:
            self.low, self.high = clopper_pearson(share * rows, rows, confidence ** (1 / among))
        self.rows, self.confidence, self.among = rows, confidence, among
        return self

    def __repr__(self) -> str:
        return f"{float(self):.3f} [{self.low:.3f}, {self.high:.3f}]"

    def __reduce__(self) -> Any:
        return Coverage, (float(self), self.rows, self.confidence, self.among)


def wilson(share: float, rows: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return Wilson's confidence interval for a binomial share.

    Parameters
    ----------
    share : float
        Measured share, from 0 to 1.
    rows : int
        Number of rows it was measured on.
    confidence : float, default=0.95
        Confidence level of the interval.

    Examples
    --------
    >>> low, high = wilson(0.0, 10)
    >>> round(low, 3), round(high, 3)
    (0.0, 0.278)
    """
    if not rows:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    spread = math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows))
    half = z * spread / (1 + z * z / rows)
    return max(0.0, centre - half), min(1.0, centre + half)


def clopper_pearson(hits: float, rows: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact confidence interval for a binomial share (Clopper and Pearson, 1934).

    It contains the true share with at least this confidence, for any share and number of rows.

    Parameters
    ----------
    hits : float
        Number of successes.
    rows : int
        Number of trials.
    confidence : float, default=0.95
        Confidence level of the interval.

    Examples
    --------
    >>> low, high = clopper_pearson(9, 10)
    >>> round(low, 4), round(high, 4)
    (0.555, 0.9975)
    """
    if not 0 <= hits <= rows:
        raise ValueError(f"'hits' must be 0 to {rows}, the number of rows, got {hits}")
    tail = (1 - confidence) / 2
    low = _beta_quantile(tail, hits, rows - hits + 1) if hits > 0 else 0.0
    high = _beta_quantile(1 - tail, hits + 1, rows - hits) if hits < rows else 1.0
    return low, high


def _beta_quantile(level: float, a: float, b: float) -> float:
    """Return the quantile of Beta(a, b), by bisection."""
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if beta_cdf(middle, a, b) < level else (low, middle)
    return high


def beta_cdf(x: float, a: float, b: float) -> float:
    """Return the distribution function of Beta(a, b), by Lentz's continued fraction.

    >>> round(beta_cdf(0.5, 2, 2), 12)
    0.5
    """
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction would converge slowly
        return 1 - beta_cdf(1 - x, b, a)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(scale + a * math.log(x) + b * math.log1p(-x)) / a
    value, c, d = 1.0, 1.0, 0.0
    for step in range(100_000):
        half = step // 2
        if not step:
            term = 1.0
        elif step % 2:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        d = 1 / (1 + term * d or 1e-300)
        c = 1 + term / c or 1e-300
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * (value - 1)


@dataclass(frozen=True)
class GroupCoverage:
    """Coverage inside each group of rows.

    The confidence interval of each group is for this group alone. That of :attr:`worst` allows
    for the number of groups.

    Parameters
    ----------
    groups : dict
        The :class:`Coverage` of each group, by its label.
    """

    groups: Mapping[Hashable, Coverage]

    def __repr__(self) -> str:
        wide = max((len(str(name)) for name in self.groups), default=0)
        lines = (f"{n!s:>{wide}}: {one!r} of {one.rows:,} rows" for n, one in self.groups.items())
        return "\n".join(lines)

    @property
    def worst_group(self) -> Hashable:
        """The group with the lowest coverage."""
        return min(self.groups, key=lambda name: self.groups[name])

    @property
    def worst(self) -> Coverage:
        """The lowest coverage of a group; its interval is corrected for the number of groups."""
        group = self.groups[self.worst_group]
        return Coverage(float(group), group.rows, group.confidence, among=len(self.groups))

    @property
    def gap(self) -> float:
        """The difference between the highest and the lowest coverage of a group."""
        return float(max(self.groups.values())) - float(self.worst)


def by_label(hits: Tensor, labels: np.ndarray) -> dict[Hashable, Coverage]:
    """Return the coverage among the rows of each label."""
    kinds, inverse = np.unique(labels, return_inverse=True)
    counts = np.bincount(inverse, minlength=len(kinds))
    sums = np.bincount(inverse, weights=hits.numpy(), minlength=len(kinds))
    return {
        kind: Coverage(float(total / count), int(count))
        for kind, total, count in zip(kinds.tolist(), sums, counts, strict=True)
    }
