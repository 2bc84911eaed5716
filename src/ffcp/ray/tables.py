"""``ffcp predict --ray``: many tables of one fit, each predicted by one of many workers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from ffcp.ray.engine import pool_of
from ffcp.tables import FittedTable, TableError
from ffcp.tables.folder import must_be_outside
from ffcp.tables.table_io import base_name, is_parquet


@dataclass(frozen=True)
class Done:
    """What was done with one table."""

    table: str
    rows: int
    empty: int
    remarks: tuple[str, ...]


class Filing:
    """Predicts whole tables into files, as one machine does; made of a reference to its fit."""

    def __init__(self, holder: list[Any], alpha: Any) -> None:
        (self._fitted,) = ray.get(holder)
        self._alpha = alpha
        torch.set_num_threads(1)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Predict the tables of a batch; what was done, or is wrong, comes back as words."""
        said = [self._done(*pair) for pair in zip(batch["table"], batch["out"], strict=True)]
        return {"said": [json.dumps(one) for one in said]}

    def _done(self, table: str, out: str) -> dict[str, Any]:
        rows = empty = 0
        remarks: dict[str, None] = {}
        try:
            for part in self._fitted.predict_file(table, out, self._alpha):
                rows, empty = rows + part.rows, empty + part.empty
                remarks.update(dict.fromkeys(part.remarks))
        except (ValueError, OSError) as error:
            return {"wrong": f"{table}: {error}"}
        return {"table": table, "rows": rows, "empty": empty, "remarks": list(remarks)}


def predict_files(
    fitted: FittedTable,
    tables: Sequence[str | Path],
    out: str | Path,
    alpha: Any = None,
    workers: int | None = None,
) -> Iterator[Done]:
    """Predict tables into a folder, which is there when all of them are written, or not at all.

    Each file is that of ``fitted.predict_file``, byte for byte. Tables, and the folder, must be
    where every worker can reach them by the same names.

    Yields
    ------
    Done
        What was done with each table, as soon as it is.
    """
    out = Path(out).absolute()
    must_be_outside(out)
    if out.exists():
        raise TableError(f"{out} is there already: --out names a folder that is not")
    unfinished = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    work = _work(tables, unfinished)
    with _connected():
        unfinished.mkdir(parents=True)
        try:
            dataset = ray.data.from_items(work, override_num_blocks=len(work))
            size = min(len(work), workers or int(ray.cluster_resources().get("CPU", 1)))
            said = dataset.map_batches(
                Filing,
                batch_size=1,
                fn_constructor_args=([ray.put(fitted)], alpha),
                **pool_of(size, {}),
            )
            written = 0
            for row in said.iter_rows():
                outcome = json.loads(row["said"])
                if "wrong" in outcome:
                    raise TableError(outcome["wrong"])
                written += 1
                yield Done(**{**outcome, "remarks": tuple(outcome["remarks"])})
            for file in unfinished.glob(".*"):
                file.unlink()  # of workers that were killed
            if {file.name for file in unfinished.iterdir()} != {Path(w["out"]).name for w in work}:
                raise RuntimeError(f"only {written} of {len(work)} tables were written")
            os.rename(unfinished, out)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _work(tables: Sequence[str | Path], folder: Path) -> list[dict[str, str]]:
    """Name the file that is to be written for each table."""
    work: dict[str, str] = {}
    for table in map(Path, tables):
        if not table.is_file():
            raise TableError(f"there is no file {table}")
        ending = ".parquet" if is_parquet(table) else ".csv"
        name = str(folder / f"{base_name(table)}.bands{ending}")
        if name in work.values():
            raise TableError(f"several tables are called {base_name(table)!r}: rename all but one")
        work[str(table.absolute())] = name
    return [{"table": table, "out": name} for table, name in work.items()]


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    """Use the cluster there is, by RAY_ADDRESS, or one of this machine for as long as needed."""
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        yield
    finally:
        if is_ours:
            ray.shutdown()


__all__ = ["Done", "predict_files"]
