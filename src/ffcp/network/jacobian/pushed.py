"""Take all rows of the Jacobian at once, a column at a time: for features narrower than the output.

A backward pass gives the gradient of one output; a tangent pushed forward gives how all outputs
react to one number of the feature. Where the feature has fewer numbers than the output, pushing
all of them takes fewer passes, and the norms are the same up to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ffcp.network import heads, inputs
from ffcp.network.cut import Tapped
from ffcp.network.jacobian.norms import wide
from ffcp.network.jacobian.sketched import push

_BYTES = 12 * 2**20  # memory for what is pushed at once; half or twice as much is slower


def width(tap: Tapped, name: str) -> int:
    """Count the numbers of one row of a feature: as many tangents have to be pushed."""
    return sum(shape[1:].numel() for shape in tap.shapes[name])


def pushed(model: nn.Module, x: Any, name: str, tap: Tapped, norm: float) -> Tensor:
    """Take the norms of all outputs by pushing a one at every number of the feature."""
    prediction, shapes = tap.prediction, [shape[1:] for shape in tap.shapes[name]]
    count = width(tap, name)
    held = (prediction[0].numel() + count) * prediction.element_size()  # bytes of a row's tangent
    rows = max(1, _BYTES // (held * count))
    at_once = max(1, _BYTES // (held * rows))
    result = torch.zeros_like(prediction, dtype=wide(prediction.dtype))
    for start in range(0, len(result), rows):
        part = slice(start, start + rows)
        with heads.behind(model, inputs.take(x, part), name) as (values, output):
            for first in range(0, count, at_once):
                numbers = range(first, min(first + at_once, count))
                ones = _ones(values, shapes, numbers)
                columns = push(output, values, ones, name).to(result.dtype)
                _collect(result[part], columns, norm)
    return result.sqrt_() if norm == 2 else result


def _ones(values: tuple[Tensor, ...], shapes: list[torch.Size], numbers: range) -> list[Tensor]:
    """Give a tangent for each of some numbers of the feature: a one there, zero elsewhere."""
    tangents, first = [], 0
    for value, shape in zip(values, shapes, strict=True):
        size = shape.numel()
        ones = value.new_zeros(len(numbers), size)
        own = torch.arange(max(numbers.start, first), min(numbers.stop, first + size))
        ones[own - numbers.start, own - first] = 1
        tangents.append(ones.view(-1, *shape))
        first += size
    return tangents


def _collect(result: Tensor, columns: Tensor, norm: float) -> None:
    """Add what some columns of the Jacobian, (columns, *shape of output), bring to the norms."""
    if norm == 2:
        result += torch.linalg.vector_norm(columns, dim=0).square_()
    elif norm == 1:
        result += columns.abs_().sum(dim=0)
    else:
        torch.maximum(result, columns.abs_().amax(dim=0), out=result)
