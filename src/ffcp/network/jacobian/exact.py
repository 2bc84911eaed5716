"""Take the rows of the Jacobian one after the other, a few outputs in one batched pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ffcp.batch import is_traced
from ffcp.network.cut import Tapped
from ffcp.network.jacobian.norms import reached, row_norms

_OUTPUTS_AT_ONCE = 8  # a batched backward pass holds the gradients of at most this many outputs
_BYTES_AT_ONCE = 2**26  # ... and at most this much memory for what goes in and what comes out


def exact(
    tap: Tapped, norm: float, of: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """Take the norms, one output coordinate of all rows at a time.

    With ``of`` those of the gradient of one number per row, in float64.
    """
    if of is not None:
        tap = replace(tap, prediction=of(tap.prediction))
    edges = [edge for group in tap.edges.values() for edge in group]
    columns: dict[str, list[Tensor]] = {name: [] for name in tap.edges}
    for gradients in jacobian_rows(tap, edges):
        rest = iter(gradients)
        for name, group in tap.edges.items():
            own = reached(name, [next(rest) for _ in group])
            own = own if of is None else [gradient.double() for gradient in own]
            columns[name].append(row_norms(own, norm))
    return {n: torch.stack(each, dim=1).view_as(tap.prediction) for n, each in columns.items()}


def jacobian_rows(tap: Tapped, edges: Sequence[GradientEdge]) -> Iterator[Sequence[Tensor | None]]:
    """Yield the gradients of output 0 of every row, then of output 1, and so on.

    Rows are independent, so one backward pass with a one in every row serves them all; a few
    outputs share one batched pass.
    """
    outputs = tap.prediction.reshape(tap.prediction.shape[0], -1)
    count = outputs.shape[1]
    if count == 1 or is_traced():  # a graph is for any number of rows; what is batched is not
        ones = torch.eye(count, dtype=outputs.dtype, device=outputs.device)
        for row in ones:
            yield from _batched(outputs, edges, row.expand_as(outputs)[None])
        return
    shapes = (shape for group in tap.shapes.values() for shape in group)
    held = (outputs.numel() + sum(shape.numel() for shape in shapes)) * outputs.element_size()
    at_once = max(1, min(_OUTPUTS_AT_ONCE, _BYTES_AT_ONCE // held))
    for start in range(0, count, at_once):
        seeds = outputs.new_zeros(min(at_once, count - start), *outputs.shape)
        for j, seed in enumerate(seeds):
            seed[:, start + j] = 1
        yield from _batched(outputs, edges, seeds)


def _batched(
    outputs: Tensor, edges: Sequence[GradientEdge], seeds: Tensor
) -> Iterator[Sequence[Tensor | None]]:
    """Take the gradients of several outputs in one pass; one by one where that is impossible."""
    if len(seeds) > 1:
        try:
            with warnings.catch_warnings():
                # Some operations are batched by a loop inside torch: still right, and no one's bug.
                warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
                stacked = torch.autograd.grad(
                    outputs, edges, seeds, retain_graph=True, allow_unused=True,
                    is_grads_batched=True,
                )  # fmt: skip
            for j in range(len(seeds)):
                yield [None if gradient is None else gradient[j] for gradient in stacked]
            return
        except RuntimeError:  # an operation that cannot be batched; the loop raises all else again
            pass
    for seed in seeds:
        yield torch.autograd.grad(outputs, edges, seed, retain_graph=True, allow_unused=True)
