"""Bounds on a head's outputs over a ball around each row: IBP and CROWN.

A head is read once into a list of nodes (`trace`). Every node follows one of three
rules: an affine map, a sum of earlier nodes, or an elementwise activation. `ibp`
pushes intervals forward through that list; `crown` pulls linear functions back.
A new layer needs one small function that returns its rule, and a line in `_LAYERS`. A module of
your own can bound itself, for `ibp` alone: give it a method ``bounds(lower, upper)`` that returns
elementwise bounds on its output, given such bounds on its input.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

__all__ = ["Bounds", "crown", "ibp", "trace"]

# Number of elements in a working tensor: small enough for the caches, large enough that the
# cost of calling torch does not show. `python -m benchmarks.bounds` is fastest around it.
_ELEMENTS = 2**18


class Bounds(NamedTuple):
    """Elementwise lower and upper bounds, both in the shape of what they bound."""

    lower: Tensor
    upper: Tensor


class _Ball(NamedTuple):
    """One ball per row: centers (n, ...), radii (n,), and the norm, inf or 2."""

    center: Tensor
    radius: Tensor
    norm: float


class _Lines(NamedTuple):
    """Lines that enclose an activation on an interval; an intercept of None is zero."""

    lower_slope: Tensor
    lower_shift: Tensor | None
    upper_slope: Tensor
    upper_shift: Tensor | None


# --------------------------------------------------------------------------------------
# The three rules


@dataclass(frozen=True)
class _Affine:
    """x -> W x + b. The functions read W and b when called, so training may go on."""

    apply: Callable[[Tensor], Tensor]  # W x + b
    push: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]  # of(W) x, no b
    pull: Callable[[Tensor, torch.Size], Tensor]  # A W, for an input of that shape
    reshapes: bool = False  # a ball stays a ball


@dataclass(frozen=True)
class _Sum:
    """sum_i scales[i] * input_i + shift, the inputs all of one shape."""

    scales: tuple[float, ...]
    shift: float = 0.0


@dataclass(frozen=True)
class _Activation:
    """An elementwise function, monotone between its turning points."""

    function: Callable[[Tensor], Tensor]
    lines: Callable[[Tensor, Tensor, Tensor], _Lines]  # of the low, the high end, the center
    turning: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Own:
    """A module that bounds itself, over boxes."""

    apply: Callable[[Tensor], Tensor]
    bounds: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


_Rule = _Affine | _Sum | _Activation | _Own


class _UnsupportedError(Exception):
    """Why a layer has no rule; `trace` adds its name and collects all of them."""


# --------------------------------------------------------------------------------------
# Affine layers


def _linear(layer: nn.Linear) -> _Affine:
    return _Affine(
        apply=lambda x: functional.linear(x, layer.weight, layer.bias),
        push=lambda x, of: functional.linear(x, of(layer.weight)),
        pull=lambda A, shape: A @ layer.weight,
    )


class _Kernel(NamedTuple):
    """A convolution over an input that `padding` (as functional.pad takes it) has made larger."""

    weight: Tensor
    stride: tuple[int, ...]
    padding: list[int]
    dilation: tuple[int, ...]
    groups: int


def _convolve(x: Tensor, kernel: _Kernel, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    convolution: Any = (functional.conv1d, functional.conv2d)[x.ndim - 3]
    x = functional.pad(x, kernel.padding) if any(kernel.padding) else x
    y: Tensor = convolution(x, weight, bias, kernel.stride, 0, kernel.dilation, kernel.groups)
    return y


def _convolve_back(A: Tensor, kernel: _Kernel, shape: torch.Size) -> Tensor:
    """Transpose of `_convolve`: spread A over the padded input, then crop the padding."""
    transpose: Any = (functional.conv_transpose1d, functional.conv_transpose2d)[A.ndim - 3]
    # functional.pad lists the last dimension first.
    pads = [sum(kernel.padding[i : i + 2]) for i in range(0, len(kernel.padding), 2)][::-1]
    # Inputs past the last full stride touch no output; conv_transpose must be told of them.
    unseen = [
        size + pad - (out - 1) * stride - dilation * (width - 1) - 1
        for size, pad, out, stride, dilation, width in zip(
            shape[1:], pads, A.shape[2:], kernel.stride, kernel.dilation, kernel.weight.shape[2:],
            strict=True,
        )
    ]  # fmt: skip
    y = transpose(A, kernel.weight, None, kernel.stride, 0, unseen, kernel.groups, kernel.dilation)
    return functional.pad(y, [-p for p in kernel.padding]) if any(kernel.padding) else y


def _convolution(layer: nn.Conv1d | nn.Conv2d) -> _Affine:
    if layer.padding_mode != "zeros":
        raise _UnsupportedError(f"padding_mode={layer.padding_mode!r}, only 'zeros' is bounded")

    def padding() -> list[int]:
        if layer.padding == "valid":
            return [0] * (2 * len(layer.kernel_size))
        if layer.padding == "same":
            totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
            return [side for t in reversed(totals) for side in (t // 2, t - t // 2)]
        return [side for p in reversed(cast(tuple[int, ...], layer.padding)) for side in (p, p)]

    def kernel() -> _Kernel:
        return _Kernel(layer.weight, layer.stride, padding(), layer.dilation, layer.groups)

    return _Affine(
        apply=lambda x: _convolve(x, kernel(), layer.weight, layer.bias),
        push=lambda x, of: _convolve(x, kernel(), of(layer.weight)),
        pull=lambda A, shape: _convolve_back(A, kernel(), shape),
    )


def _pooling(
    apply: Callable[[Tensor], Tensor], kernel: Callable[[Tensor, Sequence[int]], _Kernel]
) -> _Affine:
    """Average pooling is a convolution, channel by channel, with equal weights."""

    def push(x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
        window = kernel(x, x.shape[1:])
        return _convolve(x, window, of(window.weight))

    return _Affine(apply, push, lambda A, shape: _convolve_back(A, kernel(A, shape), shape))


def _window(
    like: Tensor, channels: int, size: Sequence[int], stride: Sequence[int], pad: Sequence[int]
) -> _Kernel:
    weight = like.new_full((channels, 1, *size), 1 / math.prod(size))
    sides = [side for p in reversed(pad) for side in (p, p)]
    return _Kernel(weight, tuple(stride), sides, (1,) * len(size), channels)


def _each_dimension(value: Any, dimensions: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,) * dimensions


def _average_pool(layer: nn.AvgPool1d | nn.AvgPool2d) -> _Affine:
    if layer.ceil_mode:
        raise _UnsupportedError("ceil_mode=True is not bounded")
    if getattr(layer, "divisor_override", None) is not None:
        raise _UnsupportedError("divisor_override is not bounded")
    dimensions = 1 if isinstance(layer, nn.AvgPool1d) else 2
    size, stride, pad = (
        _each_dimension(value, dimensions)
        for value in (layer.kernel_size, layer.stride, layer.padding)
    )
    if any(pad) and not layer.count_include_pad:
        raise _UnsupportedError("padding with count_include_pad=False is not bounded")
    return _pooling(
        lambda x: layer(x), lambda like, shape: _window(like, shape[0], size, stride, pad)
    )


def _adaptive_pool(layer: nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d) -> _Affine:
    dimensions = 1 if isinstance(layer, nn.AdaptiveAvgPool1d) else 2
    wanted = _each_dimension(layer.output_size, dimensions)

    def kernel(like: Tensor, shape: Sequence[int]) -> _Kernel:
        out = [n if w is None else w for n, w in zip(shape[1:], wanted, strict=True)]
        if any(n % w for n, w in zip(shape[1:], out, strict=True)):
            # Windows of unequal size are not a convolution.
            raise ValueError(
                f"adaptive pooling of {tuple(shape[1:])} to {tuple(out)} cannot be bounded: "
                "make the output size divide the input size, or cut the network at a later layer"
            )
        size = [n // w for n, w in zip(shape[1:], out, strict=True)]
        return _window(like, shape[0], size, size, [0] * dimensions)

    return _pooling(lambda x: layer(x), kernel)


def _batch_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d) -> _Affine:
    if layer.running_mean is None or layer.running_var is None:
        raise _UnsupportedError("without running statistics it mixes the rows of a batch")

    def scale(like: Tensor) -> Tensor:
        assert layer.running_var is not None
        gain = (layer.running_var + layer.eps).rsqrt()
        gain = gain if layer.weight is None else gain * layer.weight
        return gain.view(-1, *[1] * (like.ndim - 2))

    return _Affine(
        apply=lambda x: functional.batch_norm(
            x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=layer.eps
        ),
        push=lambda x, of: x * of(scale(x)),
        pull=lambda A, shape: A * scale(A),
    )


def _upsample(layer: nn.Upsample) -> _Affine:
    """Interpolation is a product of one matrix of weights >= 0 for each axis."""
    if layer.mode not in ("nearest", "nearest-exact", "linear", "bilinear"):
        raise _UnsupportedError(f"mode {layer.mode!r} is not bounded; linear and nearest are")

    def matrices(like: Tensor, shape: Sequence[int]) -> list[Tensor]:
        wanted = layer(like.new_zeros(1, *shape)).shape[2:]
        factors = _each_dimension(layer.scale_factor, len(wanted))
        each = zip(shape[1:], wanted, factors, strict=True)
        return [_along(layer, like, n, out, factor) for n, out, factor in each]

    def push(x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
        for axis, weight in enumerate(matrices(x, x.shape[1:]), start=2):
            x = torch.tensordot(x, of(weight), dims=([axis], [1])).movedim(-1, axis)
        return x

    def pull(A: Tensor, shape: torch.Size) -> Tensor:
        for axis, weight in enumerate(matrices(A, shape), start=2):
            A = torch.tensordot(A, weight, dims=([axis], [0])).movedim(-1, axis)
        return A

    return _Affine(apply=lambda x: layer(x), push=push, pull=pull)


def _along(
    layer: nn.Upsample, like: Tensor, size: int, wanted: int, factor: float | None
) -> Tensor:
    """Weights (wanted, size) of the interpolation along one axis."""
    mode = "linear" if layer.mode == "bilinear" else layer.mode
    eye = torch.eye(size, dtype=like.dtype, device=like.device)[None]
    # The layer's own factor, if it has one, because rounding the size may have changed it.
    keep = None if layer.recompute_scale_factor else factor
    return functional.interpolate(
        eye,
        size=wanted if keep is None else None,
        scale_factor=keep,
        mode=mode,
        align_corners=layer.align_corners,
    )[0].T


def _flatten(layer: nn.Flatten) -> _Affine:
    if layer.start_dim == 0:
        raise _UnsupportedError("start_dim=0 mixes the rows of a batch")
    return _Affine(
        apply=lambda x: layer(x),
        push=lambda x, of: layer(x),
        pull=lambda A, shape: A.reshape(len(A), *shape),
        reshapes=True,
    )


def _identity(layer: nn.Module) -> _Sum:
    return _Sum((1.0,))


# --------------------------------------------------------------------------------------
# Activations


def _kink_lines(slope: float, low: Tensor, high: Tensor, center: Tensor) -> _Lines:
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
    return _Lines(piece, None, chord, shift) if convex else _Lines(chord, shift, piece, None)


def _relu(layer: nn.ReLU) -> _Activation:
    return _Activation(functional.relu, partial(_kink_lines, 0.0))


def _leaky_relu(layer: nn.LeakyReLU) -> _Activation:
    slope = layer.negative_slope
    if slope == 0:  # slope * -inf would be NaN
        return _Activation(functional.relu, partial(_kink_lines, 0.0))
    return _Activation(
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
) -> _Lines:
    upper_slope, upper_shift = _sigmoid_upper(function, derivative, low, high)
    # x -> -f(-x) has the same shape, so a line above it gives a line below f.
    lower_slope, shift = _sigmoid_upper(lambda x: -function(-x), derivative, -high, -low)
    return _Lines(lower_slope, -shift, upper_slope, upper_shift)


def _tanh(layer: nn.Tanh) -> _Activation:
    def derivative(x: Tensor) -> Tensor:
        return 1 - torch.tanh(x).square()

    return _Activation(torch.tanh, lambda *box: _sigmoid_lines(torch.tanh, derivative, *box[:2]))


def _sigmoid(layer: nn.Sigmoid) -> _Activation:
    def derivative(x: Tensor) -> Tensor:
        return torch.sigmoid(x) * torch.sigmoid(-x)

    return _Activation(
        torch.sigmoid, lambda *box: _sigmoid_lines(torch.sigmoid, derivative, *box[:2])
    )


def _gate(
    function: Callable[[Tensor], Tensor], minimum: float, curvature: tuple[float, float]
) -> _Activation:
    """Rule for f(x) = x * s(x) with s(x) + s(-x) = 1: GELU and SiLU.

    They fall to one minimum and rise after it. `curvature` encloses f'' everywhere.
    """

    def safe(x: Tensor) -> Tensor:
        # -inf * 0 is NaN; both functions have long reached 0 at -1e4.
        return function(x.clamp(min=-1e4))

    def lines(low: Tensor, high: Tensor, center: Tensor) -> _Lines:
        middle, width = (low + high) / 2, high - low
        flat = _range(rule, low, high)
        # f(x) = x + f(-x), so bounds on f(-x) shift a line of slope one.
        steep = _range(rule, -high, -low)
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
        return _Lines(*lower, *upper)

    rule = _Activation(safe, lines, turning=(minimum,))
    return rule


def _choose(
    mask: Tensor, yes: tuple[Tensor, Tensor], no: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    return torch.where(mask, yes[0], no[0]), torch.where(mask, yes[1], no[1])


def _gelu(layer: nn.GELU) -> _Activation:
    minimum = -0.7524614220710163 if layer.approximate == "tanh" else -0.7517915246935644
    return _gate(
        lambda x: functional.gelu(x, approximate=layer.approximate), minimum, (-0.107982, 0.797885)
    )


def _silu(layer: nn.SiLU) -> _Activation:
    return _gate(functional.silu, -1.278464542761074, (-0.036915, 0.5))


_LAYERS: dict[type[nn.Module], Callable[[Any], _Rule]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.AvgPool1d: _average_pool,
    nn.AvgPool2d: _average_pool,
    nn.AdaptiveAvgPool1d: _adaptive_pool,
    nn.AdaptiveAvgPool2d: _adaptive_pool,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.Flatten: _flatten,
    nn.Upsample: _upsample,
    nn.Identity: _identity,
    nn.Dropout: _identity,
    nn.Dropout1d: _identity,
    nn.Dropout2d: _identity,
    nn.AlphaDropout: _identity,
    nn.ReLU: _relu,
    nn.LeakyReLU: _leaky_relu,
    nn.Tanh: _tanh,
    nn.Sigmoid: _sigmoid,
    nn.GELU: _gelu,
    nn.SiLU: _silu,
}


# --------------------------------------------------------------------------------------
# Reading a head


class _Node(NamedTuple):
    """One step of a head; `inputs` are positions in the list, 0 is the head's input."""

    rule: _Rule
    inputs: tuple[int, ...]
    name: str
    inplace: bool = False


