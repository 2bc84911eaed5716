"""Criteria by which a claim of the paper holds in our run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from ffcp import conformal_rank
from ffcp_paper.experiments import prediction_sets
from ffcp_paper.experiments.tasks import OUTPUT, Measured
from ffcp_paper.ffcp_internals import Division

LAW_ERROR = 0.01  # probability, for each row, that a correct program is outside the law's range
_SHORTER = 1 - 1e-6  # the same bands at two layers differ by rounding
_TUNED = 0.3  # share of calibration images on which `experiments.prediction_sets` tunes


@lru_cache(maxsize=1024)
def law_range(n: int, rows: int, alpha: float, error: float = LAW_ERROR) -> tuple[float, float]:
    """Return the range in which the coverage of one split must lie.

    With n calibration scores and k = ceil((n + 1)(1 - alpha)), the number of covered rows among
    those tested is beta-binomial with parameters k and n + 1 - k. A correct program is outside
    the range with a probability of at most ``error``.

    Parameters
    ----------
    n, rows
        Number of calibration scores, and of test rows.
    alpha
        The miscoverage level.
    error
        Half of it is left out on each side.

    Examples
    --------
    >>> low, high = law_range(1000, 500, 0.1)
    >>> round(low, 3), round(high, 3)
    (0.854, 0.94)
    """
    from scipy import stats

    k = conformal_rank(n, alpha)
    if k > n:
        return 1.0, 1.0
    law = stats.betabinom(rows, k, n + 1 - k)
    return float(law.ppf(error / 2)) / rows, float(law.isf(error / 2)) / rows


def lawful(result: Sequence[Measured], alpha: float) -> bool | None:
    """Whether the coverage of every seed lies in the law's range for its n and rows.

    ``None`` where thresholds of a seed are localized: their coverage follows another law.

    The seeds divide the same rows, so they are not independent: the allowed error is divided by
    their number, which holds whatever the dependence. For FCP and FCQR the law is about coverage
    in feature space.

    >>> lawful([Measured(0.9, 1.0, 0.8, calibrated=1000, tested=500)], 0.1)
    True
    >>> lawful([Measured(0.8, 1.0, 0.8, calibrated=1000, tested=500)], 0.1)
    False
    """
    if any(one.local for one in result):
        return None
    for one in result:
        low, high = law_range(one.calibrated, one.tested, alpha, LAW_ERROR / len(result))
        share = one.coverage if one.feature_coverage is None else one.feature_coverage
        if not low - 1e-9 <= share <= high + 1e-9:
            return False
    return True


def covers(result: Sequence[prediction_sets.Result], images: int, alpha: float) -> bool:
    """Whether prediction sets cover at least as the law says, on every split of the images.

    Half of the images calibrate, except the share that tunes; the other half tests. Sets may cover
    more: they are never empty, and one label alone can be enough.

    >>> covers([prediction_sets.Result("RAPS", 0.9, 2.0, 0.1, 0.0)], 5000, 0.1)
    True
    >>> covers([prediction_sets.Result("RAPS", 0.8, 2.0, 0.1, 0.0)], 5000, 0.1)
    False
    """
    calibrate = (images + 1) // 2
    for seed, one in enumerate(result):
        n = calibrate - int(Division(_TUNED, seed, most=10_000).mask(calibrate).sum())
        low, _ = law_range(n, images - calibrate, alpha, 2 * LAW_ERROR / len(result))
        if one.coverage < low - 1e-9:
            return False
    return True


def shorter(ours: Sequence[Measured], plain: Sequence[Measured]) -> bool:
    """Whether the mean length over seeds is below that of CP, by more than rounding.

    >>> one, two = (Measured(0.9, length, 0.8, 100, 100) for length in (1.0, 2.0))
    >>> shorter([one], [two]), shorter([one], [one])
    (True, False)
    """
    return mean(credited(ours, plain), "length") < _SHORTER * mean(plain, "length")


def credited(ours: Sequence[Measured], plain: Sequence[Measured]) -> list[Measured]:
    """Return the results, with CP's own where split CP was selected automatically.

    These seeds calibrate CP with fewer rows: any difference is chance, not a merit of the layer.

    >>> chosen = Measured(0.9, 1.0, 0.8, 100, 100, chosen=4)
    >>> [one.length for one in credited([chosen], [Measured(0.9, 2.0, 0.8, 100, 100)])]
    [2.0]
    """
    return [base if one.chosen == OUTPUT else one for one, base in zip(ours, plain, strict=True)]


def mean(result: Sequence[Any], what: str) -> float:
    """Return the mean of an attribute."""
    return statistics.fmean(getattr(one, what) for one in result)


def summary(values: Iterable[float | None]) -> dict[str, Any] | None:
    """Return mean, standard deviation and count; ``None`` if a value is missing or infinite.

    >>> summary([1.0, 3.0])
    {'mean': 2.0, 'sd': 1.4142135623730951, 'n': 2}
    >>> summary([2.0])
    {'mean': 2.0, 'sd': None, 'n': 1}
    """
    listed = list(values)
    known = [value for value in listed if value is not None and math.isfinite(value)]
    if not known or len(known) < len(listed):
        return None
    spread = statistics.stdev(known) if len(known) > 1 else None
    return {"mean": statistics.fmean(known), "sd": spread, "n": len(known)}


def summary_of(result: Sequence[Any], what: str) -> dict[str, Any] | None:
    """Return the :func:`summary` of an attribute."""
    return summary(getattr(one, what) for one in result)
