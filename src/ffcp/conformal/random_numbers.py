"""Random numbers by row number, and a stream that continues over calls."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ffcp.locks import lock

#: Draws some rows of numbers: from a generator, how many rows, how many numbers in each.
Draw = Callable[[np.random.Generator, int, int], Tensor]

_TOGETHER = 128  # rows drawn at once
_IN_ORDER = 2**18 // _TOGETHER  # draws that follow each other, before each has its own seed


def checked_seed(seed: Any) -> int | None:
    """Return the seed; raise ValueError unless it is an integer >= 0.

    >>> checked_seed(-1)
    Traceback (most recent call last):
    ValueError: 'seed' must be an integer and not negative, got -1
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise ValueError(f"'seed' must be an integer and not negative, got {seed!r}")
    return seed


class Draws(NamedTuple):
    """Random numbers for rows: those of row i do not depend on the batches.

    >>> draws = Draws(entropy=0, stream=1)
    >>> whole, part = draws.uniform(torch.arange(10)), draws.uniform(torch.tensor([9, 7]))
    >>> torch.equal(whole[[9, 7]], part)
    True
    """

    entropy: int
    # Not 0: for numpy the seed [s, 0] is s, the seed by which rows are set aside.
    stream: int

    def uniform(self, rows: Tensor, width: int = 1) -> Tensor:
        """Return ``width`` numbers in [0, 1) for each row, shape (n, width)."""
        if not len(rows):
            return torch.empty(0, width, dtype=torch.float64)
        first, last = int(rows.min()), int(rows.max())
        return self.span(range(first, last + 1), width)[rows - first]

    def span(self, rows: range, width: int = 1) -> Tensor:
        """Return the numbers of consecutive rows."""
        bits = np.random.PCG64([self.entropy, self.stream])
        bits.advance(rows.start * width)  # one step per number
        return torch.from_numpy(np.random.Generator(bits).random((len(rows), width)))

    def by(self, draw: Draw, rows: Tensor, width: int) -> Tensor:
        """Return the numbers that ``draw`` makes for each row, shape (n, width)."""
        return _series(self.entropy, self.stream, draw, width).of(rows)


class Series:
    """Rows of numbers from a function that draws them, which may take any number of steps.

    So the numbers of a row cannot be found without drawing those before it: rows are drawn 128 at
    a time, always the same ones together, and the state before each draw is kept. Draws follow
    each other for the first 262,144 rows. After that each has its own seed, so that a row far
    away does not need all others.

    >>> series = Series(0, 1, lambda random, rows, width: torch.from_numpy(
    ...     random.standard_normal((rows, width))
    ... ), width=2)
    >>> whole = torch.from_numpy(np.random.default_rng([0, 1]).standard_normal((256, 2)))
    >>> torch.equal(series.of(torch.tensor([200, 7])), whole[[200, 7]])
    True
    """

    def __init__(self, entropy: int, stream: int, draw: Draw, width: int) -> None:
        self._entropy, self._stream, self._draw, self._width = entropy, stream, draw, width
        # Before each draw, as far as is known.
        self._states = [np.random.PCG64([entropy, stream]).state]
        self._lock = lock()
        most = max(2, 2**17 // (_TOGETHER * width))  # 1 MB
        self._drawn = functools.lru_cache(maxsize=most)(self._draw_block)

    def of(self, rows: Tensor) -> Tensor:
        """Return the numbers of rows, in any order."""
        blocks, which = (rows // _TOGETHER).unique(return_inverse=True)
        drawn = [self._drawn(block) for block in blocks.tolist()]
        return torch.cat(drawn)[which * _TOGETHER + rows % _TOGETHER]

    def _draw_block(self, block: int) -> Tensor:
        if block >= _IN_ORDER:
            random = np.random.default_rng([self._entropy, self._stream, block])
            return self._draw(random, _TOGETHER, self._width)
        random, states = np.random.default_rng(0), self._states
        with self._lock:
            for number in range(min(block, len(states) - 1), block + 1):
                random.bit_generator.state = states[number]
                drawn = self._draw(random, _TOGETHER, self._width)
                if number + 1 == len(states):
                    states.append(random.bit_generator.state)
        return drawn


_series = functools.lru_cache(maxsize=64)(Series)


class Stream:
    """Counts rows over all calls and threads, so that each has its own random numbers.

    Without a seed the operating system provides one, different in every process: the workers of a
    server must not share their random numbers, even if they are forked or pickled.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self._forget()

    def _forget(self) -> None:
        self._lock = lock()
        self._next = 0
        self._drawn_by: tuple[int, int] | None = None  # process, and what the system gave it

    def entropy(self, pinned: bool = False) -> int:
        """Return the seed, or that from the operating system for this process.

        Numbers that are pinned to rows are those of the seed, 0 if none was given.
        """
        if self.seed is not None or pinned:
            return self.seed or 0
        with self._lock:
            if self._drawn_by is None or self._drawn_by[0] != os.getpid():
                self._drawn_by = (os.getpid(), secrets.randbits(62))
            return self._drawn_by[1]

    def next_rows(self, rows: int) -> int:
        """Reserve the next rows; return the number of the first."""
        with self._lock:
            first, self._next = self._next, self._next + rows
        return first

    def __getstate__(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]
        self._forget()
