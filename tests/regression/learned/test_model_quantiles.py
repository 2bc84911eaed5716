"""Quantiles that a model gives itself: compared by Auto as they are, and saved without learning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.regression.auto import OWN
from ffcp.regression.learned.learners import ModelQuantiles
from ffcp.regression.learned.nested import KNOTS
from tests.conftest import normal


class Spread(nn.Module):
    def __init__(self, knots: int) -> None:
        super().__init__()
        self.register_buffer("places", torch.special.ndtri(KNOTS).float()[:knots])

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * self.places


class Telling(nn.Module):
    """Predicts 0, and knows that noise is as large as the first column."""

    def __init__(self, knots: int = len(KNOTS), outputs: int = 1) -> None:
        super().__init__()
        self.quantiles = Spread(knots)
        self.output = nn.Linear(2, outputs)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, x: Tensor) -> Tensor:
        self.quantiles(x)
        return self.output(x)


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x = normal(count, 2, seed=seed).abs()
    return x, x[:, 0] * normal(count, 1, seed=seed + 1)[:, 0]


def calibrated(**options: object) -> ffcp.Auto:
    predictor = ffcp.Auto(Telling(), on="prediction", quantiles="quantiles", seed=0, **options)
    return predictor.calibrate(*rows(1000, 1))


def test_what_the_model_knows_is_compared_and_taken() -> None:
    predictor = calibrated()
    assert predictor.choice is not None
    assert {OWN, f"{OWN}, from the densest part"} <= set(predictor.choice.trials)
    assert predictor.choice.method.startswith(OWN)
    x, y = rows(4000, 5)
    band = predictor.predict_interval(x, alpha=0.1)
    assert float(ffcp.metrics.coverage(band, y)) == pytest.approx(0.9, abs=0.03)
    # As long as the model says: 2 x 1.64 times the first column.
    torch.testing.assert_close(band.width, 3.29 * x[:, 0], rtol=0.2, atol=0.01)


def test_the_model_is_believed_where_rows_tell_no_difference() -> None:
    x, y = torch.ones(600, 2), normal(600, 1, seed=3)[:, 0]  # the same noise everywhere
    predictor = ffcp.Auto(Telling(), on="prediction", quantiles="quantiles", seed=0)
    assert predictor.calibrate(x, y).method == OWN
    assert ffcp.Auto(Telling(), on="prediction", seed=0).calibrate(x, y).method == "CP"


def test_a_saved_choice_gives_the_same_bands(tmp_path: Path) -> None:
    predictor, (x, _) = calibrated(), rows(50, 5)
    predictor.save(tmp_path / "own.safetensors")
    again = ffcp.load(tmp_path / "own.safetensors", Telling())
    assert again.method == predictor.method
    for alpha in (0.05, 0.3):
        mine, other = (one.predict_interval(x, alpha=alpha) for one in (predictor, again))
        assert torch.equal(mine.lower, other.lower)
        assert torch.equal(mine.upper, other.upper)


@pytest.mark.parametrize("model", [Telling(knots=5), Telling(outputs=2)])
def test_a_layer_that_gives_no_quantiles_of_one_output_is_refused(model: nn.Module) -> None:
    x, y = rows(400, 1)
    target = y[:, None].expand(-1, 2) if model.output.out_features == 2 else y  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"\b9\b"):
        ffcp.Auto(model, quantiles="quantiles").calibrate(x, target)


def test_quantiles_that_are_one_number_still_lie_apart() -> None:
    quantiles = ModelQuantiles()(torch.zeros(3, 11))
    assert bool((quantiles.diff(dim=-1) > 0).all())


def test_nothing_else_is_read_from_a_file() -> None:
    assert isinstance(ModelQuantiles.from_state({}), ModelQuantiles)
    with pytest.raises(ValueError, match="w1"):
        ModelQuantiles.from_state({"w1": torch.zeros(1)})
