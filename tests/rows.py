"""Count the rows that go through a model."""

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
    """How many rows went through the model, and in how many calls."""

    rows: int = 0
    calls: int = 0


@contextmanager
def counted_rows(model: nn.Module) -> Iterator[Count]:
    """Count the rows of all calls of the model, or of twins of it, inside the block."""
    count = Count()

    def look(x: Tensor) -> None:
        count.rows += len(x)
        count.calls += 1

    with seen_by(look, model):
        yield count


@contextmanager
def seen_by(look: Callable[[Any], None], model: nn.Module) -> Iterator[None]:
    """Show the first input of all calls of the model, or of twins of it, inside the block.

    Not by a hook: a model with hooks is run itself, and one that came after calibration refused.
    """
    kind = type(model)
    forward = kind.forward

    @functools.wraps(forward)
    def shown(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _weights(module) == _weights(model):  # of which twins have no copy
            look(args[0])
        return forward(module, *args, **kwargs)

    run = Stack.run

    @functools.wraps(run)
    def shown_run(stack: Stack, x: Tensor, *args: Any) -> Any:
        used = {la.weight.data_ptr() for la in stack.layers if isinstance(la, nn.Linear)}
        if used <= set(_weights(model).values()):
            look(x)
        return run(stack, x, *args)

    with mock.patch.object(kind, "forward", shown), mock.patch.object(Stack, "run", shown_run):
        yield


def _weights(module: nn.Module) -> dict[str, int]:
    return {name: weight.data_ptr() for name, weight in module.named_parameters()}
