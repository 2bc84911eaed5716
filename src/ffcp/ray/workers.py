"""What workers do: cut blocks into batches, note them for a calibration, predict them."""

from __future__ import annotations

import pickle
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch
from ray.data.block import BlockAccessor

from ffcp.calibration_loop import Calibrating, Noted
from ffcp.network import inputs
from ffcp.ray.columns import Names
from ffcp.ray.files import WRONG, counted_from, located
from ffcp.ray.predicted import Predicted, predicted_columns
from ffcp.warnings import FFCPWarning

CUT = "__ffcp_cut"  # the number of the batch that a row belongs to
_FRESH = 60  # bits of a place in the stream of random numbers that nobody else has


@dataclass(frozen=True)
class Job:
    """What a worker needs to know; it goes to every worker once."""

    predictor: Any
    names: Names
    layout: dict[str, Any]
    size: int  # rows of a batch
    run: Calibrating | None = None
    board: Any = None  # where what was chosen is posted, if that happens on the way
    alphas: Sequence[Any] = ()
    keep: tuple[str, ...] = ()
    threads: int = 1


class Worker:
    """Holds the model, and takes blocks or batches of rows; made of a reference to its job."""

    job: Job

    def __init__(self, holder: list[Any]) -> None:
        (self.job,) = ray.get(holder)
        torch.set_num_threads(self.job.threads)  # of one process of several on a machine
        if ray.get_gpu_ids():
            self.job.predictor.to("cuda")

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        """Work on a block, batch by batch."""
        if block.num_rows:
            for row, batch in self.batches(block):
                yield self.work(batch, row)

    def batches(self, block: pa.Table) -> Iterator[tuple[int | None, pa.Table]]:
        """Give batches with the number of their first row, ``None`` if rows have none."""
        name, size = self.job.names.id, self.job.size
        access = BlockAccessor.for_block(block)
        if name is None:
            for start in range(0, block.num_rows, size):
                yield None, access.slice(start, min(start + size, block.num_rows))
            return
        numbers = block.column(name).to_numpy()
        order = np.argsort(numbers, kind="stable")
        starts = np.flatnonzero(np.diff(numbers[order] // size, prepend=-1))
        for some in np.split(order, starts[1:]):
            yield int(numbers[some[0]]), access.take(some)

    def work(self, batch: pa.Table, row: int | None) -> pa.Table:
        """Turn a batch into rows of the result."""
        raise NotImplementedError

    def _check_numbers(self, batch: pa.Table) -> None:
        name = self.job.names.id
        if name is not None:
            must_be_consecutive(batch.column(name).to_numpy(), name)

    def _named(self, error: Exception, batch: pa.Table, try_on: Callable[..., Any]) -> Exception:
        """Let an error name the file and the row that are wrong, as far as can be known."""
        names = self.job.names
        return located(error, batch, names, self.job.size, try_on, names.id is not None)


class Noting(Worker):
    """Notes batches for a calibration under way; what comes back are scores, not rows."""

    def __init__(self, holder: list[Any]) -> None:
        super().__init__(holder)
        assert self.job.run is not None
        self._run = self.job.run.using(self.job.predictor.model)

    def work(self, batch: pa.Table, row: int | None) -> pa.Table:
        """Note a batch: one row, with all that is noted in it, or with what is wrong."""
        if self.job.board is not None and self._run.is_open:
            posted = ray.get(self.job.board.read.remote())
            self._run = self._run if posted is None else posted.using(self.job.predictor.model)
        results: list[Noted] | list[Exception]
        try:
            self._check_numbers(batch)
            results = self.noted(batch, row or 0, is_pinned=row is not None)
        except WRONG as error:
            results = [self._named(error, batch, self.noted)]
        return pa.table({"noted": pa.array(map(pickle.dumps, results), pa.large_binary())})

    def noted(self, batch: pa.Table, row: int, is_pinned: bool = True) -> list[Noted]:
        """Run the model on a batch, and note what scores and choices need."""
        predictor, run = self.job.predictor, self._run
        read = inputs.Reader(predictor.model, self.job.layout)
        given = self.job.names.read(batch, row)
        if not is_pinned:
            run.draw_from(secrets.randbits(_FRESH))
        with torch.inference_mode(False):
            return [
                run.record_remotely(part, predictor.count_fitted(part))
                for part in predictor.batches(
                    given.x, given.y, given.groups, read, weights=given.weights, first_row=row
                )
            ]


class Predicting(Worker):
    """Predicts batches: bands or sets beside the columns that were asked to be kept."""

    def work(self, batch: pa.Table, row: int | None) -> pa.Table:
        """Predict a batch."""
        try:
            with warnings.catch_warnings():  # of infinite bands, which everybody can see
                warnings.simplefilter("ignore", FFCPWarning)
                self._check_numbers(batch)
                columns = self.predicted(batch, row or 0, is_pinned=row is not None)
        except WRONG as error:
            raise self._named(error, batch, self.predicted) from error
        table = batch.select(list(self.job.keep))
        for name, column in columns.items():
            table = table.append_column(name, column)
        return table

    def predicted(self, batch: pa.Table, row: int, is_pinned: bool = True) -> Predicted:
        """Give prediction and bands, or sets, of a batch."""
        given = self.job.names.read(batch, row)
        first_row = row if is_pinned else secrets.randbits(_FRESH)
        try:
            return predicted_columns(self.job.predictor, given, self.job.alphas, first_row)
        except WRONG as error:
            raise counted_from(row, error) from error


class Board:
    """Where workers read what was chosen, once it is."""

    def __init__(self) -> None:
        self._run: Calibrating | None = None

    def post(self, run: Calibrating) -> None:
        """Say what was chosen."""
        self._run = run

    def read(self) -> Calibrating | None:
        """Give what was chosen; ``None`` until it is."""
        return self._run


def with_cut(table: pa.Table, name: str | None, size: int = 1) -> pa.Table:
    """Add the number of the batch that each row belongs to, by its own number, if it has one."""
    if name is None:
        return table
    column = table.column(name)
    if not pa.types.is_integer(column.type) or column.null_count:
        raise ValueError(
            f"id={name!r} must hold the numbers of the rows, 0, 1, 2 and so on: its type is "
            f"{column.type}, and {column.null_count} are missing"
        )
    numbers = column.to_numpy().astype(np.int64)
    if len(numbers) and numbers.min() < 0:
        raise ValueError(f"id={name!r} holds {numbers.min()}: the numbers of rows count from 0")
    return table.append_column(CUT, pa.array(numbers // size))


def must_be_consecutive(numbers: np.ndarray[Any, Any], name: str) -> None:
    """Refuse rows of one batch that miss a number, or have one twice."""
    steps = np.diff(numbers)
    if (steps != 1).any():
        place = int(np.flatnonzero(steps != 1)[0])
        before, after = int(numbers[place]), int(numbers[place + 1])
        what = f"{before} twice" if before == after else f"{after} after {before}"
        raise ValueError(
            f"id={name!r} must hold the number of each row once, 0, 1, 2 and so on: it has {what}"
        )


__all__ = ["CUT", "Board", "Job", "Noting", "Predicting", "with_cut"]
