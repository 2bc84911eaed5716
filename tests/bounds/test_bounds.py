import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ffcp.bounds import Bounds, balls, crown, ibp, rules, trace

METHODS = pytest.mark.parametrize("bound", [ibp, crown])
NORMS = pytest.mark.parametrize("norm", [math.inf, 2])
fixed = settings(derandomize=True, deadline=None, max_examples=25, database=None)


@pytest.fixture(autouse=True)
def _double_precision_and_seed():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


class Residual(nn.Module):
    """relu(x + body(x)), the addition in a graph that only tracing sees."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return torch.relu(x + self.body(x))


class Functions(nn.Module):
    """Functions, methods, numbers and repeated use of the input in one forward."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6)

    def forward(self, x):
        y = functional.leaky_relu(self.one(x), 0.2) + x
        y = functional.dropout(y, 0.5, self.training)
        z = torch.tanh(2 * y - 1) - functional.gelu(self.two(y)).sigmoid()
        return torch.flatten(1 - torch.add(z, -x), 1)


class Block(nn.Module):
    """A residual block with convolutions, as in a ResNet."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = random_batch_norm(nn.BatchNorm2d(4))
        self.relu = nn.ReLU(inplace=True)
        self.two = nn.Conv2d(4, 4, 3, padding="same", groups=2)

    def forward(self, x):
        y = self.two(self.relu(self.norm(self.one(x))))
        y += x
        return self.relu(y)


def random_batch_norm(layer):
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    if layer.affine:
        nn.init.normal_(layer.weight)  # of both signs
        nn.init.normal_(layer.bias)
    return layer


def mlp(*widths, activation=nn.ReLU):
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1])


# Every supported layer occurs here: name -> (row shape, builder).
HEADS = {
    "identity": ((5,), nn.Identity),
    "linear": ((5,), lambda: nn.Linear(5, 3)),
    "linear without bias on sequences": ((3, 5), lambda: nn.Linear(5, 2, bias=False)),
    "relu first": ((6,), lambda: nn.Sequential(nn.ReLU(), mlp(6, 8, 1))),
    "relu": ((6,), lambda: mlp(6, 9, 8, 7, 3)),
    "leaky relu": ((6,), lambda: mlp(6, 9, 8, 3, activation=nn.LeakyReLU)),
    "leaky relu falling": ((6,), lambda: mlp(6, 9, 8, 3, activation=partial(nn.LeakyReLU, -0.5))),
    "leaky relu steep": ((6,), lambda: mlp(6, 9, 8, 3, activation=partial(nn.LeakyReLU, 1.7))),
    "leaky relu zero": ((6,), lambda: mlp(6, 9, 8, 3, activation=partial(nn.LeakyReLU, 0.0))),
    "tanh": ((6,), lambda: mlp(6, 9, 8, 3, activation=nn.Tanh)),
    "sigmoid": ((6,), lambda: mlp(6, 9, 8, 3, activation=nn.Sigmoid)),
    "gelu": ((6,), lambda: mlp(6, 9, 8, 3, activation=nn.GELU)),
    "gelu tanh": ((6,), lambda: mlp(6, 9, 8, 3, activation=partial(nn.GELU, approximate="tanh"))),
    "silu": ((6,), lambda: mlp(6, 9, 8, 3, activation=nn.SiLU)),
    "activations in a row": ((6,), lambda: nn.Sequential(nn.SiLU(), nn.Tanh(), nn.Linear(6, 2))),
    "dropout": (
        (6,),
        lambda: nn.Sequential(nn.Dropout(0.9), nn.AlphaDropout(0.5), mlp(6, 5, 2), nn.Dropout(0.9)),
    ),
    "batch norm 1d": (
        (6,),
        lambda: nn.Sequential(
            random_batch_norm(nn.BatchNorm1d(6)),
            nn.Linear(6, 7),
            random_batch_norm(nn.BatchNorm1d(7, affine=False)),
            nn.ReLU(),
            nn.Linear(7, 2),
        ),
    ),
    "conv 1d": (
        (2, 9),
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3, stride=2, padding=1),
            random_batch_norm(nn.BatchNorm1d(4)),
            nn.ReLU(),
            nn.Dropout1d(),
            nn.Conv1d(4, 4, 2, padding="same", dilation=3, groups=2),
            nn.Tanh(),
            nn.AvgPool1d(3, stride=1, padding=1),
            nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten()),
            nn.Linear(4, 2),
        ),
    ),
    "conv 2d": (
        (2, 7, 6),
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, (3, 2), stride=(2, 3), padding=(1, 2), dilation=(1, 2)),
            nn.ReLU(),
            nn.Dropout2d(),
            nn.AvgPool2d(2),
            nn.Conv2d(4, 2, 1, padding="valid"),
            nn.Flatten(2),
            nn.GELU(),
            nn.Flatten(),
            nn.LazyLinear(2),
        ),
    ),
    "pool first": ((2, 4, 6), lambda: nn.Sequential(nn.AdaptiveAvgPool2d((2, None)), nn.Flatten())),
    "residual": ((6,), lambda: nn.Sequential(Residual(mlp(6, 8, 6)), Residual(nn.Linear(6, 6)))),
    "functions": ((6,), Functions),
    "block": ((4, 3, 3), lambda: nn.Sequential(Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten())),
}
EVERY_HEAD = pytest.mark.parametrize("name", HEADS)


@torch.no_grad()
def build(name, rows=3, seed=0):
    torch.manual_seed(seed)
    shape, make = HEADS[name]
    head, center = make().eval(), torch.randn(rows, *shape)
    head(center)  # gives lazy layers their shape
    return head, center


def sample(center, radius, norm, points):
    """Points of each row's ball, many of them on its boundary: (points, n, ...)."""
    step = torch.randn(points, *center.shape)
    flat = step.flatten(2)
    if norm == 2:
        flat = flat / flat.norm(dim=-1, keepdim=True)
        flat[::2] *= torch.rand(len(flat[::2]), flat.shape[1], 1)
    else:
        flat = torch.where(torch.arange(points)[:, None, None] % 2 == 0, flat.sign(), flat.tanh())
    return center + flat.view_as(step) * radius.view(-1, *[1] * (center.ndim - 1))


