"""Time and tightness of IBP and CROWN bounds: ``python -m benchmarks.bounds``.

Prints how much longer ``ffcp.bounds`` takes than the same computation written by hand for one
network, and how much wider the bounds are than the exact range.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from ffcp.bounds import Bounds, crown, ibp, trace

ROWS, WIDTH, RADIUS, REPEATS = 10_000, 64, 0.1, 25
PART = 2048  # rows whose intermediate results fit the cache


def _linear_layers(net: nn.Sequential) -> tuple[nn.Linear, nn.Linear]:
    one, two = (layer for layer in net if isinstance(layer, nn.Linear))
    return one, two


def _between(low: Tensor, high: Tensor, weight: Tensor, bias: Tensor) -> Bounds:
    center = torch.addmm(bias, (low + high) / 2, weight.T)
    spread = (high - low) / 2 @ weight.abs().T
    return Bounds(center - spread, center + spread)


def _first(x: Tensor, radius: Tensor, first: nn.Linear, norm: float) -> Bounds:
    weight = first.weight
    reach = weight.norm(dim=1) if norm == 2 else weight.abs().sum(1)
    center = torch.addmm(first.bias, x, weight.T)
    spread = radius[:, None] * reach
    return Bounds(center - spread, center + spread)


def _relax(low: Tensor, high: Tensor, center: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lower slope, upper slope and upper intercept that bound a ReLU."""
    below, above = low.clamp(max=0), high.clamp(min=0)
    slope = above / (above - below).clamp(min=1e-30)
    return (center >= 0).to(low.dtype), slope, above * (1 - slope)


def _hull(A: Tensor, x: Tensor, radius: Tensor, norm: float) -> tuple[Tensor, Tensor]:
    size = A.norm(dim=1) if norm == 2 else A.abs().sum(1)
    return (A * x).sum(1), radius * size


@torch.no_grad()
def fused_ibp(x: Tensor, radius: Tensor, net: nn.Sequential, norm: float) -> Bounds:
    """IBP through Linear, ReLU, Linear."""
    one, two = _linear_layers(net)
    low, high = _first(x, radius, one, norm)
    return _between(low.relu(), high.relu(), two.weight, two.bias)


@torch.no_grad()
def fused_crown(x: Tensor, radius: Tensor, net: nn.Sequential, norm: float) -> Bounds:
    """CROWN through Linear, ReLU, Linear with one output."""
    one, two = _linear_layers(net)
    low, high = _first(x, radius, one, norm)
    box = _between(low.relu(), high.relu(), two.weight, two.bias)
    lower, upper, shift = _relax(low, high, low + high)  # symmetric around the center
    plus, minus = two.weight[0].clamp(min=0), two.weight[0].clamp(max=0)
    ends = []
    for A, constant in (
        (plus * lower + minus * upper, shift @ minus),
        (plus * upper + minus * lower, shift @ plus),
    ):
        middle, spread = _hull(A @ one.weight, x, radius, norm)
        ends.append((middle + A @ one.bias + constant + two.bias, spread))
    (bottom, below), (top, above) = ends
    return Bounds(
        torch.maximum((bottom - below)[:, None], box.lower),
        torch.minimum((top + above)[:, None], box.upper),
    )


@torch.no_grad()
def fused_ibp_after_relu(x: Tensor, radius: Tensor, net: nn.Sequential, norm: float) -> Bounds:
    """IBP through ReLU, Linear, ReLU, Linear; the norm makes no difference."""
    one, two = _linear_layers(net)
    r = radius[:, None]
    low, high = _between((x - r).relu(), (x + r).relu(), one.weight, one.bias)
    return _between(low.relu(), high.relu(), two.weight, two.bias)


@torch.no_grad()
def fused_crown_after_relu(x: Tensor, radius: Tensor, net: nn.Sequential, norm: float) -> Bounds:
    """CROWN through ReLU, Linear, ReLU, Linear with one output.

    In the infinity norm the intervals before the second ReLU are exact; in the L2 norm they
    are relaxed in turn, with one linear function per row and hidden unit.
    """
    one, two = _linear_layers(net)
    r = radius[:, None]
    first = _relax(x - r, x + r, x)
    center = torch.addmm(one.bias, x.relu(), one.weight.T)
    low, high = _between((x - r).relu(), (x + r).relu(), one.weight, one.bias)
    box = _between(low.relu(), high.relu(), two.weight, two.bias)
    if norm == 2:
        low, high = _hidden_crown(x, radius, one, first)
    lower, upper, shift = _relax(low, high, center)
    plus, minus = two.weight[0].clamp(min=0), two.weight[0].clamp(max=0)
    ends = []
    for A, constant, sign in (
        (plus * lower + minus * upper, shift @ minus, 1),
        (plus * upper + minus * lower, shift @ plus, -1),
    ):
        B = A @ one.weight
        positive, negative = (B * sign).clamp(min=0) * sign, (B * sign).clamp(max=0) * sign
        C = positive * first[0] + negative * first[1]
        middle, spread = _hull(C, x, radius, norm)
        middle = middle + (negative * first[2]).sum(1)
        ends.append((middle + A @ one.bias + constant + two.bias, spread))
    (bottom, below), (top, above) = ends
    return Bounds(
        torch.maximum((bottom - below)[:, None], box.lower),
        torch.minimum((top + above)[:, None], box.upper),
    )