@dataclass(frozen=True)
class Head:
    """A head that `trace` has read; `ibp` and `crown` take it in place of the module."""

    nodes: tuple[_Node, ...]
    output: int


def _dropout_as_module(p: float = 0.5, training: bool = True, inplace: bool = False) -> nn.Module:
    if training:
        raise _UnsupportedError("training=True drops values at random")
    return nn.Identity()


def _flatten_as_module(start_dim: int = 0, end_dim: int = -1) -> nn.Module:
    return nn.Flatten(start_dim, end_dim)


# A function called with (value, *args, **kwargs) does what this module made of
# (*args, **kwargs) does to the value. Strings are methods of a tensor.
_FUNCTIONS: dict[Callable[..., Any] | str, Callable[..., nn.Module]] = {
    **dict.fromkeys((torch.relu, functional.relu, "relu"), nn.ReLU),
    **dict.fromkeys((torch.tanh, functional.tanh, "tanh"), nn.Tanh),
    **dict.fromkeys((torch.sigmoid, functional.sigmoid, "sigmoid"), nn.Sigmoid),
    **dict.fromkeys((torch.flatten, "flatten"), _flatten_as_module),
    functional.leaky_relu: nn.LeakyReLU,
    functional.gelu: nn.GELU,
    functional.silu: nn.SiLU,
    functional.dropout: _dropout_as_module,
    functional.avg_pool1d: nn.AvgPool1d,
    functional.avg_pool2d: nn.AvgPool2d,
    functional.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    functional.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
}

