"""Push tangents forward through the head: exact norms for narrow features, and sketches.

A backward pass gives the gradient of one output; a tangent pushed forward gives how all outputs
react to one direction of the feature. Where the feature has fewer numbers than the output, pushing
a one at each of them takes fewer passes, and the norms are the same up to rounding. Random signs
in place of the ones give an estimate, from as few passes as one likes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ffcp.batch import is_traced
from ffcp.locks import lock
from ffcp.network import heads, inputs
from ffcp.network.cut import Tapped
from ffcp.network.jacobian.norms import Sketch, wide

# torch counts the levels of its forward mode once for all threads, so only one may use it.
_FORWARD_MODE = lock()
_BYTES = 16 * 2**20  # memory for what is pushed at once; half or twice as much is slower
Tangents = Callable[[range], list[Tensor]]  # (tangents, *shape of a row) of each tensor


def width(tap: Tapped, name: str) -> int:
    """Count the numbers of one row of a feature."""
    return sum(shape[1:].numel() for shape in tap.shapes[name])


def pushed(model: nn.Module, x: Any, name: str, tap: Tapped, norm: float) -> Tensor:
    """Take the norms of all outputs by pushing a one at every number of the feature."""
    shapes, count = [shape[1:] for shape in tap.shapes[name]], width(tap, name)

    def ones(numbers: range) -> list[Tensor]:
        rows = torch.zeros(len(numbers), count)
        rows[torch.arange(len(numbers)), torch.tensor(numbers)] = 1
        parts = rows.split([shape.numel() for shape in shapes], dim=1)
        return [part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]

    return _norms(model, x, name, tap, ones, count, norm)


def sketched(model: nn.Module, x: Any, name: str, tap: Tapped, method: Sketch) -> Tensor:
    """Estimate the norms from products J u with random signs u."""
    if is_traced():
        raise ValueError("a sketch draws random numbers: use method='exact' or 'coloured'")
    shapes = [shape[1:] for shape in tap.shapes[name]]
    signs: Tangents = functools.partial(_signs, shapes, method.seed)
    if width(tap, name) * method.probes <= 2 * _BYTES:  # small enough to be drawn once
        signs = functools.cache(signs)
    norms = _norms(model, x, name, tap, signs, method.probes, 2)
    return norms.div_(math.sqrt(method.probes))


def _norms(
    model: nn.Module, x: Any, name: str, tap: Tapped, tangents: Tangents, count: int, norm: float
) -> Tensor:
    """Push so many tangents, and take the norms over them.

    Several tangents go through the head together; what they are tangent to is computed once for
    all of them. Better few rows and many tangents at a time than the reverse.
    """
    prediction = tap.prediction
    held = (prediction[0].numel() + width(tap, name)) * prediction.element_size()
    rows = max(1, _BYTES // (held * count))
    at_once = max(1, _BYTES // (held * rows))
    result = torch.zeros_like(prediction, dtype=wide(prediction.dtype))
    for start in range(0, len(result), rows):
        part = slice(start, start + rows)
        with heads.behind(model, inputs.take(x, part), name) as (values, output):
            for first in range(0, count, at_once):
                block = tangents(range(first, min(first + at_once, count)))
                block = [tangent.to(value) for tangent, value in zip(block, values, strict=True)]
                columns = _push(output, values, block, name).to(result.dtype)
                if norm == 2:
                    result[part] += columns.square_().sum(dim=0)
                elif norm == 1:
                    result[part] += columns.abs_().sum(dim=0)
                else:
                    result[part] = torch.maximum(result[part], columns.abs_().amax(dim=0))
    return result.sqrt_() if norm == 2 else result


def _push(
    output: Callable[..., Tensor], values: tuple[Tensor, ...], tangents: Sequence[Tensor], name: str
) -> Tensor:
    """Push tangents through the head: (tangents, *shape of output)."""

    def push_one(*tangent: Tensor) -> Tensor:
        rows = tuple(t.expand_as(v) for t, v in zip(tangent, values, strict=True))
        pushed: Tensor = torch.func.jvp(output, values, rows)[1]
        return pushed

    try:
        with _FORWARD_MODE:
            result: Tensor = torch.func.vmap(push_one)(*tangents)
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
        # As single bytes until they are used.
        drawn.append(torch.from_numpy(signs.view(np.int8)).mul_(2).sub_(1).view(-1, *shape))
    return drawn
