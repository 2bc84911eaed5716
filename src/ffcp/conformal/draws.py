"""Random numbers that belong to rows by their number, and a stream that goes on over calls."""

from __future__ import annotations

import functools
import os
import secrets
import threading
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Draws(NamedTuple):
    """Random numbers for rows: row i has the same ones however rows are cut into batches.

    >>> draws = Draws(entropy=0, stream=1)
    >>> whole, part = draws.uniform(torch.arange(10)), draws.uniform(torch.tensor([9, 7]))
    >>> torch.equal(whole[[9, 7]], part)
    True
    """

    entropy: int
    # Not 0: numpy takes [seed, 0] for seed, which divides the rows.
    stream: int

    def uniform(self, rows: Tensor, width: int = 1) -> Tensor:
        """Give ``width`` numbers in [0, 1) for each row, shape (n, width)."""
        if not len(rows):
            return torch.empty(0, width, dtype=torch.float64)
        first, last = int(rows.min()), int(rows.max())
        return self.span(range(first, last + 1), width)[rows - first]

    def span(self, rows: range, width: int = 1) -> Tensor:
        """Give the numbers of consecutive rows."""
        bits = np.random.PCG64(_seeds(self.entropy, self.stream))
        bits.advance(rows.start * width)  # a number takes one step
        return torch.from_numpy(np.random.Generator(bits).random((len(rows), width)))


@functools.lru_cache(maxsize=64)
def _seeds(entropy: int, stream: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([entropy, stream])


class Stream:
    """Counts rows over all calls and threads, and says which random numbers are theirs.

    Without a seed the operating system gives one, another in every process: the workers of a
    server must not share their random numbers, also where they are forked or sent a copy.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._drawn_by: tuple[int, int] | None = None  # process, and what the system gave it

    def entropy(self, pinned: bool = False) -> int:
        """Give the seed, or what the operating system gave this process in its place.

        Numbers that are pinned to rows are those of the seed, 0 if none was given.
        """
        if self.seed is not None or pinned:
            return self.seed or 0
        with self._lock:
            if self._drawn_by is None or self._drawn_by[0] != os.getpid():
                self._drawn_by = (os.getpid(), secrets.randbits(62))
            return self._drawn_by[1]

    def next_rows(self, rows: int) -> int:
        """Give the number of the first of the next rows, which nobody else gets."""
        with self._lock:
            first, self._next = self._next, self._next + rows
        return first

    def __getstate__(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]
        self._forget()
