"""Counting of the rows that pass through a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor, nn

from ffcp.network.jacobian.stack import Stack


@dataclass
class Count:
    """The number of rows and calls of a model."""

    rows: int = 0
    calls: int = 0


@contextmanager
def counted_rows(model: nn.Module) -> Iterator[Count]:
    """Count the rows of all calls of the model, or of its copies, inside the block."""
    count = Count()

    def add(x: Tensor) -> None:
        count.rows += len(x)
        count.calls += 1

    with watched_inputs(add, model):
        yield count


@contextmanager
def watched_inputs(callback: Callable[[Any], None], model: nn.Module) -> Iterator[None]:
    """Pass the first input of all calls of the model, or of its copies, to ``callback``.

    Not by a hook: a model with hooks is not copied, and a hook added after calibration is refused.
    """
    kind = type(model)
    forward = kind.forward

    @functools.wraps(forward)
    def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _weights(module) == _weights(model):  # copies share the weights
            callback(args[0])
        return forward(module, *args, **kwargs)

    run = Stack.run

    @functools.wraps(run)
    def watched_run(stack: Stack, x: Tensor, *args: Any) -> Any:
        used = {la.weight.data_ptr() for la in stack.layers if isinstance(la, nn.Linear)}
        if used <= set(_weights(model).values()):
            callback(x)
        return run(stack, x, *args)

    patched = mock.patch.object
    with patched(kind, "forward", watched), patched(Stack, "run", watched_run):
        yield


def _weights(module: nn.Module) -> dict[str, int]:
    return {name: weight.data_ptr() for name, weight in module.named_parameters()}
