"""Backward operations that ONNX does not have, written with operations that it has."""

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
    """Return the gradient with respect to the input: the transposed convolution."""
    left_out = [0] * len(stride)
    if not transposed:  # rows at the end of each axis that the stride left out
        for i, step in enumerate(stride):
            width = dilation[i] * (weight.shape[i + 2] - 1) + 1
            reached = (gradient.shape[i + 2] - 1) * step - 2 * padding[i] + width
            left_out[i] = x.shape[i + 2] - reached
    back = aten.convolution.default(
        gradient, weight, None, stride, padding, dilation, not transposed, left_out, groups
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
    """Return the gradient of average pooling with respect to the input, axis by axis."""
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
    """Return the gradient of adaptive average pooling with respect to the input."""
    axes = []
    for size, count in zip(x.shape[-2:], gradient.shape[-2:], strict=True):
        index = torch.arange(count, device=x.device)
        inside = _windows(index * size // count, -(-(index + 1) * size // count), size)
        axes.append(inside.to(x.dtype) / inside.sum(dim=1, keepdim=True))
    return _spread(gradient, *axes)


def _windows(start: Tensor, end: Tensor, size: int) -> Tensor:
    """Return a mask, (n, size), of the positions in each window."""
    places = torch.arange(size, device=start.device)
    return (places >= start[:, None]) & (places < end[:, None])


def _spread(gradient: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the gradient (..., n, m) distributed over the windows of two axes."""
    return rows.T @ gradient @ columns


#: By operation; torch decomposes the others itself.
BACKWARD: dict[Any, Callable[..., Any]] = {
    aten.convolution_backward.default: convolution_backward,
    aten.avg_pool2d_backward.default: average_pool_backward,
    aten._adaptive_avg_pool2d_backward.default: adaptive_average_pool_backward,
    **get_decompositions([aten.silu_backward.default, aten.mish_backward.default]),
}
