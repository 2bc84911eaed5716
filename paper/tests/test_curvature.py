"""The scale of second order, built from ffcp's public names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ffcp
from ffcp_paper.experiments.curvature import Curvature


def smooth() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
    return nn.Sequential(*layers).double()


def scales(model: nn.Sequential, x: torch.Tensor, scale: Curvature) -> torch.Tensor:
    predictor = ffcp.IntervalPredictor(model, scale=scale)
    predictor.calibrate(x, torch.ones(len(x)))
    residual = (1 - model(x).detach()).abs()
    return residual / predictor.score(x, torch.ones(len(x))).reshape(-1, 1)


@pytest.mark.parametrize("feature", ["input", "0", "2"])
def test_a_small_step_gives_the_hessian_along_the_gradient(feature: str) -> None:
    model, x = smooth(), torch.randn(30, 3, dtype=torch.float64)
    cut = 0 if feature == "input" else int(feature) + 1
    v, head = model[:cut](x).detach(), model[cut:]
    big, small = (Curvature(model, feature, step) for step in (2e-3, 1e-3))
    # scale = norm + step / 2 |curvature|: the difference of two steps is the curvature.
    bend = (scales(model, x, big) - scales(model, x, small)) / 5e-4
    for row in range(len(x)):
        gradient = torch.autograd.functional.jacobian(head, v[row : row + 1]).flatten()
        hessian = torch.autograd.functional.hessian(lambda one: head(one).sum(), v[row : row + 1])
        unit, size = gradient / gradient.norm(), v.shape[1]
        expected = (unit @ hessian.reshape(size, size) @ unit).abs()
        torch.testing.assert_close(bend[row, 0], expected, rtol=1e-3, atol=1e-4)


def test_a_zero_gradient_has_the_floor_as_scale() -> None:
    model = smooth()
    with torch.no_grad():
        model[4].weight.zero_()
    x = torch.randn(30, 3, dtype=torch.float64)
    found = scales(model, x, Curvature(model, "0", floor=0.25))
    torch.testing.assert_close(found, torch.full_like(found, 0.25))
