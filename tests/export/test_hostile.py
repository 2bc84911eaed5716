"""What users do to files, and to the models behind them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.export.graph import ROWS
from tests.export import models
from tests.export.running import holds, run_here

X = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
Y = torch.randn(400, generator=torch.Generator().manual_seed(1))


@pytest.mark.long
def test_no_rows_give_empty_bands_and_sets(tmp_path):
    path, none = tmp_path / "band.onnx", X[:0]
    ffcp.FFCP(models.mlp(), "0").calibrate(X, Y).export(path, X[:50])
    assert all(part.shape == (0,) for part in run_here(path, {"x": none}).values())
    ffcp.RAPS(nn.Linear(5, 4)).calibrate(X, torch.arange(400) % 4).export(path, X[:50])
    assert run_here(path, {"x": none, "random": np.zeros(0)})["mask"].shape == (0, 4)


@pytest.mark.long
def test_a_number_that_is_none_spoils_its_own_row_and_no_other(tmp_path):
    path = tmp_path / "band.onnx"
    ffcp.FFCP(models.mlp(), "0").calibrate(X, Y).export(path, X[:50])
    clean = run_here(path, {"x": X})
    for column, wrong in enumerate((torch.nan, torch.inf, -torch.inf, torch.nan, torch.nan)):
        rows = X.clone()
        rows[3, column] = wrong
        spoilt = run_here(path, {"x": rows})
        for name, values in spoilt.items():
            assert values[3].isnan().all()
            assert torch.equal(values[4:], clean[name][4:])


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_types_of_numbers_than_float32(dtype, tmp_path):
    path, x = tmp_path / "band.onnx", X.to(dtype)
    predictor = ffcp.FFCP(models.mlp().to(dtype), "0").calibrate(x, Y)
    predictor.export(path, x[:50])
    holds(run_here(path, {"x": x}), predictor.predict_interval(x))


class Counting(nn.Module):
    """Has buffers, one of them for the number of its calls, and is left in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 1)
        )
        self.register_buffer("mean", torch.arange(5.0))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.layers(x - self.mean)
        return result


@pytest.mark.long
def test_buffers_go_into_the_file_and_stay_what_they_are(tmp_path):
    path, model = tmp_path / "band.onnx", Counting().train()
    predictor = ffcp.FFCP(model, "layers.0").calibrate(X, Y)
    predictor.export(path, X[:50])
    assert float(model.calls) == 0
    assert model.layers[3].training
    holds(run_here(path, {"x": X}), predictor.predict_interval(X))


class Inputs(nn.Module):
    """Takes two tensors from a dict, wherever they are in it."""

    def __init__(self, one: Callable[[Any], Tensor], other: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.one, self.other = one, other
        self.first, self.second, self.head = nn.Linear(5, 8), nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x: Any) -> Tensor:
        hidden = torch.relu(self.first(self.one(x)) + self.second(self.other(x)))
        result: Tensor = self.head(hidden)
        return result


@pytest.mark.long
@pytest.mark.parametrize(
    ("names", "make", "one", "other"),
    [
        # Names of torch's own operations and constants, which are in every graph.
        (
            ["linear", "_param_constant0"],
            lambda a, b: {"linear": a, "_param_constant0": b},
            lambda x: x["linear"],
            lambda x: x["_param_constant0"],
        ),
        # Two paths that are written alike.
        (
            ["a_b", "a_b_"],
            lambda a, b: {"a": {"b": a}, "a_b": b},
            lambda x: x["a"]["b"],
            lambda x: x["a_b"],
        ),
        # Names of other inputs, and of outputs.
        (
            ["xlower_0.1", "xgroup"],
            lambda a, b: {"lower_0.1": a, "group": b},
            lambda x: x["lower_0.1"],
            lambda x: x["group"],
        ),
        (["x0_0", "x0_1"], lambda a, b: ((a, b),), lambda x: x[0], lambda x: x[1]),
    ],
)
def test_inputs_keep_their_names_whatever_these_are(names, make, one, other, tmp_path):
    path, more = tmp_path / "band.onnx", X[:, :2].sin()
    predictor = ffcp.FFCP(Inputs(one, other), "head").calibrate(make(X, more), Y)
    predictor.export(path, make(X[:50], more[:50]), alphas=(0.1, 0.2))
    session = onnxruntime.InferenceSession(path)
    assert [given.name for given in session.get_inputs()] == names
    made = run_here(path, dict(zip(names, (X, more), strict=True)))
    for alpha in (0.1, 0.2):
        holds(made, predictor.predict_interval(make(X, more), alpha), f"_{alpha}")


