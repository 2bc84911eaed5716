"""Gradients of layers that have no ONNX, by operations that have; knows no statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

aten = torch.ops.aten


def convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> tuple[Tensor, None, None]:
    """Return the gradient in the input: the convolution's transpose. Weights are frozen."""
    beyond = [0] * len(stride)
    if not transposed:  # what the stride left over at the far end of every axis
        reached = [
            (size - 1) * step - 2 * pad + spread * (width - 1) + 1
            for size, step, pad, spread, width in zip(
                gradient.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True
            )
        ]
        beyond = [size - end for size, end in zip(x.shape[2:], reached, strict=True)]
    back = aten.convolution.default(
        gradient, weight, None, stride, padding, dilation, not transposed, beyond, groups
    )
    return back, None, None


def average_pool_backward(
    gradient: Tensor,
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """Return the gradient in the input of windows that are averaged, one axis after the other."""
    axes = []
    for axis, size in enumerate(x.shape[-2:]):
        width, pad = kernel[axis % len(kernel)], padding[axis % len(padding)]
        step = (stride or kernel)[axis % len(stride or kernel)]
        start = step * torch.arange(gradient.shape[axis - 2], device=x.device) - pad
        end = (start + width).clamp_max(size + pad)  # a last window may reach beyond the padding
        inside = _windows(start, end, size)
        count = end - start if count_include_pad else inside.sum(dim=1)
        axes.append(inside.to(x.dtype) / (1 if divisor_override else count[:, None]))
    return _spread(gradient, *axes) / (divisor_override or 1)


def adaptive_average_pool_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient in the input of windows that are as large as they must be."""
    axes = []
    for size, count in zip(x.shape[-2:], gradient.shape[-2:], strict=True):
        places = torch.arange(count, device=x.device)
        inside = _windows(places * size // count, -(-(places + 1) * size // count), size)
        axes.append(inside.to(x.dtype) / inside.sum(dim=1, keepdim=True))
    return _spread(gradient, *axes)


def _windows(start: Tensor, end: Tensor, size: int) -> Tensor:
    """Return which of the places (size,) lie in each window (n,)."""
    places = torch.arange(size, device=start.device)
    return (places >= start[:, None]) & (places < end[:, None])


def _spread(gradient: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return what the windows (n, size) of two axes have from the gradient (..., n, m)."""
    return rows.T @ gradient @ columns


#: By operation; what torch can take apart by itself is left to it.
BACKWARD: dict[Any, Callable[..., Any]] = {
    aten.convolution_backward.default: convolution_backward,
    aten.avg_pool2d_backward.default: average_pool_backward,
    aten._adaptive_avg_pool2d_backward.default: adaptive_average_pool_backward,
    **get_decompositions([aten.silu_backward.default, aten.mish_backward.default]),
}
