"""Forecasts of the next score, for conformal PID control: its part D."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Forecast = Callable[[np.ndarray], Any]

_ROWS, _SMOOTHING = 100, 0.2


def theta(scores: np.ndarray) -> float:
    """Forecast by the theta method: exponential smoothing, and half of the trend.

    With theta = 2 that is what the method of Assimakopoulos and Nikolopoulos (2000) amounts to
    (Hyndman and Billah, 2003). It looks at the last 100 finite scores, with a fixed smoothing.

    >>> round(theta(np.full(50, 3.0)), 6)
    3.0
    >>> bool(theta(np.arange(50.0)) > 45)
    True
    """
    known = scores[np.isfinite(scores)][-_ROWS:]
    n = len(known)
    if n < 2:
        return float(known[0]) if n else 0.0
    shares = (1 - _SMOOTHING) ** np.arange(n - 1, -1, -1)
    shares[1:] *= _SMOOTHING  # the first score is where smoothing starts
    time = np.arange(n) - (n - 1) / 2
    slope = float(time @ known) / float(time @ time)
    # Smoothing forecasts a line 1 / s steps too late; the theta method makes up for one half.
    return float(shares @ known) + slope / 2 / _SMOOTHING


FORECASTS: dict[str, Forecast] = {"theta": theta}


def forecast_of(given: Forecast | str | None) -> Forecast | None:
    """Find a forecast by its name, or take a function of the scores so far.

    >>> forecast_of("theta") is theta
    True
    """
    if given is None or callable(given):
        return given
    if given not in FORECASTS:
        raise ValueError(
            f"unknown forecast {given!r}: give {', '.join(map(repr, FORECASTS))}, or a function "
            "from the scores so far, the oldest first, to the next one"
        )
    return FORECASTS[given]