_SUMS: dict[Callable[..., Any] | str, tuple[float, ...]] = {
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add"), (1.0, 1.0)),
    **dict.fromkeys((operator.sub, operator.isub, torch.sub, "sub"), (1.0, -1.0)),
    **dict.fromkeys((operator.neg, torch.neg, "neg"), (-1.0,)),
}
_PRODUCTS = (operator.mul, operator.imul, torch.mul, "mul")


def _combine(target: Callable[..., Any] | str, args: Sequence[Any]) -> tuple[_Sum, list[fx.Node]]:
    """Rule for a sum, difference or multiple, and the values that enter it."""
    values = [arg for arg in args if isinstance(arg, fx.Node)]
    numbers = [arg for arg in args if isinstance(arg, int | float)]
    if target in _PRODUCTS:
        if len(values) != 1 or len(numbers) != 1:
            raise _UnsupportedError("only a product with a number is bounded")
        return _Sum((float(numbers[0]),)), values
    signs = _SUMS[target]
    if len(signs) != len(args) or len(values) + len(numbers) != len(args):
        raise _UnsupportedError("only values computed from the input, and numbers, can be added")
    terms = list(zip(signs, args, strict=True))
    scales = tuple(sign for sign, arg in terms if isinstance(arg, fx.Node))
    shift = sum(sign * arg for sign, arg in terms if isinstance(arg, int | float))
    return _Sum(scales, shift), values


