"""Ray workers, which score batches for a calibration or predict them."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import secrets
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch

from ffcp.distributed.parts import State, state_of
from ffcp.predictor import Predictor
from ffcp.ray.columns import WRONG, Names
from ffcp.ray.predicted import predicted_columns
from ffcp.warnings import FFCPWarning

_FRESH = 60  # bits of a random, hence unique, position in the stream of random numbers


@dataclass(frozen=True)
class Job:
    """The description of the work, sent to every worker once."""

    predictor: Any
    names: Names
    board: Any = None  # the actor that publishes the selection, if there is one
    rank_error: Any = None
    alphas: Sequence[Any] = ()
    keep: tuple[str, ...] = ()
    threads: int = 1


class Worker:
    """Base class: holds the model, constructed from a reference to the job."""

    def __init__(self, holder: list[Any]) -> None:
        self.job: Job = ray.get(holder)[0]
        torch.set_num_threads(self.job.threads)  # several processes share a machine
        if ray.get_gpu_ids():
            self.job.predictor.to("cuda")


class Scoring(Worker):
    """Scores batches: returns a calibration of each batch, or an error.

    Before the selection is made, batches are returned unchanged.
    """

    def __init__(self, holder: list[Any]) -> None:
        super().__init__(holder)
        self._settled = self.job.predictor if self.job.board is None else None

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        """Yield one row that holds the pickled calibration."""
        if batch.num_rows:
            packed = pickle.dumps(self._part(batch))
            yield pa.table({"part": pa.array([packed], pa.large_binary())})

    def _part(self, batch: pa.Table) -> State | pa.Table | Exception:
        job = self.job
        if self._settled is None:
            selected = ray.get(job.board.read.remote())
            if selected is None:
                return batch
            self._settled = job.predictor.restored(selected)
        try:
            return calibrated(self._settled.settled(), job.names, batch, job.rank_error)
        except WRONG as error:
            return error


def calibrated(
    predictor: Predictor, names: Names, batch: pa.Table, rank_error: Any, new: Any = None
) -> State:
    """Return the calibration of some rows; an error names the row and its file."""
    try:
        x, y, groups, weights = names.read(batch)
        with torch.inference_mode(False):
            predictor.calibrate(
                x, y, groups=groups, weights=weights, new=new, rank_error=rank_error
            )
    except WRONG as error:
        raise names.located(error, batch) from error
    return state_of(predictor)


class Board:
    """The actor that publishes the selection to the workers."""

    def __init__(self) -> None:
        self._has_enough, self._posted = False, asyncio.Event()
        self._selected: State | None = None

    async def stop(self) -> None:
        """Pause the workers: there are enough rows for the selection."""
        self._has_enough = True

    async def post(self, selected: State) -> None:
        """Publish the selection."""
        self._selected = selected
        self._posted.set()

    async def read(self) -> State | None:
        """Return the selection; ``None`` while rows for it are still collected."""
        if not self._has_enough:
            return None
        await self._posted.wait()
        return self._selected


class Predicting(Worker):
    """Predicts batches: returns intervals or sets beside the kept columns."""

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        """Yield the predicted rows; rows with row numbers have the random numbers of these."""
        if self.job.names.id is None:
            yield self._predicted(batch, secrets.randbits(_FRESH))
            return
        numbers = batch.column(self.job.names.id).to_numpy()
        starts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
        for start, stop in itertools.pairwise(starts):
            yield self._predicted(batch.slice(start, stop - start), int(numbers[start]))

    def _predicted(self, batch: pa.Table, first_row: int) -> pa.Table:
        job = self.job
        table = batch.select(list(job.keep))
        try:
            with warnings.catch_warnings():  # infinite intervals are visible in the result
                warnings.simplefilter("ignore", FFCPWarning)
                rows = job.names.read(batch)
                columns = predicted_columns(job.predictor, rows, job.alphas, first_row)
        except WRONG as error:
            raise job.names.located(error, batch) from error
        for name, column in columns.items():
            table = table.append_column(name, column)
        return table


__all__ = ["Board", "Job", "Predicting", "Scoring", "Worker", "calibrated"]
