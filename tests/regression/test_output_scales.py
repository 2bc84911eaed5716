"""Outputs that share a threshold: bands do not depend on their units."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp import conformal_rank
from ffcp.regression.joint import learned_output_scales
from tests.conftest import normal, small_mlp
from tests.law import ERROR_RATE, draw_hits, p_value

UNITS = torch.tensor([1.0, 5.0, 0.1, 2.0])


def zero(outputs: int = 4) -> nn.Linear:
    model = nn.Linear(3, outputs)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


class InUnits(nn.Module):
    """A model whose outputs are given in other units."""

    def __init__(self, model: nn.Module, units: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("units", units)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) * self.units


METHODS: dict[str, Any] = {
    "CP": ffcp.CP,
    "FFCP": lambda model, **options: ffcp.FFCP(model, "model.0", **options),
    "FFCP, auto": lambda model, **options: ffcp.FFCP(model, ["model.0", "input"], **options),
    "LCP": lambda model, **options: ffcp.LCP(
        model, ffcp.kernels.Localizer("nearest", "input", 60), **options
    ),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("joint", [True, 0.75])
@pytest.mark.parametrize("name", METHODS)
def test_bands_scale_with_the_units_of_an_output(name: str, joint: bool | float) -> None:
    x, y, new = normal(300, 4, seed=0), normal(300, 3, seed=1), normal(20, 4, seed=2)

    def band(units: Tensor) -> ffcp.Interval:
        model = InUnits(small_mlp(outputs=3), units)
        return METHODS[name](model, joint=joint).calibrate(x, y * units).predict_interval(new)

    plain = band(torch.ones(3))
    for unit in (1000.0, 2.0**-10):
        units = torch.tensor([1.0, unit, 1.0])
        for ours, expected in zip(band(units), plain, strict=True):
            torch.testing.assert_close(ours / units, expected, rtol=1e-5, atol=1e-5)


def test_without_scales_the_largest_unit_decides() -> None:
    x, y = normal(500, 3, seed=0), normal(500, 4, seed=1) * UNITS

    def length(output_scales: Any) -> float:
        predictor = ffcp.IntervalPredictor(
            zero(), joint=True, output_scales=output_scales
        ).calibrate(x, y)
        band = predictor.predict_interval(x[:1])
        return float((band.upper - band.lower).log().mean().exp())

    assert length(None) > 15
    assert length("auto") < 5
    assert length(UNITS) < 5


@pytest.mark.heavy
@pytest.mark.parametrize("joint", [True, 0.75])
def test_all_outputs_are_covered_as_promised(joint: bool | float) -> None:
    """The exact law of the rows that are left; a right program fails at ERROR_RATE of seeds."""
    n, t, aside = 100, 40, 20

    def sample(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, 3, generator=generator)
        return x, torch.randn(rows, 4, generator=generator) * UNITS

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        predictor = ffcp.CP(model, joint=joint).calibrate(x_cal, y_cal)
        assert len(predictor.calibration) == n - aside
        band = predictor.predict_interval(x, 0.1)
        share = ((band.lower <= y) & (y <= band.upper)).double().mean(dim=1)
        return share >= float(joint)

    model = zero()
    hits = draw_hits(sample, covered, n=n, t=t, repeats=300)
    assert p_value(hits, t, n - aside, conformal_rank(n - aside, 0.1)) > ERROR_RATE


def test_rows_that_taught_scales_do_not_calibrate() -> None:
    x, y = normal(200, 3, seed=0), normal(200, 4, seed=1) * UNITS
    assert len(ffcp.CP(zero(), joint=True).calibrate(x, y).calibration) == 160
    fitted = ffcp.CP(zero(), joint=True).fit_output_scales(normal(200, 3, seed=2), y)
    assert len(fitted.calibrate(x, y).calibration) == 200
    assert fitted.output_scales.tolist() == list(learned_output_scales(y.double().abs(), 0.1))


@pytest.mark.parametrize(("outputs", "rows"), [(1, 200), (4, 10)])
def test_one_output_or_few_rows_have_no_scales(outputs: int, rows: int) -> None:
    x, y = normal(rows, 3, seed=0), normal(rows, outputs, seed=1)
    predictor = ffcp.CP(zero(outputs), joint=True).calibrate(x, y)
    assert predictor.output_scales is None
    assert len(predictor.calibration) == rows


def test_scales_are_saved_and_compared(tmp_path: Path) -> None:
    x, y, model = normal(200, 3, seed=0), normal(200, 4, seed=1) * UNITS, zero()
    predictor = ffcp.CP(model, joint=True).calibrate(x, y)
    predictor.save(tmp_path / "bands")
    loaded = ffcp.load(tmp_path / "bands", model)
    assert torch.equal(loaded.output_scales, predictor.output_scales)
    assert torch.equal(loaded.predict_interval(x).upper, predictor.predict_interval(x).upper)
    other = ffcp.CP(model, joint=True).calibrate(x, y.flip(1))
    with pytest.raises(ValueError, match="output_scales="):
        predictor.merge(other)
    alike = ffcp.IntervalPredictor(model, joint=True, output_scales=UNITS).calibrate(
        x[:100], y[:100]
    )
    alike.merge(
        ffcp.IntervalPredictor(model, joint=True, output_scales=UNITS).calibrate(x[100:], y[100:])
    )
    assert len(alike.calibration) == 200


def test_missing_targets_teach_nothing() -> None:
    y = normal(100, 2, seed=1).double()
    y[:50, 0] = math.nan
    output_scales = learned_output_scales(y, 0.1)
    assert output_scales[0] == learned_output_scales(y[50:], 0.1)[0]
    assert learned_output_scales(torch.zeros(20, 1), 0.1) == (1.0,)
    assert learned_output_scales(torch.tensor([[0.0]] * 19 + [[3.0]]), 0.1) == (3.0,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"joint": False, "output_scales": [1.0]}, "output_scales"),
        ({"joint": True, "output_scales": [1.0, 0.0]}, "output_scales"),
        ({"joint": True, "output_scales": "big"}, "output_scales"),
    ],
)
def test_what_are_no_scales_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ffcp.IntervalPredictor(zero(), **options)


def test_as_many_scales_as_outputs() -> None:
    predictor = ffcp.IntervalPredictor(zero(), joint=True, output_scales=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"\b4\b"):
        predictor.calibrate(normal(50, 3, seed=0), normal(50, 4, seed=1))
    with pytest.raises(ValueError, match="scales"):
        predictor.fit_output_scales(normal(50, 3, seed=0), normal(50, 4, seed=1))
    with pytest.raises(ValueError, match="scales"):
        ffcp.CP(zero()).fit_output_scales(normal(50, 3, seed=0), normal(50, 4, seed=1))


@pytest.mark.parametrize("side", ["lower", "upper", "each"])
def test_each_side_of_a_box_is_free_of_units(side: str) -> None:
    x, y = normal(300, 3, seed=0), normal(300, 4, seed=1)
    plain, scaled = (
        ffcp.IntervalPredictor(zero(), joint=True, side=side)
        .calibrate(x, y * units)
        .predict_interval(x[:3])
        for units in (torch.ones(4), 2**10 * torch.ones(4).cumsum(0).exp2())
    )
    units = 2**10 * torch.ones(4).cumsum(0).exp2()
    for ours, expected in zip(scaled, plain, strict=True):
        torch.testing.assert_close(ours / units, expected)


def test_balls_in_feature_space_refuse_scales() -> None:
    with pytest.raises(ValueError, match="output_scales"):
        ffcp.FCP(zero(), "input", joint=True, output_scales=[1.0] * 4)
