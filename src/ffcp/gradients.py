"""Norms of the rows of the head's Jacobian: the only place that calls autograd for a score."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ffcp import checks, inputs
from ffcp.features import OUTPUT, Cut, Tapped, resolve

_NORMS = (1, 2, math.inf)
_OUTPUTS_AT_ONCE = 8  # one batched backward pass holds the gradients of this many outputs


def gradient_norms(
    model: nn.Module,
    x: Any,
    features: Sequence[str | nn.Module],
    norm: float = 2,
    batch_size: int | None = None,
) -> tuple[Tensor, dict[str | nn.Module, Tensor]]:
    """Predict, and measure how strongly each output reacts to each named feature.

    One forward pass and, for a model with one output, one backward pass give the norms at all
    features. The part of the model before the earliest feature runs without a graph. The model
    runs in eval mode and is afterwards as it was: mode, ``requires_grad``, hooks, random state.

    Parameters
    ----------
    model
        Any module whose forward returns one floating-point tensor with a row per input row.
    x
        A tensor or array, or a tuple or dict of them as the model takes them.
    features
        Dotted module names, modules, ``"input"`` or ``"output"`` (whose norm is 1).
    norm
        1, 2 or ``inf``.
    batch_size
        Rows per pass; by default about 16 MB of input, at most 8,192 rows.

    Returns
    -------
    prediction : Tensor
        The model's output, detached.
    norms : dict
        For each feature as given, the norms in the shape of the output: at output j of row i
        the norm of the gradient of that output with respect to the feature of row i.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 1, bias=False))
    >>> _ = nn.init.constant_(model[0].weight, 3.0)
    >>> prediction, norms = gradient_norms(model, torch.ones(1, 2), ["input", "output"])
    >>> norms["input"]  # the norm of (3, 3)
    tensor([[4.2426]])
    """
    names = [resolve(model, feature) for feature in features]
    x = inputs.to_tensors(x, model)
    prediction, norms = run(model, x, names, checked_norm(norm), batch_size)
    return prediction, {f: norms[name] for f, name in zip(features, names, strict=True)}


def checked_norm(norm: float) -> float:
    """Refuse a norm other than 1, 2 and infinity."""
    if norm not in _NORMS:
        raise ValueError(f"norm must be 1, 2 or float('inf'), got {norm!r}")
    return norm


def run(
    model: nn.Module,
    x: Any,
    names: Sequence[str],
    norm: float = 2,
    batch_size: int | None = None,
    first_row: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Predict all rows, batch by batch, with the norms at the named features.

    No names: only the prediction, without a graph. ``first_row`` is the number that errors give
    to the first row. What every band rests on passes through here, so NaN and infinity stop
    here.
    """
    rows = inputs.row_count(x)
    if not rows:
        raise ValueError("x has no rows")
    names = list(dict.fromkeys(names))
    inner = [name for name in names if name != OUTPUT]
    buffer, sums = inputs.RowBuffer(rows), []
    with Cut(model, inner) as cut:
        for batch in inputs.batches(x, batch_size):
            # While the batch is in the cache; looked at when all are done.
            sums += [t.sum() for _, t in inputs.leaves(batch) if t.is_floating_point()]
            buffer.add(_finished(cut(batch), norm))
    if not all(math.isfinite(total.item()) for total in sums):
        for key, tensor in inputs.leaves(x, "x"):
            checks.finite(tensor, key, first_row)
    prediction, norms = buffer[OUTPUT], {name: buffer[name] for name in inner}
    checks.finite(prediction, "the prediction", first_row)
    for name, values in norms.items():
        checks.finite(values, f"the gradient at feature {name!r}", first_row)
    if OUTPUT in names:
        norms[OUTPUT] = torch.ones_like(prediction)
    return prediction, norms


def run_scalar(
    model: nn.Module, x: Any, feature: str, scalar: Callable[[Tensor], Tensor], first_row: int = 0
) -> tuple[Tensor, Tensor]:
    """Run one batch; return the output and the gradient norm at a feature of a number made of it.

    ``scalar`` turns the output into one number per row, as the probability of the top class.

    >>> model = nn.Linear(2, 3)
    >>> _, norms = run_scalar(model, torch.ones(4, 2), "input", lambda output: output[:, 0])
    >>> torch.allclose(norms, model.weight[0].double().norm())
    True
    """
    for key, tensor in inputs.leaves(x, "x"):
        checks.finite(tensor, key, first_row)
    with Cut(model, [feature]) as cut:
        prediction, edges = cut(x)
        value = scalar(prediction)
        checks.finite(prediction, "the prediction", first_row)
        found = torch.autograd.grad(value.sum(), edges[feature], allow_unused=True)
    reached = [gradient for gradient in found if gradient is not None]
    if not reached:
        raise ValueError(f"feature {feature!r} does not influence the output: choose another layer")
    # Over all dimensions and all tensors of one feature.
    rows = [gradient.reshape(len(gradient), -1).double() for gradient in reached]
    norms: Tensor = torch.linalg.vector_norm(torch.cat(rows, dim=1), dim=1)
    checks.finite(norms, f"the gradient at feature {feature!r}", first_row)
    return prediction.detach(), norms


