"""The head behind a cut: the rest of the model, and nothing but it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ffcp.batch import Requires
from ffcp.network.forward import run_batch
from ffcp.network.heads import head
from tests.conftest import normal, small_mlp

X = normal(200, 4, seed=0)


class Skips(nn.Module):
    def __init__(self, around: bool) -> None:
        super().__init__()
        self.stem, self.mid, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        v = self.stem(x)
        w = torch.relu(self.mid(torch.relu(v)))
        return self.last(w + v if self.around else w + 1)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5))
        self.block = Skips(around=True)
        self.block.last = nn.Linear(4, 4)
        self.fit, self.out = nn.Linear(6, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        v = self.block(self.fit(self.trunk(x)))
        return self.out(nn.functional.dropout(v, 0.5, self.training))


@pytest.mark.parametrize(
    ("model", "feature"),
    [
        (small_mlp(), "0"),
        (small_mlp(), "3"),
        (small_mlp(), "input"),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 1)), "0.0"),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 1)), "0"),
        (Skips(around=False), "stem"),
        (Skips(around=True), "stem"),
        (Nested(), "trunk.0"),
        (Nested(), "block"),
        (Nested(), "fit"),
    ],
)
def test_head_of_the_feature_is_the_model(model: nn.Module, feature: str) -> None:
    model.eval()
    seen = run_batch(model, X, Requires(values=(feature,)))
    torch.testing.assert_close(head(model, feature)(seen.values[feature]), seen.output)


def test_a_skip_connection_around_the_cut_is_named() -> None:
    with pytest.raises(ValueError, match="mid"):
        head(Skips(around=True), "mid")
