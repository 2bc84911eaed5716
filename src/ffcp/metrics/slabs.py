"""Coverage of intervals on the worst slab of the input space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.metrics.intervals import as_tensor, hits_of
from ffcp.metrics.shares import Coverage


def worst_slab_coverage(
    interval: Sequence[Any],
    y: Any,
    x: Any,
    *,
    share: float = 0.1,
    directions: int = 1000,
    seed: int = 0,
    joint: Any = False,
    missing: bool = False,
) -> Coverage:
    """Return the coverage on the worst slab ``a <= v.x <= b`` with a given share of the rows.

    The slab is searched for on one random half of the rows and measured on the other (Cauchois,
    Gupta and Duchi, 2021), so the search does not bias the result.

    Parameters
    ----------
    interval : Interval or (lower, upper)
        Intervals, or their ends.
    y : array-like
        Targets, in the shape of the ends.
    x : array-like
        Inputs, (n, d).
    share : float, default=0.1
        Smallest share of the rows in a slab.
    directions : int, default=1000
        Number of random directions v.
    seed : int, default=0
        Seed of the directions and of the split into halves.
    joint : bool, float, str or tuple, default=False
        Whether a row is covered only if all its outputs are, as in :func:`coverage`.
    missing : bool, default=False
        Whether NaN in ``y`` is a missing target.

    Examples
    --------
    >>> x = torch.linspace(0, 1, 1000)[:, None]
    >>> upper = (x[:, 0] < 0.8).double()  # nothing is covered on the right
    >>> float(worst_slab_coverage((torch.zeros(1000), upper), torch.full((1000,), 0.5), x))
    0.0
    """
    if not 0 < share <= 1:
        raise ValueError(f"'share' must lie in (0, 1], got {share}")
    hits = hits_of(interval, y, joint, missing)
    points = as_tensor(x).reshape(len(hits), -1)
    points, hits = points[~hits.isnan()], hits[~hits.isnan()]
    if len(hits) < 4:
        raise ValueError(f"worst-slab coverage needs at least 4 rows, got {len(hits)}")
    random = np.random.default_rng(seed)
    search, report = torch.from_numpy(random.permutation(len(hits))).tensor_split([len(hits) // 2])
    vectors = torch.from_numpy(random.standard_normal((directions, points.shape[1])))
    windows = [worst_window(points[search] @ vector, hits[search], share) for vector in vectors]
    worst = min(range(directions), key=lambda i: windows[i][0])
    _, low, high = windows[worst]
    along = points[report] @ vectors[worst]
    inside = hits[report][(along >= low) & (along <= high)]
    return Coverage(float(inside.mean()) if len(inside) else math.nan, len(inside))


def worst_window(along: Tensor, hits: Tensor, share: float) -> tuple[float, float, float]:
    """Return the mean, start and end of the least covered run of at least ``share`` of the rows.

    Dinkelbach's iteration: guess the smallest mean c, find the run that minimises
    sum(hits) - c * length by prefix sums, take its mean as the next guess.
    """
    order = along.argsort()
    sums = torch.cat([hits.new_zeros(1), hits[order].cumsum(0)])
    n, least = len(hits), max(1, math.ceil(len(hits) * share))
    index = torch.arange(n + 1, dtype=hits.dtype)
    start, stop, mean = 0, n, float(sums[-1]) / n
    while True:
        cost = sums - mean * index
        highest, where = cost[: n + 1 - least].cummax(0)
        gains = cost[least:] - highest
        end = int(gains.argmin())
        if float(gains[end]) >= -1e-9:
            return mean, float(along[order[start]]), float(along[order[stop - 1]])
        start, stop = int(where[end]), end + least
        mean = float(sums[stop] - sums[start]) / (stop - start)
