"""CROWN lies inside IBP, wider balls have wider bounds, rows do not meet."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ffcp.bounds import Bounds, balls, crown, ibp
from tests.bounds.heads import (
    EVERY_HEAD,
    METHODS,
    NORMS,
    assert_inside,
    build,
    fixed,
    mlp,
)

pytestmark = pytest.mark.heavy


@NORMS
@EVERY_HEAD
def test_crown_lies_inside_ibp_on_every_row(name, norm):
    head, center = build(name, rows=50)
    radius = torch.rand(50) * 2
    inner, outer = crown(head, center, radius, norm), ibp(head, center, radius, norm)
    assert (inner.lower >= outer.lower).all()
    assert (inner.upper <= outer.upper).all()
    assert (inner.lower <= inner.upper).all()


@pytest.mark.parametrize("name", ["relu", "tanh", "gelu", "silu", "sigmoid", "residual", "block"])
@NORMS
def test_crown_is_tighter_than_ibp_on_deep_heads(name, norm):
    head, center = build(name, rows=20)
    inner, outer = (bound(head, center, 0.1, norm) for bound in (crown, ibp))
    assert (inner.upper - inner.lower).mean() < 0.8 * (outer.upper - outer.lower).mean()


@NORMS
@EVERY_HEAD
def test_ibp_widens_with_the_radius(name, norm):
    head, center = build(name)
    boxes = [ibp(head, center, radius, norm) for radius in (0.0, 0.1, 0.5, 3.0, math.inf)]
    for inner, outer in itertools.pairwise(boxes):
        assert (outer.lower <= inner.lower + 1e-12).all()
        assert (outer.upper >= inner.upper - 1e-12).all()


@NORMS
@fixed
@given(
    seed=st.integers(0, 10**6),
    widths=st.lists(st.integers(1, 7), min_size=2, max_size=6),
    activation=st.sampled_from([nn.ReLU, nn.LeakyReLU]),
    radii=st.tuples(st.floats(0, 5), st.floats(0, 5)),
)
def test_crown_of_relu_networks_widens_with_the_radius(norm, seed, widths, activation, radii):
    torch.manual_seed(seed)
    head, center = mlp(*widths, activation=activation), torch.randn(8, widths[0])
    inner, outer = (crown(head, center, radius, norm) for radius in sorted(radii))
    assert (outer.lower <= inner.lower + 1e-9).all()
    assert (outer.upper >= inner.upper - 1e-9).all()


@NORMS
@pytest.mark.parametrize("name", ["linear", "relu first", "relu", "residual", "conv 2d"])
def test_crown_widens_with_the_radius(name, norm):
    head, center = build(name)
    boxes = [crown(head, center, radius, norm) for radius in (0.0, 0.1, 0.5, 3.0, math.inf)]
    for inner, outer in itertools.pairwise(boxes):
        assert (outer.lower <= inner.lower + 1e-9).all()
        assert (outer.upper >= inner.upper - 1e-9).all()


@METHODS
@NORMS
@pytest.mark.parametrize("name", ["relu first", "relu", "tanh", "conv 2d", "residual"])
def test_a_row_gets_the_same_bounds_alone_and_in_any_batch(name, norm, bound, monkeypatch):
    head, center = build(name, rows=11)
    radius = torch.rand(11)
    whole = bound(head, center, radius, norm)
    rows = [bound(head, center[i : i + 1], radius[i], norm) for i in range(11)]
    for end, parts in zip(whole, zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(end, torch.cat(parts))
    # Also when memory allows a few rows, or one coordinate of one row, at a time.
    for elements in (5000, 1):
        monkeypatch.setattr(balls, "ELEMENTS", elements)
        torch.testing.assert_close(tuple(bound(head, center, radius, norm)), tuple(whole))


@METHODS
@pytest.mark.parametrize("name", ["relu first", "relu", "conv 2d", "functions"])
def test_no_rows_give_no_bounds(name, bound):
    head, center = build(name)
    assert bound(head, center[:0], 1.0).lower.shape == (
        0,
        *bound(head, center, 1.0).lower.shape[1:],
    )


@METHODS
def test_a_row_may_be_a_single_number(bound):
    class Difference(nn.Module):
        def forward(self, x):
            return torch.relu(x + 1) - 2 * x

    lower, upper = bound(Difference(), torch.tensor([0.0, 2.0]), 1.0)
    points = torch.linspace(-1, 1, 101)[:, None] + torch.tensor([0.0, 2.0])
    assert lower.shape == (2,)
    assert_inside(Difference()(points), Bounds(lower, upper))


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result._is_view():
            self.elements = max(self.elements, result.numel())
        return result


@METHODS
@NORMS
@pytest.mark.parametrize("widths", [(16, 24, 32, 1), (16, 24, 16, 40)])
def test_memory_does_not_grow_with_rows_and_units(bound, norm, widths, monkeypatch):
    monkeypatch.setattr(balls, "ELEMENTS", 2**13)
    head = nn.Sequential(nn.ReLU(), mlp(*widths))
    with LargestTensor() as largest:
        bound(head, torch.randn(150, widths[0]), 0.5, norm)
    assert 2**10 < largest.elements <= 2**13


@NORMS
def test_both_ways_through_an_activation_of_the_input_agree(norm):
    # With one output per row there is a short cut; a second path to the input disables it.
    head, center = build("relu first")

    class Detour(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = head

        def forward(self, x):
            return self.head(x) + self.head(0 * x + 1) * 0

    torch.testing.assert_close(
        tuple(crown(head, center, 0.6, norm)), tuple(crown(Detour(), center, 0.6, norm))
    )
