"""One forward pass serves everybody: scores, slacks, embeddings and choices."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ffcp
from tests.conftest import normal, small_mlp

ROWS, CHECKED = 240, 8  # rows of the data, and those that the row check looks at
Y = normal(ROWS, seed=1)
X = normal(ROWS, 4, seed=0)
X[:, 3] = torch.arange(ROWS)  # by which a row is known


def near(on: str, bandwidth: float | str = 100) -> ffcp.Localizer:
    return ffcp.Localizer("nearest", on=on, bandwidth=bandwidth)


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
    "Learned": lambda: ffcp.Learned(small_mlp()),
    "Auto": lambda: ffcp.Auto(small_mlp()),
    "a slack among several": lambda: ffcp.Bands(
        small_mlp(), slack=[ffcp.GradientNorm("0"), lambda seen: 1 + seen.output.abs()]
    ),
}


class PassCount:
    """Counts how often each row went through a model."""

    def __init__(self, model: nn.Module) -> None:
        self.times = torch.zeros(ROWS, dtype=torch.int64)
        # On the way in: hooks that only look at outputs are left out of copies of the model.
        model.register_forward_pre_hook(self._count)

    def __deepcopy__(self, memo: dict) -> PassCount:
        return self  # one count, whichever copy of the model is run

    def _count(self, module: nn.Module, args: tuple) -> None:
        self.times += torch.bincount(args[0][:, 3].long(), minlength=ROWS)


@pytest.mark.parametrize("data", ["arrays", "arrays in batches", "loader"])
@pytest.mark.parametrize("name", METHODS)
def test_calibrating_passes_every_row_once(name: str, data: str) -> None:
    predictor = METHODS[name]()
    predictor.batch_size = 50 if data == "arrays in batches" else None
    count = PassCount(predictor.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        if data == "loader":
            predictor.calibrate(DataLoader(TensorDataset(X, Y), batch_size=50))
        else:
            predictor.calibrate(X, Y)
    assert (count.times[CHECKED:] == 1).all()
    assert int(count.times[:CHECKED].max()) <= 9  # the row check, and the search for layers


@pytest.mark.parametrize("batch_size", [None, 50])
@pytest.mark.parametrize("name", METHODS)
def test_predicting_and_scoring_pass_every_row_once(name: str, batch_size: int | None) -> None:
    predictor = METHODS[name]()
    predictor.batch_size = batch_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        predictor.calibrate(X, Y)
        count = PassCount(predictor.model)
        predictor.predict_interval(X)
    assert (count.times == 1).all()
    predictor.score(X, Y)
    assert (count.times == 2).all()


def test_random_thresholds_are_looked_up_after_one_pass() -> None:
    localizer = ffcp.Localizer("gaussian", on="input", bandwidth=100.0)
    predictor = ffcp.LCP(small_mlp(), localizer, guarantee="random", batch_size=50)
    predictor.calibrate(X, Y)
    count = PassCount(predictor.model)
    predictor.predict_interval(X)
    assert (count.times == 1).all()
