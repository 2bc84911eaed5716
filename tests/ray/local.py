"""The work of Ray's workers in this process: quick, and with rows in any order and any blocks."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
from ray import cloudpickle
from ray.data.block import BlockAccessor

from ffcp.ray import engine
from ffcp.ray.workers import CUT, with_cut


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

    def filter(self, expr: Any) -> Rows:
        keep = expr(self.table)
        return Rows(self.table.filter(keep), self.seed, self.blocks)

    def limit(self, rows: int) -> Rows:
        return Rows(self.table.slice(0, rows))

    def iter_batches(self, **how: Any) -> Iterator[pa.Table]:
        yield self.table

    def cut(self, size: int, name: str | None) -> Iterator[pa.Table]:
        """Give blocks: as they come, or with equal numbers of batches together."""
        rng = np.random.default_rng(self.seed)
        if name is None:
            places = np.sort(rng.integers(0, self.table.num_rows, self.blocks - 1))
            for start, stop in zip([0, *places], [*places, self.table.num_rows], strict=True):
                for first in range(start, stop, size):
                    yield self.table.slice(first, min(size, stop - first))
            return
        access = BlockAccessor.for_block(self.table)
        shuffled = access.take(rng.permutation(self.table.num_rows))
        numbered = with_cut(shuffled, name, size)
        cuts = numbered.column(CUT).to_numpy()
        owner = rng.integers(0, self.blocks, cuts.max() + 1 if len(cuts) else 1)
        for block in rng.permutation(self.blocks):
            rows = np.flatnonzero(owner[cuts] == block)
            yield BlockAccessor.for_block(numbered).take(rows)


class Column:
    """Stands for a column in an expression."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __lt__(self, end: int) -> Any:
        return lambda table: pa.array(table.column(self.name).to_numpy() < end)

    def __ge__(self, end: int) -> Any:
        return lambda table: pa.array(table.column(self.name).to_numpy() >= end)


class LocalBoard:
    """Stands for the actor that says what was chosen."""

    def __init__(self) -> None:
        self.posted: Any = None
        self.post = self.read = self

    def remote(self, *run: Any) -> Any:
        if run:
            (self.posted,) = run
        return self.posted


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ffcp.ray work on :class:`Rows`, in this process; all that is sent is pickled."""

    def divided(dataset: Rows, work: Any, job: Any, pool: Any) -> Any:
        board, sent = job.board, cloudpickle.dumps(replace(job, board=None))
        workers = [work([replace(pickle.loads(sent), board=board)]) for _ in range(2)]
        blocks = dataset.cut(job.size, job.names.id)

        class Result(Rows):
            def __init__(self) -> None: ...

            def iter_batches(self, **how: Any) -> Iterator[pa.Table]:
                for number, block in enumerate(blocks):
                    yield from workers[number % 2](block)

        return Result()

    class Order:
        preserve_order = False

    monkeypatch.setattr(Rows.context, "execution_options", Order, raising=False)
    monkeypatch.setattr(engine, "Dataset", Rows)
    monkeypatch.setattr(engine, "_divided", divided)
    monkeypatch.setattr(engine, "pool_of", lambda workers, resources: {})
    monkeypatch.setattr(engine, "_board", LocalBoard)
    monkeypatch.setattr(engine, "col", Column)
    monkeypatch.setattr(ray, "get", lambda given: given)
    # Asked for these, Ray starts, or joins whatever cluster the machine has, or had.
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [])
