"""Weights in whole numbers and their running sums."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffcp.conformal.kernel_weights import ONE, RunningSums


@given(
    st.integers(1, 400),
    st.integers(1, 3),
    st.integers(0, 10**6),
    st.sampled_from([1, 3, ONE]),
)
def test_running_sums_equal_brute_force(n: int, columns: int, seed: int, largest: int) -> None:
    random = np.random.default_rng(seed)
    weights = random.integers(0, largest, (n, columns), endpoint=True)
    weights[random.random((n, columns)) < 0.4] = 0
    sums = RunningSums(torch.from_numpy(weights).int())
    running = np.cumsum(weights, axis=0)
    assert sums.total.tolist() == running[-1].tolist()
    target = random.integers(1, max(2, 1.2 * running[-1].max()), columns)
    expected = [int(np.searchsorted(running[:, j], target[j])) for j in range(columns)]
    assert sums.position(torch.from_numpy(target)).tolist() == expected
    row = random.integers(0, n, columns, endpoint=True)
    before = [int(weights[: row[j], j].sum()) for j in range(columns)]
    assert sums.before(torch.from_numpy(row)).tolist() == before
