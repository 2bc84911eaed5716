"""Conformal test martingales: wealth of bets against p-values, which grows when they change.

If p-values are independent and uniform, as online conformal p-values of exchangeable data are
(:class:`ffcp.online.pvalues.OnlineRanks`), the wealth of any bets that are fair and made before
the p-value is seen is a martingale that starts at 1, and by Ville's inequality ever reaches a
threshold c with probability at most 1 / c, however long the stream (Vovk, Gammerman and Shafer,
2022).

A p-value may be one number, or an array with one for each of several streams. Wealth is kept as
its logarithm.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from ffcp import files
from ffcp.online.lanes import listed, number

_SMALLEST = 2.0**-53  # p-values are cut off here, which only makes bets smaller


class Martingale(Protocol):
    """Bets against p-values, one after the other."""

    def bet(self, p: Any) -> None:
        """Take the next p-value."""

    @property
    def log_wealth(self) -> Any:
        """The logarithm of the wealth, in the shape of a p-value."""

    def state(self) -> Any:
        """Give all that changes, of one stream, in plain numbers."""

    def restore(self, state: Any) -> None:
        """Take over what :meth:`state` gave; what cannot have been given is a ValueError."""


class PowerMixture:
    """Bets by powers: a mixture over epsilon of the wealth of bets epsilon * p ** (epsilon - 1).

    It grows when p-values become small, that is when scores become large. The mixture holds
    ``powers`` epsilons, evenly spaced up to 1; the last one never loses, so that wealth stays
    above 1 / powers. With every bet a share ``jump`` of the wealth is spread over all epsilons
    anew, so that a late change is found about as soon as an early one.

    Parameters
    ----------
    powers
        How many epsilons.
    jump
        The share of the wealth that is spread anew with every bet.
    mirrored
        Bet on large p-values: scores that become small.

    Examples
    --------
    >>> surprised = PowerMixture()
    >>> for p in [0.01] * 20:
    ...     surprised.bet(p)
    >>> bool(surprised.log_wealth > math.log(100))
    True
    """

    def __init__(self, powers: int = 32, jump: float = 1e-4, mirrored: bool = False) -> None:
        if powers < 2 or not 0 <= jump < 1:
            raise ValueError(f"powers must be at least 2 and jump in [0, 1), got {powers}, {jump}")
        self.powers, self.jump, self.mirrored = powers, jump, mirrored
        self._epsilon = np.arange(1, powers + 1) / powers
        self._logs = np.full(powers, -math.log(powers))  # and a column for each stream
        self._is_new = True
        self.log_wealth: Any = np.float64(0)

    def bet(self, p: Any) -> None:
        """Take the next p-value."""
        p = np.maximum(1 - np.asarray(p) if self.mirrored else p, _SMALLEST)
        epsilon = self._epsilon.reshape(-1, *([1] * np.ndim(p)))
        logs = self._logs.reshape(self.powers, *([1] * np.ndim(p))) if self._is_new else self._logs
        logs = logs + np.log(epsilon) + (epsilon - 1) * np.log(p)
        self.log_wealth = np.logaddexp.reduce(logs, axis=0)
        if self.jump:
            anew = self.log_wealth + math.log(self.jump / self.powers)
            logs = np.logaddexp(logs + math.log1p(-self.jump), anew)
        self._logs, self._is_new = logs, False

    def state(self) -> Any:
        """Give the logarithm of the wealth, that of each power, and whether it has bet."""
        return [float(self.log_wealth), self._logs.tolist(), self._is_new]

    def restore(self, state: Any) -> None:
        """Take over what :meth:`state` gave."""
        wealth, logs, is_new = listed(state, 3)
        kept = _finite(logs, self.powers)
        self.log_wealth, self._logs = np.float64(_finite([wealth], 1)[0]), kept
        self._is_new = files.rebuilt(bool, is_new)


class PlugIn:
    """Bets by the density of the p-values so far, a histogram (after Fedorova and others, 2012).

    It grows when p-values stop being uniform in any way that lasts.

    Parameters
    ----------
    bins
        How many bins the histogram has.
    prior
        How many p-values each bin is given to begin with.

    Examples
    --------
    >>> uneven = PlugIn()
    >>> for p in [0.45, 0.55] * 20:
    ...     uneven.bet(p)
    >>> bool(uneven.log_wealth > math.log(100))
    True
    """

    def __init__(self, bins: int = 10, prior: float = 5.0) -> None:
        if bins < 2 or not prior > 0:
            raise ValueError(f"bins must be at least 2 and prior positive, got {bins}, {prior}")
        self.bins, self.prior = bins, prior
        self._counts: Any = None
        self._seen = 0
        self.log_wealth: Any = np.float64(0)

    def bet(self, p: Any) -> None:
        """Take the next p-value."""
        p = np.asarray(p, dtype=np.float64)
        if self._counts is None:
            self._counts = np.full((*p.shape, self.bins), self.prior)
        place = np.minimum((p * self.bins).astype(np.int64), self.bins - 1)[..., None]
        own = np.take_along_axis(self._counts, place, axis=-1)
        share = own[..., 0] / (self._seen + self.bins * self.prior)
        self.log_wealth = self.log_wealth + np.log(share * self.bins)
        np.put_along_axis(self._counts, place, own + 1, axis=-1)
        self._seen += 1

    def state(self) -> Any:
        """Give the logarithm of the wealth, and the histogram."""
        counts = None if self._counts is None else self._counts.tolist()
        return [float(self.log_wealth), counts, self._seen]

    def restore(self, state: Any) -> None:
        """Take over what :meth:`state` gave."""
        wealth, counts, seen = listed(state, 3)
        histogram = None if counts is None else _finite(counts, self.bins)
        if files.count(seen) != (
            0 if histogram is None else round(float(histogram.sum()) - self.bins * self.prior)
        ) or (histogram is not None and histogram.min() < self.prior):
            raise ValueError("a histogram does not add up to the p-values it is of")
        self.log_wealth = np.float64(_finite([wealth], 1)[0])
        self._counts, self._seen = histogram, seen


class Average:
    """The mean wealth of several martingales on the same p-values, a martingale itself.

    Martingales on different p-values must not be averaged: each is fair given its own past only.
    """

    def __init__(self, parts: tuple[Martingale, ...] | None = None) -> None:
        self.parts = parts or (PowerMixture(), PowerMixture(mirrored=True), PlugIn())

    def bet(self, p: Any) -> None:
        """Take the next p-value."""
        for part in self.parts:
            part.bet(p)

    @property
    def log_wealth(self) -> Any:
        """The logarithm of the mean wealth."""
        logs = np.stack([np.asarray(part.log_wealth) for part in self.parts])
        return np.logaddexp.reduce(logs, axis=0) - math.log(len(self.parts))

    def state(self) -> Any:
        """Give that of every part."""
        return [part.state() for part in self.parts]

    def restore(self, state: Any) -> None:
        """Take over what :meth:`state` gave."""
        for part, own in zip(self.parts, listed(state, len(self.parts)), strict=True):
            part.restore(own)


def _finite(saved: Any, length: int) -> np.ndarray:
    values = np.array([number(one) for one in listed(saved, length)])
    if not np.isfinite(values).all():
        raise ValueError("wealth is infinite")
    return values
