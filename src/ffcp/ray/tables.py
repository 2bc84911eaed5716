"""Prediction of many tables with one fit, by Ray workers: ``ffcp predict --ray``."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch

from ffcp.tables import FittedTable, TableError
from ffcp.tables.folder import must_be_outside
from ffcp.tables.table_io import base_name, is_parquet


class Done(NamedTuple):
    """The result for one table: numbers of rows and remarks."""

    rows: int
    empty: int
    remarks: tuple[str, ...]


def _predicted(fitted: FittedTable, table: str, out: str, alpha: Any) -> Done:
    """Predict one table into a file, in a worker."""
    torch.set_num_threads(1)
    rows = empty = 0
    remarks: dict[str, None] = {}
    try:
        for part in fitted.predict_file(table, out, alpha):
            rows, empty = rows + part.rows, empty + part.empty
            remarks.update(dict.fromkeys(part.remarks))
    except (ValueError, OSError) as error:
        raise TableError(f"{table}: {error}") from error
    return Done(rows, empty, tuple(remarks))


def predict_files(
    fitted: FittedTable, tables: Sequence[str | Path], out: str | Path, alpha: Any = None
) -> Iterator[Done]:
    """Predict tables into a folder, which appears when all of them are written, or not at all.

    Each file is identical to that of ``fitted.predict_file``. All workers must be able to access
    the tables and the folder by the same paths.

    Yields
    ------
    Done
        The result for each table, when it is finished.
    """
    out = Path(out).absolute()
    must_be_outside(out)
    if out.exists():
        raise TableError(f"--out {out} already exists: name a new folder")
    unfinished = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    files = _files(tables, unfinished, fitted.kind)
    with _connected():
        unfinished.mkdir(parents=True)
        task, sent = ray.remote(_predicted), ray.put(fitted)
        running = [task.remote(sent, table, file, alpha) for table, file in files.items()]
        try:
            while running:
                (done,), running = ray.wait(running)
                yield ray.get(done)
            for file in unfinished.glob(".*"):
                file.unlink()  # temporary files of killed workers
            os.rename(unfinished, out)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        finally:
            for task in running:
                ray.cancel(task)
            shutil.rmtree(unfinished, ignore_errors=True)


def _files(tables: Sequence[str | Path], folder: Path, kind: str) -> dict[str, str]:
    """Return the output file of each table."""
    files: dict[str, str] = {}
    for table in map(Path, tables):
        if not table.is_file():
            raise TableError(f"there is no file {table}")
        ending = ".parquet" if is_parquet(table) else ".csv"
        name = str(folder / f"{base_name(table)}.{kind}{ending}")
        if name in files.values():
            raise TableError(f"several tables are named {base_name(table)!r}: rename all but one")
        files[str(table.absolute())] = name
    return files


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    """Connect to the cluster at RAY_ADDRESS, or start one on this machine for the duration."""
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        if is_ours:
            ray.shutdown()


__all__ = ["Done", "predict_files"]
