"""How a calibration grows: ``python -m benchmarks.scale``.

Summaries of a thousand workers are merged, scores are streamed into a summary, and 1, 2 and 4
processes calibrate together, beside the same processes that run the bare model. The summaries to be
merged are made up: sorted exponential numbers stand for those of a million points.
"""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ffcp
import ffcp.distributed
from benchmarks.timing import Resident, show, table, verdict
from ffcp.conformal.calibration import Marginal
from ffcp.conformal.compressed import Compressed
from ffcp.conformal.summaries import Piece

ERROR = 1e-4
WORKERS, POINTS, SECONDS = 1000, 10**6, 10.0
STREAMED = (10**5, 10**6, 10**7)
SORTED = 4 * 10**7
FLAT = 64.0  # MB that a stream may take, however long it is
BATCH, FEATURES, WIDTH = 8192, 100, 512
DIVIDED = (2**16, 2**20)  # rows that processes share
PROCESSES = (1, 2, 4)
SHARED, RANKS = 10**9, 64  # of a job too large for this machine
SHARE = 1.15  # of the bare model's time


# -- merging ---------------------------------------------------------------------------------------


def summary(random: np.random.Generator) -> Compressed:
    """Make up what :meth:`compress` keeps of a million exponential scores."""
    weight = int(ERROR * POINTS) + 1
    values = np.sort(random.standard_exponential(-(-POINTS // weight)))
    pieces = [[Piece(values, weight, POINTS, weight - 1)]]
    return Compressed(ERROR, pieces=pieces)


def workers() -> list[Any]:
    """Give predictors as a thousand workers would send them."""
    random, model = np.random.default_rng(0), ffcp.Stored()
    made = []
    for _ in range(WORKERS):
        predictor = ffcp.CP(model).calibrate(torch.zeros(20), torch.ones(20))
        predictor._state = replace(predictor._state, calibration=summary(random))
        made.append(predictor)
    return made


def merging() -> None:
    first, *others = workers()
    with tempfile.TemporaryDirectory() as folder:
        first.save(f"{folder}/one")
        size = Path(f"{folder}/one").stat().st_size
        start, of_core = time.perf_counter(), time.process_time()
        for other in others:
            first.merge(other)
        error, kept = first.calibration.rank_error, first.calibration.scores.numel()
        first.compress(2 * ERROR)
        seconds, of_core = time.perf_counter() - start, time.process_time() - of_core
        first.save(f"{folder}/all")
        whole = Path(f"{folder}/all").stat().st_size
    made = table(f"{WORKERS:,} summaries of {POINTS:,} points each, merged one by one", "", "")
    made.add_row("one worker's file", f"{size / 1e3:.0f} kB")
    made.add_row("moved in all", f"{WORKERS * size / 1e6:.0f} MB")
    made.add_row("seconds to merge and compress", f"{seconds:.1f} {verdict(seconds, SECONDS)}")
    made.add_row("of one core, others apart", f"{of_core:.1f}")
    made.add_row("points", f"{len(first.calibration):,}")
    made.add_row("rank error when merged", f"{error:.3g}")
    made.add_row("scores held when merged", f"{kept:,} ({8 * kept / 1e6:.0f} MB)")
    made.add_row("file in the end", f"{whole / 1e3:.0f} kB")
    made.add_row("rank error in the end", f"{first.calibration.rank_error:.3g}")
    show(made)


# -- a stream --------------------------------------------------------------------------------------


def batches(rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Make rows up as they are asked for; only the batch at hand is in memory."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, rows, BATCH):
        size = min(BATCH, rows - start)
        yield torch.zeros(size), torch.empty(size).exponential_(generator=generator)


def stream(rows: int, error: float | None) -> tuple[float, float, int, float]:
    """Calibrate on a stream: seconds, MB above the beginning, scores kept, rank error."""
    torch.set_num_threads(1)
    predictor = ffcp.CP(ffcp.Stored())
    predictor.calibrate(batches(BATCH), rank_error=error)  # what is loaded only once
    with Resident() as memory:
        start = time.process_time()  # of this process: others are kept apart
        predictor.calibrate(batches(rows), rank_error=error)
        predictor.predict_interval(torch.zeros(1))
        seconds = time.process_time() - start
    kept = predictor.calibration
    return seconds, memory.grown, kept.scores.numel(), getattr(kept, "rank_error", 0.0)


def streaming() -> None:
    made = table(
        f"Calibrating on a stream, rank_error={ERROR:g}, each in a process of its own",
        "rows", "s", "MB", "scores kept", "rank error", "", "all scores: s", "MB",
    )  # fmt: skip
    for rows in STREAMED:
        few, everything = [_apart(stream, rows, error) for error in (ERROR, None)]
        seconds, memory, kept, error = few
        cells = f"{seconds:.2f}", f"{memory:.0f}", f"{kept:,}", f"{error:.2g}"
        is_flat = verdict(memory, FLAT)
        made.add_row(f"{rows:,}", *cells, is_flat, f"{everything[0]:.2f}", f"{everything[1]:.0f}")
    show(made)


def one_of_many() -> None:
    """Measure what one process of a large job would do besides running the model."""
    seconds, memory, kept, error = _apart(stream, SHARED // RANKS, ERROR / 2)
    made = table(
        f"One of {RANKS} processes that share {SHARED:,} rows, rank_error={ERROR:g}", "", ""
    )
    made.add_row("its rows", f"{SHARED // RANKS:,}")
    made.add_row("seconds of one core, without the model", f"{seconds:.1f}")
    made.add_row("MB for the summary on the way", f"{memory:.0f}")
    made.add_row("kB that it sends to each other process", f"{8 * kept / 1e3:.0f}")
    made.add_row("rank error of what it sends", f"{error:.2g}")
    made.add_row(f"seconds of one core to sort {SORTED:,} scores", f"{_apart(sorting):.1f}")
    show(made)


def sorting() -> float:
    """Measure what it takes to keep all scores, and sort them."""
    scores = torch.rand(SORTED, 1, dtype=torch.float64)
    start = time.process_time()
    Marginal().fit(scores).quantile(0.1)
    return time.process_time() - start


def _apart(work: Any, *arguments: Any) -> Any:
    """Run something in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


# -- several processes -----------------------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def together(rank: int, size: int, meet: str, rows: int, rounds: int, results: Any) -> None:
    """Run the bare model and calibrate, in turn, in one of several processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=size)
    generator, model = torch.Generator().manual_seed(rank), network()
    held = [  # and come round again and again
        (torch.randn(2048, FEATURES, generator=generator), torch.randn(2048, generator=generator))
        for _ in range(8)
    ]

    def part() -> Iterator[tuple[Tensor, Tensor]]:
        return itertools.islice(itertools.cycle(held), rows // size // 2048)

    def bare() -> None:
        with torch.inference_mode():
            torch.cat([model(x) for x, _ in part()])

    def ours() -> None:
        ffcp.distributed.calibrate(ffcp.CP(model), part())

    spent: dict[Any, list[tuple[float, float]]] = {bare: [], ours: []}
    for number in range(rounds + 1):
        for work, times in spent.items():
            dist.barrier()
            start, of_core = time.perf_counter(), time.process_time()
            work()
            core = torch.tensor([time.process_time() - of_core], dtype=torch.float64)
            dist.all_reduce(core)  # also waits for the last
            if number:  # the first round makes ready
                times.append((time.perf_counter() - start, float(core)))
    if rank == 0:
        results.put([tuple(map(min, zip(*times, strict=True))) for times in spent.values()])
    dist.destroy_process_group()


def processes(rounds: int = 5) -> None:
    made = table(
        f"CP on rows divided among processes of one thread, {FEATURES} features, two layers of "
        f"{WIDTH}; best of {rounds} in turn",
        "rows", "processes", "bare, rows/s", "ours, rows/s", "ratio", "",
        "bare, core seconds", "ours", "ratio",
    )  # fmt: skip
    context = multiprocessing.get_context("spawn")
    for rows, size in itertools.product(DIVIDED, PROCESSES):
        with tempfile.TemporaryDirectory() as folder:
            results, meet = context.Queue(), f"file://{folder}/meet"
            started = [
                context.Process(target=together, args=(rank, size, meet, rows, rounds, results))
                for rank in range(size)
            ]
            for process in started:
                process.start()
            (bare, bare_core), (ours, ours_core) = results.get(timeout=600)
            for process in started:
                process.join()
        rates = f"{rows / bare:,.0f}", f"{rows / ours:,.0f}", f"{ours / bare:.2f}"
        cores = f"{bare_core:.2f}", f"{ours_core:.2f}", f"{ours_core / bare_core:.2f}"
        made.add_row(f"{rows:,}", f"{size}", *rates, verdict(ours / bare, SHARE), *cores)
    show(made)


def main() -> None:
    torch.set_num_threads(1)
    merging()
    streaming()
    one_of_many()
    processes()


if __name__ == "__main__":
    main()
