"""Columns that grow batch by batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.network.inputs import RowBuffer


class Same(nn.Module):
    """Returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("rows", [None, 27])
def test_batches_of_another_shape_are_refused(rows: int | None) -> None:
    buffer = RowBuffer(rows)
    for _ in range(3):
        buffer.add({"score": torch.zeros(8, 4)})
    with pytest.raises(ValueError, match="score"):
        buffer.add({"score": torch.zeros(3, 1)})  # would be broadcast


def test_a_loader_of_several_widths_is_refused_by_calibrate_and_score() -> None:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for rows, width in ((8, 4), (8, 4), (8, 4), (3, 1)):
            yield torch.randn(rows, width), torch.randn(rows, width)

    predictor = ffcp.CP(Same()).calibrate(torch.randn(30, 4), torch.randn(30, 4))
    with pytest.raises(ValueError, match="per row"):
        predictor.score(batches())
    with pytest.raises(ValueError, match="per row"):
        ffcp.CP(Same()).calibrate(batches())


def test_predictions_of_a_model_that_returns_its_input_are_copies() -> None:
    x = torch.randn(60, 1)
    predictor = ffcp.CP(Same()).calibrate(x, x + 1)

    def refilled() -> Iterator[Tensor]:
        batch = torch.empty(10, 1)
        for part in x.split(10):
            yield batch.copy_(part)

    interval = predictor.predict_interval(refilled())
    assert torch.equal(interval.prediction, x)
    kept = x.clone()
    predictor.predict_interval(x).prediction.add_(5)
    assert torch.equal(x, kept)
