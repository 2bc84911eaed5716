"""Pick how the gradient norms of a pass are taken, and take them: exactly, or by another module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ffcp.batch import Requires, is_traced
from ffcp.network.cut import Cut, Tapped
from ffcp.network.jacobian import chained, coloured, norms, pushed
from ffcp.network.jacobian.coloured import HiddenWindowsError
from ffcp.network.jacobian.norms import AUTO, COLOURED, EXACT, Sketch, Smooth

# Limits of ``"auto"``: up to so many outputs the head is not probed; above so many coloured passes
# or outputs the norms are estimated.
_FEW_OUTPUTS = 64
_MANY_PASSES = 256
_MANY_OUTPUTS = 4096
_PUSHED_COST = 2  # of pushing a tangent forward, in backward passes
_OUTPUTS_AT_ONCE = 8  # a batched backward pass holds the gradients of at most this many outputs
_BYTES_AT_ONCE = 2**26  # of its inputs and outputs


def take_norms(
    model: nn.Module, x: Any, tap: Tapped, names: Sequence[str], requires: Requires
) -> dict[str, Tensor]:
    """Return the norms at the named features that ``requires`` lists, from a pass over ``x``."""
    if not names:
        return {}
    method = norms.checked_method(requires.method)
    norm = norms.checked_norm(requires.norm)
    if isinstance(method, Smooth):
        return {name: _smoothed(model, x, name, requires) for name in names}
    if isinstance(method, Sketch):
        if requires.of is not None:
            raise ValueError("one number per row has one gradient: nothing to sketch, use 'exact'")
        if norm != 2:
            raise ValueError(f"a sketch estimates the L2 norm only, not norm={norm}")
        return {name: pushed.sketched(model, x, name, tap, method) for name in names}
    outputs = tap.prediction[0].numel()
    is_few = outputs <= _FEW_OUTPUTS and method != COLOURED
    if requires.of is not None or outputs == 1 or is_few:
        return exact(tap, norm, requires.of)
    if method == EXACT:
        return _exact(model, x, tap, norm)
    return {name: _mapped(model, x, tap.only(name), name, method, norm) for name in names}


def _smoothed(model: nn.Module, x: Any, name: str, requires: Requires) -> Tensor:
    """Return the mean norm over features perturbed by normal noise, the same for every row."""
    method: Smooth = requires.method
    totals: list[Tensor] = []
    for sample in range(method.samples):
        # Seed and sample are mixed, so that the streams of neighbouring seeds do not overlap.
        mixed = np.random.SeedSequence([method.seed, sample]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(mixed[0]) >> 1)

        def moved(value: Tensor, generator: torch.Generator = generator) -> Tensor:
            shape = value.shape[1:]
            noise = torch.randn(shape, generator=generator, dtype=torch.float32)
            return value + method.sigma * noise.to(value)

        with Cut(model, [name], change=moved) as cut:
            plain = requires._replace(method=method.method)
            totals.append(take_norms(model, x, cut(x), [name], plain)[name])
    return torch.stack(totals).cpu().double().mean(dim=0).to(totals[0])


def _exact(model: nn.Module, x: Any, tap: Tapped, norm: float) -> dict[str, Tensor]:
    """Return exact norms: at narrow features from the feature's side, else from the outputs'."""
    tried = {name: _narrow(model, x, tap, name, norm) for name in tap.edges}
    narrow = {name: norms for name, norms in tried.items() if norms is not None}
    rest = [name for name in tap.edges if name not in narrow]
    # One backward pass for each output serves all that are left.
    return {**narrow, **(exact(tap.only(*rest), norm) if rest else {})}


def _narrow(model: nn.Module, x: Any, tap: Tapped, name: str, norm: float) -> Tensor | None:
    """Return exact norms from the feature's side; ``None`` where that takes more passes."""
    if tap.moved:
        return None
    outputs, width = tap.prediction[0].numel(), pushed.width(tap, name)
    layers = chained.chain(model, name, tap)
    if layers is not None and chained.passes(layers, width, norm) < outputs:
        with Cut(model, values=(name,)) as cut:
            feature = cut(x).values[name]
        return chained.chained(feature, layers, norm).view_as(tap.prediction)
    if width * _PUSHED_COST > outputs:
        return None
    try:
        return pushed.pushed(model, x, name, tap, norm)
    except ValueError:  # an operation without forward-mode derivative
        return None


def _mapped(model: nn.Module, x: Any, tap: Tapped, name: str, method: str, norm: float) -> Tensor:
    """Colour if requested or, for ``"auto"``, if it pays and is right."""
    outputs = tap.prediction[0].numel()
    estimate = outputs > _MANY_OUTPUTS and norm == 2
    if method == AUTO and not estimate:
        narrow = _narrow(model, x, tap, name, norm)
        if narrow is not None:
            return narrow
    colours = coloured.colours(model, x, name)
    if method == COLOURED:
        if colours is None:
            raise ValueError(
                f"the head behind {name!r} cannot be coloured: its feature has shape "
                f"{tuple(tap.shapes[name][0])} and its output {tuple(tap.prediction.shape)}, and "
                "both must be maps (rows, channels, positions ...). Use method='exact' or Sketch"
            )
        return coloured.coloured(tap, name, colours, norm)
    if colours and colours.passes <= min(outputs // 2, _MANY_PASSES):
        try:
            return coloured.coloured(tap, name, colours, norm)
        except HiddenWindowsError:
            # Earlier rows have exact norms: estimates would give scores that do not compare.
            if colours.proved and estimate:
                raise
    return pushed.sketched(model, x, name, tap, Sketch()) if estimate else exact(tap, norm)[name]


# -- rows of the Jacobian, one after the other --------------------------------------------------


def exact(
    tap: Tapped, norm: float, of: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the norms, computed for one output of all rows at a time.

    With ``of`` those of the gradient of one number per row, in float64.
    """
    if of is not None:
        tap = replace(tap, prediction=of(tap.prediction))
    edges = [edge for group in tap.edges.values() for edge in group]
    columns: dict[str, list[Tensor]] = {name: [] for name in tap.edges}
    for gradients in jacobian_rows(tap, edges):
        remaining = iter(gradients)
        for name, group in tap.edges.items():
            tensors = norms.reached(name, [next(remaining) for _ in group])
            tensors = tensors if of is None else [gradient.double() for gradient in tensors]
            columns[name].append(norms.row_norms(tensors, norm))
    return {n: torch.stack(c, dim=1).view_as(tap.prediction) for n, c in columns.items()}


def jacobian_rows(tap: Tapped, edges: Sequence[GradientEdge]) -> Iterator[Sequence[Tensor | None]]:
    """Yield the gradients of output 0 of every row, then of output 1, and so on.

    Rows are independent, so one backward pass with a one in every row serves them all; a few
    outputs share one batched pass.
    """
    outputs = tap.prediction.reshape(tap.prediction.shape[0], -1)
    count = outputs.shape[1]
    if count == 1 or is_traced():  # batched passes would fix the number of rows
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
    """Yield the gradients of several outputs from one pass; one by one where that fails."""
    if len(seeds) > 1:
        try:
            with warnings.catch_warnings():
                # Some operations are batched by a loop inside torch, which is right but slow.
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