def _rule_of(layer: nn.Module) -> _Rule | None:
    """Rule of a layer or of the layer it inherits its forward from, as parametrized ones do."""
    for kind in type(layer).__mro__:
        if kind in _LAYERS and type(layer).forward is kind.forward:
            return _LAYERS[kind](layer)
    bounds = getattr(layer, "bounds", None)
    return _Own(layer, bounds) if callable(bounds) else None


class _OneLevel(fx.Tracer):
    """Records the calls of submodules without entering them."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


class _Reader:
    """Appends the steps of a module to a list, and keeps what it cannot bound for the error."""

    def __init__(self) -> None:
        self.nodes = [_Node(_Sum(()), (), "input")]
        self.problems: list[str] = []

    def add(self, rule: _Rule, inputs: Sequence[int], name: str, inplace: bool = False) -> int:
        self.nodes.append(_Node(rule, tuple(inputs), name, inplace))
        return len(self.nodes) - 1

    def refuse(self, what: str, reason: object = "") -> int:
        self.problems.append(f"{what}: {reason}" if str(reason) else what)
        return 0  # any position will do, the list is not going to be used

    def module(self, module: nn.Module, name: str, inputs: Sequence[int]) -> int:
        what = f"layer {name!r} ({type(module).__name__})" if name else type(module).__name__
        try:
            rule = _rule_of(module)
        except _UnsupportedError as reason:
            return self.refuse(what, reason)
        if rule is not None:
            if len(inputs) != 1:
                return self.refuse(what, f"called with {len(inputs)} values")
            if rule == _Sum((1.0,)):
                return inputs[0]
            return self.add(rule, inputs, name, getattr(module, "inplace", False))
        if type(module).forward is nn.Sequential.forward:
            # Not named_children, which skips a layer the second time it is used.
            for child_name, child in module._modules.items():
                assert child is not None
                inputs = [self.module(child, _join(name, child_name), inputs)]
            return inputs[0]
        # fx calls the layers of torch.nn leaves: what they compute is not to be looked into.
        if fx.Tracer().is_leaf_module(module, name):
            return self.refuse(what)
        return self.graph(module, name, inputs, what)

    def graph(self, module: nn.Module, name: str, inputs: Sequence[int], what: str) -> int:
        try:
            graph = _OneLevel().trace(module)
        except Exception as reason:  # whatever a forward raises when it meets a symbol
            return self.refuse(what, f"torch.fx cannot trace it: {reason}")
        places: dict[fx.Node, int] = {}
        values = iter(inputs)
        for node in graph.nodes:
            if node.op == "placeholder":
                place = next(values, None)
                if place is None:
                    return self.refuse(what, "takes more than one input")
                places[node] = place
            elif node.op == "output":
                if not isinstance(node.args[0], fx.Node):
                    return self.refuse(what, "returns something other than one tensor")
                return places[node.args[0]]
            else:
                places[node] = self.call(module, name, node, places)
        raise AssertionError("a graph of torch.fx ends in an output")

    def call(
        self, module: nn.Module, name: str, node: fx.Node, places: Mapping[fx.Node, int]
    ) -> int:
        if node.op == "call_module":
            path = str(node.target)
            child = module.get_submodule(path)
            path = _join(name, path)
            values = [places[arg] for arg in node.args if isinstance(arg, fx.Node)]
            if node.kwargs or len(values) != len(node.args):
                return self.refuse(
                    f"layer {path!r} ({type(child).__name__})",
                    "called with something other than values computed from the input",
                )
            return self.module(child, path, values)
        path = _join(name, node.name)
        called = getattr(node.target, "__name__", node.target)
        what = f"{node.op} {path!r} ({called} in {type(module).__name__})"
        try:
            return self.function(node, path, places)
        except (_UnsupportedError, TypeError) as reason:
            return self.refuse(what, reason)

    def function(self, node: fx.Node, path: str, places: Mapping[fx.Node, int]) -> int:
        if node.op == "get_attr":
            raise _UnsupportedError("a tensor used outside a layer")
        if node.target in _SUMS or node.target in _PRODUCTS:
            if node.kwargs:
                raise _UnsupportedError(f"called with {dict(node.kwargs)}")
            rule, values = _combine(node.target, node.args)
            return self.add(rule, [places[value] for value in values], path)
        if node.target not in _FUNCTIONS:
            raise _UnsupportedError()
        if len(node.all_input_nodes) != 1 or node.args[:1] != (node.all_input_nodes[0],):
            raise _UnsupportedError("called with something other than one value and constants")
        same = _FUNCTIONS[node.target](*node.args[1:], **node.kwargs)
        return self.module(same, path, [places[node.all_input_nodes[0]]])

    def check_inplace(self, output: int) -> None:
        """Refuse an in-place layer whose input is used elsewhere: fx sees the old value there."""
        uses = [0] * len(self.nodes)
        for source in [output, *(i for node in self.nodes for i in node.inputs)]:
            uses[source] += 1
        for node in self.nodes:
            if not (node.inplace and isinstance(node.rule, _Activation)):
                continue
            source = node.inputs[0]
            while uses[source] == 1 and getattr(self.nodes[source].rule, "reshapes", False):
                source = self.nodes[source].inputs[0]  # the same memory in another shape
            if uses[source] > 1:
                self.refuse(
                    f"layer {node.name!r}",
                    f"overwrites {self.nodes[source].name!r}, used elsewhere; set inplace=False",
                )


def _join(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child


def trace(head: nn.Module) -> Head:
    """Read the structure of a head once, to bound it many times.

    Weights are not copied: `ibp` and `crown` use the values that the module holds when they
    are called. Layers that are added or replaced later are not noticed.

    Parameters
    ----------
    head : nn.Module
        A layer, a (nested) ``nn.Sequential``, or a module that ``torch.fx`` can trace. It is
        read as in eval mode; its mode stays as it is.

    Returns
    -------
    Head
        What `ibp` and `crown` accept in place of the module.

    Raises
    ------
    TypeError
        If the head contains something that cannot be bounded. The message lists all of it.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from ffcp.bounds import ibp, trace
    >>> head = trace(nn.Sequential(nn.ReLU(), nn.Flatten()))
    >>> ibp(head, torch.tensor([[-1.0, 2.0]]), 0.5)
    Bounds(lower=tensor([[0.0000, 1.5000]]), upper=tensor([[0.0000, 2.5000]]))
    """
    reader = _Reader()
    modes = [(module, module.training) for module in head.modules()]
    head.eval()  # a forward may ask for self.training
    try:
        output = reader.module(head, "", [0])
    finally:
        for module, mode in modes:
            module.training = mode
    if not reader.problems:
        reader.check_inplace(output)
    if reader.problems:
        known = ", ".join(kind.__name__ for kind in _LAYERS)
        raise TypeError(
            "cannot bound this head because of\n  "
            + "\n  ".join(reader.problems)
            + f"\nUse one of {known}, sums of them, or cut the network at a later layer."
        )
    return Head(tuple(reader.nodes), output)


# --------------------------------------------------------------------------------------
# IBP: intervals forward


def _column(radius: Tensor, like: Tensor) -> Tensor:
    return radius.view(-1, *[1] * (like.ndim - 1))


def _box(value: _Ball | Bounds) -> Bounds:
    if isinstance(value, Bounds):
        return value
    radius = _column(value.radius, value.center)
    return Bounds(value.center - radius, value.center + radius)


def _range(rule: _Activation, low: Tensor, high: Tensor) -> Bounds:
    """Exact range of an activation: its extremes are at the ends or at a turning point."""
    ends = rule.function(low), rule.function(high)
    if not rule.turning:
        return Bounds(*ends)
    lower, upper = torch.minimum(*ends), torch.maximum(*ends)
    for point in rule.turning:
        value = rule.function(low.new_tensor(point))
        inside = (low <= point) & (point <= high)
        lower = torch.where(inside, torch.minimum(lower, value), lower)
        upper = torch.where(inside, torch.maximum(upper, value), upper)
    return Bounds(lower, upper)


def _affine_of_ball(rule: _Affine, ball: _Ball) -> _Ball | Bounds:
    """Exact bounds of an affine map over a ball: radius times the dual norm of each row of W."""
    middle = rule.apply(ball.center)
    if rule.reshapes:
        return ball._replace(center=middle)
    ones = ball.center.new_ones(1, *ball.center.shape[1:])
    l2 = ball.norm == 2
    reach = rule.push(ones, torch.square).sqrt() if l2 else rule.push(ones, torch.abs)
    radius = _column(ball.radius, middle)
    spread = radius * reach
    if ball.radius.isinf().any():
        # An output that does not depend on the input stays where it is, though inf * 0 is NaN.
        spread = torch.where(reach > 0, spread, 0.0)
    return Bounds(middle - spread, middle + spread)


def _affine_of_box(rule: _Affine, box: Bounds) -> Bounds:
    """W c + b plus and minus |W| r, for the box's center c and radius r."""
    # A sum is the cheapest way to find an infinity or a NaN anywhere.
    radius = (box.upper - box.lower).mul_(0.5)
    if not math.isfinite(radius.sum()):
        return _affine_of_unbounded(rule, box)
    middle = rule.apply((box.lower + box.upper).mul_(0.5))
    spread = rule.push(radius, torch.abs)
    return Bounds(middle - spread, middle + spread)


