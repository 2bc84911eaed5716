"""Bandwidths that are chosen on points of their own."""

from __future__ import annotations

import pytest
import torch

from ffcp.conformal.bandwidth_selection import choose_bandwidth
from ffcp.conformal.kernels import as_kernel
from tests.conftest import normal


@pytest.mark.heavy
def test_the_bandwidth_is_small_where_the_noise_changes_and_large_where_not() -> None:
    x = torch.linspace(0, 1, 600)[:, None]
    noise = normal(600, seed=2).abs().double()
    steps = torch.where(x[:, 0] < 0.5, 0.1, 1.0) * noise
    for kernel in ("gaussian", "laplace", "box"):
        chosen = [
            choose_bandwidth(as_kernel(kernel), scores[:, None], x, 0.1, planned=4000).bandwidth
            for scores in (steps, noise)
        ]
        assert chosen[0] < 0.3 < 0.8 < chosen[1]
    near = [
        choose_bandwidth(as_kernel("nearest"), scores[:, None], x, 0.1, planned=4000).bandwidth
        for scores in (steps, noise)
    ]
    assert near[0] < 1000 < near[1]


def test_too_few_points_to_choose() -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        choose_bandwidth(as_kernel("box"), torch.zeros(2, 1), torch.zeros(2, 1), 0.1, planned=9)
