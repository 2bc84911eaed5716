"""One pass over a batch: the output, gradient norms and values of layers, all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ffcp.batch import BatchOutput, Requires
from ffcp.network import arrays, inputs, jacobian
from ffcp.network.cut import Cut, NoGradientError, call, undisturbed
from ffcp.network.features import INPUT, OUTPUT, module_names, resolve
from ffcp.network.inputs import RowBuffer
from ffcp.network.jacobian import AUTO, Method, Smooth
from ffcp.network.jacobian.stack import by_hand
from ffcp.network.model import OWN_HOOK, Weights, borrowed, uncompiled, without_copies
from ffcp.network.model_output import Output, picking

ONLY_OUTPUT = Requires()
_PER_ROW = ("output", "rows", "groups", "weights", "random")  # with an entry for each row


def run_batch(
    model: nn.Module,
    x: Any,
    requires: Requires = ONLY_OUTPUT,
    first_row: int = 0,
    groups: Any = None,
    weights: Tensor | None = None,
    columns: Sequence[str | int] | None = None,
    now: Weights | None = None,
) -> BatchOutput:
    """Run the model once on one batch and return the required features.

    Parameters
    ----------
    model : nn.Module
        A module whose forward returns one floating-point tensor with a row per input row.
    x : array-like, frame, tuple, dict or loader
        Tensors as the model takes them (see :func:`ffcp.network.inputs.to_tensors`).
    requires : Requires, default=ONLY_OUTPUT
        Features by their names (see :func:`ffcp.network.features.resolve`). The norm at
        ``"output"`` is 1. The value at ``"input"`` is the input, all its tensors side by side
        if there are several, and that at ``"output"`` the output.
    first_row : int, default=0
        The number that errors give to the first row. NaN and infinity in the input, the
        prediction or a gradient are errors.
    groups : array-like
    weights : Tensor, default=None
    columns : sequence of str or int, default=None
        Those of the rows, and the names of the columns, passed on unchanged.
    now : Weights, default=None
        The model's weights, if the caller has just read them and will compare them afterwards.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> out = run_batch(model, torch.ones(4, 2), Requires(norms=("0",), values=("1",)))
    >>> out.norms["0"].shape, out.values["1"].shape
    (torch.Size([4, 1]), torch.Size([4, 3]))
    """
    rows = inputs.row_count(x)
    if not rows:
        raise ValueError("x has no rows")
    for key, tensor in inputs.leaves(x, "x"):
        arrays.check_finite(tensor, key, first_row)
    inner = [name for name in dict.fromkeys(requires.norms) if name != OUTPUT]
    # No layer of a compiled model can be cut at.
    whole = uncompiled(model) if requires.norms or requires.values else model
    values: dict[str, Tensor] = {}
    with borrowed(whole, now if whole is model else None) as frozen:
        result = by_hand(frozen, x, inner, requires)
        if result is not None:
            output, norms = result
        else:
            # Smoothing runs the model on perturbed features; the plain pass needs no graph.
            tapped = [] if isinstance(requires.method, Smooth) else inner
            with Cut(frozen, tapped, values=requires.values) as cut:
                tap = cut(x)
                if requires.logits:
                    tap.prediction = as_logits(tap.prediction)
                output, values = tap.prediction.detach(), tap.values
                # A model may return its input, which the user may fill again.
                memory = output.untyped_storage().data_ptr()
                if any(t.untyped_storage().data_ptr() == memory for _, t in inputs.leaves(x)):
                    output = output.clone()
                norms = jacobian.take_norms(frozen, x, tap, inner, requires)
    output = as_logits(output) if requires.logits else output
    arrays.check_finite(output, "the prediction", first_row)
    for name, norm in norms.items():
        arrays.check_finite(norm, f"the gradient at feature {name!r}", first_row)
    if OUTPUT in requires.norms:
        norms = {**norms, OUTPUT: norms_of_output(output, requires)}
    if output.device.type == "mps":  # without float64: continue on the CPU
        output = output.cpu()
        norms = {name: norm.cpu() for name, norm in norms.items()}
        values = {name: value.cpu() for name, value in values.items()}
    numbers = range(first_row, first_row + rows)
    return BatchOutput(x, output, norms, values, numbers, groups, weights, None, columns)


def run_batches(
    model: nn.Module,
    x: Any,
    requires: Requires = ONLY_OUTPUT,
    batch_size: int | None = None,
    first_row: int = 0,
) -> Iterator[BatchOutput]:
    """Split an input into batches and run each; between them the model is as the user left it.

    >>> parts = run_batches(nn.Linear(2, 1), torch.ones(5, 2), batch_size=2)
    >>> [out.rows for out in parts]
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    if not inputs.row_count(x):
        raise ValueError("x has no rows")
    for batch in inputs.batches(x, batch_size):
        out = run_batch(model, batch, requires, first_row)
        first_row += len(out.rows)
        yield out


