"""The rule of each kind of layer: one small function per kind, and the table of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Bounds(NamedTuple):
    """Elementwise lower and upper bounds, both in the shape of the bounded tensor.

    Parameters
    ----------
    lower, upper : Tensor
        The bounds.
    """

    lower: Tensor
    upper: Tensor


class Lines(NamedTuple):
    """Lines that enclose an activation on an interval; an intercept of None is zero."""

    lower_slope: Tensor
    lower_shift: Tensor | None
    upper_slope: Tensor
    upper_shift: Tensor | None


@dataclass(frozen=True)
class Affine:
    """x -> W x + b. The functions read W and b when called, so training may go on."""

    apply: Callable[[Tensor], Tensor]  # W x + b
    push: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]  # of(W) x, no b
    reshapes: bool = False  # a ball stays a ball

    def pull(self, A: Tensor, shape: torch.Size) -> Tensor:
        """Return A W, for an input of that shape."""
        pulled: Tensor = torch.func.vjp(self.apply, A.new_zeros(len(A), *shape))[1](A)[0]
        return pulled


@dataclass(frozen=True)
class Sum:
    """sum_i scales[i] * input_i + shift, the inputs all of one shape."""

    scales: tuple[float, ...]
    shift: float = 0.0


@dataclass(frozen=True)
class Activation:
    """An elementwise function, monotone between its turning points."""

    function: Callable[[Tensor], Tensor]
    lines: Callable[[Tensor, Tensor, Tensor], Lines]  # of the low, the high end, the center
    turning: tuple[float, ...] = ()

    def range(self, low: Tensor, high: Tensor) -> Bounds:
        """Return the exact range on an interval: its extremes are at the ends or where it turns."""
        ends = self.function(low), self.function(high)
        if not self.turning:
            return Bounds(*ends)
        lower, upper = torch.minimum(*ends), torch.maximum(*ends)
        for point in self.turning:
            value = self.function(low.new_tensor(point))
            inside = (low <= point) & (point <= high)
            lower = torch.where(inside, torch.minimum(lower, value), lower)
            upper = torch.where(inside, torch.maximum(upper, value), upper)
        return Bounds(lower, upper)


@dataclass(frozen=True)
class Own:
    """A module with its own ``bounds`` method, which takes boxes."""

    apply: Callable[[Tensor], Tensor]
    bounds: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


Rule = Affine | Sum | Activation | Own


class UnsupportedError(Exception):
    """The reason why a layer has no rule; `trace` collects them and adds the names."""


# -- affine layers -----------------------------------------------------------------------------


def linear(layer: nn.Linear) -> Affine:
    """W x + b on the last dimension."""
    return Affine(
        apply=lambda x: functional.linear(x, layer.weight, layer.bias),
        push=lambda x, of: functional.linear(x, of(layer.weight)),
    )


def convolution(layer: nn.Conv1d | nn.Conv2d) -> Affine:
    """One and two dimensions, zero padding."""
    if layer.padding_mode != "zeros":
        raise UnsupportedError(f"padding_mode={layer.padding_mode!r}, only 'zeros' is bounded")
    convolve: Any = functional.conv1d if isinstance(layer, nn.Conv1d) else functional.conv2d
    options = layer.stride, layer.padding, layer.dilation, layer.groups
    return Affine(
        apply=lambda x: convolve(x, layer.weight, layer.bias, *options),
        push=lambda x, of: convolve(x, of(layer.weight), None, *options),
    )


def _pooling(layer: nn.Module, window: Callable[[torch.Size], int]) -> Affine:
    """Return the rule of a mean; ``window`` is the number of values averaged, by input shape."""

    def push(x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
        size = window(x.shape)
        pushed: Tensor = layer(x) * (size * of(x.new_tensor(1 / size)))
        return pushed

    return Affine(apply=lambda x: layer(x), push=push)


def average_pool(layer: nn.AvgPool1d | nn.AvgPool2d) -> Affine:
    """Means over windows of one size."""
    if layer.ceil_mode or getattr(layer, "divisor_override", None) is not None:
        raise UnsupportedError("ceil_mode=True and divisor_override are not bounded")
    dimensions = 1 if isinstance(layer, nn.AvgPool1d) else 2
    sizes = _each_dimension(layer.kernel_size, dimensions)
    padding = _each_dimension(layer.padding, dimensions)
    if any(padding) and not layer.count_include_pad:
        raise UnsupportedError("padding with count_include_pad=False is not bounded")
    return _pooling(layer, lambda shape: math.prod(sizes))


def adaptive_pool(layer: nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d) -> Affine:
    """Means over windows that divide the input evenly."""
    dimensions = 1 if isinstance(layer, nn.AdaptiveAvgPool1d) else 2
    output_size = _each_dimension(layer.output_size, dimensions)

    def window(shape: torch.Size) -> int:
        before = shape[2:]
        after = [b if a is None else a for a, b in zip(output_size, before, strict=True)]
        if any(b % a for a, b in zip(after, before, strict=True)):
            # Windows of unequal size have unequal weights.
            sizes = f"{tuple(before)} to {tuple(after)}"
            raise ValueError(f"adaptive pooling of {sizes}: the sizes must divide evenly")
        return math.prod(before) // math.prod(after)

    return _pooling(layer, window)


def _each_dimension(value: Any, dimensions: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,) * dimensions


def batch_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d) -> Affine:
    """Scale and shift each channel by the running statistics."""
    if layer.running_mean is None or layer.running_var is None:
        raise UnsupportedError("without running statistics it mixes the rows of a batch")

    def scale(like: Tensor) -> Tensor:
        assert layer.running_var is not None
        gain = (layer.running_var + layer.eps).rsqrt()
        gain = gain if layer.weight is None else gain * layer.weight
        return gain.view(-1, *[1] * (like.ndim - 2))

    return Affine(
        apply=lambda x: functional.batch_norm(
            x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=layer.eps
        ),
        push=lambda x, of: x * of(scale(x)),
    )


def upsample(layer: nn.Upsample) -> Affine:
    """Interpolation is a product of one matrix of weights >= 0 for each axis."""
    if layer.mode not in ("nearest", "nearest-exact", "linear", "bilinear"):
        raise UnsupportedError(f"mode {layer.mode!r} is not bounded; linear and nearest are")

    def matrices(like: Tensor, shape: Sequence[int]) -> list[Tensor]:
        output_size = layer(like.new_zeros(1, *shape)).shape[2:]
        factors = _each_dimension(layer.scale_factor, len(output_size))
        axes = zip(shape[1:], output_size, factors, strict=True)
        return [_along(layer, like, size, out, factor) for size, out, factor in axes]

    def push(x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
        for axis, weight in enumerate(matrices(x, x.shape[1:]), start=2):
            x = torch.tensordot(x, of(weight), dims=([axis], [1])).movedim(-1, axis)
        return x

    return Affine(apply=lambda x: layer(x), push=push)


def _along(layer: nn.Upsample, like: Tensor, size: int, out: int, factor: float | None) -> Tensor:
    """Return the weights (out, size) of the interpolation along one axis."""
    mode = "linear" if layer.mode == "bilinear" else layer.mode
    eye = torch.eye(size, dtype=like.dtype, device=like.device)[None]
    # The layer's own factor, if it has one, because rounding the size may have changed it.
    factor = None if layer.recompute_scale_factor else factor
    return functional.interpolate(
        eye,
        size=out if factor is None else None,
        scale_factor=factor,
        mode=mode,
        align_corners=layer.align_corners,
    )[0].T


def flatten(layer: nn.Flatten) -> Affine:
    """Return the rule of a change of shape."""
    if layer.start_dim == 0:
        raise UnsupportedError("start_dim=0 mixes the rows of a batch")
    return Affine(apply=lambda x: layer(x), push=lambda x, of: layer(x), reshapes=True)


def identity(layer: nn.Module) -> Sum:
    """Return the input unchanged, as dropout does in eval mode."""
    return Sum((1.0,))


# -- activations -------------------------------------------------------------------------------


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


def leaky_relu(layer: nn.ReLU | nn.LeakyReLU) -> Activation:
    """Multiply by a constant below zero only; by zero, for ReLU."""
    slope = getattr(layer, "negative_slope", 0.0)
    function = (
        functional.relu if slope == 0 else partial(functional.leaky_relu, negative_slope=slope)
    )
    return Activation(function, partial(_kink_lines, slope), turning=(0.0,) if slope < 0 else ())


def _chord(
    function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the slope of the chord, and the intercepts of the lines through either end.

    The intercepts differ by rounding only, but a rounded slope on a short interval can be
    far off; the safer of the two intercepts gives a valid bound with any slope.
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
    """Return a line above an increasing function, convex left of 0 and concave right of it."""
    at_low = function(low)

    def covers(touch: Tensor) -> Tensor:
        """Whether the tangent at `touch` passes above the left end."""
        return function(touch) + derivative(touch) * (low - touch) >= at_low

    # A tangent at a point t >= 0 lies above the concave part. If it also lies above the left
    # end it lies above the convex part. Bisect for the smallest t with this property: `right`
    # always has it, if any point has, however early the search stops.
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
    center: Tensor,
) -> Lines:
    upper_slope, upper_shift = _sigmoid_upper(function, derivative, low, high)
    # x -> -f(-x) has the same shape, so a line above it gives a line below f.
    lower_slope, shift = _sigmoid_upper(lambda x: -function(-x), derivative, -high, -low)
    return Lines(lower_slope, -shift, upper_slope, upper_shift)


def tanh(layer: nn.Tanh) -> Activation:
    """Convex below zero, concave above."""
    lines = partial(_sigmoid_lines, torch.tanh, lambda x: 1 - torch.tanh(x).square())
    return Activation(torch.tanh, lines)


def sigmoid(layer: nn.Sigmoid) -> Activation:
    """Convex below zero, concave above."""
    lines = partial(_sigmoid_lines, torch.sigmoid, lambda x: torch.sigmoid(x) * torch.sigmoid(-x))
    return Activation(torch.sigmoid, lines)


def _gate(
    function: Callable[[Tensor], Tensor], minimum: float, curvature: tuple[float, float]
) -> Activation:
    """Return the rule for f(x) = x * s(x) with s(x) + s(-x) = 1: GELU and SiLU.

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


LAYERS: dict[type[nn.Module], Callable[[Any], Rule]] = {
    nn.Linear: linear,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d), convolution),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d), average_pool),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d), adaptive_pool),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d), batch_norm),
    nn.Flatten: flatten,
    nn.Upsample: upsample,
    **dict.fromkeys((nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d), identity),
    nn.AlphaDropout: identity,
    **dict.fromkeys((nn.ReLU, nn.LeakyReLU), leaky_relu),
    nn.Tanh: tanh,
    nn.Sigmoid: sigmoid,
    nn.GELU: gelu,
    nn.SiLU: silu,
}


def rule_of(layer: nn.Module) -> Rule | None:
    """Return the rule of a layer, or of the class it inherits its forward from; None if unknown."""
    for kind in type(layer).__mro__:
        if kind in LAYERS and type(layer).forward is kind.forward:
            return LAYERS[kind](layer)
    bounds = getattr(layer, "bounds", None)
    return Own(layer, bounds) if callable(bounds) else None
