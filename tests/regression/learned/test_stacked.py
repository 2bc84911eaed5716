"""Trees and networks averaged: the weight comes from rows that neither learned from."""

from pathlib import Path

import pytest
import torch
from torch import nn

import ffcp
from ffcp.regression.learned.feature_columns import FeatureColumns
from ffcp.regression.learned.learners import NETWORK, MeanQuantiles
from ffcp.regression.learned.nested import LEVELS
from ffcp.regression.learned.quantile_fitting import CrossFit, QuantileFitter, Rows, stacked
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


def test_outputs_in_large_units_do_not_decide_the_weight_alone() -> None:
    residuals = (normal(400, 2, seed=0) * torch.tensor([1.0, 3.0])).double()
    networks, trees = (quantiles(width).expand(-1, 2, -1) for width in (1.0, 3.0))
    found = set()
    for unit in (1e-3, 1.0, 1e3):
        units = torch.tensor([[1.0], [unit]]).double()
        fits = [CrossFit(one * units, []) for one in (networks, trees)]
        found.add(stacked(*fits, residuals * units[:, 0]).weight)
    assert len(found) == 1


@pytest.mark.long
@pytest.mark.parametrize("tells", ["input", "hidden values"])
def test_networks_learn_from_hidden_values_only_where_they_tell_more(tells: str) -> None:
    rows, width = 480, 64
    columns = normal(rows, 2 + width, seed=0)  # a prediction, an input, and hidden values
    told = columns[:, 1 if tells == "input" else 2]
    residuals = (told.abs() + 0.1)[:, None].double() * normal(rows, 1, seed=1)
    if tells == "hidden values":
        columns[:, 3:] = columns[:, 2:3]
    fitter = QuantileFitter(FeatureColumns(takes_input=True, values="0", width=width), 0, 0.05)
    fresh = Rows(columns, residuals, torch.ones(rows))
    found = fitter.cross_fitted(NETWORK, fresh, lambda: None)
    assert found.hidden == (tells == "hidden values")
    learned = fitter.learned_score(NETWORK, fresh, found).learner
    other = columns.clone()
    other[:, 2:] += 1
    is_ignored = torch.equal(learned(fresh_columns(other)), learned(fresh_columns(columns)))
    assert is_ignored == (tells == "input")


def fresh_columns(columns: torch.Tensor) -> torch.Tensor:
    """Return columns with the logarithm of the prediction, as learners see them."""
    return torch.cat([columns[:, :1], columns[:, :1].abs().log(), columns[:, 1:]], dim=1)


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
