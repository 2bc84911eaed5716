"""Rows per second over Ray Data workers, beside the bare model in the same engine, and memory.

    python -m benchmarks.ray_rows                        # a minute or two
    python -m benchmarks.ray_rows --rows 100000 1000000 10000000

The bare model is what one writes by hand: a class whose constructor takes the network, and which
gives ``map_batches`` a column of predictions. Calibrating brings scores back, predicting gives
``prediction``, ``lower`` and ``upper``. All are timed in turn, the best of several; their peak of
resident memory is that of the largest worker, by the number of rows.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.data import ActorPoolStrategy, DataContext, Dataset
from torch import Tensor, nn

import ffcp
from ffcp.ray import calibrate, predict

WIDTH, SIZE = 100, 8192
STORE = 200 * 2**20


class Weighed(nn.Module):
    """The paper's network, which notes the largest memory that its process ever had."""

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
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            Path(self.folder, f"{os.getpid()}").write_text(str(peak))
        found: Tensor = self.layers(x)
        return found


class Bare:
    """The model alone, as one writes it by hand."""

    def __init__(self, holder: list[Any]) -> None:
        (self.model,) = ray.get(holder)
        self.model.eval()
        torch.set_num_threads(1)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        with torch.inference_mode():
            return {"prediction": self.model(torch.from_numpy(batch["x"]))[:, 0].numpy()}


def rows(count: int) -> Dataset:
    """Make rows on the way, one block for every 4 batches."""

    def made(batch: dict[str, Any]) -> dict[str, Any]:
        rng = np.random.default_rng(int(batch["id"][0]))
        x = rng.random((len(batch["id"]), WIDTH), dtype=np.float32)
        return {"x": x, "y": x[:, 0], "id": batch["id"]}

    blocks = max(4, count // (4 * SIZE))
    return ray.data.range(count, override_num_blocks=blocks).map_batches(made, batch_size=None)


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
        "bare model": lambda count, workers: bare(count, workers, model),
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


def timed(job: Callable[[int, int], Any], count: int, workers: int) -> float:
    start = time.perf_counter()
    job(count, workers)
    return time.perf_counter() - start


def peaks(folder: str) -> Iterator[int]:
    """Give the peaks of all workers so far, in MB, and forget them."""
    for file in Path(folder).iterdir():
        yield int(file.read_text())
        file.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=2)
    asked = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        num_cpus=2,
        object_store_memory=STORE,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    DataContext.get_current().enable_progress_bars = False
    with tempfile.TemporaryDirectory() as folder:
        model = Weighed(folder)
        todo = jobs(model)
        few, many = min(asked.rows), asked.rows[min(1, len(asked.rows) - 1)]
        print(f"seconds that {many - few:,} rows take beyond {few:,}, best of {asked.repeats}")
        print(f"{'':14}" + "".join(f"{f'{w} workers':>26}" for w in asked.workers))
        best: dict[tuple[str, int], float] = {}
        for _ in range(asked.repeats):
            for workers in asked.workers:
                for name, job in todo.items():
                    # The difference of two sizes: workers take their time to start.
                    found = timed(job, many, workers) - timed(job, few, workers)
                    best[name, workers] = min(found, best.get((name, workers), np.inf))
        for name in todo:
            line = f"{name:14}"
            for workers in asked.workers:
                seconds, own = best["bare model", workers], best[name, workers]
                line += f"{(many - few) / own:>14,.0f}/s {own / seconds:>7.2f} x"
            print(line)
        list(peaks(folder))
        print("\npeak memory of the largest worker, MB")
        for count in asked.rows:
            line = f"{count:>12,} rows"
            for name in ("bare model", "predict", "calibrate"):
                todo[name](count, 2)
                line += f"   {name} {max(peaks(folder))}"
            print(line, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