def _affine_of_unbounded(rule: _Affine, box: Bounds) -> Bounds:
    """As `_affine_of_box`, with the infinite ends counted apart from the finite ones."""
    ends = [torch.where(end.isinf(), 0.0, end) for end in box]
    middle = rule.apply((ends[0] + ends[1]) / 2)
    spread = rule.push((ends[1] - ends[0]) / 2, torch.abs)
    open_below, open_above = (end.isinf().to(end.dtype) for end in box)

    def reaches(positive: Tensor, negative: Tensor) -> Tensor:
        """Whether an infinite end enters with the weights of the sign that lets it through."""
        through = rule.push(positive, functional.relu) + rule.push(
            negative, lambda W: functional.relu(-W)
        )
        return through > 0

    return Bounds(
        (middle - spread).masked_fill(reaches(open_below, open_above), -math.inf),
        (middle + spread).masked_fill(reaches(open_above, open_below), math.inf),
    )


def _sum_of(node: _Node, rule: _Sum, values: Sequence[_Ball | Bounds]) -> _Ball | Bounds:
    if len(values) == 1 and isinstance(values[0], _Ball):
        center, radius, norm = values[0]
        if rule.scales[0] != 0:
            scale = rule.scales[0]
            return _Ball(center * scale + rule.shift, radius * abs(scale), norm)
    boxes = [_box(value) for value in values]
    shapes = {tuple(box.lower.shape[1:]) for box in boxes}
    if len(shapes) > 1:
        raise ValueError(
            f"{node.name!r} adds rows of shapes {' and '.join(map(str, sorted(shapes)))}; "
            "only equal shapes can be added, expand them in a Linear layer"
        )
    lower = torch.full_like(boxes[0].lower, rule.shift)
    upper = lower.clone()
    for scale, box in zip(rule.scales, boxes, strict=True):
        if scale == 0:  # 0 * inf is NaN
            continue
        low, high = (box.lower, box.upper) if scale > 0 else (box.upper, box.lower)
        lower.add_(low, alpha=scale)
        upper.add_(high, alpha=scale)
    return Bounds(lower, upper)


