"""How far a feature must move: exactly, and by a number of steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import ffcp
from ffcp.regression.fcp import inversion
from tests.conftest import normal
from tests.regression.models import leaky

NORMS = [2, math.inf]


@pytest.mark.parametrize("norm", NORMS)
def test_exact_inversion_finds_the_nearest_feature_of_a_linear_head(norm: float) -> None:
    weight = normal(5, seed=1)
    v, y = normal(40, 5, seed=2), normal(40, seed=3)
    distance = inversion.exact_distance(lambda u: u @ weight, v, y, norm=norm)
    dual = weight.norm() if norm == 2 else weight.abs().sum()
    torch.testing.assert_close(distance, (y - v @ weight).abs() / dual, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_the_ball_of_the_exact_distance_holds_y(norm: float) -> None:
    model = leaky()
    v, y = normal(200, 8, seed=2), 3 * normal(200, seed=3)
    rest = model[1:]
    distance = inversion.exact_distance(lambda u: rest(u)[:, 0], v, y, norm=norm)
    assert torch.isfinite(distance).all()
    for method in (ffcp.bounds.ibp, ffcp.bounds.crown):
        low, high = method(rest, v, distance, norm)
        assert ((low[:, 0] - 1e-5 <= y) & (y <= high[:, 0] + 1e-5)).all()


def test_unreachable_targets_are_infinitely_far() -> None:
    distance = inversion.exact_distance(
        lambda u: u.square().sum(dim=1), torch.ones(2, 3), torch.tensor([5.0, -1.0])
    )
    assert torch.isfinite(distance).tolist() == [True, False]


def test_one_trajectory_serves_all_numbers_of_steps() -> None:
    model = leaky()
    rest, v, y = model[1:], normal(30, 8, seed=1), normal(30, seed=2)

    def column(u: Tensor) -> Tensor:
        return rest(u)[:, 0]

    together = inversion.descend(column, v, y, [1, 5, 20], lr=0.05)
    for count, distance in zip([1, 5, 20], together, strict=True):
        alone = inversion.descend(column, v, y, [count], lr=0.05)[0]
        torch.testing.assert_close(distance, alone)


def test_descent_follows_the_gradient_of_the_squared_error() -> None:
    v, y = torch.zeros(1, 1), torch.tensor([1.0])
    # v <- v - 0.1 * 2 (v - 1): 0.2, then 0.36
    distance = inversion.descend(lambda u: u[:, 0], v, y, [1, 2], lr=0.1)
    torch.testing.assert_close(distance, torch.tensor([[0.2], [0.36]]))
