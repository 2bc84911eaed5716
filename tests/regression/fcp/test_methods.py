"""FCP and FCQR as a user meets them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp import calibration_loop
from tests.conftest import normal, small_mlp
from tests.regression.models import leaky

X, NEW = normal(200, 4, seed=0), normal(50, 4, seed=2)


def test_a_model_that_cannot_be_traced_asks_for_its_head() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)) if x.sum() > -1e9 else x

    model = Branches()
    with pytest.raises(ValueError, match="head="):
        ffcp.FCP(model, "first")
    ffcp.FCP(model, "first", head=model.second, steps=3).calibrate(X, torch.zeros(200))
    with pytest.raises(ValueError, match="head"):
        ffcp.FCP(model, "first", head=nn.Linear(3, 1), steps=3).calibrate(X, torch.zeros(200))


def test_a_layer_without_bounds_is_named_at_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=1), nn.Linear(4, 1))
    with pytest.raises(TypeError, match="Softmax"):
        ffcp.FCP(model, "0")


def test_unconverged_points_are_reported() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    y = model(X).detach()[:, 0] + 0.05
    y[7] = -1e6
    nn.init.constant_(model[2].weight, 0.1)
    with pytest.warns(ffcp.FFCPWarning, match="feature"):
        predictor = ffcp.FCP(model, "0", invert="exact").calibrate(X, y)
    assert 7 in predictor.unconverged
    lost = len(predictor.unconverged)
    assert int(predictor.calibration.scores.isinf().sum()) == lost
    with pytest.warns(ffcp.FFCPWarning, match=f"{lost} of 200"):
        assert predictor.predict_interval(NEW, alpha=lost / 250).upper.isinf().all()
    assert predictor.predict_interval(NEW, alpha=(lost + 2) / 201).upper.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"norm": 1}, "norm"),
        ({"bound": "exact"}, "bound"),
        ({"invert": "newton"}, "invert"),
        ({"steps": 0}, "steps"),
        ({"lr": -1.0}, "lr"),
        ({"lr": math.nan}, "lr"),
        ({"optimizer": "lbfgs"}, "optimizer"),
        ({"selection_fraction": 0}, "selection_fraction"),
    ],
)
def test_settings_out_of_range(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ffcp.FCP(leaky(), "0", **settings)


def test_bad_numbers_are_named() -> None:
    x = X.clone()
    x[5, 0] = math.nan
    with pytest.raises(ValueError, match="row 5"):
        ffcp.FCP(leaky(), "0", steps=2).calibrate(x, torch.zeros(200))


def test_predict_before_calibrate() -> None:
    with pytest.raises(RuntimeError, match="calibrate"):
        ffcp.FCP(leaky(), "0").predict_interval(X)
    with pytest.raises(RuntimeError, match="steps"):
        ffcp.FCP(leaky(), "0").score(X, torch.zeros(200))


def test_the_model_is_left_in_its_mode() -> None:
    model = small_mlp().train()
    ffcp.FCP(model, "0", steps=3).calibrate(X, torch.zeros(200)).predict_interval(NEW)
    assert all(module.training for module in model.modules())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_rows_whose_target_is_missing_have_no_score_of_fcqr() -> None:
    model, y = small_mlp(outputs=2), normal(200, seed=3)
    y[::2] = math.nan
    predictor = ffcp.FCQR(model, "0", steps=3, missing=True)
    assert torch.equal(predictor.score(X, y).isnan(), y.isnan())
    known = ffcp.FCQR(model, "0", steps=3).calibrate(X[1::2], y[1::2])
    interval = predictor.calibrate(X, y).predict_interval(NEW)
    assert torch.equal(interval.upper, known.predict_interval(NEW).upper)


def test_rows_without_a_feature_for_their_target_are_counted_in_a_summary_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibration_loop, "_AT_ONCE", 50)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    y = model(X).detach()[:, 0] + 0.05
    y[::40] = -1e6
    nn.init.constant_(model[2].weight, 0.1)
    predictor = ffcp.FCP(model, "0", invert="exact", batch_size=25)
    with pytest.warns(ffcp.FFCPWarning, match="feature"):
        rows = predictor.calibrate(X, y).unconverged
    assert set(rows) >= {0, 40, 80, 120, 160}
    with pytest.warns(ffcp.FFCPWarning, match=f"{len(rows)} calibration rows"):
        assert predictor.calibrate(X, y, rank_error=0.01).unconverged == rows


def test_coverage_in_feature_space_needs_one_threshold() -> None:
    y = normal(200, seed=3)
    predictor = ffcp.FCP(leaky(), "0", steps=3).calibrate(X, y, groups=["a", "b"] * 100)
    with pytest.raises(ValueError, match="groups"):
        predictor.feature_coverage(X, y)
