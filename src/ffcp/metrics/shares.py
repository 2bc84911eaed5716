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
    """A share of covered rows: a number that also knows its confidence interval.

    ``low`` and ``high`` bound the true coverage by Wilson's binomial interval, ``rows`` is the
    number of rows it was measured on.

    >>> measured = Coverage(0.9, rows=1000)
    >>> measured
    0.900 [0.880, 0.917]
    >>> measured > 0.89
    True
    """

    low: float
    high: float
    rows: int
    confidence: float

    def __new__(cls, share: float, rows: int, confidence: float = 0.95) -> Coverage:
        """Attach the interval that holds the true share with this confidence."""
        self = super().__new__(cls, share)
        self.low, self.high = wilson(share, rows, confidence)
        self.rows, self.confidence = rows, confidence
        return self

    def __repr__(self) -> str:
        return f"{float(self):.3f} [{self.low:.3f}, {self.high:.3f}]"

    def __reduce__(self) -> Any:
        return Coverage, (float(self), self.rows, self.confidence)


def wilson(share: float, rows: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return Wilson's confidence interval for a binomial share.

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


@dataclass(frozen=True)
class GroupCoverage:
    """Coverage inside each group of rows."""

    groups: Mapping[Hashable, Coverage]

    @property
    def worst_group(self) -> Hashable:
        """The group that is covered least."""
        return min(self.groups, key=lambda name: self.groups[name])

    @property
    def worst(self) -> Coverage:
        """Coverage of the group that is covered least."""
        return self.groups[self.worst_group]

    @property
    def gap(self) -> float:
        """How far the best covered group is above the worst."""
        return float(max(self.groups.values())) - float(self.worst)


def by_label(hits: Tensor, labels: np.ndarray) -> dict[Hashable, Coverage]:
    """Measure the covered share among the rows of each label."""
    kinds, inverse = np.unique(labels, return_inverse=True)
    counts = np.bincount(inverse, minlength=len(kinds))
    sums = np.bincount(inverse, weights=hits.numpy(), minlength=len(kinds))
    return {
        kind.item(): Coverage(float(total / count), int(count))
        for kind, total, count in zip(kinds, sums, counts, strict=True)
    }
