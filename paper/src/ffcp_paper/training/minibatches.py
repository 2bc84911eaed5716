"""Row orders and dropout masks of stacked training.

They follow the random stream of single training, so that both yield the same networks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 16  # steps whose dropout is drawn at a time: few calls, and it stays in the cache


@dataclass(frozen=True)
class Shape:
    """Sizes from the inputs to the outputs, and the dropout after each hidden layer."""

    sizes: tuple[int, ...]
    dropout: float

    @property
    def hidden(self) -> tuple[int, ...]:
        """Sizes of the hidden layers."""
        return self.sizes[1:-1]


@dataclass(frozen=True)
class Block:
    """The dropout of some steps, and at the start of an epoch the order of the rows.

    ``masks`` has a line for each of the networks ``numbers``: for each step and hidden layer the
    factors of a batch, one after the other.
    """

    numbers: list[int]
    start: int
    stop: int
    orders: list[Tensor]
    masks: Tensor

    def only(self, numbers: list[int]) -> Block:
        """Drop networks whose training has ended since the block was drawn."""
        if numbers == self.numbers:
            return self
        at = [self.numbers.index(number) for number in numbers]
        orders = [self.orders[i] for i in at] if self.orders else []
        return Block(numbers, self.start, self.stop, orders, self.masks[at])


class MinibatchSampler:
    """Draws row orders and dropout masks, block by block, from one generator per seed.

    Single training draws both from the one global generator: the order of an epoch, then for
    each step and layer the dropout.
    """

    def __init__(
        self,
        alive: list[int],
        seeds: Sequence[int],
        rows: int,
        batch_size: int,
        shape: Shape,
        dtype: torch.dtype,
    ) -> None:
        self.alive = alive
        self.rows, self.batch_size, self.shape = rows, batch_size, shape
        self._dtype, self._seeds = dtype, seeds
        self._generators = {seed: torch.Generator().manual_seed(seed) for seed in seeds}
        self._start = 0

    def __call__(self) -> Block:
        """Draw the next block for the networks that are alive."""
        numbers, start = self.alive, self._start
        seeds = list(dict.fromkeys(self._seeds[number] for number in numbers))
        generators = [self._generators[seed] for seed in seeds]
        stop = min(self.rows, start + _BLOCK * self.batch_size)
        orders = [] if start else [torch.randperm(self.rows, generator=g) for g in generators]
        self._start = stop % self.rows
        masks = self._masks(generators, start, stop)
        if len(seeds) < len(numbers):
            at = [seeds.index(self._seeds[number]) for number in numbers]
            orders, masks = [orders[i] for i in at] if orders else [], masks[at]
        return Block(numbers, start, stop, orders, masks)

    def _masks(self, generators: list[torch.Generator], start: int, stop: int) -> Tensor:
        dropout, hidden = self.shape.dropout, self.shape.hidden
        if not dropout:
            return torch.empty(len(generators), 0)  # nn.Dropout(0) draws nothing
        masks = torch.empty(len(generators), (stop - start) * sum(hidden), dtype=self._dtype)
        sizes = [
            min(self.batch_size, stop - at) * width
            for at in range(start, stop, self.batch_size)
            for width in hidden
        ]
        for line, generator in zip(masks, generators, strict=True):
            for part in (line,) if _draws_concatenate() else line.split(sizes):
                part.bernoulli_(1 - dropout, generator=generator)
        return masks.div_(1 - dropout)


@functools.cache
def _draws_concatenate() -> bool:
    """Whether one long draw equals several short ones in sequence.

    It does not on processors for which torch draws with a vendor's library.
    """
    one, two = (torch.Generator().manual_seed(0) for _ in range(2))
    long = torch.empty(2000).bernoulli_(0.5, generator=one)
    short = [torch.empty(1000).bernoulli_(0.5, generator=two) for _ in range(2)]
    return torch.equal(long, torch.cat(short))


def prefetch(draw: Callable[[], Block]) -> Iterator[Block]:
    """Draw a block on another thread while the one before is in use."""
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(draw)
        while True:
            block = pending.result()
            pending = pool.submit(draw)
            yield block
