"""Gradients that have no ONNX, taken apart: the same numbers as torch's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ffcp
from ffcp.export.backward import adaptive_average_pool_backward, average_pool_backward
from tests.conftest import normal
from tests.export.running import holds, run_here


def gradient_of(function: object, x: Tensor, gradient: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x), x, gradient)[0]  # type: ignore[operator]


@pytest.mark.parametrize("override", [None, 5])
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("count_include_pad", [False, True])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [([2, 2], [], [0, 0]), ([3], [2], [1]), ([2, 3], [1, 2], [1, 1]), ([3, 1], [3, 2], [0, 0])],
)
def test_the_gradient_of_averages_is_that_of_torch(
    kernel: list[int], stride: list[int], padding: list[int], count_include_pad: bool,
    ceil_mode: bool, override: int | None,
) -> None:  # fmt: skip
    x = normal(2, 3, 8, 7, seed=0).double()
    settings = (ceil_mode, count_include_pad, override)

    def pooled(x: Tensor) -> Tensor:
        return functional.avg_pool2d(x, kernel, stride or None, padding, *settings)

    gradient = torch.randn_like(pooled(x))
    found = average_pool_backward(gradient, x, kernel, stride, padding, *settings)
    torch.testing.assert_close(found, gradient_of(pooled, x, gradient))


@pytest.mark.parametrize("size", [(1, 1), (3, 4), (8, 7), (9, 2)])
def test_the_gradient_of_averages_of_any_size_is_that_of_torch(size: tuple[int, int]) -> None:
    x = normal(2, 3, 8, 7, seed=0).double()

    def pooled(x: Tensor) -> Tensor:
        return functional.adaptive_avg_pool2d(x, size)

    gradient = torch.randn_like(pooled(x))
    found = adaptive_average_pool_backward(gradient, x)
    torch.testing.assert_close(found, gradient_of(pooled, x, gradient))


@pytest.mark.long
@pytest.mark.parametrize(
    "layers",
    [
        (nn.SiLU(), nn.Flatten(), nn.Linear(144, 1)),
        (nn.Mish(), nn.Flatten(), nn.Linear(144, 1)),
        (nn.Tanh(), nn.AvgPool2d(3, 2, 1), nn.Tanh(), nn.Flatten(), nn.Linear(36, 1)),
        (nn.Tanh(), nn.AdaptiveAvgPool2d((4, 5)), nn.Tanh(), nn.Flatten(), nn.Linear(80, 1)),
    ],
    ids=["SiLU", "Mish", "AvgPool2d", "AdaptiveAvgPool2d"],
)
def test_networks_with_these_layers_are_exported(
    layers: tuple[nn.Module, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *layers)
    x, y = normal(60, 3, 6, 6, seed=1), normal(60, seed=2)
    predictor = ffcp.FFCP(model, "0").calibrate(x, y)
    predictor.export(tmp_path / "band.onnx", x[:20])
    holds(run_here(tmp_path / "band.onnx", {"x": x}), predictor.predict_interval(x))
