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
        with pytest.raises(ValueError, match="probabilities"):
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
        with pytest.raises(ValueError, match=r"\b41\b"):
            make(model, batch_size=batch_size).calibrate(x, Y[:60])
    predictor = make(model).calibrate(x[:40], Y[:40])
    for call in (predictor.predict_set, predictor.score_all):
        with pytest.raises(ValueError, match=r"\b41\b"):
            call(x)


def test_bad_input_names_the_row(make) -> None:
    x = X.clone()
    x[17, 2] = math.nan
    with pytest.raises(ValueError, match=r"\b17\b"):
        make(network(), batch_size=8).calibrate(x, Y)


@pytest.mark.parametrize(
    ("y", "error", "message"),
    [
        (Y.float(), TypeError, "float32"),
        (Y > 2, TypeError, "bool"),
        (Y + 1, ValueError, r"\b6\b"),
        (Y - 1, ValueError, "-1"),
        (Y[:, None], ValueError, r"\b300\b"),
        (nn.functional.one_hot(Y), ValueError, "argmax"),
        (Y[:200], ValueError, r"\b200\b"),
        (np.array(["cat"] * 300), TypeError, "numbers"),
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
        with pytest.raises(ValueError, match=r"\b211\b"):
            predictor.calibrate(loader, update=update)
    assert predictor.choice == untouched.choice
    for other in (predictor, untouched):  # random numbers go on where they were
        other.calibrate(X[:9], Y[:9], update=True)
    assert torch.equal(predictor.calibration.scores, untouched.calibration.scores)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(4, 1), "class"),
        (nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), "class"),
        (nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3))), r"2, 3\)"),
    ],
)
@pytest.mark.parametrize("gradient", [{}, {"gradient": "feature", "feature": "input"}])
def test_outputs_that_are_no_logits(model: nn.Module, message: str, gradient: dict) -> None:
    with pytest.raises(ValueError, match=message):
        ffcp.FFRAPS(model, **gradient).calibrate(X, Y)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"delta": -0.1}, ValueError, "delta"),
        ({"delta": math.nan, "tune": "size"}, ValueError, "delta"),
        ({"lam": math.nan}, ValueError, "lam"),
        ({"kreg": 1.5}, TypeError, "kreg"),
        ({"kreg": -1, "tune": "size"}, ValueError, "kreg"),
        ({"temperature": "auto"}, ValueError, "temperature"),
        ({"temperature": -1.0}, ValueError, "temperature"),
        ({"temperature": None}, ValueError, "temperature"),
        ({"tune": "best"}, ValueError, "tune"),
        ({"tune": "size", "lam": 0, "kreg": 0, "delta": 0}, ValueError, "tune"),
        ({"tune_fraction": 1.0}, ValueError, "tune_fraction"),
        ({"tune_alpha": 0}, ValueError, "alpha"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 0.5}, ValueError, "seed"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"gradient": "logit"}, ValueError, "gradient"),
        ({"gradient": "feature"}, ValueError, "feature"),
        ({"gradient": "feature", "feature": "6x"}, ValueError, "6x"),
        ({"gradient": "feature", "feature": "output"}, ValueError, "gradient"),
        ({"feature": "0"}, ValueError, "gradient"),
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

    with pytest.raises(ValueError, match="'b'"):
        ffcp.FFRAPS(Unused(), gradient="feature", feature="b").calibrate(X, Y)


@pytest.mark.parametrize("alpha", [0, 1, math.nan, "0.1"])
def test_bad_alpha(make, alpha: object) -> None:
    predictor = make(network()).calibrate(X, Y)
    with pytest.raises((ValueError, TypeError), match="alpha"):
        predictor.predict_set(X, alpha)


def test_predict_before_calibrate_and_nothing_at_all(make) -> None:
    predictor = make(network())
    with pytest.raises(RuntimeError, match="calibrate"):
        predictor.predict_set(X)
    for data in ((X[:0], Y[:0]), ([],)):
        with pytest.raises(ValueError, match="empty"):
            predictor.calibrate(*data)
    predictor.calibrate(X, Y)
    for update in (False, True):
        with pytest.raises(ValueError, match="empty"):
            predictor.calibrate([], update=update)
    for call in (lambda: predictor.predict_set(X[:0]), lambda: predictor.score(X[:0], Y[:0])):
        with pytest.raises(ValueError, match=r"\bx\b"):
            call()
    with pytest.raises(ValueError, match="first_row"):
        predictor.predict_set(X, first_row=-1)
    with pytest.raises(TypeError, match="targets"):
        predictor.score(X, None)


def test_too_few_rows_to_tune_and_calibrate() -> None:
    with pytest.raises(ValueError, match=r"\b1\b"):
        ffcp.RAPS(network(), tune="size", seed=1).calibrate(X[:1], Y[:1])


def test_another_number_of_classes_than_at_calibration() -> None:
    seven = normal(300, 7, seed=1)
    predictor = ffcp.RAPS(nn.Identity()).calibrate(seven[:, :6], Y)
    with pytest.raises(ValueError, match=r"\b7\b"):
        predictor.predict_set(seven)
    with pytest.raises(ValueError, match=r"\b6\b"):
        predictor.calibrate(seven, Y, update=True)


def test_another_model_than_at_calibration() -> None:
    predictor = ffcp.RAPS(network()).calibrate(X, Y)
    predictor.model = network(7)
    with pytest.raises(RuntimeError, match="weights"):
        predictor.predict_set(X)


def test_a_model_that_mixes_rows_is_refused(make) -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("0", nn.Linear(4, K))

        def forward(self, x: Tensor) -> Tensor:
            v = self.get_submodule("0")(x)
            return v - v.mean(dim=0)

    with pytest.raises(ValueError, match="mixes"):
        make(Mixes()).calibrate(X, Y)


def test_model_that_is_no_module() -> None:
    with pytest.raises(TypeError, match="function"):
        ffcp.APS(lambda x: x)
