"""Conformal test martingales: the wealth of bets against p-values, which grows under drift.

P-values relative to one fixed calibration set are each uniform, but depend on each other through
that set: if its scores happen to be low, all p-values are too small, and a martingale that bets on
them eventually raises a false alarm. So the set grows: each score is ranked among the calibration
scores and all earlier ones, including itself, and is then added. These p-values are independent
and uniform as long as calibration and stream together are exchangeable.

The wealth of fair bets that are made before the p-value is known is then a martingale that starts
at 1, and by Ville's inequality it ever reaches a threshold c with probability at most 1 / c, for
streams of any length (Vovk, Gammerman and Shafer, 2022).

A p-value may be one number, or an array with one for each of several streams. Wealth is stored as
its logarithm.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

_SMALLEST = 2.0**-53  # smaller p-values are clipped, which only reduces the bets


class OnlineRanks:
    """Ranks each score among the earlier ones, with ties broken at random.

    Parameters
    ----------
    start : iterable of float, default=()
        Earlier scores, in any order.
    seed : int, default=None
        Seed of the random numbers that break ties; by default from the operating system.

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
        self.scores = sorted(map(float, start))
        self._random = np.random.default_rng(seed)

    def p_value(self, score: float) -> float:
        """Return the share of scores, including this one, that are larger; ties at random."""
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
        """Restore what :meth:`state` returned."""
        self.scores = state["scores"]
        self._random.bit_generator.state = state["random"]


class PowerMixture:
    """Bets by powers: a mixture over epsilon of the wealth of bets epsilon * p ** (epsilon - 1).

    It grows when p-values become small, that is, when scores become large. The mixture has
    ``powers`` epsilons, evenly spaced up to 1; the last one does not bet, so that wealth falls
    slowly. With every bet a share ``jump`` of the wealth is redistributed over all
    epsilons, so that a late change is detected about as fast as an early one.

    Parameters
    ----------
    powers : int, default=32
        Number of epsilons.
    jump : float, default=1e-4
        Share of the wealth that is redistributed with every bet.
    mirrored : bool, default=False
        Bet on large p-values, that is, on scores that become small.

    Examples
    --------
    >>> martingale = PowerMixture()
    >>> for p in [0.01] * 20:
    ...     martingale.bet(p)
    >>> bool(martingale.log_wealth > math.log(100))
    True
    """

    def __init__(self, powers: int = 32, jump: float = 1e-4, mirrored: bool = False) -> None:
        self.powers, self.jump, self.mirrored = powers, jump, mirrored
        self._logs = np.full(powers, -math.log(powers))  # later with a row for each stream
        self.log_wealth: Any = np.float64(0)

    def bet(self, p: Any) -> None:
        """Bet against the next p-value."""
        p = np.maximum(1 - np.asarray(p) if self.mirrored else np.asarray(p), _SMALLEST)
        epsilon = np.arange(1, self.powers + 1) / self.powers
        logs = self._logs + np.log(epsilon) + (epsilon - 1) * np.log(p)[..., None]
        self.log_wealth = np.logaddexp.reduce(logs, axis=-1)
        redistributed = self.log_wealth + math.log(self.jump / self.powers)
        self._logs = np.logaddexp(logs + math.log1p(-self.jump), redistributed[..., None])

    def state(self) -> Any:
        """Return the logarithm of the wealth, and that of each power."""
        return [float(self.log_wealth), self._logs.tolist()]

    def restore(self, state: Any) -> None:
        """Restore what :meth:`state` returned."""
        self.log_wealth, self._logs = np.float64(state[0]), np.array(state[1])


class PlugIn:
    """Bets by the density of the p-values so far, a histogram (after Fedorova and others, 2012).

    It grows under any lasting deviation of p-values from uniformity.

    Examples
    --------
    >>> martingale = PlugIn()
    >>> for p in [0.45, 0.55] * 20:
    ...     martingale.bet(p)
    >>> bool(martingale.log_wealth > math.log(100))
    True
    """

    bins = 10

    def __init__(self) -> None:
        self._counts = np.full(self.bins, 5.0)  # prior counts; later with a row for each stream
        self.log_wealth: Any = np.float64(0)

    def bet(self, p: Any) -> None:
        """Bet against the next p-value."""
        p = np.asarray(p, dtype=np.float64)
        counts = np.array(np.broadcast_to(self._counts, (*p.shape, self.bins)))
        index = np.minimum((p * self.bins).astype(np.int64), self.bins - 1)[..., None]
        count = np.take_along_axis(counts, index, axis=-1)
        share = count[..., 0] / counts.sum(axis=-1)
        self.log_wealth = self.log_wealth + np.log(share * self.bins)
        np.put_along_axis(counts, index, count + 1, axis=-1)
        self._counts = counts

    def state(self) -> Any:
        """Return the logarithm of the wealth, and the histogram."""
        return [float(self.log_wealth), self._counts.tolist()]

    def restore(self, state: Any) -> None:
        """Restore what :meth:`state` returned."""
        self.log_wealth, self._counts = np.float64(state[0]), np.array(state[1])


class Average:
    """The mean wealth of three martingales on the same p-values, which is a martingale.

    Martingales on different p-values must not be averaged: each is fair only given its own past.
    """

    def __init__(self) -> None:
        self.parts: tuple[PowerMixture | PlugIn, ...] = (
            PowerMixture(),
            PowerMixture(mirrored=True),
            PlugIn(),
        )

    def bet(self, p: Any) -> None:
        """Bet against the next p-value."""
        for part in self.parts:
            part.bet(p)

    @property
    def log_wealth(self) -> Any:
        """The logarithm of the mean wealth."""
        logs = np.stack([np.asarray(part.log_wealth) for part in self.parts])
        return np.logaddexp.reduce(logs, axis=0) - math.log(len(self.parts))

    def state(self) -> Any:
        """Return the state of every part."""
        return [part.state() for part in self.parts]

    def restore(self, state: Any) -> None:
        """Restore what :meth:`state` returned."""
        for part, part_state in zip(self.parts, state, strict=True):
            part.restore(part_state)
