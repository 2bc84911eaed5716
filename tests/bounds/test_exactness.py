"""Where bounds are exact, they equal what brute force finds."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import nn

from ffcp.bounds import crown, ibp, trace
from tests.bounds.heads import (
    EVERY_HEAD,
    METHODS,
    NORMS,
    build,
    mlp,
    random_batch_norm,
)


@pytest.mark.long
@METHODS
def test_linear_head_equals_vertex_enumeration_in_the_infinity_norm(bound):
    head, center = build("linear")
    corners = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=5)))
    values = head(center + 0.7 * corners[:, None])
    lower, upper = bound(head, center, 0.7)
    torch.testing.assert_close(lower, values.amin(0))
    torch.testing.assert_close(upper, values.amax(0))


@METHODS
@torch.no_grad()
def test_linear_head_is_exact_in_the_l2_norm(bound):
    head, center = build("linear")
    row_norms = head.weight.norm(dim=1)
    lower, upper = bound(head, center, 0.7, 2)
    torch.testing.assert_close(lower, head(center) - 0.7 * row_norms)
    torch.testing.assert_close(upper, head(center) + 0.7 * row_norms)


CONVOLUTIONS = {
    "1d": ((3, 8), lambda: nn.Conv1d(3, 2, 3, stride=2, padding=1)),
    "1d same, even kernel": ((3, 8), lambda: nn.Conv1d(3, 2, 4, padding="same")),
    "2d": ((2, 6, 5), lambda: nn.Conv2d(2, 4, (3, 2), stride=(3, 2), padding=(2, 1), groups=2)),
    "2d dilated same": ((2, 5, 5), lambda: nn.Conv2d(2, 2, 2, padding="same", dilation=(1, 3))),
    "pool 1d": ((2, 7), lambda: nn.AvgPool1d(3, stride=2, padding=1)),
    "pool 2d": ((2, 5, 7), lambda: nn.AvgPool2d((2, 3), stride=(1, 2))),
    "adaptive pool": ((2, 4, 6), lambda: nn.AdaptiveAvgPool2d((2, 3))),
    "batch norm": ((3, 2, 2), lambda: random_batch_norm(nn.BatchNorm2d(3)).eval()),
}


@METHODS
@NORMS
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("place", ["alone", "after a relu", "between relus"])
@torch.no_grad()
def test_spatial_layers_agree_with_their_dense_matrix(name, norm, bound, place):
    shape, make = CONVOLUTIONS[name]
    layer = make()
    size = math.prod(shape)
    bias = layer(torch.zeros(1, *shape))
    matrix = (layer(torch.eye(size).view(size, *shape)) - bias).flatten(1)
    dense = nn.Linear(size, matrix.shape[1])
    dense.weight.copy_(matrix.T)
    dense.bias.copy_(bias.flatten())
    before = [] if place == "alone" else [nn.LeakyReLU()]
    after = [nn.ReLU(), nn.Linear(matrix.shape[1], 3)] if place == "between relus" else []
    center = torch.randn(3, *shape)
    spatial = bound(nn.Sequential(*before, layer, nn.Flatten(), *after), center, 0.5, norm)
    flat = bound(nn.Sequential(*before, dense, *after), center.flatten(1), 0.5, norm)
    torch.testing.assert_close(tuple(spatial), tuple(flat))


@pytest.mark.long
@METHODS
@NORMS
@EVERY_HEAD
@torch.no_grad()
def test_radius_zero_gives_the_heads_own_output(name, norm, bound):
    head, center = build(name)
    for end in bound(head, center, 0.0, norm):
        torch.testing.assert_close(end, head(center))


@NORMS
@torch.no_grad()
def test_crown_is_exact_for_a_chain_of_affine_layers(norm):
    head = nn.Sequential(
        nn.Linear(4, 6), random_batch_norm(nn.BatchNorm1d(6)), nn.Linear(6, 5), nn.Linear(5, 2)
    ).eval()
    center = torch.randn(3, 4)
    whole = nn.Linear(4, 2)
    whole.bias.copy_(head(torch.zeros(1, 4))[0])
    whole.weight.copy_((head(torch.eye(4)) - whole.bias).T)
    got, exact = crown(head, center, 0.5, norm), ibp(whole, center, 0.5, norm)
    torch.testing.assert_close(tuple(got), tuple(exact))
    assert (ibp(head, center, 0.5, norm).upper > exact.upper + 0.01).all()


def activation_patterns(net, center, radius):
    """Exact range over a box: on each pattern of the ReLUs the network is affine, so two LPs."""
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    layers = [(m.weight.detach().numpy(), m.bias.detach().numpy()) for m in layers]
    box = [(c - radius, c + radius) for c in center.tolist()]
    ends = []
    hidden = [len(b) for _, b in layers[:-1]]
    for pattern in itertools.product([0, 1], repeat=sum(hidden)):
        on = np.split(np.array(pattern), np.cumsum(hidden)[:-1])
        A, b = np.eye(len(center)), np.zeros(len(center))
        rows, limits = [], []
        for (W, shift), active in zip(layers[:-1], on, strict=True):
            A, b = W @ A, W @ b + shift
            sign = 1 - 2 * active  # active: -(A x + b) <= 0
            rows.append(sign[:, None] * A)
            limits.append(-sign * b)
            A, b = active[:, None] * A, active * b
        A, b = layers[-1][0] @ A, layers[-1][0] @ b + layers[-1][1]
        for sign in (1, -1):
            result = linprog(sign * A[0], np.vstack(rows), np.hstack(limits), bounds=box)
            if result.success:
                ends.append(sign * result.fun + b[0])
    return min(ends), max(ends)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_exact_range_of_a_tiny_relu_network_lies_inside_the_bounds(seed):
    torch.manual_seed(seed)
    net, center = mlp(2, 3, 3, 1), torch.randn(1, 2)
    low, high = activation_patterns(net, center[0], 0.8)
    for bound in (ibp, crown):
        lower, upper = bound(net, center, 0.8)
        assert lower.item() <= low + 1e-7
        assert upper.item() >= high - 1e-7
    # CROWN is not just any enclosure: it stays near the range where IBP does not.
    assert upper.item() - lower.item() <= 2 * (high - low) + 1e-7


@pytest.mark.long
@NORMS
def test_crown_is_exact_where_no_relu_changes_sign(norm):
    net, center = mlp(3, 6, 5, 1), torch.randn(4, 3)
    stable = crown(net, center, 1e-5, norm)
    gradient = torch.func.vmap(torch.func.grad(lambda v: net(v)[0]))(center)
    dual = gradient.norm(dim=1) if norm == 2 else gradient.abs().sum(1)
    torch.testing.assert_close(
        stable.upper - stable.lower, 2e-5 * dual[:, None], rtol=1e-6, atol=1e-14
    )


def test_one_unstable_neuron_is_bounded_exactly_from_above():
    net = mlp(2, 1, 1)
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0, 2.0]]))
        net[0].bias.fill_(0.5)
        net[2].weight.fill_(3.0)
        net[2].bias.fill_(1.0)
    # Before the ReLU: [-2.5, 3.5]. Both methods know the range of a single neuron.
    for bound in (ibp, crown):
        lower, upper = bound(net, torch.zeros(1, 2), 1.0)
        assert upper.item() == pytest.approx(11.5)
        assert lower.item() == pytest.approx(1.0)


def test_crown_of_two_unstable_neurons_is_the_value_worked_out_by_hand():
    # relu(x) - relu(x - 1) on [-1, 3], with range [0, 1]. Chords: relu(x) <= 3/4 (x + 1) and
    # relu(x - 1) <= 1/2 (x + 1); pieces: relu(x) >= x, relu(x - 1) >= x - 1 on [-2, 2] (a tie).
    net = mlp(1, 2, 1)
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0], [1.0]]))
        net[0].bias.copy_(torch.tensor([0.0, -1.0]))
        net[2].weight.copy_(torch.tensor([[1.0, -1.0]]))
        net[2].bias.zero_()
    lower, upper = crown(net, torch.ones(1, 1), 2.0)
    # Above: 3/4 (x + 1) - (x - 1) = 7/4 - x/4, at most 2 at x = -1.
    assert upper.item() == pytest.approx(2.0)
    # Below: x - 1/2 (x + 1) = x/2 - 1/2, at least -1 at x = -1.
    assert lower.item() == pytest.approx(-1.0)


UPSAMPLES = {
    "size": lambda: nn.Upsample(size=(7, 9), mode="bilinear", align_corners=True),
    "factor": lambda: nn.Upsample(scale_factor=2.5, mode="bilinear"),
    "two factors": lambda: nn.Upsample(scale_factor=(1.5, 2.4)),
    "nearest": lambda: nn.Upsample(scale_factor=3),
    "smaller": lambda: nn.Upsample(size=(2, 3), mode="bilinear"),
}


@pytest.mark.parametrize("name", UPSAMPLES)
@pytest.mark.parametrize("norm", [math.inf, 2])
def test_interpolation_is_bounded_exactly(name: str, norm: float) -> None:
    torch.manual_seed(0)
    head, center = UPSAMPLES[name](), torch.randn(2, 3, 4, 5)
    value = head(center)
    jacobian = torch.func.jacrev(lambda v: head(v[None])[0])(center[0])
    rows = jacobian.reshape(value[0].numel(), -1)
    reach = 0.3 * (rows.norm(dim=1) if norm == 2 else rows.abs().sum(dim=1))
    for bound in (ibp, crown):
        found = bound(head, center, 0.3, norm)
        torch.testing.assert_close((found.upper - value)[0].reshape(-1), reach)
        torch.testing.assert_close((value - found.lower)[0].reshape(-1), reach)


def test_crown_pulls_back_through_interpolation() -> None:
    torch.manual_seed(0)
    head = nn.Sequential(
        nn.Conv2d(2, 3, 1), nn.ReLU(), UPSAMPLES["factor"](), nn.Conv2d(3, 2, 3, padding=1)
    )
    center = torch.randn(1, 2, 4, 5)
    moved = center + 0.2 * (2 * torch.rand(300, 2, 4, 5) - 1)
    inner, outer = crown(head, center, 0.2), ibp(head, center, 0.2)
    values = head(moved)
    assert (values >= inner.lower - 1e-5).all()
    assert (values <= inner.upper + 1e-5).all()
    assert (inner.upper - inner.lower).sum() < (outer.upper - outer.lower).sum()


def test_cubic_interpolation_is_refused() -> None:
    with pytest.raises(TypeError, match="bicubic"):
        trace(nn.Upsample(scale_factor=2, mode="bicubic"))