def _hidden_crown(
    x: Tensor, radius: Tensor, one: nn.Linear, first: tuple[Tensor, Tensor, Tensor]
) -> Bounds:
    """Return L2 bounds of W relu(x) + b, by the signs of W, without a tensor (n, 64, 64)."""
    plus, minus = one.weight.clamp(min=0), one.weight.clamp(max=0)
    lower, upper, shift = first
    ends = []
    for a, b, constant in ((lower, upper, shift @ minus.T), (upper, lower, shift @ plus.T)):
        middle = (a * x) @ plus.T + (b * x) @ minus.T + constant + one.bias
        size = (a.square() @ plus.square().T + b.square() @ minus.square().T).sqrt()
        ends.append((middle, radius[:, None] * size))
    (bottom, below), (top, above) = ends
    return Bounds(bottom - below, top + above)


def _seconds(*calls: Callable[[], object]) -> list[float]:
    """Return the best time of each call, timed in turn."""
    best = [math.inf] * len(calls)
    for repeat in range(REPEATS + 3):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if repeat >= 3:
                best[i] = min(best[i], time.perf_counter() - start)
    return best


def _in_parts(bound: Callable[[Tensor, Tensor], Bounds], x: Tensor, radius: Tensor) -> Bounds:
    pairs = zip(torch.split(x, PART), torch.split(radius, PART), strict=True)
    ends = zip(*(bound(*pair) for pair in pairs), strict=True)
    return Bounds(*(torch.cat(end) for end in ends))


def speed() -> None:
    """Compare times; by hand is the better of the whole batch and of parts that fit the cache."""
    torch.manual_seed(0)
    x, radius = torch.randn(ROWS, WIDTH), torch.rand(ROWS) * RADIUS
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    relu_first = nn.Sequential(nn.ReLU(), *plain)
    cases = [
        ("Linear-ReLU-Linear", plain, "ibp", ibp, fused_ibp),
        ("Linear-ReLU-Linear", plain, "crown", crown, fused_crown),
        ("ReLU-Linear-ReLU-Linear", relu_first, "ibp", ibp, fused_ibp_after_relu),
        ("ReLU-Linear-ReLU-Linear", relu_first, "crown", crown, fused_crown_after_relu),
    ]
    print(f"{ROWS} rows, {WIDTH} wide: time over that of hand-written code, best of {REPEATS}")
    print(f"{'head':<24} {'norm':<5} {'method':<7} {'by hand':>9} {'module':>7} {'traced':>7}")
    for name, net, method, bound, fused in cases:
        head = trace(net)
        for norm in (math.inf, 2):
            by_hand = partial(fused, net=net, norm=norm)
            torch.testing.assert_close(
                tuple(bound(head, x, radius, norm)), tuple(by_hand(x, radius))
            )
            whole, parts, module, traced = _seconds(
                partial(by_hand, x, radius),
                partial(_in_parts, by_hand, x, radius),
                partial(bound, net, x, radius, norm),
                partial(bound, head, x, radius, norm),
            )
            hand = min(whole, parts)
            print(
                f"{name:<24} {norm:<5} {method:<7} {1e3 * hand:6.2f} ms "
                f"{module / hand:6.2f}x {traced / hand:6.2f}x"
            )


def _disc(norm: float, points: int = 301) -> Tensor:
    """Return a dense grid of the unit disc, including its boundary."""
    if norm == 2:
        angles = torch.linspace(0, 2 * math.pi, points)
        radii = torch.linspace(0, 1, points)[:, None, None]
        return (radii * torch.stack([angles.cos(), angles.sin()], dim=1)).flatten(0, 1)
    side = torch.linspace(-1, 1, points)
    return torch.cartesian_prod(side, side)


@torch.no_grad()
def tightness(networks: int = 20, hidden: int = 8) -> None:
    print()
    print(f"width of the bounds over the range on a dense grid, mean of {networks} networks")
    print(f"{'ReLU layers':<12} {'norm':<5} {'radius':>6} {'ibp':>8} {'crown':>8}")
    for depth in (1, 2, 3):
        for norm in (math.inf, 2):
            for radius in (0.1, 1.0):
                ratios = torch.stack(
                    [_width_ratios(seed, depth, hidden, radius, norm) for seed in range(networks)]
                )
                by_ibp, by_crown = ratios.mean(0).tolist()
                print(f"{depth:<12} {norm:<5} {radius:>6} {by_ibp:7.2f}x {by_crown:7.2f}x")


def _width_ratios(seed: int, depth: int, hidden: int, radius: float, norm: float) -> Tensor:
    torch.manual_seed(seed)
    widths = [2, *[hidden] * depth]
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Linear(hidden, 1))
    center = torch.randn(1, 2)
    values = net(center + radius * _disc(norm))
    width = values.max() - values.min()
    bounds = [bound(net, center, radius, norm) for bound in (ibp, crown)]
    return torch.stack([(b.upper - b.lower).squeeze() / width for b in bounds])


def main() -> None:
    torch.set_num_threads(1)
    speed()
    tightness()


if __name__ == "__main__":
    main()
