"""Trees and networks averaged: the weight comes from rows that neither learned from."""

from pathlib import Path

import pytest
import torch
from torch import nn

import ffcp
from ffcp.regression.learned.learners import MeanQuantiles
from ffcp.regression.learned.nested import LEVELS
from ffcp.regression.learned.teaching import CrossFit, stacked
from tests.conftest import normal


def quantiles(width: float, rows: int = 400) -> torch.Tensor:
    return width * torch.special.ndtri(LEVELS).expand(rows, 1, -1)


@pytest.mark.parametrize(("truth", "weight"), [(1.0, 0.25), (2.0, 0.5), (3.0, 0.75)])
def test_the_weight_is_nearest_to_what_the_residuals_are_like(truth: float, weight: float) -> None:
    residuals = truth * normal(400, 1, seed=0).double()
    networks, trees = CrossFit(quantiles(0.5), []), CrossFit(quantiles(3.5), [7])
    found = stacked(networks, trees, residuals)
    assert (found.weight, found.rounds) == (weight, [7])
    assert torch.allclose(found.quantiles, quantiles(0.5 + 3 * weight))


def test_missing_residuals_say_nothing_about_the_weight() -> None:
    residuals = normal(400, 1, seed=0).double()
    residuals[::2] = torch.nan
    assert (
        stacked(CrossFit(quantiles(0.5), []), CrossFit(quantiles(3.5), []), residuals).weight
        == 0.25
    )


@pytest.mark.long
def test_the_weight_is_saved_and_a_damaged_one_refused(tmp_path: Path) -> None:
    pytest.importorskip("lightgbm")
    x = torch.rand(400, 1)
    model = nn.Linear(1, 1)
    predictor = ffcp.Learned(model, learner="both", seed=0).calibrate(x, x[:, 0] * torch.randn(400))
    predictor.save(tmp_path / "learned.safetensors")
    loaded = ffcp.load(tmp_path / "learned.safetensors", model)
    assert torch.equal(loaded.predict_interval(x).upper, predictor.predict_interval(x).upper)
    state = predictor.calibrated().score.learner.state()
    for weight in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match="weight"):
            MeanQuantiles.from_state({**state, "weight": torch.tensor(weight).double()})