def _finished(tap: Tapped, norm: float) -> dict[str, Tensor]:
    """Take from a pass the output and the norms; its graph dies with this call."""
    norms = _norms(tap.prediction, tap.edges, norm) if tap.edges else {}
    return {OUTPUT: tap.prediction.detach(), **norms}


def _norms(
    prediction: Tensor, edges: dict[str, list[GradientEdge]], norm: float
) -> dict[str, Tensor]:
    """Take the norms, one output coordinate of all rows at a time."""
    flat = [edge for group in edges.values() for edge in group]
    columns: dict[str, list[Tensor]] = {name: [] for name in edges}
    for gradients in _jacobian_rows(prediction, flat):
        rest = iter(gradients)
        for name, group in edges.items():
            own = [next(rest) for _ in group]
            if all(gradient is None for gradient in own):
                raise ValueError(
                    f"feature {name!r} does not influence the output: choose another layer"
                )
            columns[name].append(_combine([g for g in own if g is not None], norm))
    return {
        name: (values[0] if len(values) == 1 else torch.stack(values, dim=1)).view_as(prediction)
        for name, values in columns.items()
    }


def _jacobian_rows(
    prediction: Tensor, edges: Sequence[GradientEdge]
) -> Iterator[Sequence[Tensor | None]]:
    """Yield the gradients of output 0 of every row, then of output 1, and so on.

    Rows are independent, so one backward pass with a one in every row serves them all; a few
    outputs share one batched pass.
    """
    outputs = prediction.reshape(len(prediction), -1)
    count = outputs.shape[1]
    if count == 1:  # the sum's gradient is a one in every row
        yield torch.autograd.grad(outputs.sum(), edges, allow_unused=True)
        return
    for start in range(0, count, _OUTPUTS_AT_ONCE):
        columns = range(start, min(start + _OUTPUTS_AT_ONCE, count))
        yield from _batched_rows(outputs, edges, columns, keep=columns.stop < count)


def _batched_rows(
    outputs: Tensor, edges: Sequence[GradientEdge], columns: range, *, keep: bool
) -> Iterator[Sequence[Tensor | None]]:
    """Take the gradients of several outputs in one pass; one by one where that is impossible."""
    chosen = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)[
        columns.start : columns.stop
    ]
    seeds = chosen[:, None, :].expand(-1, len(outputs), -1)
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


def _combine(gradients: Sequence[Tensor], norm: float) -> Tensor:
    """Norm of each row over all dimensions and all tensors of one feature."""
    parts = [_row_norm(gradient, norm) for gradient in gradients]
    return parts[0] if len(parts) == 1 else _row_norm(torch.stack(parts, dim=1), norm)


def _row_norm(gradient: Tensor, norm: float) -> Tensor:
    rows = gradient.reshape(len(gradient), -1)
    if rows.dtype in (torch.float16, torch.bfloat16):
        rows = rows.float()  # squares overflow half precision
    if norm == 2:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms
    # vector_norm is 15 times slower than these two for norms other than 2.
    return rows.abs().sum(dim=1) if norm == 1 else rows.abs().amax(dim=1)


def check_rows(model: nn.Module, x: Any, names: Sequence[str], sample: int = 8) -> None:
    """Refuse a model that mixes rows, by its predictions and by its gradients."""
    x = inputs.take(x, slice(0, sample))
    if inputs.row_count(x) == 1:  # a loader of single rows: the row beside itself
        x = inputs.take(x, torch.tensor([0, 0]))
    asked = inputs.row_count(x) // 2
    names = [name for name in names if name != OUTPUT]
    # One block around all passes: each of them then draws other random numbers, if it draws.
    with Cut(model) as cut:
        checks.rows_independent(lambda batch: cut(batch).prediction, x)
    if not names or not asked:
        return
    with Cut(model, names) as cut:
        prediction, edges = cut(x)
        flat = [(name, edge) for name, group in edges.items() for edge in group]
        gradients = torch.autograd.grad(
            prediction[:asked].sum(), [edge for _, edge in flat], allow_unused=True
        )
    for (name, _), gradient in zip(flat, gradients, strict=True):
        if gradient is not None:
            checks.gradient_stays_in_row(name, gradient, asked)