def as_logits(output: Tensor) -> Tensor:
    """Return a logit for each of two classes where the model gives one, (n,) or (n, 1).

    >>> as_logits(torch.tensor([[2.0], [-1.0]]))
    tensor([[ 0.,  2.],
            [ 0., -1.]])
    """
    if output.dim() > 2 or (output.dim() == 2 and output.shape[1] != 1):
        return output
    second = output.reshape(-1, 1)
    return torch.cat([torch.zeros_like(second), second], dim=1)


def part_of(out: BatchOutput, rows: slice | Tensor) -> BatchOutput:
    """Return the batch output of some rows, by a slice, a mask or numbers.

    >>> whole = run_batch(nn.Linear(2, 1), torch.ones(5, 2))
    >>> part_of(whole, slice(2, 4)).rows, part_of(whole, torch.arange(5) > 2).rows
    (range(2, 4), [3, 4])
    """
    if isinstance(rows, Tensor) and rows.dtype == torch.bool:
        rows = slice(None) if bool(rows.all()) else rows.nonzero()[:, 0]

    def part(column: Any) -> Any:
        if column is None:
            return None
        if isinstance(column, Tensor) or isinstance(rows, slice):
            return column[rows]
        if isinstance(column, range):  # of many rows, in one step
            return torch.arange(column.start, column.stop)[rows].tolist()
        return [column[number] for number in rows.tolist()]

    return out._replace(
        x=None if out.x is None else inputs.take(out.x, rows),
        norms={name: norm[rows] for name, norm in out.norms.items()},
        values={name: value[rows] for name, value in out.values.items()},
        **{name: part(getattr(out, name)) for name in _PER_ROW},
    )


def joined(outs: Sequence[BatchOutput]) -> BatchOutput:
    """Concatenate the batch outputs of several passes.

    >>> whole = run_batch(nn.Linear(2, 1), torch.ones(5, 2))
    >>> joined([part_of(whole, slice(0, 2)), part_of(whole, slice(2, 5))]).rows
    [0, 1, 2, 3, 4]
    """

    def whole(name: str) -> Any:
        parts = [getattr(out, name) for out in outs]
        if parts[0] is None:
            return None
        if isinstance(parts[0], Tensor):
            return torch.cat(parts)
        return [entry for part in parts for entry in part]

    first = outs[0]
    return first._replace(
        x=None if first.x is None else inputs.join([out.x for out in outs]),
        norms={name: torch.cat([out.norms[name] for out in outs]) for name in first.norms},
        values={name: torch.cat([out.values[name] for out in outs]) for name in first.values},
        **{name: whole(name) for name in _PER_ROW},
    )


def norms_of_output(output: Tensor, requires: Requires) -> Tensor:
    """Return the norms at the output itself, all of them 1."""
    if requires.of is None:
        return torch.ones_like(output)
    return torch.ones(len(output), dtype=torch.float64, device=output.device)


