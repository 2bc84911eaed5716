"""Small networks and data that several tests of bands share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.conftest import normal


def leaky(outputs: int = 1) -> nn.Sequential:
    """Make a network whose head reaches every number."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 8), nn.LeakyReLU(0.2),
        nn.Linear(8, outputs),
    )  # fmt: skip


def targets(model: nn.Module, x: Tensor, seed: int = 5) -> Tensor:
    """Give what the model says, with noise."""
    return model(x).detach().mean(dim=1) + 0.3 * normal(len(x), seed=seed)


def heteroscedastic(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    """Draw points whose noise grows with one of their numbers."""
    x = torch.randn(rows, 4, generator=generator)
    noise = torch.randn(rows, generator=generator)
    return x, x[:, 0] + noise * (0.2 + x[:, 1].abs())
