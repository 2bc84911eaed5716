"""The named methods are the formulas of their papers."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import ffcp
from tests.conftest import normal, small_mlp
from tests.core import threshold
from tests.regression.models import leaky

X, Y, NEW = normal(200, 4, seed=0), normal(200, seed=1), normal(50, 4, seed=2)


def test_cp_is_the_conformal_quantile_of_absolute_residuals(mlp: nn.Module) -> None:
    mlp.eval()
    residuals = (Y - mlp(X)[:, 0]).abs().detach().double().sort().values
    q = residuals[math.ceil(201 * 0.9) - 1]
    band = ffcp.CP(mlp).calibrate(X, Y).predict_interval(NEW, alpha=0.1)
    center = mlp(NEW).detach()[:, 0]
    torch.testing.assert_close(band.prediction, center)
    torch.testing.assert_close(band.lower, (center.double() - q).float())
    torch.testing.assert_close(band.upper, (center.double() + q).float())


def test_ffcp_divides_the_residual_by_the_gradient_norm(mlp: nn.Module) -> None:
    mlp.eval()
    head = mlp[1:]
    scale = {}
    for name, x in {"cal": X, "new": NEW}.items():
        v = mlp[0](x).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(head(v).sum(), v)
        scale[name] = gradient.norm(dim=1).double().clamp_min(1e-6)
    residuals = (Y - mlp(X)[:, 0]).detach().abs().double()
    q = (residuals / scale["cal"]).sort().values[math.ceil(201 * 0.8) - 1]
    predictor = ffcp.FFCP(mlp, "0").calibrate(X, Y)
    band = predictor.predict_interval(NEW, alpha=0.2)
    torch.testing.assert_close((band.upper - band.lower).double(), 2 * q * scale["new"],
                               rtol=1e-5, atol=1e-6)  # fmt: skip
    torch.testing.assert_close(predictor.score(X, Y), residuals / scale["cal"], rtol=1e-5, atol=0)


def test_ffcp_at_the_output_is_cp(mlp: nn.Module) -> None:
    cp = ffcp.CP(mlp).calibrate(X, Y).predict_interval(NEW)
    for feature in ("output", mlp):
        ff = ffcp.FFCP(mlp, feature).calibrate(X, Y).predict_interval(NEW)
        assert all(torch.equal(a, b) for a, b in zip(cp, ff, strict=True))


def test_ffcp_after_the_last_relu_is_cp(mlp: nn.Module) -> None:
    # The rest of the network is linear there, so its gradient is constant.
    cp = ffcp.CP(mlp).calibrate(X, Y).predict_interval(NEW)
    ff = ffcp.FFCP(mlp, "4").calibrate(X, Y).predict_interval(NEW)
    torch.testing.assert_close(ff, cp)


def test_a_vanishing_gradient_gets_the_floor(mlp: nn.Module) -> None:
    nn.init.constant_(mlp[3].bias, -100.0)  # every ReLU behind it is dead
    predictor = ffcp.FFCP(mlp, "0", floor=0.5).calibrate(X, Y)
    assert torch.equal(predictor.score(X, Y), ffcp.CP(mlp).score(X, Y) / 0.5)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2)])
def test_bands_have_the_shape_of_the_output(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(small_mlp(outputs=math.prod(shape)), nn.Unflatten(1, shape or (1,)))
    if not shape:
        model = nn.Sequential(small_mlp(), nn.Flatten(0))
    y = torch.randn(200, *shape)
    for predictor in (ffcp.CP(model), ffcp.FFCP(model, "0.0")):
        band = predictor.calibrate(X, y).predict_interval(NEW)
        assert band.lower.shape == band.upper.shape == band.prediction.shape == (50, *shape)
        assert predictor.score(X, y).shape == y.shape


def test_joint_scores_are_the_largest_over_outputs() -> None:
    model, y = small_mlp(outputs=3), torch.randn(200, 3)
    apart = ffcp.FFCP(model, "0").score(X, y)
    scale = ffcp.scales.GradientNorm("0")
    joint = ffcp.IntervalPredictor(model, scale=scale, joint=True, output_scales=None).score(X, y)
    assert torch.equal(joint, apart.amax(dim=1))


# -- quantile regression -----------------------------------------------------------------------


@pytest.mark.parametrize("make", [ffcp.CQR, lambda m: ffcp.FFCQR(m, "0"),
                                  lambda m: ffcp.FCQR(m, "0", steps=2)])  # fmt: skip
def test_a_model_with_one_output_is_refused_by_quantile_methods(make) -> None:
    with pytest.raises(ValueError, match="shape"):
        make(leaky(1)).calibrate(X, torch.zeros(200))


def test_cqr_is_the_published_formula() -> None:
    model, y = leaky(2), normal(200, seed=9)
    low, high = model(X).detach().double().sort(dim=1).values.T
    scores = torch.maximum(low - y, y - high)
    q = scores.sort().values[math.ceil(201 * 0.9) - 1]
    predictor = ffcp.CQR(model).calibrate(X, y)
    torch.testing.assert_close(predictor.score(X, y), scores)
    band = predictor.predict_interval(NEW)
    low, high = model(NEW).detach().double().sort(dim=1).values.T
    torch.testing.assert_close(band.lower.double(), low - q, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(band.upper.double(), high + q, rtol=1e-5, atol=1e-6)


def test_ffcqr_divides_each_side_by_its_own_norm() -> None:
    model, y = leaky(2), normal(200, seed=9)
    prediction, norms = ffcp.gradient_norms(model, X, ["0"])
    order = prediction.argsort(dim=1)
    ends = prediction.gather(1, order).double()
    scale = norms["0"].gather(1, order).double()
    expected = torch.maximum((ends[:, 0] - y) / scale[:, 0], (y - ends[:, 1]) / scale[:, 1])
    torch.testing.assert_close(ffcp.FFCQR(model, "0").score(X, y), expected)


def test_ffcqr_at_the_output_is_cqr() -> None:
    model, y = leaky(2), normal(200, seed=9)
    a = ffcp.CQR(model).calibrate(X, y).predict_interval(NEW)
    b = ffcp.FFCQR(model, "output").calibrate(X, y).predict_interval(NEW)
    torch.testing.assert_close(a, b)


def test_ffcqr_chooses_its_layer() -> None:
    model, y = leaky(2), normal(200, seed=9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        predictor = ffcp.FFCQR(model).calibrate(X, y)
    assert predictor.choice.rows == 40
    assert predictor.feature in predictor.choice.candidates


def test_both_norms_come_from_one_backward_pass() -> None:
    model = leaky(2)
    passes = []

    class Counted(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output) -> None:
            pass

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            passes.append(1)
            return gradient

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return Counted.apply(self.inner(x))

    _, norms = ffcp.gradient_norms(Watched(), X, ["inner.0"])
    assert len(passes) == 1
    torch.testing.assert_close(norms["inner.0"], ffcp.gradient_norms(model, X, ["0"])[1]["0"])


def test_several_targets_with_two_quantiles_each() -> None:
    model = nn.Sequential(leaky(6), nn.Unflatten(1, (3, 2)))
    y = normal(200, 3, seed=4)
    for predictor in (ffcp.CQR(model), ffcp.FFCQR(model, "0.0")):
        band = predictor.calibrate(X, y).predict_interval(NEW)
        assert band.lower.shape == band.prediction.shape == (50, 3)
        assert (band.lower <= band.upper).all()


def test_crossed_quantiles_give_the_band_of_the_ordered_ones() -> None:
    model, y = leaky(2), normal(200, seed=9)
    flipped = nn.Sequential(*model[:-1], nn.Linear(8, 2))
    flipped[-1].load_state_dict({k: v.flip(0) for k, v in model[-1].state_dict().items()})
    for make in (ffcp.CQR, lambda m: ffcp.FFCQR(m, "0"), lambda m: ffcp.FCQR(m, "0", steps=5)):
        a = make(model).calibrate(X, y).predict_interval(NEW)
        b = make(flipped).calibrate(X, y).predict_interval(NEW)
        torch.testing.assert_close(a, b)


def test_a_band_that_shrinks_to_nothing_is_a_point() -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x[:, 0].abs() * -1, x[:, 0].abs()], dim=1) + 0 * x[:, :1]

    wide = torch.full((100, 1), 50.0)
    predictor = ffcp.CQR(Wide()).calibrate(wide, torch.zeros(100))
    assert threshold(predictor.calibration, 0.1) == -50
    band = predictor.predict_interval(torch.tensor([[1.0], [60.0]]))
    assert band.lower[0] == band.upper[0] == 0
    torch.testing.assert_close(band.upper[1], torch.tensor(10.0))
