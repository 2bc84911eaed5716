"""Take the mean norm over features moved by normal noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ffcp.network.cut import Cut, Tapped
from ffcp.network.jacobian.settings import Smooth


def smoothed(
    model: nn.Module, x: Any, name: str, method: Smooth, norms_of: Callable[[Tapped], Tensor]
) -> Tensor:
    """Take the mean of ``norms_of`` over passes with a perturbed feature."""
    total: Tensor | None = None
    for sample in range(method.samples):
        noise = Noise(method.sigma, method.seed, sample)
        with Cut(model, [name], change=noise) as moved:
            norms = norms_of(moved(x))
        total = norms.double() if total is None else total.add_(norms)
    assert total is not None  # there is at least one sample
    return (total / method.samples).to(norms.dtype)


class Noise:
    """Adds normal noise to a feature: the same to every row, whatever rows are beside it."""

    def __init__(self, sigma: float, seed: int, sample: int) -> None:
        self._sigma = sigma
        self._generator = torch.Generator().manual_seed(_mixed(seed, sample))

    def __call__(self, value: Tensor) -> Tensor:
        """Move a feature (n, ...)."""
        noise = torch.randn(
            value.shape[1:],
            generator=self._generator,
            dtype=torch.float32,  # whatever is default
        )
        return value + self._sigma * noise.to(value)


def _mixed(seed: int, number: int) -> int:
    """Make one seed of two numbers, so that streams of neighbouring seeds do not meet."""
    # Shifted as a Python integer: numpy 1 cannot shift one uint64.
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0]) >> 1
