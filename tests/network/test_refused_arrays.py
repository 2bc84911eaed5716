"""Arrays without rows of numbers are refused; what is no array goes to the model as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ffcp
from tests.conftest import normal


class Named(nn.Module):
    """A model of named inputs, of which one is a word."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)

    def forward(self, x: Tensor, kind: str) -> Tensor:
        assert kind == "plain"
        return self.line(x)


def test_what_is_no_array_is_handed_on() -> None:
    x = {"x": normal(60, 3, seed=0), "kind": "plain"}
    predictor = ffcp.CP(Named()).calibrate(x, normal(60, seed=1))
    assert predictor.predict_interval(x).lower.shape == (60,)


@pytest.mark.parametrize(
    ("x", "word"),
    [
        (torch.quantize_per_tensor(torch.rand(20, 3), 0.1, 0, torch.quint8), "quantized"),
        (torch.nested.nested_tensor([torch.rand(3), torch.rand(2)]), "nested"),
        (torch.rand(20, 3, dtype=torch.complex64), "complex"),
        (torch.rand(20, 3).to("meta"), "meta"),
    ],
)
def test_tensors_without_rows_of_numbers_are_refused(x: Any, word: str) -> None:
    with pytest.raises((TypeError, ValueError), match=word):
        ffcp.CP(nn.Linear(3, 1)).calibrate(x, normal(20, seed=1))
