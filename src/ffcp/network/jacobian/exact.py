"""Take the rows of the Jacobian one after the other, a few outputs in one batched pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ffcp.batch import is_traced
from ffcp.network.cut import Tapped
from ffcp.network.jacobian.norms import reached, row_norms

_OUTPUTS_AT_ONCE = 8  # a batched backward pass holds the gradients of at most this many outputs
_BYTES_AT_ONCE = 2**26  # ... and at most this much memory for what goes in and what comes out


def exact(tap: Tapped, norm: float) -> dict[str, Tensor]:
    """Take the norms, one output coordinate of all rows at a time."""
    edges = [edge for group in tap.edges.values() for edge in group]
    columns: dict[str, list[Tensor]] = {name: [] for name in tap.edges}
    for gradients in jacobian_rows(tap, edges):
        rest = iter(gradients)
        for name, group in tap.edges.items():
            own = [next(rest) for _ in group]
            columns[name].append(row_norms(reached(name, own), norm))
    return {name: _joined(norms).view_as(tap.prediction) for name, norms in columns.items()}


def _joined(columns: list[Tensor]) -> Tensor:
    if len(columns) == 1:
        return columns[0]
    return torch.cat([column.unsqueeze(1) for column in columns], dim=1)


def jacobian_rows(tap: Tapped, edges: Sequence[GradientEdge]) -> Iterator[Sequence[Tensor | None]]:
    """Yield the gradients of output 0 of every row, then of output 1, and so on.

    Rows are independent, so one backward pass with a one in every row serves them all; a few
    outputs share one batched pass.
    """
    outputs = tap.prediction.reshape(tap.prediction.shape[0], -1)
    count = outputs.shape[1]
    if count == 1:
        yield torch.autograd.grad(outputs, edges, torch.ones_like(outputs), allow_unused=True)
        return
    if is_traced():  # a graph is for any number of rows; what is batched has a fixed one
        ones = torch.eye(count, dtype=outputs.dtype, device=outputs.device)
        for column in range(count):
            seed = ones[column].expand_as(outputs)
            yield torch.autograd.grad(outputs, edges, seed, retain_graph=True, allow_unused=True)
        return
    shapes = (shape for group in tap.shapes.values() for shape in group)
    held = outputs.numel() + sum(shape.numel() for shape in shapes)
    most = _BYTES_AT_ONCE // (held * outputs.element_size())
    at_once = max(1, min(_OUTPUTS_AT_ONCE, most))
    for start in range(0, count, at_once):
        columns = range(start, min(start + at_once, count))
        yield from _batched_rows(outputs, edges, columns, keep=columns.stop < count)


def _batched_rows(
    outputs: Tensor, edges: Sequence[GradientEdge], columns: range, *, keep: bool
) -> Iterator[Sequence[Tensor | None]]:
    """Take the gradients of several outputs in one pass; one by one where that is impossible."""
    seeds = outputs.new_zeros(len(columns), *outputs.shape)
    for j, column in enumerate(columns):
        seeds[j, :, column] = 1
    try:
        with warnings.catch_warnings():
            # Some operations are batched by a loop inside torch: still right, and no one's bug.
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            stacked = torch.autograd.grad(
                outputs, edges, seeds, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
    except RuntimeError:  # an operation that cannot be batched; the loop raises all else again
        for j, seed in enumerate(seeds):
            last = j == len(seeds) - 1 and not keep
            yield torch.autograd.grad(
                outputs, edges, seed, retain_graph=not last, allow_unused=True
            )
        return
    for j in range(len(columns)):
        yield [None if gradient is None else gradient[j] for gradient in stacked]