def assert_inside(values, box, tolerance=1e-9):
    assert (values >= box.lower - tolerance).all()
    assert (values <= box.upper + tolerance).all()


# --- soundness --------------------------------------------------------------------------


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


# --- exactness --------------------------------------------------------------------------


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


# --- relations --------------------------------------------------------------------------


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


# --- graphs -----------------------------------------------------------------------------


class Cancel(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x):
        y = self.one(x)
        return y + (-1) * y + 0.1 * x


@NORMS
def test_crown_sees_branches_cancel(norm):
    center = torch.randn(3, 4)
    lower, upper = crown(Cancel(), center, 1.0, norm)
    torch.testing.assert_close(lower, 0.1 * (center - 1))
    torch.testing.assert_close(upper, 0.1 * (center + 1))


def test_crown_sees_a_residual_branch_cancel_through_stable_relus():
    class Minus(nn.Module):
        def forward(self, x):
            return torch.relu(x + 5) - x

    lower, upper = crown(Minus(), torch.zeros(1, 2), 1.0)
    torch.testing.assert_close(lower, torch.full((1, 2), 5.0))
    torch.testing.assert_close(upper, torch.full((1, 2), 5.0))
    assert ibp(Minus(), torch.zeros(1, 2), 1.0).upper.max() == 7


def test_crown_sees_the_input_cancel_its_own_activation():
    class Minus(nn.Module):
        def forward(self, x):
            return torch.relu(x) - x

    for end in crown(Minus(), torch.full((1, 2), 5.0), 1.0):
        torch.testing.assert_close(end, torch.zeros(1, 2))


def test_crown_bounds_hidden_units_by_crown_too():
    # The hidden unit is x - x + 1 = 1; as an interval, [-1, 3], whose relaxed ReLU reaches 1.5.
    head = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 1))
    with torch.no_grad():
        head[0].weight.fill_(1.0)
        head[0].bias.zero_()
        head[1].weight.copy_(torch.tensor([[1.0, -1.0]]))
        head[1].bias.fill_(1.0)
        head[3].weight.fill_(1.0)
        head[3].bias.zero_()
    for end in crown(head, torch.zeros(1, 1), 1.0):
        assert end.item() == pytest.approx(1.0)


