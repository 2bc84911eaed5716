"""Bases: which outputs of the model are the ends of the band."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import ffcp
from tests.conftest import normal, small_mlp

X, Y, NEW = normal(200, 4, seed=0), normal(200, seed=1), normal(50, 4, seed=2)


def seen(output: Tensor) -> ffcp.BatchOutput:
    return ffcp.BatchOutput(None, output, {}, {}, range(len(output)))


class Two(nn.Module):
    """The first and the last of a network's three quantiles."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[:, [0, 2]]


@pytest.mark.parametrize("scale", [None, ffcp.scales.GradientNorm("0")])
def test_three_quantiles_need_no_wrapper(scale: ffcp.scales.GradientNorm | None) -> None:
    model = small_mlp(outputs=3)
    predictor = ffcp.IntervalPredictor(
        model, ffcp.scores.Quantiles(0, 2, median=1), scale
    ).calibrate(X, Y)
    band = predictor.predict_interval(NEW)
    assert torch.equal(band.prediction, model.eval()(NEW)[:, 1].detach())
    two = Two(model)
    wrapped = ffcp.CQR(two) if scale is None else ffcp.FFCQR(two, "inner.0")
    expected = wrapped.calibrate(X, Y).predict_interval(NEW)
    torch.testing.assert_close(band.lower, expected.lower)
    torch.testing.assert_close(band.upper, expected.upper)


def test_three_quantiles_with_all_that_is_automatic() -> None:
    model, base = small_mlp(outputs=3), ffcp.scores.Quantiles(0, 2, median=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        predictor = ffcp.IntervalPredictor(
            model, base, ffcp.scales.GradientNorm(), ffcp.calibrations.Local()
        ).calibrate(X, Y)
        band = predictor.predict_interval(NEW)
    assert band.lower.shape == band.prediction.shape == (50,)
    assert (band.lower <= band.upper).all()


def test_several_targets_of_three_quantiles() -> None:
    model = nn.Sequential(small_mlp(outputs=6), nn.Unflatten(1, (2, 3)))
    base = ffcp.scores.Quantiles(0, 2, median=1)
    band = (
        ffcp.IntervalPredictor(model, base)
        .calibrate(X, normal(200, 2, seed=3))
        .predict_interval(NEW)
    )
    assert band.lower.shape == band.prediction.shape == (50, 2)
    assert torch.equal(band.prediction, model.eval()(NEW)[..., 1].detach())


def test_places_in_any_order() -> None:
    output = normal(20, 4, seed=0)
    ends = ffcp.scores.Quantiles(3, 1, of=4)(seen(output), output.abs())
    low, order = output[:, [3, 1]].sort(dim=1)
    torch.testing.assert_close(torch.cat([ends.lo, ends.hi], dim=1), low.double())
    scales = output[:, [3, 1]].abs().gather(1, order).double()
    torch.testing.assert_close(torch.cat([ends.scale_lo, ends.scale_hi], dim=1), scales)


def test_a_point_is_both_ends() -> None:
    output = normal(20, 3, seed=0)
    ends = ffcp.scores.Point()(seen(output), output.abs())
    assert ends.is_symmetric
    assert torch.equal(ends.lo, output.double())


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"lower": -1}, "-1"),
        ({"lower": 1.0}, "quantiles"),
        ({"lower": 0, "upper": 0}, "0, 0"),
        ({"lower": 0, "upper": 2, "median": 2}, "places"),
        ({"lower": 0, "upper": 2, "of": 2}, r"\b2\b"),
    ],
)
def test_places_that_cannot_be_meant(places: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ffcp.scores.Quantiles(**places)


def test_a_model_of_another_number_of_quantiles_is_refused() -> None:
    base = ffcp.scores.Quantiles(0, 2, median=1)
    with pytest.raises(ValueError, match="200, 2"):
        ffcp.IntervalPredictor(small_mlp(outputs=2), base).calibrate(X, Y)
    with pytest.raises(ValueError, match="200, 3"):
        ffcp.CQR(small_mlp(outputs=3)).calibrate(X, Y)


def test_other_places_are_other_settings() -> None:
    one, two = (
        ffcp.IntervalPredictor(small_mlp(outputs=3), base).calibrate(X, Y)
        for base in (ffcp.scores.Quantiles(0, 2), ffcp.scores.Quantiles(0, 2, median=1))
    )
    with pytest.raises(ValueError, match="median"):
        one.merge(two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantiles_that_cross_are_put_in_order(dtype: torch.dtype) -> None:
    x, y = normal(100, 2, seed=1).sort(dim=1).values.to(dtype), normal(100, seed=2)
    straight = ffcp.CQR(ffcp.Stored()).calibrate(x, y)
    crossed = ffcp.CQR(ffcp.Stored()).calibrate(x.flip(1), y)
    assert torch.equal(straight.calibration.scores, crossed.calibration.scores)
    for one, other in zip(
        straight.predict_interval(x), crossed.predict_interval(x.flip(1)), strict=True
    ):
        assert torch.equal(one, other)