def _intervals(head: Head, ball: _Ball) -> list[_Ball | Bounds]:
    """Bounds of every node. The ball itself is carried on to the first affine map."""
    values: list[_Ball | Bounds] = [ball]
    for node in head.nodes[1:]:
        inputs = [values[i] for i in node.inputs]
        match node.rule:
            case _Sum():
                values.append(_sum_of(node, node.rule, inputs))
            case _Activation():
                values.append(_range(node.rule, *_box(inputs[0])))
            case _Own(_, bounds):
                values.append(Bounds(*bounds(*_box(inputs[0]))))
            case _Affine():
                value = inputs[0]
                if isinstance(value, _Ball):
                    values.append(_affine_of_ball(node.rule, value))
                else:
                    values.append(_affine_of_box(node.rule, value))
    return values


# --------------------------------------------------------------------------------------
# CROWN: linear functions backward


def _flat(A: Tensor) -> Tensor:
    # Not flatten(2) nor reshape(..., -1): a node may have one value per row, or no rows.
    return A.reshape(*A.shape[:2], math.prod(A.shape[2:]))


def _dot(A: Tensor, x: Tensor) -> Tensor:
    """Inner products of coefficients (n or 1, specs, ...) and values (n or 1, ...)."""
    A = _flat(A)
    x = x.reshape(len(x), A.shape[2])
    if len(A) == 1:
        return x @ A[0].T
    if len(x) == 1:
        return A @ x[0]
    return (A * x.unsqueeze(1)).sum(-1)


def _lower_bound(
    head: Head,
    ball: _Ball,
    boxes: Sequence[Bounds],
    lines: Mapping[int, _Lines],
    target: int,
    specs: Tensor,
) -> Tensor:
    """Lower bounds, (n or 1, specs), of the inner products of specs with a node's value.

    Walks from the target to the input and keeps: product >= sum over pending nodes of
    A . node + constant. The A of a node that is used twice add up before it is passed, which
    is how cancellation between branches is seen. A has one row for all until a relaxed
    activation makes it depend on the row.
    """
    pending = {target: specs}
    constant = specs.new_zeros(1, specs.shape[1])

    def send(to: int, A: Tensor) -> None:
        pending[to] = pending[to] + A if to in pending else A

    for i in range(target, 0, -1):
        if i not in pending:
            continue
        A, node = pending.pop(i), head.nodes[i]
        match node.rule:
            case _Sum(scales, shift):
                if shift:
                    constant = constant + shift * _flat(A).sum(-1)
                for j, scale in zip(node.inputs, scales, strict=True):
                    send(j, A if scale == 1 else A * scale)
            case _Affine() as rule:
                j = node.inputs[0]
                shape = boxes[j].lower.shape[1:]
                # The image of zero is the bias, whatever the layer.
                constant = constant + _dot(A, rule.apply(A.new_zeros(1, *shape)))
                send(j, rule.pull(A.flatten(0, 1), shape).view(*A.shape[:2], *shape))
            case _Activation():
                line = lines[i]
                if node.inputs[0] == 0 and not pending and len(A) == 1:
                    return constant + _lower_bound_at_ball(A, line, ball)
                # A positive coefficient needs the line below, a negative one the line above.
                positive, negative = A.clamp(min=0), A.clamp(max=0)
                if line.lower_shift is not None:
                    constant = constant + _dot(positive, line.lower_shift)
                if line.upper_shift is not None:
                    constant = constant + _dot(negative, line.upper_shift)
                A = positive * line.lower_slope.unsqueeze(1)
                send(node.inputs[0], A.addcmul_(negative, line.upper_slope.unsqueeze(1)))
    if 0 not in pending:
        return constant
    A = pending[0]
    constant = constant + _dot(A, ball.center)
    flat = _flat(A)
    # In place, for A has done its work.
    dual = flat.norm(dim=-1) if ball.norm == 2 else flat.abs_().sum(-1)
    return constant - ball.radius.unsqueeze(1) * dual


def _lower_bound_at_ball(A: Tensor, line: _Lines, ball: _Ball) -> Tensor:
    """Last step of `_lower_bound` for an activation of the ball itself, A the same for all rows.

    The positive and negative entries of A never share a place, so that the norm of their sum
    splits, and matrix products do without a coefficient per row, spec and coordinate.
    """
    parts = (
        (A.clamp(min=0), line.lower_slope, line.lower_shift),
        (A.clamp(max=0), line.upper_slope, line.upper_shift),
    )
    middle, size = A.new_zeros(()), A.new_zeros(())
    for part, slope, shift in parts:
        value = slope * ball.center
        middle = middle + _dot(part, value if shift is None else value.add_(shift))
        if ball.norm == 2:
            size = size + _dot(part.square(), slope.square())
        else:
            size = size + _dot(part.abs(), slope.abs())
    return middle - ball.radius.unsqueeze(1) * (size.sqrt() if ball.norm == 2 else size)


