"""Goodness of fit to the law of split conformal prediction.

With n exchangeable calibration scores without ties and k = ceil((n + 1)(1 - alpha)), the
coverage given the calibration set follows Beta(k, n + 1 - k), so the number of covered points
among t fresh ones is beta-binomial. A test at level ERROR_RATE rejects a correct program for
that share of all seeds; seeds are fixed, so a test that passes once passes always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy import stats
from torch import Tensor

ERROR_RATE = 1e-4


def p_value(hits: Sequence[int] | np.ndarray, t: int, n: int, k: int) -> float:
    """Chi-square p-value of hits out of t against the beta-binomial law, bins pooled to >= 10."""
    law = stats.betabinom(t, k, n + 1 - k)
    expected = law.pmf(np.arange(t + 1)) * len(hits)
    observed = np.bincount(np.asarray(hits), minlength=t + 1)
    pooled: list[list[float]] = [[0.0, 0.0]]
    for e, o in zip(expected, observed, strict=True):
        if pooled[-1][0] >= 10:
            pooled.append([0.0, 0.0])
        pooled[-1][0] += e
        pooled[-1][1] += o
    if pooled[-1][0] < 10 and len(pooled) > 1:
        last = pooled.pop()
        pooled[-1] = [pooled[-1][0] + last[0], pooled[-1][1] + last[1]]
    e, o = np.array(pooled).T
    return float(stats.chisquare(o, e * o.sum() / e.sum()).pvalue)


def upper_p_value(hits: Sequence[int] | np.ndarray, t: int, n: int, k: int) -> float:
    """P-value against "covers at least as often as the law": small when coverage is too low."""
    law = stats.betabinom(t, k, n + 1 - k)
    z = (np.mean(hits) - law.mean()) / (law.std() / np.sqrt(len(hits)))
    return float(stats.norm.cdf(z))


def draw_hits(
    sample: Callable[[torch.Generator, int], tuple[Tensor, Tensor]],
    covered: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    *,
    n: int,
    t: int,
    repeats: int,
    seed: int = 0,
) -> np.ndarray:
    """Count covered test points over many independent draws of n calibration and t test points.

    ``covered(x_cal, y_cal, x, y)`` says which of the test points are covered: (t,) or (t, m).
    """
    generator = torch.Generator().manual_seed(seed)
    counts = []
    for _ in range(repeats):
        x, y = sample(generator, n + t)
        inside = covered(x[:n], y[:n], x[n:], y[n:])
        counts.append(inside.sum(dim=0).numpy())
    return np.stack(counts)
