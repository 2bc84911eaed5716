"""The work of Ray's workers in this process: quick, and with rows in any order and any blocks."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
from ray import cloudpickle
from ray.data.block import BlockAccessor

from ffcp.ray import engine
from ffcp.ray.workers import Board


class Rows:
    """Stands for a Ray dataset whose rows come in the order and in the blocks of a seed."""

    class context:
        max_errored_blocks = 0

    def __init__(self, table: pa.Table, seed: int = 0, blocks: int = 5) -> None:
        self.table, self.seed, self.blocks = table, seed, blocks

    @classmethod
    def of(cls, arrays: dict[str, Any], **how: Any) -> Rows:
        return cls(BlockAccessor.batch_to_arrow_block(arrays), **how)

    def columns(self) -> list[str]:
        return self.table.column_names

    def select_columns(self, names: list[str]) -> Rows:
        return Rows(self.table.select(names), self.seed, self.blocks)

    def sort(self, name: str) -> Rows:
        return Rows(
            self.table.take(np.argsort(self.table[name].to_numpy())), self.seed, self.blocks
        )

    def limit(self, rows: int) -> Rows:
        return Rows(self.table.slice(0, min(rows, self.table.num_rows)))

    def iter_batches(self, **how: Any) -> Iterator[pa.Table]:
        yield self.table

    def cut(self, size: int) -> Iterator[pa.Table]:
        """Yield batches of some blocks."""
        rng = np.random.default_rng(self.seed)
        places = np.sort(rng.integers(0, self.table.num_rows, self.blocks - 1))
        for start, stop in zip([0, *places], [*places, self.table.num_rows], strict=True):
            for first in range(start, stop, size):
                yield self.table.slice(first, min(size, stop - first))


class LocalBoard:
    """Stands for the actor that tells what was selected."""

    def __init__(self) -> None:
        board = Board()
        for name in ("stop", "post", "read"):
            setattr(self, name, Call(getattr(board, name)))


class Call:
    """Stands for a method of an actor."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *given: Any) -> Any:
        # In a thread of its own: a browser's loop may be running in this one.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._method(*given)).result()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ffcp.ray work on :class:`Rows`, in this process; all that is sent is pickled."""

    def mapped(dataset: Rows, work: Any, job: Any, size: int, pool: Any) -> Any:
        board, sent = job.board, cloudpickle.dumps(replace(job, board=None))
        workers = [work([replace(pickle.loads(sent), board=board)]) for _ in range(2)]
        batches = dataset.cut(size)

        class Result(Rows):
            def __init__(self) -> None: ...

            def iter_batches(self, **how: Any) -> Iterator[pa.Table]:
                for number, batch in enumerate(batches):
                    yield from workers[number % 2](batch)

        return Result()

    class Order:
        preserve_order = False

    monkeypatch.setattr(Rows.context, "execution_options", Order, raising=False)
    monkeypatch.setattr(engine, "Dataset", Rows)
    monkeypatch.setattr(engine, "_mapped", mapped)
    monkeypatch.setattr(engine, "pool_of", lambda workers, resources: {})
    monkeypatch.setattr(engine, "_board", LocalBoard)
    monkeypatch.setattr(ray, "get", lambda given: given)
    # Asked for these, Ray starts, or joins whatever cluster the machine has, or had.
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [])
