"""Bad input of label sets: every message says what is wrong and what to do."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ffcp
from tests.classification.material import K, X, Y, network
from tests.conftest import normal


def test_probabilities_instead_of_logits() -> None:
    model = nn.Sequential(network(), nn.Softmax(dim=1))
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(ValueError, match=r"looks like probabilities.*torch\.log"):
            ffcp.RAPS(model.to(dtype)).calibrate(X.to(dtype), Y)
    ffcp.RAPS(nn.Sequential(network(), nn.LogSoftmax(dim=1))).calibrate(X, Y)
    ffcp.RAPS(nn.Sequential(network(), nn.ReLU())).calibrate(X, Y)  # nonnegative, but no sums


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_name_the_row(make, bad: float) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Identity())

        def forward(self, x: Tensor) -> Tensor:
            return torch.where(self.inner(x) > 100, bad, x)

    x = normal(60, K, seed=1)
    x[41] = 1000
    model = nn.Sequential(Broken())
    for batch_size in (None, 10):
        with pytest.raises(ValueError, match=f"the prediction holds {bad} in row 41"):
            make(model, batch_size=batch_size).calibrate(x, Y[:60])
    predictor = make(model).calibrate(x[:40], Y[:40])
    for call in (predictor.predict_set, predictor.score_all):
        with pytest.raises(ValueError, match="in row 41"):
            call(x)


def test_bad_input_names_the_row(make) -> None:
    x = X.clone()
    x[17, 2] = math.nan
    with pytest.raises(ValueError, match="x holds nan in row 17"):
        make(network(), batch_size=8).calibrate(x, Y)


@pytest.mark.parametrize(
    ("y", "error", "message"),
    [
        (Y.float(), TypeError, r"integers.*got torch.float32.*y\.long\(\)"),
        (Y > 2, TypeError, "integers.*got torch.bool"),
        (Y + 1, ValueError, r"label 6 in row \d+ is out of range.*6 classes.*from 0 to 5"),
        (Y - 1, ValueError, r"label -1 in row \d+ is out of range"),
        (Y[:, None], ValueError, r"shape \(300, 1\), expected one integer per row: \(300,\)"),
        (nn.functional.one_hot(Y), ValueError, r"one-hot rows use y\.argmax"),
        (Y[:200], ValueError, r"x has 300 rows but the target has shape \(200,\)"),
        (np.array(["cat"] * 300), TypeError, "must be numbers"),
    ],
)
def test_bad_labels(y: object, error: type, message: str) -> None:
    predictor = ffcp.RAPS(network())
    with pytest.raises(error, match=message):
        predictor.calibrate(X, y)
    with pytest.raises(error, match=message):
        predictor.score(X, y)


def test_a_bad_label_in_a_loader_names_the_row_of_the_stream() -> None:
    y = Y.clone()
    y[211] = 99
    loader = DataLoader(TensorDataset(X, y), batch_size=50)
    predictor = ffcp.RAPS(network(), tune="size", seed=0).calibrate(X, Y)
    untouched = copy.deepcopy(predictor)
    for update in (False, True):
        with pytest.raises(ValueError, match="label 99 in row 211"):
            predictor.calibrate(loader, update=update)
    assert predictor.choice == untouched.choice
    for other in (predictor, untouched):  # random numbers go on where they were
        other.calibrate(X[:9], Y[:9], update=True)
    assert torch.equal(predictor.calibration.scores, untouched.calibration.scores)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(4, 1), r"one class only.*torch\.cat"),
        (nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), r"output has shape \(\d+,\).*\(n, K\)"),
        (nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3))), r"shape \(\d+, 2, 3\)"),
    ],
)
@pytest.mark.parametrize("gradient", [{}, {"gradient": "feature", "feature": "input"}])
def test_outputs_that_are_no_logits(model: nn.Module, message: str, gradient: dict) -> None:
    with pytest.raises(ValueError, match=message):
        ffcp.FFRAPS(model, **gradient).calibrate(X, Y)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"delta": -0.1}, ValueError, "delta must be a number and not negative"),
        ({"delta": math.nan, "tune": "size"}, ValueError, "delta must be a number"),
        ({"lam": math.nan}, ValueError, "lam must be a number and not negative"),
        ({"kreg": 1.5}, TypeError, "kreg must be an integer"),
        ({"kreg": -1, "tune": "size"}, ValueError, "kreg must not be negative"),
        ({"temperature": "auto"}, ValueError, "temperature must be a positive number or 'fit'"),
        ({"temperature": -1.0}, ValueError, "temperature must be a positive number"),
        ({"temperature": None}, ValueError, "temperature must be a positive number"),
        ({"tune": "best"}, ValueError, "tune must be None, 'size' or 'coverage', got 'best'"),
        ({"tune": "size", "lam": 0, "kreg": 0, "delta": 0}, ValueError, "nothing to tune"),
        ({"tune_fraction": 1.0}, ValueError, "tune_fraction must lie between 0 and 1"),
        ({"tune_alpha": 0}, ValueError, "strictly between 0 and 1"),
        ({"seed": -1}, ValueError, "seed must be an integer and not negative"),
        ({"seed": 0.5}, ValueError, "seed must be an integer"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"gradient": "logit"}, ValueError, "gradient must be 'softmax' or 'feature'"),
        ({"gradient": "feature"}, ValueError, "needs a layer: give feature="),
        ({"gradient": "feature", "feature": "6x"}, ValueError, "no feature '6x'.*closest first: 6"),
        ({"gradient": "feature", "feature": "output"}, ValueError, "gradient='softmax'"),
        ({"feature": "0"}, ValueError, "has no part in gradient='softmax'"),
    ],
)
def test_settings_out_of_range(settings: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ffcp.FFRAPS(network(), **settings)


def test_a_feature_that_does_not_influence_the_top_probability() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, K), nn.Linear(4, K)

        def forward(self, x: Tensor) -> Tensor:
            self.b(x)
            return self.a(x)

    with pytest.raises(ValueError, match=r"does not influence|no gradient"):
        ffcp.FFRAPS(Unused(), gradient="feature", feature="b").calibrate(X, Y)


@pytest.mark.parametrize("alpha", [0, 1, math.nan, "0.1"])
def test_bad_alpha(make, alpha: object) -> None:
    predictor = make(network()).calibrate(X, Y)
    with pytest.raises((ValueError, TypeError), match="alpha must"):
        predictor.predict_set(X, alpha)


def test_predict_before_calibrate_and_nothing_at_all(make) -> None:
    predictor = make(network())
    with pytest.raises(RuntimeError, match="no calibration: call calibrate"):
        predictor.predict_set(X)
    for data in ((X[:0], Y[:0]), ([],)):
        with pytest.raises(ValueError, match="calibration data is empty"):
            predictor.calibrate(*data)
    predictor.calibrate(X, Y)
    for update in (False, True):
        with pytest.raises(ValueError, match="calibration data is empty"):
            predictor.calibrate([], update=update)
    for call in (lambda: predictor.predict_set(X[:0]), lambda: predictor.score(X[:0], Y[:0])):
        with pytest.raises(ValueError, match="x has no rows"):
            call()
    with pytest.raises(ValueError, match="first_row counts from 0, got -1"):
        predictor.predict_set(X, first_row=-1)
    with pytest.raises(TypeError, match="no targets"):
        predictor.score(X, None)


def test_too_few_rows_to_tune_and_calibrate() -> None:
    with pytest.raises(ValueError, match="1 rows cannot be divided"):
        ffcp.RAPS(network(), tune="size", seed=1).calibrate(X[:1], Y[:1])


def test_another_number_of_classes_than_at_calibration() -> None:
    seven = normal(300, 7, seed=1)
    predictor = ffcp.RAPS(nn.Identity()).calibrate(seven[:, :6], Y)
    with pytest.raises(ValueError, match="calibrated on 6 classes, but the model now gives 7"):
        predictor.predict_set(seven)
    with pytest.raises(ValueError, match="calibrated on 6 classes"):
        predictor.calibrate(seven, Y, update=True)


def test_another_model_than_at_calibration() -> None:
    predictor = ffcp.RAPS(network()).calibrate(X, Y)
    predictor.model = network(7)
    with pytest.raises(RuntimeError, match="weights are no longer those of the calibration"):
        predictor.predict_set(X)


def test_a_model_that_mixes_rows_is_refused(make) -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("0", nn.Linear(4, K))

        def forward(self, x: Tensor) -> Tensor:
            v = self.get_submodule("0")(x)
            return v - v.mean(dim=0)

    with pytest.raises(ValueError, match="the model mixes rows"):
        make(Mixes()).calibrate(X, Y)


def test_model_that_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got function"):
        ffcp.APS(lambda x: x)
