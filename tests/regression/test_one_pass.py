"""One forward pass serves everybody: scores, scales, embeddings and choices."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ffcp
from tests.conftest import normal, small_mlp
from tests.rows import watched_inputs

ROWS, CHECKED = 240, 8  # rows of the data, and those that the row check looks at
Y = normal(ROWS, seed=1)
X = normal(ROWS, 4, seed=0)
X[:, 3] = torch.arange(ROWS)  # by which a row is known


def near(on: str, bandwidth: float | str = 100) -> ffcp.kernels.Localizer:
    return ffcp.kernels.Localizer("nearest", on=on, bandwidth=bandwidth)


MANY = "FFCP, layer chosen, many outputs"
METHODS = {
    "CP": lambda: ffcp.CP(small_mlp()),
    "FFCP": lambda: ffcp.FFCP(small_mlp(), "0"),
    "FFCP, layer chosen": lambda: ffcp.FFCP(small_mlp()),
    "LCP on the prediction": lambda: ffcp.LCP(small_mlp(), near("prediction")),
    "LCP on the input": lambda: ffcp.LCP(small_mlp(), near("input")),
    "LCP on a layer": lambda: ffcp.LCP(small_mlp(), near("3")),
    "LCP, bandwidth chosen": lambda: ffcp.LCP(small_mlp(), near("3", "auto")),
    "FFLCP": lambda: ffcp.FFLCP(small_mlp(), "0", near("3")),
    "FFLCP, both chosen": lambda: ffcp.FFLCP(small_mlp(), "auto", near("input", "auto")),
    "CQR": lambda: ffcp.CQR(small_mlp(outputs=2)),
    "FFCQR": lambda: ffcp.FFCQR(small_mlp(outputs=2), "0"),
    "FFCQR, layer chosen": lambda: ffcp.FFCQR(small_mlp(outputs=2)),
    MANY: lambda: ffcp.FFCP(small_mlp(outputs=70)),
    "Learned": lambda: ffcp.Learned(small_mlp()),
    "Auto": lambda: ffcp.Auto(small_mlp()),
    "a scale among several": lambda: ffcp.IntervalPredictor(
        small_mlp(), scale=[ffcp.scales.GradientNorm("0"), lambda seen: 1 + seen.output.abs()]
    ),
}


def target(name: str) -> Tensor:
    return Y[:, None].expand(-1, 70) if name == MANY else Y


@contextmanager
def passes(model: nn.Module) -> Iterator[Tensor]:
    """Count how often each row goes through a model."""
    times = torch.zeros(ROWS, dtype=torch.int64)

    def count(x: Tensor) -> None:
        times.add_(torch.bincount(x[:, 3].long(), minlength=ROWS))

    with watched_inputs(count, model):
        yield times


@pytest.mark.long
@pytest.mark.parametrize("data", ["arrays", "arrays in batches", "loader"])
@pytest.mark.parametrize("name", METHODS)
def test_calibrating_passes_every_row_once(name: str, data: str) -> None:
    predictor, y = METHODS[name](), target(name)
    predictor.batch_size = 50 if data == "arrays in batches" else None
    with passes(predictor.model) as times, warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        if data == "loader":
            predictor.calibrate(DataLoader(TensorDataset(X, y), batch_size=50))
        else:
            predictor.calibrate(X, y)
    # Of many outputs the gradients at narrow layers are pushed through the model, layer by layer.
    assert set(times[CHECKED:].tolist()) <= ({1, 6} if name == MANY else {1})
    assert int(times[:CHECKED].max()) <= (14 if name == MANY else 9)  # row check, search for layers


@pytest.mark.long
@pytest.mark.parametrize("batch_size", [None, 50])
@pytest.mark.parametrize("name", METHODS)
def test_predicting_and_scoring_pass_every_row_once(name: str, batch_size: int | None) -> None:
    predictor, y = METHODS[name](), target(name)
    predictor.batch_size = batch_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        predictor.calibrate(X, y)
        with passes(predictor.model) as times:
            predictor.predict_interval(X)
            once = 2 if name == MANY else 1  # and again with tangents
            assert (times == once).all()
            predictor.score(X, y)
            assert (times == 2 * once).all()


def test_random_thresholds_are_looked_up_after_one_pass() -> None:
    localizer = ffcp.kernels.Localizer("gaussian", on="input", bandwidth=100.0)
    predictor = ffcp.LCP(small_mlp(), localizer, guarantee="random", batch_size=50)
    predictor.calibrate(X, Y)
    with passes(predictor.model) as times:
        predictor.predict_interval(X)
    assert (times == 1).all()