@pytest.mark.long
def test_outputs_of_levels_that_are_close_have_names_of_their_own(tmp_path):
    path, predictor = tmp_path / "band.onnx", ffcp.CP(nn.Linear(5, 1)).calibrate(X, Y)
    predictor.export(path, X[:50], alphas=(0.1, 0.1000001, Fraction(1, 3)))
    made = run_here(path, {"x": X})
    for name, alpha in (("0.1000001", 0.1000001), ("0.333333333333", Fraction(1, 3))):
        holds(made, predictor.predict_interval(X, alpha), f"_{name}")
    with pytest.raises(ValueError, match="alphas"):
        predictor.export(path, X[:50], alphas=(Fraction(1, 3), 0.333333333333))


class Shaped(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result[:, 0] if not self.shape else result.reshape(-1, *self.shape)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(), (2, 2), (1, 4)], ids=str)
def test_predictions_of_other_shapes(shape, tmp_path):
    path, model = tmp_path / "band.onnx", Shaped(*shape)
    y = model(X).detach() + torch.randn(400, *shape)
    predictor = ffcp.FFCP(model, "layers.0").calibrate(X, y)
    predictor.export(path, X[:50])
    holds(run_here(path, {"x": X}), predictor.predict_interval(X))


@pytest.mark.long
@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_numbers_that_are_tiny_or_huge(size, tmp_path):
    path, model = tmp_path / "band.onnx", models.mlp()
    with torch.no_grad():
        model[-1].weight.mul_(size)
        model[-1].bias.mul_(size)
    predictor = ffcp.FFCP(model, "0", floor=1e-30).calibrate(X, size * Y)
    predictor.export(path, X[:50])
    holds(run_here(path, {"x": X}), predictor.predict_interval(X))


@pytest.mark.long
def test_dead_units_leave_the_floor_and_too_few_points_the_whole_line(tmp_path):
    path, model = tmp_path / "band.onnx", models.mlp()
    with torch.no_grad():
        model[3].bias.fill_(-100.0)
    predictor = ffcp.FFCP(model, "0", floor=0.25).calibrate(X[:20], Y[:20])
    with pytest.warns(ffcp.FFCPWarning, match="alpha="):
        predictor.export(path, X[:50], alphas=(0.1, 0.01))
    made = run_here(path, {"x": X})
    holds(made, predictor.predict_interval(X, 0.1), "_0.1")
    assert bool((made["lower_0.01"] == -torch.inf).all())
    assert bool((made["upper_0.01"] == torch.inf).all())


@pytest.mark.long
def test_another_reader_of_the_format_gives_the_same_bands(tmp_path):
    path, predictor = tmp_path / "band.onnx", ffcp.FFCP(models.mlp(), "0").calibrate(X, Y)
    predictor.export(path, X[:50])
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    names = [output.name for output in model.graph.output]
    values = onnx.reference.ReferenceEvaluator(model).run(None, {"x": X.numpy()})
    made = dict(zip(names, map(torch.from_numpy, values), strict=True))
    holds(made, predictor.predict_interval(X))


class Wrong(nn.Linear):
    """Goes wrong with one number of rows, that which graphs are made with."""

    def forward(self, x: Tensor) -> Tensor:
        more = x[:, :2] @ torch.ones(3, 1) if x.shape[0] == ROWS else 0
        return super().forward(x) + more


def test_what_goes_wrong_is_raised_and_not_printed(tmp_path, caplog):
    predictor = ffcp.CP(Wrong(5, 1)).calibrate(X, Y)
    with pytest.raises(ValueError, match="CP"):
        predictor.export(tmp_path / "band.onnx", X[:50])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
