"""Rules of activations: lines that enclose each of them on an interval."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from ffcp.bounds.rules.kinds import Activation, Lines


def _kink_lines(slope: float, low: Tensor, high: Tensor, center: Tensor) -> Lines:
    """Lines around x for x >= 0, slope * x for x < 0."""
    below, above = low.clamp(max=0), high.clamp(min=0)
    # Where 0 is outside the interval the chord is the function itself.
    width = (above - below).clamp_(min=torch.finfo(low.dtype).tiny)
    chord = above.sub(below, alpha=slope).div_(width)
    shift = above.addcmul(above, chord, value=-1)
    # Of the two pieces, the one on which the center lies: it mostly holds on the longer side,
    # which leaves the smaller area, and is the same for every radius, so that bounds grow with it.
    piece = (center >= 0).to(low.dtype).mul_(1 - slope).add_(slope)
    convex = slope <= 1
    return Lines(piece, None, chord, shift) if convex else Lines(chord, shift, piece, None)


def relu(layer: nn.ReLU) -> Activation:
    """Zero below zero, the identity above."""
    return Activation(functional.relu, partial(_kink_lines, 0.0))


def leaky_relu(layer: nn.LeakyReLU) -> Activation:
    """Multiply by a constant below zero only."""
    slope = layer.negative_slope
    if slope == 0:  # slope * -inf would be NaN
        return Activation(functional.relu, partial(_kink_lines, 0.0))
    return Activation(
        lambda x: functional.leaky_relu(x, slope),
        partial(_kink_lines, slope),
        turning=(0.0,) if slope < 0 else (),
    )


def _chord(
    function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Slope of the chord, and the intercepts that put it through either end.

    The intercepts differ by rounding only, but a rounded slope on a short interval can be
    far off; whoever takes the safe one of the two is right with any slope.
    """
    at_low, at_high, width = function(low), function(high), high - low
    slope = torch.where(width > 0, (at_high - at_low) / width, 0.0)
    return slope, at_low - slope * low, at_high - slope * high


def _sigmoid_upper(
    function: Callable[[Tensor], Tensor],
    derivative: Callable[[Tensor], Tensor],
    low: Tensor,
    high: Tensor,
) -> tuple[Tensor, Tensor]:
    """Line above an increasing function that is convex left of 0 and concave right of it."""
    at_low = function(low)

    def covers(touch: Tensor) -> Tensor:
        """Whether the tangent at `touch` passes above the left end."""
        return function(touch) + derivative(touch) * (low - touch) >= at_low

    # A tangent at a point t >= 0 lies above the concave part. If it also lies above the left
    # end it lies above the convex part. Look for the smallest such t: `right` always is one,
    # if any is, however early the search stops.
    left, right = low.clamp(min=0), high
    for _ in range(16):
        middle = (left + right) / 2
        good = covers(middle)
        left, right = torch.where(good, left, middle), torch.where(good, middle, right)
    concave = low >= 0
    touch = torch.where(concave, (low + high) / 2, right)
    tangent = concave | ((high > 0) & covers(right))
    slope = derivative(touch)
    # No tangent covers the left end: the function lies below its chord.
    chord, through_low, through_high = _chord(function, low, high)
    return (
        torch.where(tangent, slope, chord),
        torch.where(
            tangent, function(touch) - slope * touch, torch.maximum(through_low, through_high)
        ),
    )


def _sigmoid_lines(
    function: Callable[[Tensor], Tensor],
    derivative: Callable[[Tensor], Tensor],
    low: Tensor,
    high: Tensor,
) -> Lines:
    upper_slope, upper_shift = _sigmoid_upper(function, derivative, low, high)
    # x -> -f(-x) has the same shape, so a line above it gives a line below f.
    lower_slope, shift = _sigmoid_upper(lambda x: -function(-x), derivative, -high, -low)
    return Lines(lower_slope, -shift, upper_slope, upper_shift)


def tanh(layer: nn.Tanh) -> Activation:
    """Convex below zero, concave above."""

    def derivative(x: Tensor) -> Tensor:
        return 1 - torch.tanh(x).square()

    return Activation(torch.tanh, lambda *box: _sigmoid_lines(torch.tanh, derivative, *box[:2]))


def sigmoid(layer: nn.Sigmoid) -> Activation:
    """Convex below zero, concave above."""

    def derivative(x: Tensor) -> Tensor:
        return torch.sigmoid(x) * torch.sigmoid(-x)

    return Activation(
        torch.sigmoid, lambda *box: _sigmoid_lines(torch.sigmoid, derivative, *box[:2])
    )


def _gate(
    function: Callable[[Tensor], Tensor], minimum: float, curvature: tuple[float, float]
) -> Activation:
    """Rule for f(x) = x * s(x) with s(x) + s(-x) = 1: GELU and SiLU.

    They fall to one minimum and rise after it. `curvature` encloses f'' everywhere.
    """

    def safe(x: Tensor) -> Tensor:
        # -inf * 0 is NaN; both functions have long reached 0 at -1e4.
        return function(x.clamp(min=-1e4))

    def lines(low: Tensor, high: Tensor, center: Tensor) -> Lines:
        middle, width = (low + high) / 2, high - low
        flat = rule.range(low, high)
        # f(x) = x + f(-x), so bounds on f(-x) shift a line of slope one.
        steep = rule.range(-high, -low)
        # A function strays from its chord by at most |f''| * width^2 / 8.
        slope, through_low, through_high = _chord(safe, low, high)
        sag, bulge = (c * width.square() / 8 for c in curvature)
        under = torch.minimum(through_low, through_high) - bulge
        over = torch.maximum(through_low, through_high) - sag

        zero, one = torch.zeros_like(low), torch.ones_like(low)
        lower, upper = (zero, flat.lower), (zero, flat.upper)
        for line in ((one, steep.lower), (slope, under)):
            lower = _choose(line[0] * middle + line[1] > lower[0] * middle + lower[1], line, lower)
        for line in ((one, steep.upper), (slope, over)):
            upper = _choose(line[0] * middle + line[1] < upper[0] * middle + upper[1], line, upper)
        return Lines(*lower, *upper)

    rule = Activation(safe, lines, turning=(minimum,))
    return rule


def _choose(
    mask: Tensor, yes: tuple[Tensor, Tensor], no: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    return torch.where(mask, yes[0], no[0]), torch.where(mask, yes[1], no[1])


def gelu(layer: nn.GELU) -> Activation:
    """X times the normal distribution function."""
    minimum = -0.7524614220710163 if layer.approximate == "tanh" else -0.7517915246935644
    return _gate(
        lambda x: functional.gelu(x, approximate=layer.approximate), minimum, (-0.107982, 0.797885)
    )


def silu(layer: nn.SiLU) -> Activation:
    """X times the logistic function."""
    return _gate(functional.silu, -1.278464542761074, (-0.036915, 0.5))
