"""Norms of the rows of the head's Jacobian: the only place that calls autograd for a score.

One output needs one backward pass. Of many outputs the rows are taken one by one (``"exact"``),
several at once where windows do not overlap (``"coloured"``), or estimated for all outputs
together by random probes (:class:`Sketch`). :class:`Smooth` takes the mean over perturbed
features. ``"auto"`` looks at the head and picks.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ffcp import checks, colouring, heads, inputs
from ffcp.colouring import wide
from ffcp.features import OUTPUT, Cut, Tapped, resolve

_NORMS = (1, 2, math.inf)
_OUTPUTS_AT_ONCE = 8  # a batched backward pass holds the gradients of at most this many outputs
_BYTES_AT_ONCE = 2**26  # ... and at most this much memory for what goes in and what comes out
_PROBE_BYTES = 36 * 2**20  # the same for probes; half or twice as much is slower
# How ``"auto"`` picks: outputs so few that probing the head does not pay; coloured passes and
# outputs so many that an estimate is better.
_FEW_OUTPUTS = 64
_MANY_PASSES = 256
_MANY_OUTPUTS = 4096


EXACT, COLOURED, AUTO = "exact", "coloured", "auto"


@dataclass(frozen=True)
class Sketch:
    """Estimate the norms of all rows at once from random probes (L2 norm only).

    For random signs u, the mean of (J u)^2 is the squared norm of every row of J; ``probes`` of
    them leave a relative error of about 1 / sqrt(2 * probes). A probe costs what a forward pass
    through the head costs, however many outputs there are. The signs are the same for every
    input, so the estimate is a fixed function of the input: it can cost width, never coverage.
    Where the head is linear the error is the same for all inputs and costs nothing at all.

    Parameters
    ----------
    probes
        How many.
    seed
        Of the signs.

    Examples
    --------
    >>> model = nn.Linear(1000, 2)
    >>> _, norms = gradient_norms(model, torch.zeros(1, 1000), ["input"], method=Sketch(400))
    >>> bool(((norms["input"] / model.weight.norm(dim=1) - 1).abs() < 0.2).all())
    True
    """

    probes: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.probes < 1:
            raise ValueError(f"a sketch needs at least one probe, got {self.probes}")

    def __str__(self) -> str:
        return f"sketch({self.probes}, seed={self.seed})"


@dataclass(frozen=True)
class Smooth:
    """Take the mean norm over perturbed features, for gradients that vanish.

    Where ReLUs are dead the gradient is zero though a small step would change the output. The
    mean over ``samples`` features with normal noise sees such steps. The noise is the same for
    every input, so the score stays a fixed function of the input.

    Parameters
    ----------
    sigma
        Standard deviation of the noise, in units of the feature. A constant: it must not be
        estimated from the calibration data.
    samples
        How many perturbed features; each costs a pass through the model.
    seed
        Of the noise.
    method
        How the norms of each pass are taken: ``"auto"``, ``"exact"``, ``"coloured"`` or a
        :class:`Sketch`.

    Examples
    --------
    >>> model = nn.Sequential(nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> _ = nn.init.constant_(model[1].weight, 3.0)
    >>> x = torch.tensor([[-0.1]])  # the ReLU is dead here
    >>> gradient_norms(model, x, ["input"])[1]["input"].item()
    0.0
    >>> smooth = Smooth(sigma=1.0, samples=100)
    >>> bool(gradient_norms(model, x, ["input"], method=smooth)[1]["input"] > 1)
    True
    """

    sigma: float
    samples: int = 8
    seed: int = 0
    method: str | Sketch = AUTO

    def __post_init__(self) -> None:
        if not 0 < self.sigma < math.inf:
            raise ValueError(f"sigma must be a positive number, got {self.sigma}")
        if self.samples < 1:
            raise ValueError(f"smoothing needs at least one sample, got {self.samples}")
        if isinstance(checked_method(self.method), Smooth):
            raise TypeError("a Smooth cannot be smoothed again: give its method as another kind")

    def __str__(self) -> str:
        return f"smooth({self.sigma:g}, {self.samples}, seed={self.seed}, {self.method})"


Method = str | Sketch | Smooth


def checked_method(method: Method) -> Method:
    """Refuse a way to take norms that there is not.

    >>> checked_method("coloured")
    'coloured'
    """
    if isinstance(method, (Sketch, Smooth)) or method in (AUTO, EXACT, COLOURED):
        return method
    raise ValueError(
        f"method must be 'auto', 'exact', 'coloured', Sketch(probes) or Smooth(sigma, samples), "
        f"got {method!r}"
    )


def gradient_norms(
    model: nn.Module,
    x: Any,
    features: Sequence[str | nn.Module],
    norm: float = 2,
    batch_size: int | None = None,
    method: Method = AUTO,
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
        Rows per pass; by default about 16 MB of input (2 MB of images), at most 8,192 rows.
    method
        How the norms are taken when there are many outputs. ``"exact"``: one row of the Jacobian
        after the other. ``"coloured"``: the same numbers from far fewer passes, for heads whose
        outputs see only a window of the feature map (convolutions, pooling, interpolation).
        :class:`Sketch`: an estimate. :class:`Smooth`: the mean over perturbed features.
        ``"auto"``: exact for up to 64 outputs; else coloured if it needs at most half as many
        passes and at most 256; else exact for up to 4,096 outputs; else ``Sketch(32)``, or
        exact for norms other than 2.

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
    prediction, norms = run(model, x, names, checked_norm(norm), batch_size, method=method)
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
    method: Method = AUTO,
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
    take = _Taker(model, norm, checked_method(method))
    buffer, sums = inputs.RowBuffer(rows), []
    with Cut(model, inner) as cut:
        for batch in inputs.batches(x, batch_size):
            # While the batch is in the cache; looked at when all are done.
            sums += [t.sum() for _, t in inputs.leaves(batch) if t.is_floating_point()]
            buffer.add(take(cut, batch))
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
        prediction, edges, _ = cut(x)
        value = scalar(prediction)
        checks.finite(prediction, "the prediction", first_row)
        found = torch.autograd.grad(value.sum(), edges[feature], allow_unused=True)
    reached = _influence(feature, found)
    # Over all dimensions and all tensors of one feature.
    rows = [gradient.reshape(len(gradient), -1).double() for gradient in reached]
    norms: Tensor = torch.linalg.vector_norm(torch.cat(rows, dim=1), dim=1)
    checks.finite(norms, f"the gradient at feature {feature!r}", first_row)
    return prediction.detach(), norms


class _Taker:
    """Takes from a pass the output and the norms; no graph outlives a call."""

    def __init__(self, model: nn.Module, norm: float, method: Method) -> None:
        if norm != 2 and isinstance(method, Sketch):
            raise ValueError(f"a sketch estimates the L2 norm only, not norm={norm}")
        self._model, self._norm, self._method = model, norm, method

    def __call__(self, cut: Cut, x: Any) -> dict[str, Tensor]:
        if isinstance(self._method, Smooth):
            return self._smoothed(cut, x, self._method)
        tap = cut(x)
        return {OUTPUT: tap.prediction.detach(), **self._norms(tap, x, self._method)}

    def _norms(self, tap: Tapped, x: Any, method: str | Sketch) -> dict[str, Tensor]:
        if not tap.edges:
            return {}
        if tap.prediction[0].numel() == 1 and method in (AUTO, COLOURED):
            method = EXACT
        if method == EXACT:
            return _exact(tap, self._norm)
        if isinstance(method, Sketch):
            return {name: _sketched(self._model, x, name, tap, method) for name in tap.edges}
        return {name: self._mapped(tap.only(name), name, x, method) for name in tap.edges}

    def _mapped(self, tap: Tapped, name: str, x: Any, method: str) -> Tensor:
        """Colour if that was asked for or, for ``"auto"``, if it pays."""
        outputs = tap.prediction[0].numel()
        if method == AUTO and outputs <= _FEW_OUTPUTS:
            return _exact(tap, self._norm)[name]
        found = colouring.colours(self._model, x, name)
        if method == COLOURED and found is None:
            raise ValueError(
                f"the head behind {name!r} cannot be coloured: its feature has shape "
                f"{tuple(tap.shapes[name][0])} and its output {tuple(tap.prediction.shape)}, and "
                "both must be maps (rows, channels, positions ...). Use method='exact' or Sketch"
            )
        if found and (method == COLOURED or found.passes <= min(outputs // 2, _MANY_PASSES)):
            return _coloured(tap, name, found, self._norm)
        if outputs <= _MANY_OUTPUTS or self._norm != 2:
            return _exact(tap, self._norm)[name]
        return _sketched(self._model, x, name, tap, Sketch())

    def _smoothed(self, cut: Cut, x: Any, method: Smooth) -> dict[str, Tensor]:
        """Take the mean over perturbed features, each feature perturbed alone."""
        tap = cut(x)
        prediction, names = tap.prediction.detach(), list(tap.edges)
        del tap
        result = {OUTPUT: prediction}
        for name in names:
            total = torch.zeros_like(prediction, dtype=torch.float64)
            for sample in range(method.samples):
                noise = _Noise(method.sigma, method.seed, sample)
                with Cut(self._model, [name], change=noise) as moved:
                    total += self._norms(moved(x), x, method.method)[name]
            result[name] = (total / method.samples).to(prediction.dtype)
        return result


class _Noise:
    """Adds normal noise to a feature: the same to every row, whatever rows are beside it."""

    def __init__(self, sigma: float, seed: int, sample: int) -> None:
        self._sigma = sigma
        self._generator = torch.Generator().manual_seed(_mixed(seed, sample))

    def __call__(self, value: Tensor) -> Tensor:
        noise = torch.randn(value.shape[1:], generator=self._generator)
        return value + self._sigma * noise.to(value)


def _mixed(seed: int, number: int) -> int:
    """Make one seed of two numbers, so that streams of neighbouring seeds do not meet."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> 1)


def _exact(tap: Tapped, norm: float) -> dict[str, Tensor]:
    """Take the norms, one output coordinate of all rows at a time."""
    edges = [edge for group in tap.edges.values() for edge in group]
    rows, outputs = len(tap.prediction), tap.prediction[0].numel()
    norms: dict[str, Tensor] = {}
    for output, gradients in enumerate(_jacobian_rows(tap, edges)):
        rest = iter(gradients)
        for name, group in tap.edges.items():
            own = [next(rest) for _ in group]
            found = _combine(_influence(name, own), norm)
            if outputs == 1:
                norms[name] = found
                continue
            if name not in norms:
                norms[name] = found.new_empty(rows, outputs)
            norms[name][:, output] = found
    return {name: values.view_as(tap.prediction) for name, values in norms.items()}


def _influence(name: str, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Drop the tensors of a feature that play no role; at least one has to."""
    reached = [gradient for gradient in gradients if gradient is not None]
    if not reached:
        raise ValueError(f"feature {name!r} does not influence the output: choose another layer")
    return reached


def _jacobian_rows(tap: Tapped, edges: Sequence[GradientEdge]) -> Iterator[Sequence[Tensor | None]]:
    """Yield the gradients of output 0 of every row, then of output 1, and so on.

    Rows are independent, so one backward pass with a one in every row serves them all; a few
    outputs share one batched pass.
    """
    outputs = tap.prediction.reshape(len(tap.prediction), -1)
    count = outputs.shape[1]
    if count == 1:  # the sum's gradient is a one in every row
        yield torch.autograd.grad(outputs.sum(), edges, allow_unused=True)
        return
    held = outputs.numel() + sum(shape.numel() for group in tap.shapes.values() for shape in group)
    at_once = max(1, min(_OUTPUTS_AT_ONCE, _BYTES_AT_ONCE // (held * outputs.element_size())))
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


def _coloured(tap: Tapped, name: str, found: colouring.Colours, norm: float) -> Tensor:
    """Take the norms with one backward pass per colour."""

    def backward(start: Tensor) -> Tensor:
        gradients = torch.autograd.grad(
            tap.prediction, tap.edges[name], start, retain_graph=True, allow_unused=True
        )
        return _influence(name, gradients)[0]

    return colouring.norms(backward, tap.prediction, found, norm)


def _sketched(model: nn.Module, x: Any, name: str, tap: Tapped, method: Sketch) -> Tensor:
    """Estimate the norms from products J u with random signs u.

    The tangents of several probes go through the head together; what they are tangent to is
    computed once for all of them. Better few rows and many probes at a time than the reverse.
    """
    held = tap.prediction.numel() + sum(shape.numel() for shape in tap.shapes[name])
    held = held * tap.prediction.element_size() // len(tap.prediction)  # bytes of one row
    rows = max(1, _PROBE_BYTES // (2 * held * method.probes))
    at_once = max(1, _PROBE_BYTES // (2 * held * rows))
    total = torch.zeros_like(tap.prediction, dtype=wide(tap.prediction.dtype))
    shapes = [shape[1:] for shape in tap.shapes[name]]
    draw: Callable[[range], list[Tensor]] = functools.partial(_signs, shapes, method.seed)
    if held * method.probes <= 4 * _PROBE_BYTES:  # small enough to be drawn once for all rows
        draw = functools.cache(draw)
    for start in range(0, len(total), rows):
        part = slice(start, start + rows)
        with heads.behind(model, inputs.take(x, part), name) as (values, output):
            for first in range(0, method.probes, at_once):
                signs = draw(range(first, min(first + at_once, method.probes)))
                signs = [one.to(value) for one, value in zip(signs, values, strict=True)]
                pushed = _pushed(output, values, signs, name)
                total[part] += pushed.to(total.dtype).square_().sum(dim=0)
    return total.div_(method.probes).sqrt_()


def _pushed(
    output: Callable[..., Tensor], values: tuple[Tensor, ...], signs: Sequence[Tensor], name: str
) -> Tensor:
    """Push tangents, (probes, *shape of a row), through the head: (probes, *shape of output)."""

    def along(*tangents: Tensor) -> Tensor:
        rows = tuple(t.expand_as(v) for t, v in zip(tangents, values, strict=True))
        pushed: Tensor = torch.func.jvp(output, values, rows)[1]
        return pushed

    try:
        result: Tensor = torch.func.vmap(along)(*signs)
    except RuntimeError as error:
        raise ValueError(
            f"the head behind {name!r} cannot be sketched, because torch cannot push a tangent "
            f"through it ({error}). Use method='exact' or 'coloured'"
        ) from error
    return result


def _signs(shapes: Sequence[torch.Size], seed: int, probes: range) -> list[Tensor]:
    """Draw random signs for one row of every tensor, (probes, *shape); all rows use the same."""
    drawn = []
    for number, shape in enumerate(shapes):
        size = shape.numel()
        streams = (np.random.default_rng([seed, probe, number]) for probe in probes)
        # Bits are 25 times faster than Bernoulli numbers.
        bits = [np.frombuffer(stream.bytes(-(-size // 8)), dtype=np.uint8) for stream in streams]
        signs = np.unpackbits(np.stack(bits), axis=1, count=size)
        # In single bytes as long as possible.
        drawn.append(torch.from_numpy(signs.view(np.int8)).mul_(2).sub_(1).view(-1, *shape))
    return drawn


def _combine(gradients: Sequence[Tensor], norm: float) -> Tensor:
    """Norm of each row over all dimensions and all tensors of one feature."""
    parts = [_row_norm(gradient, norm) for gradient in gradients]
    return parts[0] if len(parts) == 1 else _row_norm(torch.stack(parts, dim=1), norm)


def _row_norm(gradient: Tensor, norm: float) -> Tensor:
    rows = gradient.reshape(len(gradient), -1)
    rows = rows.to(wide(rows.dtype))
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
        prediction, edges, _ = cut(x)
        flat = [(name, edge) for name, group in edges.items() for edge in group]
        gradients = torch.autograd.grad(
            prediction[:asked].sum(), [edge for _, edge in flat], allow_unused=True
        )
    for (name, _), gradient in zip(flat, gradients, strict=True):
        if gradient is not None:
            checks.gradient_stays_in_row(name, gradient, asked)
