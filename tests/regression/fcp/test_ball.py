"""Bands that bound the head over a ball, and the number of steps that is chosen for them."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

import ffcp
from ffcp.regression.fcp.feature_ball import STEP_COUNTS
from tests.conftest import normal
from tests.core import set_aside, threshold
from tests.regression.models import leaky, targets

X, NEW = normal(200, 4, seed=0), normal(50, 4, seed=2)
NORMS = [2, math.inf]


def test_the_number_of_steps_is_chosen_on_points_that_do_not_calibrate() -> None:
    model = leaky()
    y = targets(model, X)
    predictor = ffcp.FCP(model, "0").calibrate(X, y)
    assert len(predictor.calibration) == 160
    enough = [count for count, share in predictor.step_coverage.items() if share >= 0.9]
    assert predictor.steps == (enough[0] if enough else STEP_COUNTS[-1])
    assert tuple(predictor.step_coverage) == STEP_COUNTS
    mask = set_aside(200)
    expected = ffcp.FCP(model, "0", steps=predictor.steps).calibrate(X[~mask], y[~mask])
    torch.testing.assert_close(predictor.calibration.scores, expected.calibration.scores)


@pytest.mark.long
def test_loader_and_arrays_choose_the_same_steps() -> None:
    model = leaky()
    y = targets(model, X)
    whole = ffcp.FCP(model, "0").calibrate(X, y)
    stream = ffcp.FCP(model, "0").calibrate((X[i : i + 9], y[i : i + 9]) for i in range(0, 200, 9))
    assert whole.steps == stream.steps
    torch.testing.assert_close(
        whole.calibration.scores, stream.calibration.scores, rtol=1e-4, atol=1e-6
    )


def test_the_chosen_steps_travel_with_the_state() -> None:
    model = leaky()
    old = ffcp.FCP(model, "0").calibrate(X, targets(model, X))
    new = ffcp.FCP(leaky(), "0")
    new.load_state_dict(old.state_dict())
    assert new.steps == old.steps
    torch.testing.assert_close(new.predict_interval(NEW), old.predict_interval(NEW))
    assert not any(key.startswith(("_head", "head")) for key in old.state_dict())


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("norm", NORMS)
def test_batch_size_does_not_change_the_descent(optimizer: str, norm: float) -> None:
    model = leaky()
    y = targets(model, X)
    settings = {"steps": 15, "lr": 0.05, "optimizer": optimizer, "norm": norm}
    whole = ffcp.FCP(model, "0", **settings).score(X, y)
    cut = ffcp.FCP(model, "0", batch_size=7, **settings).score(X, y)
    torch.testing.assert_close(whole, cut, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("bound", ["ibp", "crown"])
def test_bands_of_smaller_alpha_hold_those_of_larger(bound: str) -> None:
    model = leaky()
    predictor = ffcp.FCP(model, "0", invert="exact", bound=bound).calibrate(X, targets(model, X))
    wide, narrow = (predictor.predict_interval(NEW, alpha=a) for a in (0.05, 0.5))
    assert (wide.lower <= narrow.lower + 1e-6).all()
    assert (wide.upper >= narrow.upper - 1e-6).all()


@pytest.mark.parametrize("norm", NORMS)
def test_a_negative_threshold_shrinks_the_band_of_fcqr(norm: float) -> None:
    model = leaky(2)
    y = model(X).detach().mean(dim=1)  # in the middle: every score is negative
    predictor = ffcp.FCQR(model, "0", steps=5, norm=norm).calibrate(X, y)
    assert (predictor.calibration.scores < 0).all()
    band = predictor.predict_interval(NEW)
    low, high = model(NEW).detach().sort(dim=1).values.T
    assert (band.lower >= low - 1e-6).all()
    assert (band.upper <= high + 1e-6).all()
    assert ((band.upper - band.lower) < 0.99 * (high - low)).double().mean() > 0.9


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"steps": 200, "lr": 0.1}, {"invert": "exact"}])
@pytest.mark.parametrize("norm", NORMS)
def test_a_target_inside_the_quantiles_is_in_the_band_if_its_score_is_small_enough(
    settings: dict, norm: float
) -> None:
    model = leaky(2)
    low, high = model(X).detach().sort(dim=1).values.T
    y = low + (high - low) * torch.rand(200)
    predictor = ffcp.FCQR(model, "0", norm=norm, **settings).calibrate(X, y)
    for alpha in (0.1, 0.5, Fraction(9, 10)):
        near = predictor.score(X, y) <= threshold(predictor.calibration, alpha)
        band = predictor.predict_interval(X, alpha=alpha)
        assert torch.equal((band.lower <= y) & (y <= band.upper), near)
