"""Estimate the norms of all rows of the Jacobian from products with random signs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ffcp.batch import is_traced
from ffcp.locks import lock
from ffcp.network import heads, inputs
from ffcp.network.cut import Tapped
from ffcp.network.jacobian.norms import wide
from ffcp.network.jacobian.settings import Sketch

# The levels of torch's forward mode are one count for all threads: two at once lose theirs.
_FORWARD_MODE = lock()
_PROBE_BYTES = 36 * 2**20  # memory for probes; half or twice as much is slower


def sketched(model: nn.Module, x: Any, name: str, tap: Tapped, method: Sketch) -> Tensor:
    """Estimate the norms from products J u with random signs u.

    The tangents of several probes go through the head together; what they are tangent to is
    computed once for all of them. Better few rows and many probes at a time than the reverse.
    """
    if is_traced():
        raise ValueError("a sketch draws random numbers: use method='exact' or 'coloured'")
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
                pushed = push(output, values, signs, name)
                total[part] += pushed.to(total.dtype).square_().sum(dim=0)
    return total.div_(method.probes).sqrt_()


def push(
    output: Callable[..., Tensor], values: tuple[Tensor, ...], signs: Sequence[Tensor], name: str
) -> Tensor:
    """Push tangents, (probes, *shape of a row), through the head: (probes, *shape of output)."""

    def along(*tangents: Tensor) -> Tensor:
        rows = tuple(t.expand_as(v) for t, v in zip(tangents, values, strict=True))
        pushed: Tensor = torch.func.jvp(output, values, rows)[1]
        return pushed

    try:
        with _FORWARD_MODE:
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