def gradient_norms(
    model: nn.Module,
    x: Any,
    features: Sequence[str | nn.Module],
    norm: float = 2,
    batch_size: int | None = None,
    method: Method = AUTO,
    output: Output = None,
) -> tuple[Tensor, dict[str | nn.Module, Tensor]]:
    """Predict, and measure how strongly each output reacts to each named feature.

    One forward pass and, for a model with one output, one backward pass give the norms at all
    features. The part of the model before the earliest feature runs without a graph. The model
    runs in eval mode and is afterwards as it was: mode, ``requires_grad``, hooks.

    Parameters
    ----------
    model : nn.Module
        Any module whose forward returns one floating-point tensor with a row per input row.
    x : array-like, frame, tuple or dict
        A tensor or array, or a tuple or dict of them as the model takes them.
    features : sequence of str or nn.Module
        Dotted module names, modules, ``"input"`` or ``"output"`` (whose norm is 1).
    norm : float, default=2
        1, 2 or ``inf``.
    batch_size : int, default=None
        Rows per pass; by default about 16 MB of input (2 MB of images), at most 8,192 rows.
    method : str, Sketch or Smooth, default="auto"
        How the norms are taken when there are many outputs. ``"exact"``: one row of the Jacobian
        after the other. ``"coloured"``: the same numbers from far fewer passes, for heads whose
        outputs see only a window of the feature map (convolutions, pooling, interpolation). One
        more pass proves on every batch that no output depends on anything outside its window;
        a head where one does is an error. :class:`Sketch`: an estimate. :class:`Smooth`: the
        mean over perturbed features. ``"auto"``: exact for up to 64 outputs; else coloured if
        it needs at most half as many passes and at most 256, and proves right; else exact for
        up to 4,096 outputs; else ``Sketch(32)``, or exact for norms other than 2.
    output : str, int or callable, default=None
        Which part of what the model returns is the prediction, if that is no tensor: a key, an
        index or a function.

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
    model = picking(model, output)
    x = inputs.to_tensors(x, model)
    requires = Requires(norms=tuple(dict.fromkeys(names)), norm=norm, method=method)
    buffer = RowBuffer(inputs.row_count(x))
    for out in run_batches(model, x, requires, batch_size):
        buffer.add({"": out.output, **out.norms})
    norms = {f: buffer[name] for f, name in zip(features, names, strict=True)}
    return buffer[""], norms


def check_rows(
    model: nn.Module,
    x: Any,
    names: Sequence[str],
    sample: int = 8,
    dtype: torch.dtype | None = None,
) -> None:
    """Raise ValueError if a model mixes rows, by its predictions and by its gradients.

    The same rows run twice, to tell randomness from mixing, and half of them in another order. The
    gradient of the outputs of the first rows is exactly zero in all later rows unless the model
    carries information from row to row. ``dtype`` is that in which the model computes, if its
    output has a longer one.
    """
    x = inputs.take(x, slice(0, sample))
    if inputs.row_count(x) == 1:  # a loader of single rows: use the row twice
        x = inputs.take(x, torch.tensor([0, 0]))
    rows = inputs.row_count(x)
    half, order = rows // 2, torch.arange((rows + 1) // 2).flip(0)
    names = [name for name in names if name != OUTPUT]
    model = uncompiled(model) if names else model
    with borrowed(model) as frozen:
        # One block around all passes, so that a random model draws new numbers in each.
        with undisturbed(frozen):
            whole = call(frozen, x, rows)
            if whole.requires_grad and frozen is not model:
                # Nothing in a copy needs a gradient: its forward is a closure over the model.
                without_copies(model)
                return check_rows(model, x, names, sample, dtype)
            repeated = call(frozen, x, rows)
            reordered = call(frozen, inputs.take(x, order), len(order))
        if not _close(whole, repeated, dtype):
            raise ValueError(
                "two passes over the same rows disagree: forward is random even in eval mode "
                "(dropout with training=True?). Make it deterministic; the score of a row must "
                "be a fixed number"
            )
        if not _close(whole[order.to(whole.device)], reordered, dtype):
            raise ValueError(
                "the model mixes rows: its prediction for a row changes with the other rows of "
                "the batch (batch statistics forced inside forward, attention over the batch?). "
                "Make the model treat rows separately, for example by layers in eval mode"
            )
        if not names or not half:
            return
        with Cut(frozen, names) as cut:
            tap = cut(x)
            tapped = [name for name, edges in tap.edges.items() for _ in edges]
            edges = [edge for edges in tap.edges.values() for edge in edges]
            gradients = torch.autograd.grad(tap.prediction[:half].sum(), edges, allow_unused=True)
    for name, gradient in zip(tapped, gradients, strict=True):
        if gradient is not None and (gradient[half:].nan_to_num() != 0).any():
            raise ValueError(
                f"the model mixes rows: the output of one row has a gradient at feature {name!r} "
                "of another row. Conformal scores need rows that are treated separately"
            )


def _close(a: Tensor, b: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether two outputs for the same rows differ by rounding only."""
    # Another batch size means other kernels and another order of summation: differences by
    # rounding, which grow with depth, are not mixing.
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return bool(torch.equal(torch.isfinite(a), torch.isfinite(b)))
    tolerance = min(1e3 * torch.finfo(dtype or a.dtype).eps, 0.1)
    a, b = a.cpu(), b.cpu()  # not every device has float64
    scale = torch.maximum(a.abs().max(), b.abs().max()).double()
    return bool((a.double() - b.double()).abs().max() <= tolerance * scale)