def test_crown_keeps_the_l2_ball_through_stable_activations():
    head, center = nn.Sequential(nn.ReLU(), nn.Linear(4, 1)), torch.full((1, 4), 5.0)
    exact = ibp(head[1], center, 1.0, 2)
    torch.testing.assert_close(tuple(crown(head, center, 1.0, 2)), tuple(exact))
    assert ibp(head, center, 1.0, 2).upper > exact.upper + 0.01


def test_a_layer_used_twice_is_applied_twice():
    relu, layer = nn.ReLU(), nn.Linear(3, 3)
    head, center = nn.Sequential(layer, relu, layer, relu), torch.randn(2, 3)
    torch.testing.assert_close(ibp(head, center, 0.0).lower, head(center))


def test_a_traced_head_reads_new_weights():
    head, center = build("relu")
    traced = trace(head)
    before = crown(traced, center, 0.5)
    with torch.no_grad():
        head[0].weight.mul_(2)
    assert not torch.equal(crown(traced, center, 0.5).lower, before.lower)
    torch.testing.assert_close(tuple(crown(traced, center, 0.5)), tuple(crown(head, center, 0.5)))


def test_a_parametrized_layer_counts_as_the_layer_it_is():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    center = torch.randn(2, 3)
    torch.testing.assert_close(ibp(layer, center, 0.0).upper, layer(center))


# --- infinity ---------------------------------------------------------------------------


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


# --- what stays as it was, and what is refused ------------------------------------------


@METHODS
def test_modes_gradients_and_parameters_are_left_alone(bound):
    head, center = build("batch norm 1d")
    head.train()
    head[2].eval()
    before = {k: v.clone() for k, v in head.state_dict().items()}
    center.requires_grad_()
    box = bound(head, center, 0.5)
    assert not box.lower.requires_grad
    assert [m.training for m in head] == [True, True, False, True, True]
    assert all(p.requires_grad and p.grad is None for p in head.parameters())
    assert all(torch.equal(before[k], v) for k, v in head.state_dict().items())
    assert torch.equal(box.lower, bound(head.eval(), center, 0.5).lower)


@METHODS
def test_training_only_branches_are_read_in_eval_mode_and_the_mode_restored(bound):
    head, center = build("functions")
    expected = bound(head, center, 0.5)
    head.train()
    assert torch.equal(bound(head, center, 0.5).lower, expected.lower)
    assert head.training
    assert head.one.training


def test_an_unsupported_layer_is_named_with_a_remedy():
    head = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.LayerNorm(3)), nn.Softmax(1))
    with pytest.raises(TypeError, match=r"layer '1\.1' \(LayerNorm\)") as error:
        ibp(head, torch.zeros(1, 3), 1.0)
    assert "layer '2' (Softmax)" in str(error.value)
    assert "Use one of Linear" in str(error.value)
    assert "cut the network at a later layer" in str(error.value)


def test_a_subclass_with_its_own_forward_is_not_taken_for_its_parent():
    class Shifted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + self.bias

    with pytest.raises(TypeError, match=r"'0\.weight' \(weight in Shifted\)"):
        trace(nn.Sequential(Shifted(2, 2)))


