"""Count the rows that go through a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass
class Count:
    """How many rows went through the model, and in how many calls."""

    rows: int = 0
    calls: int = 0


@contextmanager
def counted_rows(model: nn.Module) -> Iterator[Count]:
    """Count, by a hook on the model, the rows of all calls inside the block."""
    count = Count()

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        count.rows += len(args[0])
        count.calls += 1

    # On the way in: hooks that only look at outputs are left out of copies of the model.
    handle = model.register_forward_pre_hook(look)
    try:
        yield count
    finally:
        handle.remove()