def _tighten(
    head: Head,
    ball: _Ball,
    boxes: Sequence[Bounds],
    lines: Mapping[int, _Lines],
    target: int,
    specs: int,
) -> Bounds:
    """CROWN bounds of a node, `specs` coordinates at a time; the output's within its box."""
    box = boxes[target]
    shape = box.lower.shape
    size = shape[1:].numel()
    parts = []
    for start in range(0, size, specs):
        count = min(specs, size - start)
        rows = torch.arange(count, device=box.lower.device)
        unit = box.lower.new_zeros(count, size)
        unit[rows, rows + start] = 1
        # The upper bound of a coordinate is minus the lower bound of its negative.
        both = torch.cat([unit, -unit]).view(1, 2 * count, *shape[1:])
        bound = _lower_bound(head, ball, boxes, lines, target, both)
        parts.append(bound.expand(shape[0], -1).reshape(shape[0], 2, count))
    bound = torch.cat(parts, dim=2)
    lower, upper = bound[:, 0].reshape(shape), -bound[:, 1].reshape(shape)
    if target != head.output:
        # Not intersected: the linear functions behind these lines run over this very range, and
        # lines drawn for a smaller one would let a larger ball have smaller bounds.
        known = lower.isfinite() & upper.isfinite()
        lower, upper = lower.where(known, box.lower), upper.where(known, box.upper)
        return Bounds(lower, torch.maximum(lower, upper))
    # fmax and fmin pass over a NaN, which is what an infinite radius leaves of a linear
    # bound: such a row keeps its box. Rounding may push a bound past the other end.
    lower = torch.fmin(torch.fmax(lower, box.lower), box.upper)
    upper = torch.fmax(torch.fmin(upper, box.upper), lower)
    return Bounds(lower, upper)


def _loose(head: Head, norm: float) -> list[bool]:
    """For every node, whether its IBP box can be larger than its range.

    Boxes are exact as long as the coordinates vary independently of each other, and after
    one affine map of such coordinates, or of the ball. CROWN has nothing to add there.
    """
    independent, exact, loose = range(3)
    states = [independent]
    for node in head.nodes[1:]:
        state = max(states[i] for i in node.inputs)
        match node.rule:
            case _Sum():
                state = state if len(node.inputs) == 1 else loose
            case _Activation():
                # The coordinates of an L2 ball depend on each other; only the ball's own
                # affine image is exact.
                state = exact if norm == 2 and state == independent else state
            case _Affine(reshapes=False):
                state = exact if state == independent else loose
        states.append(state)
    return [state == loose for state in states]


def _shares_coefficients(head: Head, target: int) -> bool:
    """Whether `_lower_bound` of this node needs no coefficients of its own for each row."""
    below: set[int] = set()
    todo = [target]
    while todo:
        i = todo.pop()
        if i not in below:
            below.add(i)
            todo.extend(head.nodes[i].inputs)
    activations = [i for i in below if isinstance(head.nodes[i].rule, _Activation)]
    first = [i for i in below if 0 in head.nodes[i].inputs]
    return not activations or (len(first) == 1 and activations == first)


