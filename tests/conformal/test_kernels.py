"""Kernels as weights and as densities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import ffcp
from ffcp.conformal.kernels import as_kernel
from ffcp.conformal.random_numbers import Draws
from tests.core import filled, threshold


@pytest.mark.parametrize(
    # The mean squared length of a step: h^2 d, h^2 d (d + 1) and h^2 d / (d + 2).
    ("kernel", "mean"),
    [("gaussian", 3.0), ("laplace", 12.0), ("box", 3 / 5)],
)
def test_random_neighbours_are_drawn_from_the_kernel(kernel: str, mean: float) -> None:
    chosen = as_kernel(kernel)
    steps = Draws(0, 3).by(chosen.steps, torch.arange(20_000), 3)
    assert float(steps.square().sum(dim=1).mean()) == pytest.approx(mean, rel=0.05)
    assert float(steps.mean().abs()) < 0.1


@pytest.mark.parametrize("kernel", ["gaussian", "laplace", "box"])
def test_weights_fall_with_the_distance_from_1(kernel: str) -> None:
    weights = as_kernel(kernel).log_weight(torch.linspace(0, 9, 50).double()).exp()
    assert weights[0] == 1
    assert (weights.diff() <= 0).all()


def test_neighbours_are_no_function_of_the_distance_and_no_density() -> None:
    nearest = as_kernel("nearest")
    with pytest.raises(TypeError, match="nearest"):
        nearest.log_weight(torch.zeros(1))
    with pytest.raises(TypeError, match="nearest"):
        nearest.steps(np.random.default_rng(0), 1, 1)


def test_what_is_no_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="cosine"):
        as_kernel("cosine")
    with pytest.raises(TypeError, match=r"\b3\b"):
        as_kernel(3)


def test_a_kernel_of_ones_own() -> None:
    class Triangle(ffcp.kernels.Kernel):
        name = "triangle"

        def log_weight(self, squared: Tensor) -> Tensor:
            return (1 - squared.sqrt()).clamp_min(0).log()

    near = ffcp.calibrations.Local(
        ffcp.kernels.Localizer(Triangle(), bandwidth=2.0), guarantee="none"
    )
    near = filled(near, torch.arange(40.0)[:, None], {"embedding": torch.arange(40.0)[:, None]})
    # At 10 the points 9, 10 and 11 weigh 1/2, 1 and 1/2, and the new one 1.
    places = {"embedding": torch.tensor([[10.0]])}
    assert threshold(near, 0.5, places).item() == 10
    assert threshold(near, 0.4, places).item() == 11
