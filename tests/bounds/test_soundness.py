"""No point of a ball leaves the bounds."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ffcp.bounds import ibp, rules
from tests.bounds.heads import EVERY_HEAD, METHODS, NORMS, assert_inside, build, fixed, mlp, sample


@pytest.mark.long
@METHODS
@NORMS
@EVERY_HEAD
@torch.no_grad()
def test_ten_thousand_points_of_the_ball_never_leave_the_bounds(name, norm, bound):
    head, center = build(name, rows=4)
    radius = torch.tensor([0.03, 0.3, 1.0, 4.0])
    points = sample(center, radius, norm, 10_000 // 4)
    box = bound(head, center, radius, norm)
    values = head(points.flatten(0, 1)).unflatten(0, points.shape[:2])
    assert box.lower.shape == box.upper.shape == values.shape[1:]
    assert_inside(values, box)


@pytest.mark.long
@METHODS
@fixed
@given(
    seed=st.integers(0, 10**6),
    widths=st.lists(st.integers(1, 7), min_size=2, max_size=5),
    activation=st.sampled_from([nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU]),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    radius=st.floats(0, 5),
    norm=st.sampled_from([math.inf, 2]),
)
def test_random_networks_stay_within_bounds(bound, seed, widths, activation, scale, radius, norm):
    torch.manual_seed(seed)
    head, center = mlp(*widths, activation=activation), torch.randn(2, widths[0])
    with torch.no_grad():
        for weight in head.parameters():
            weight.mul_(scale)
        radii = torch.full((2,), radius)
        points = sample(center, radii, norm, 2000)
        assert_inside(head(points), bound(head, center, radius, norm), 1e-9 * max(1, scale**4))


@METHODS
def test_single_precision_holds_up_to_rounding(bound):
    head, center = build("relu")
    head, center = head.float(), center.float()
    points = sample(center.double(), torch.full((3,), 0.5), math.inf, 3000).float()
    box = bound(head, center, 0.5)
    assert box.lower.dtype == torch.float32
    assert_inside(head(points), box, 1e-5)


ACTIVATIONS = [
    nn.ReLU(), nn.LeakyReLU(0.3), nn.LeakyReLU(-0.3), nn.LeakyReLU(2.0), nn.Tanh(), nn.Sigmoid(),
    nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU(),
]  # fmt: skip


@pytest.mark.parametrize("layer", ACTIVATIONS, ids=str)
@fixed
@given(
    middle=st.floats(-6, 6),
    width=st.one_of(st.floats(0, 12), st.floats(0, 1e-6)),
    share=st.floats(0, 1),
)
def test_lines_enclose_the_activation_on_its_interval(layer, middle, width, share):
    low, high = torch.tensor([middle - width / 2]), torch.tensor([middle + width / 2])
    rule = rules.rule_of(layer)
    lines = rule.lines(low, high, low + share * (high - low))
    below, below_shift, above, above_shift = lines
    x = low + (high - low) * torch.linspace(0, 1, 501)
    y = layer(x)
    assert (below * x + (0 if below_shift is None else below_shift) <= y + 1e-12).all()
    assert (above * x + (0 if above_shift is None else above_shift) >= y - 1e-12).all()


@pytest.mark.parametrize("layer", ACTIVATIONS, ids=str)
@fixed
@given(middle=st.floats(-6, 6), width=st.floats(0, 12))
def test_ibp_of_an_activation_is_its_exact_range(layer, middle, width):
    center, radius = torch.tensor([[middle]]), width / 2
    y = layer(center + radius * torch.linspace(-1, 1, 20_001))
    lower, upper = ibp(layer, center, radius)
    # f'' is below 1, so a grid misses a smooth minimum by at most (step / 2)^2 / 2.
    assert (
        -1e-12
        <= y.min() - lower
        <= (width / 20_000) ** 2 + 3 * width / 20_000 * (isinstance(layer, nn.LeakyReLU)) + 1e-12
    )
    assert upper.item() == pytest.approx(y.max().item(), abs=1e-12)


@METHODS
@NORMS
@EVERY_HEAD
def test_an_infinite_radius_gives_no_nan_and_leaves_other_rows_alone(name, norm, bound):
    head, center = build(name)
    radius = torch.tensor([0.5, math.inf, 0.5])
    got, finite = bound(head, center, radius, norm), bound(head, center, 0.5, norm)
    for end, usual in zip(got, finite, strict=True):
        assert not end.isnan().any()
        torch.testing.assert_close(end[::2], usual[::2])
    assert (got.lower[1] <= finite.lower[1]).all()
    assert (got.upper[1] >= finite.upper[1]).all()


@METHODS
def test_an_infinite_radius_keeps_the_bounds_that_exist(bound):
    head = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3))
    with torch.no_grad():
        head[0].weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]))
        head[0].bias.copy_(torch.tensor([0.0, 2.0, 0.0]))
        head[2].weight.copy_(torch.tensor([[1.0, 1, 0], [0, 1, 0], [-1, 0, -1]]))
        head[2].bias.zero_()
    lower, upper = bound(head, torch.zeros(1, 2), math.inf)
    # A sum of ReLUs is bounded below, a constant on both sides, minus a sum above.
    assert lower.tolist() == [[2, 2, -math.inf]]
    assert upper.tolist() == [[math.inf, 2, 0]]
    squashed = bound(nn.Sequential(head, nn.Sigmoid()), torch.zeros(1, 2), math.inf)
    torch.testing.assert_close(
        squashed.upper, torch.tensor([[1.0, torch.sigmoid(torch.tensor(2.0)), 0.5]])
    )


@METHODS
@pytest.mark.parametrize("layer", [*ACTIVATIONS, nn.LeakyReLU(0.0)], ids=str)
def test_an_infinite_radius_gives_the_whole_range_of_an_activation(bound, layer):
    y = layer(torch.linspace(-50, 50, 100_001))
    lower, upper = bound(layer, torch.zeros(1, 1), math.inf)
    for end, reached in ((lower.item(), y.min().item()), (upper.item(), y.max().item())):
        if abs(reached) > 10:
            assert end == math.copysign(math.inf, reached)
        else:
            assert end == pytest.approx(reached, abs=1e-6)


@METHODS
def test_an_input_times_zero_is_bounded_for_any_radius(bound):
    class Zero(nn.Module):
        def forward(self, x):
            return 0 * torch.relu(x) + 0 * x + 3

    for end in bound(Zero(), torch.ones(1, 2), math.inf):
        assert end.tolist() == [[3, 3]]


@METHODS
def test_overflow_gives_infinite_bounds_rather_than_nan(bound):
    head, center = build("relu")
    box = bound(head.float(), center.float(), 1e38)
    assert not box.lower.isnan().any()
    assert not box.upper.isnan().any()
