"""Quantiles that a model gives itself, as those of ``ffcp fit`` do, are in the file too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.regression.auto import OWN
from ffcp.regression.learned.nested import KNOTS
from tests.export.running import holds, run_alone


class Telling(nn.Module):
    """Predicts a mean, and gives quantiles at a layer that the mean does not come from."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
        self.mean, self.spread = nn.Linear(8, 1), nn.Linear(8, len(KNOTS))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        self.spread(hidden)
        mean: Tensor = self.mean(hidden)
        return mean


def calibrated(model: nn.Module, layer: str, x: Tensor, y: Tensor, nested: str) -> ffcp.Auto:
    """Make an Auto that took the model's own quantiles, and let it have these nested sets."""
    predictor = ffcp.Auto(model, on="prediction", quantiles=layer, seed=0).calibrate(x, y)
    assert predictor.method == OWN
    if nested != "central":
        state = predictor.calibrated()
        predictor._state = replace(state, score=state.score.shaped(nested))
    return predictor


@pytest.mark.heavy
def test_a_models_own_quantiles_hold_the_librarys_bands(tmp_path):
    torch.manual_seed(0)
    model, x = Telling().eval(), torch.randn(2_000, 3)
    with torch.no_grad():
        model.spread.bias.copy_(torch.special.ndtri(KNOTS))
    predictor = calibrated(model, "spread", x[:900], torch.randn(900), "central")
    predictor.export(tmp_path / "band.onnx", x[:100], alphas=(0.1, 0.02))
    rows = 3 * x[900:]  # farther out than the example
    made, one = run_alone(tmp_path / "band.onnx", {"x": rows}, {"x": rows[:1]})
    for alpha in (0.1, 0.02):
        band = predictor.predict_interval(rows, alpha)
        holds(made, band, f"_{alpha}")
        holds(one, ffcp.Interval(*(part[:1] for part in band)), f"_{alpha}")


@pytest.mark.slow
@pytest.mark.parametrize("nested", ["central", "grown"])
def test_a_network_for_tables_holds_the_librarys_bands(nested, tmp_path):
    network = pytest.importorskip("ffcp.tables.network")
    torch.manual_seed(0)
    x = torch.randn(3_000, 4)
    y = (2 * torch.randn(3_000)).exp()  # long tails, which quantiles draw in
    model = network.TableNetwork.for_rows(x, numbers=4, outputs=1, y=y[:1_000]).eval()
    with torch.no_grad():
        model.spread.weight.normal_(std=0.01)
    predictor = calibrated(model, network.QUANTILES, x[:1_500], y[:1_500], nested)
    rows = x[1_500:]
    levels = (0.1, 0.4)
    predictor.export(tmp_path / "band.onnx", x[:100], alphas=levels)
    (made,) = run_alone(tmp_path / "band.onnx", {"x": rows})
    for level in levels:
        # Of two sets that are equally short the file may take the other.
        off = 0.01 if nested == "grown" else 0.0
        # The hyperbolic sine, which takes tails back to where they were, magnifies rounding.
        holds(made, predictor.predict_interval(rows, level), f"_{level}", off=off, units=400)