def _portions(head: Head, sizes: Sequence[int], norm: float) -> tuple[int, dict[int, int]]:
    """How many rows to work on at once, and of each node to tighten how many coordinates.

    The nodes to tighten are the output and what enters activations, unless the box is exact.
    """
    loose = _loose(head, norm)
    entering = [n.inputs[0] for n in head.nodes if isinstance(n.rule, _Activation)]
    targets = [i for i in (*entering, head.output) if loose[i]]
    shared = [i for i in targets if _shares_coefficients(head, i)]
    largest = max(sizes)
    # A coordinate has two bounds, and coefficients have a positive and a negative part.
    coefficients = _ELEMENTS // 4
    widest = max((sizes[i] for i in targets if i not in shared), default=1)
    rows = max(1, coefficients // (widest * largest))
    per_spec = {i: max(rows, largest) if i in shared else rows * largest for i in targets}
    return rows, {i: max(1, coefficients // n) for i, n in per_spec.items()}


def _values(head: Head, x: Tensor) -> list[Tensor]:
    """Value of every node at a point of each row."""
    values = [x]
    for node in head.nodes[1:]:
        inputs = [values[i] for i in node.inputs]
        match node.rule:
            case _Sum(scales, shift):
                terms = [scale * value for scale, value in zip(scales, inputs, strict=True)]
                values.append(sum(terms[1:], terms[0] + shift))
            case _Activation(function):
                values.append(function(inputs[0]))
            case _Affine() | _Own() as rule:
                values.append(rule.apply(inputs[0]))
    return values


def _crown_rows(head: Head, ball: _Ball, specs: Mapping[int, int]) -> Bounds:
    boxes = [_box(value) for value in _intervals(head, ball)]
    centers = _values(head, ball.center)
    lines: dict[int, _Lines] = {}
    todo = dict(specs)

    def tightened(i: int) -> Bounds:
        if i in todo:
            boxes[i] = _tighten(head, ball, boxes, lines, i, todo.pop(i))
        return boxes[i]

    for i, node in enumerate(head.nodes):
        if isinstance(node.rule, _Activation):
            lines[i] = node.rule.lines(*tightened(node.inputs[0]), centers[node.inputs[0]])
    return tightened(head.output)


# --------------------------------------------------------------------------------------
# The public functions


def _ball(center: Tensor, radius: float | Tensor, norm: float | str) -> _Ball:
    """Check what the user gave, and name the value or row that is wrong."""
    if float(norm) not in (math.inf, 2.0):
        raise ValueError(f"norm is {norm!r}; use math.inf or 2")
    if center.ndim == 0 or not center.is_floating_point():
        raise ValueError(
            f"center has shape {tuple(center.shape)} and type {center.dtype}; "
            "give a floating-point tensor with one row per ball"
        )
    if not math.isfinite(center.sum()):
        bad = (~center.isfinite()).reshape(len(center), -1).any(1)
        if bad.any():
            raise ValueError(f"center is not finite in row {int(bad.nonzero()[0])}")
    radii = torch.as_tensor(radius).to(center)
    if radii.ndim > 0 and radii.shape != center.shape[:1]:
        raise ValueError(
            f"radius has shape {tuple(radii.shape)}, center {tuple(center.shape)}; "
            f"give a number or one radius per row, shape {tuple(center.shape[:1])}"
        )
    bad = ~(radii >= 0)  # NaN too
    if bad.any():
        if radii.ndim == 0:
            raise ValueError(f"radius is {radii.item()}; it must be at least 0")
        row = int(bad.nonzero()[0])
        raise ValueError(f"radius is {radii[row].item()} in row {row}; it must be at least 0")
    return _Ball(center, radii.expand(len(center)), float(norm))


def _sizes(head: Head, ball: _Ball) -> list[int]:
    """How many values each node has per row, seen on a row of zeros."""
    shape = ball.center.shape[1:]
    row = _Ball(ball.center.new_zeros(1, *shape), ball.radius.new_zeros(1), ball.norm)
    return [_box(value).lower.numel() for value in _intervals(head, row)]


def _by_rows(bound: Callable[[_Ball], Bounds], ball: _Ball, rows: int) -> Bounds:
    center, radius, norm = ball
    rows = max(rows, 1)
    if len(center) <= rows:
        return bound(ball)
    parts = [
        bound(_Ball(c, r, norm))
        for c, r in zip(torch.split(center, rows), torch.split(radius, rows), strict=True)
    ]
    return Bounds(*(torch.cat(ends) for ends in zip(*parts, strict=True)))


@torch.no_grad()
def ibp(
    head: nn.Module | Head, center: Tensor, radius: float | Tensor, norm: float | str = math.inf
) -> Bounds:
    """Bound a head's outputs over a ball around each row by interval arithmetic.

    The bounds are exact for a single affine layer, for any layers at radius 0, and in the
    infinity norm for elementwise activations followed by one affine layer.

    Parameters
    ----------
    head : nn.Module or Head
        What to bound, taken in eval mode; see `trace` for calling it many times.
    center : Tensor
        Centers of the balls, one per row: shape (n, ...).
    radius : float or Tensor
        One radius for all rows, or a tensor of shape (n,). May be 0 and may be infinite.
    norm : float
        ``math.inf`` or 2.

    Returns
    -------
    Bounds
        ``lower`` and ``upper``, in the shape of the head's output, infinite where there is
        no bound. They hold up to the rounding of the arithmetic.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from ffcp.bounds import ibp
    >>> head = nn.Sequential(nn.ReLU(), nn.Linear(2, 1))
    >>> _ = nn.init.ones_(head[1].weight), nn.init.zeros_(head[1].bias)
    >>> ibp(head, torch.tensor([[3.0, -1.0]]), 1.0)
    Bounds(lower=tensor([[2.]]), upper=tensor([[4.]]))
    """
    head = head if isinstance(head, Head) else trace(head)
    ball = _ball(center, radius, norm)
    rows = _ELEMENTS // (2 * max(_sizes(head, ball)))  # an interval has two ends
    return _by_rows(lambda part: _box(_intervals(head, part)[head.output]), ball, rows)


@torch.no_grad()
def crown(
    head: nn.Module | Head, center: Tensor, radius: float | Tensor, norm: float | str = math.inf
) -> Bounds:
    """Bound a head's outputs over a ball around each row by linear relaxation.

    Linear functions are pulled back from the output to the ball. Every activation is
    enclosed between two lines on the range of its input, which is bounded the same way.
    The result lies inside that of `ibp`, and is exact wherever the head is affine. For heads
    of ReLU and LeakyReLU it grows with the radius.

    Parameters
    ----------
    head : nn.Module or Head
        What to bound, taken in eval mode; see `trace` for calling it many times.
    center : Tensor
        Centers of the balls, one per row: shape (n, ...).
    radius : float or Tensor
        One radius for all rows, or a tensor of shape (n,). May be 0; a row with an infinite
        radius gets the bounds of `ibp`.
    norm : float
        ``math.inf`` or 2.

    Returns
    -------
    Bounds
        ``lower`` and ``upper``, in the shape of the head's output, infinite where there is
        no bound. They hold up to the rounding of the arithmetic.

    Notes
    -----
    Time and memory grow with the number of outputs and of hidden units: each needs its own
    linear function. Rows, and units where need be, are worked on in parts of bounded size.

    Examples
    --------
    Two layers that undo each other, which intervals cannot see:

    >>> import torch
    >>> from torch import nn
    >>> from ffcp.bounds import crown, ibp
    >>> head = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    >>> head[0].weight.data = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    >>> head[1].weight.data = torch.tensor([[1.0, -1.0]])
    >>> ibp(head, torch.zeros(1, 2), 1.0).upper, crown(head, torch.zeros(1, 2), 1.0).upper
    (tensor([[4.]]), tensor([[2.]]))
    """
    head = head if isinstance(head, Head) else trace(head)
    own = [node.name for node in head.nodes if isinstance(node.rule, _Own)]
    if own:
        raise ValueError(f"layer {own[0]!r} bounds itself over boxes, which only ibp can use")
    ball = _ball(center, radius, norm)
    rows, specs = _portions(head, _sizes(head, ball), ball.norm)
    return _by_rows(lambda part: _crown_rows(head, part, specs), ball, rows)