class Calls(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.relu = nn.ReLU(inplace=True)
        self.call = call

    def forward(self, x):
        return self.call(self, x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda self, x: x * x, "'mul'.*product with a number"),
        (lambda self, x: x.cumsum(1), "'cumsum'"),
        (lambda self, x: x + self.layer.bias, "'layer_bias'.*outside a layer"),
        (lambda self, x: self.layer(input=x), r"layer 'layer' \(Linear\).*called with"),
        (lambda self, x: torch.add(x, x, alpha=2), "'add'.*alpha"),
        (lambda self, x: x.flatten(), "start_dim=0 mixes the rows"),
        (lambda self, x: functional.dropout(x), "at random"),
        (lambda self, x: (x, x), "other than one tensor"),
        (lambda self, x: x if x.sum() > 0 else -x, "torch.fx cannot trace it"),
        (lambda self, x: self.relu(x) + x, "'relu'.*overwrites 'input'.*inplace=False"),
    ],
)
def test_a_call_that_cannot_be_bounded_is_named(call, message):
    with pytest.raises(TypeError, match=message):
        trace(Calls(call))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Conv1d(2, 2, 3, padding=1, padding_mode="reflect"), "padding_mode='reflect'"),
        (nn.AvgPool1d(3, ceil_mode=True), "ceil_mode"),
        (nn.AvgPool2d(3, divisor_override=2), "divisor_override"),
        (nn.AvgPool2d(3, padding=1, count_include_pad=False), "count_include_pad"),
        (nn.BatchNorm1d(2, track_running_stats=False), "mixes the rows"),
    ],
)
def test_an_option_that_cannot_be_bounded_is_named(layer, message):
    with pytest.raises(TypeError, match=f"layer '0'.*{message}"):
        trace(nn.Sequential(layer))


def test_uneven_adaptive_pooling_quotes_both_sizes():
    with pytest.raises(ValueError, match=r"\(5,\) to \(2,\)"):
        ibp(nn.AdaptiveAvgPool1d(2), torch.zeros(1, 3, 5), 1.0)


def test_a_broadcast_sum_quotes_both_shapes():
    head = Calls(lambda self, x: self.layer(x) + x.flatten(1))
    with pytest.raises(ValueError, match=r"'add'.*\(2, 2\) and \(4,\)"):
        ibp(head, torch.zeros(1, 2, 2), 1.0)


@METHODS
@pytest.mark.parametrize(
    ("radius", "message"),
    [
        (-0.5, r"radius is -0\.5"),
        (math.nan, "radius is nan"),
        (torch.tensor([1.0, -2.0, 0.0]), r"radius is -2\.0 in row 1"),
        (torch.tensor([1.0, 2.0, math.nan]), "radius is nan in row 2"),
        (torch.ones(2), r"radius has shape \(2,\), center \(3, 5\).*shape \(3,\)"),
        (torch.ones(3, 1), r"radius has shape \(3, 1\)"),
    ],
)
def test_a_bad_radius_is_quoted(bound, radius, message):
    with pytest.raises(ValueError, match=message):
        bound(nn.Linear(5, 1), torch.zeros(3, 5), radius)


@METHODS
def test_a_bad_center_or_norm_is_quoted(bound):
    center = torch.zeros(3, 5)
    with pytest.raises(ValueError, match="norm is 1"):
        bound(nn.Linear(5, 1), center, 1.0, 1)
    with pytest.raises(ValueError, match=r"torch\.int64"):
        bound(nn.Linear(5, 1), center.long(), 1.0)
    center[2, 1] = math.nan
    with pytest.raises(ValueError, match="row 2"):
        bound(nn.Linear(5, 1), center, 1.0)


def test_bounds_unpack_as_lower_and_upper():
    lower, upper = box = ibp(nn.Identity(), torch.zeros(1, 1), 1.0)
    assert isinstance(box, Bounds)
    assert (lower.item(), upper.item()) == (-1, 1)


# --- interpolation, and modules that bound themselves -------------------------------------------

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
    with pytest.raises(TypeError, match="mode 'bicubic' is not bounded"):
        trace(nn.Upsample(scale_factor=2, mode="bicubic"))


class Halved(nn.Module):
    """A module that says itself how it maps bounds."""

    def forward(self, x: Tensor) -> Tensor:
        return -x / 2

    def bounds(self, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        return -upper / 2, -lower / 2


def test_a_module_can_bound_itself_for_ibp_alone() -> None:
    head = nn.Sequential(Halved(), nn.ReLU())
    found = ibp(head, torch.tensor([[-3.0, 1.0]]), 1.0)
    assert found.lower.tolist() == [[1.0, 0.0]]
    assert found.upper.tolist() == [[2.0, 0.0]]
    with pytest.raises(ValueError, match="layer '0' bounds itself over boxes, which only ibp"):
        crown(head, torch.zeros(1, 2), 1.0)