# -- features to select from -------------------------------------------------------------------

_CANDIDATES = 8
_SAMPLE = 8  # rows that are run to find them


def candidates(model: nn.Module, x: Any) -> list[str]:
    """Return at most 8 features spread over the depth, in the order of the forward pass.

    Candidates are modules called exactly once, whose output is floating-point, has a row for each
    input row and influences the prediction.
    """
    x = inputs.take(x, slice(0, _SAMPLE))
    with borrowed(uncompiled(model)) as frozen:
        names = _distinct_features(frozen, x)
        if all(tensor.is_floating_point() for _, tensor in inputs.leaves(x)):
            names = [INPUT, *names]
        try:
            with Cut(frozen, names) as cut:
                tap = cut(x)
                arrivals = [tap.edges[name][0] for name in names]
                gradients = torch.autograd.grad(tap.prediction.sum(), arrivals, allow_unused=True)
        except NoGradientError:  # only plain CP is left
            return []
    names = [name for name, gradient in zip(names, gradients, strict=True) if gradient is not None]
    spread = torch.linspace(0, len(names) - 1, min(_CANDIDATES, len(names))).round().long()
    return [names[index] for index in spread.tolist()]


def _distinct_features(model: nn.Module, x: Any) -> list[str]:
    """Return modules whose output is one usable tensor, in call order, without repeats."""
    recorded: list[tuple[str, Tensor, int]] = []  # holding the tensors keeps their ids unique
    calls: dict[str, int] = {}
    rows = inputs.row_count(x)

    def watch(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, value: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            usable = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
            if usable and len(value) == rows and torch.is_grad_enabled():
                recorded.append((name, value, value._version))

        setattr(record, OWN_HOOK, True)
        return record

    with undisturbed(model), ExitStack() as stack:
        for name, module in module_names(model).items():
            if not isinstance(module, torch.jit.ScriptModule):  # those refuse hooks
                stack.callback(module.register_forward_hook(watch(name)).remove)
        prediction = call(model, x, rows)
    # A container returns its last child's tensor and dropout its input: one feature, one name.
    tensors = [prediction, *(tensor for _, tensor in inputs.leaves(x))]
    taken = {(id(tensor), tensor._version) for tensor in tensors}
    names = []
    for name, tensor, version in recorded:
        if calls[name] == 1 and (id(tensor), version) not in taken:
            taken.add((id(tensor), version))
            names.append(name)
    return names
