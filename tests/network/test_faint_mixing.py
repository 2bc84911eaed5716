"""Rows that mix ever so little are refused in float64, where rounding is no excuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ffcp
from tests.conftest import normal


class Faint(nn.Module):
    """A model in float64 that adds a little of the other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.line(x)
        return found + 1e-6 * found.mean()


def test_faint_mixing_in_float64_is_refused() -> None:
    x, y = normal(60, 3, seed=0).double(), normal(60, seed=1).double()
    with pytest.raises(ValueError, match="rows"), torch.no_grad():
        ffcp.CP(Faint()).calibrate(x, y)
