"""Rules of affine layers: linear, convolution, pooling, batch norm, interpolation, reshaping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ffcp.bounds.rules.kinds import Affine, Sum, UnsupportedError


def linear(layer: nn.Linear) -> Affine:
    """W x + b on the last dimension."""
    return Affine(
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


def convolution(layer: nn.Conv1d | nn.Conv2d) -> Affine:
    """One and two dimensions, zero padding."""
    if layer.padding_mode != "zeros":
        raise UnsupportedError(f"padding_mode={layer.padding_mode!r}, only 'zeros' is bounded")

    def padding() -> list[int]:
        if layer.padding == "valid":
            return [0] * (2 * len(layer.kernel_size))
        if layer.padding == "same":
            totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
            return [side for t in reversed(totals) for side in (t // 2, t - t // 2)]
        return [side for p in reversed(cast(tuple[int, ...], layer.padding)) for side in (p, p)]

    def kernel() -> _Kernel:
        return _Kernel(layer.weight, layer.stride, padding(), layer.dilation, layer.groups)

    return Affine(
        apply=lambda x: _convolve(x, kernel(), layer.weight, layer.bias),
        push=lambda x, of: _convolve(x, kernel(), of(layer.weight)),
        pull=lambda A, shape: _convolve_back(A, kernel(), shape),
    )


def _pooling(
    apply: Callable[[Tensor], Tensor], kernel: Callable[[Tensor, Sequence[int]], _Kernel]
) -> Affine:
    """Average pooling is a convolution, channel by channel, with equal weights."""

    def push(x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
        window = kernel(x, x.shape[1:])
        return _convolve(x, window, of(window.weight))

    return Affine(apply, push, lambda A, shape: _convolve_back(A, kernel(A, shape), shape))


def _window(
    like: Tensor, channels: int, size: Sequence[int], stride: Sequence[int], pad: Sequence[int]
) -> _Kernel:
    weight = like.new_full((channels, 1, *size), 1 / math.prod(size))
    sides = [side for p in reversed(pad) for side in (p, p)]
    return _Kernel(weight, tuple(stride), sides, (1,) * len(size), channels)


def _each_dimension(value: Any, dimensions: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,) * dimensions


def average_pool(layer: nn.AvgPool1d | nn.AvgPool2d) -> Affine:
    """Means over windows of one size."""
    if layer.ceil_mode:
        raise UnsupportedError("ceil_mode=True is not bounded")
    if getattr(layer, "divisor_override", None) is not None:
        raise UnsupportedError("divisor_override is not bounded")
    dimensions = 1 if isinstance(layer, nn.AvgPool1d) else 2
    size, stride, pad = (
        _each_dimension(value, dimensions)
        for value in (layer.kernel_size, layer.stride, layer.padding)
    )
    if any(pad) and not layer.count_include_pad:
        raise UnsupportedError("padding with count_include_pad=False is not bounded")
    return _pooling(
        lambda x: layer(x), lambda like, shape: _window(like, shape[0], size, stride, pad)
    )


def adaptive_pool(layer: nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d) -> Affine:
    """Means over windows that divide the input evenly."""
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
        pull=lambda A, shape: A * scale(A),
    )


def upsample(layer: nn.Upsample) -> Affine:
    """Interpolation is a product of one matrix of weights >= 0 for each axis."""
    if layer.mode not in ("nearest", "nearest-exact", "linear", "bilinear"):
        raise UnsupportedError(f"mode {layer.mode!r} is not bounded; linear and nearest are")

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

    return Affine(apply=lambda x: layer(x), push=push, pull=pull)


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


def flatten(layer: nn.Flatten) -> Affine:
    """Keep the numbers, change the shape."""
    if layer.start_dim == 0:
        raise UnsupportedError("start_dim=0 mixes the rows of a batch")
    return Affine(
        apply=lambda x: layer(x),
        push=lambda x, of: layer(x),
        pull=lambda A, shape: A.reshape(len(A), *shape),
        reshapes=True,
    )


def identity(layer: nn.Module) -> Sum:
    """Do nothing, as dropout in eval mode."""
    return Sum((1.0,))
