"""Throughput and memory of Ray Data workers, compared with the bare model.

    python -m benchmarks.ray_rows                        # some minutes
    python -m benchmarks.ray_rows --rows 100000 1000000 10000000

The bare model is a hand-written class for ``map_batches`` that returns a column of predictions.
Calibrating returns scores; predicting returns ``prediction``, ``lower`` and ``upper``. All are run
in turn, and the best of several runs counts. Rows per second are counted between the first and the
last batch. Processor time is that of the workers' processes including Ray, which is more stable
than wall-clock time on a shared machine. Memory excludes the shared object store.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray.data import ActorPoolStrategy, DataContext, Dataset
from torch import Tensor, nn

import ffcp
from ffcp.ray import calibrate, predict

BARE = "bare model"
WIDTH, SIZE = 100, 8192
STORE = 200 * 2**20


class LoggedNetwork(nn.Module):
    """The paper's network, which logs time and memory of its process at every batch."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts: list[nn.Module] = [nn.Linear(WIDTH, 64), nn.ReLU()]
        for _ in range(2):
            parts += [nn.Linear(64, 64), nn.ReLU()]
        self.layers = nn.Sequential(*parts, nn.Linear(64, 1))
        self.folder, self.driver = folder, os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if os.getpid() != self.driver:
            entry = [time.time(), time.process_time(), len(x), own_memory()]
            with Path(self.folder, f"{os.getpid()}").open("a") as file:
                file.write(json.dumps(entry) + "\n")
        result: Tensor = self.layers(x)
        return result


def own_memory() -> float:
    """Return the memory of this process without shared memory, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


class Run(NamedTuple):
    """Measurements of one run."""

    speed: float  # rows per second
    cost: float  # microseconds of a processor per row
    memory: float  # of the largest worker

    @classmethod
    def read(cls, folder: str) -> Run:
        """Return the measurements in the workers' logs, and delete the logs."""
        workers = []
        for file in Path(folder).iterdir():
            workers.append(np.array([json.loads(line) for line in file.read_text().splitlines()]))
            file.unlink()
        first = min(w[0, 0] for w in workers)
        last = max(w[-1, 0] for w in workers)
        rows = sum(
            w[:-1, 2].sum() for w in workers
        )  # the cost of a batch is known when the next begins
        paid = sum(w[-1, 1] - w[0, 1] for w in workers)
        memory = max(w[:, 3].max() for w in workers)
        return cls(rows / (last - first), 1e6 * paid / rows, memory)


class Bare:
    """The model alone, written by hand."""

    def __init__(self, holder: list[Any]) -> None:
        (self.model,) = ray.get(holder)
        self.model.eval()
        torch.set_num_threads(1)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        with torch.inference_mode():
            return {"prediction": self.model(torch.from_numpy(batch["x"]))[:, 0].numpy()}


def rows(count: int) -> Dataset:
    """Return rows that are generated on the fly, one block for every 4 batches."""

    def generate(batch: dict[str, Any]) -> dict[str, Any]:
        rng = np.random.default_rng(int(batch["id"][0]))
        x = rng.random((len(batch["id"]), WIDTH), dtype=np.float32)
        return {"x": x, "y": x[:, 0], "id": batch["id"]}

    blocks = max(1, count // (4 * SIZE))
    return ray.data.range(count, override_num_blocks=blocks).map_batches(generate, batch_size=None)


def bare(count: int, workers: int, model: nn.Module) -> None:
    drain(
        rows(count).map_batches(
            Bare,
            batch_size=SIZE,
            fn_constructor_args=([ray.put(model)],),
            compute=ActorPoolStrategy(size=workers),
            num_cpus=0,
        )
    )


def drain(dataset: Dataset) -> None:
    for _ in dataset.iter_internal_ref_bundles():
        pass


def jobs(model: nn.Module) -> dict[str, Callable[[int, int], Any]]:
    rng = np.random.default_rng(0)
    x = rng.random((2000, WIDTH), dtype=np.float32)
    ready = ffcp.CP(model).calibrate(x, x[:, 0])
    return {
        BARE: lambda count, workers: bare(count, workers, model),
        "predict": lambda count, workers: drain(
            predict(ready, rows(count), x="x", keep=[], workers=workers)
        ),
        "calibrate": lambda count, workers: calibrate(
            ffcp.CP(model), rows(count), x="x", y="y", workers=workers
        ),
        "predict, id=": lambda count, workers: drain(
            predict(ready, rows(count), x="x", keep=[], id="id", workers=workers)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timed", type=int, default=1_000_000, help="rows of the timed runs")
    parser.add_argument(
        "--rows",
        type=int,
        nargs="*",
        default=[100_000, 1_000_000],
        help="rows of the runs whose memory is measured",
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--jobs", nargs="+", help="rows of the table to run, besides the bare model"
    )
    asked = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=STORE,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    DataContext.get_current().enable_progress_bars = False
    with tempfile.TemporaryDirectory() as folder:
        todo = jobs(LoggedNetwork(folder))
        if asked.jobs:
            todo = {name: job for name, job in todo.items() if name in (BARE, *asked.jobs)}
        print(f"{asked.timed:,} rows: rows per second, and the slowdown against the bare model;")
        print("processor microseconds per row, and their ratio to the bare model")
        print(f"{'':14}" + "".join(f"{f'{w} workers':>36}" for w in asked.workers))
        runs: dict[tuple[str, int], list[Run]] = {}
        for _ in range(asked.repeats):
            for workers in asked.workers:
                for name, job in todo.items():
                    job(asked.timed, workers)
                    runs.setdefault((name, workers), []).append(Run.read(folder))
        for name in todo:
            line = f"{name:14}"
            for workers in asked.workers:
                cost, bare_cost = (
                    min(run.cost for run in runs[one, workers]) for one in (name, BARE)
                )
                speed, bare_speed = (
                    max(run.speed for run in runs[one, workers]) for one in (name, BARE)
                )
                line += f"{speed:>12,.0f}/s {bare_speed / speed:>6.2f} x"
                line += f" {cost:>6.2f} {cost / bare_cost:>6.2f} x"
            print(line)
        if not asked.rows:
            return
        print("\nmemory of the largest of 2 workers, MB")
        for count in asked.rows:
            line = f"{count:>12,} rows"
            for name in (one for one in (BARE, "predict", "calibrate") if one in todo):
                todo[name](count, 2)
                line += f"   {name} {Run.read(folder).memory:.0f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
