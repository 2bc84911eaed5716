"""Time and memory of large calibrations: ``python -m benchmarks.scale``.

Summaries of a thousand workers are merged, scores are streamed into a summary, and 1, 2 and 4
processes calibrate together, compared with the same processes running the bare model. The merged
summaries are synthetic: sorted exponential numbers in place of a million scores each.
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
FLAT = 100.0  # MB that a stream may take, however long it is
BATCH, FEATURES, WIDTH = 8192, 100, 512
DIVIDED = (2**16, 2**20)  # rows that processes share
PROCESSES = (1, 2, 4)
SHARED, RANKS = 10**9, 64  # of a job too large for this machine
SHARE = 1.15  # of the bare model's time


# -- merging ---------------------------------------------------------------------------------------


def summary(random: np.random.Generator) -> Compressed:
    """Return a synthetic summary of a million exponential scores, as :meth:`compress` makes it."""
    weight = int(ERROR * POINTS) + 1
    values = np.sort(random.standard_exponential(-(-POINTS // weight)))
    pieces = [[Piece(values, weight, POINTS, weight - 1)]]
    return Compressed(ERROR, pieces=pieces)


def workers() -> list[Any]:
    """Return one predictor per worker, each with a summary."""
    random, model = np.random.default_rng(0), ffcp.Stored()
    predictors = []
    for _ in range(WORKERS):
        predictor = ffcp.CP(model).calibrate(torch.zeros(20), torch.ones(20))
        predictor._state = replace(predictor._state, calibration=summary(random))
        predictors.append(predictor)
    return predictors


def merging() -> None:
    first, *others = workers()
    with tempfile.TemporaryDirectory() as folder:
        first.save(f"{folder}/one")
        size = Path(f"{folder}/one").stat().st_size
        start, of_core = time.perf_counter(), time.process_time()
        for other in others:
            first.merge(other)
        error, held = first.calibration.rank_error, first.calibration.scores.numel()
        first.compress(2 * ERROR)
        seconds, of_core = time.perf_counter() - start, time.process_time() - of_core
        first.save(f"{folder}/all")
        whole = Path(f"{folder}/all").stat().st_size
    report = table(f"{WORKERS:,} summaries of {POINTS:,} points each, merged one by one", "", "")
    report.add_row("one worker's file", f"{size / 1e3:.0f} kB")
    report.add_row("moved in all", f"{WORKERS * size / 1e6:.0f} MB")
    report.add_row("seconds to merge and compress", f"{seconds:.1f} {verdict(seconds, SECONDS)}")
    report.add_row("of one core, others apart", f"{of_core:.1f}")
    report.add_row("points", f"{len(first.calibration):,}")
    report.add_row("rank error when merged", f"{error:.3g}")
    report.add_row("scores held when merged", f"{held:,} ({8 * held / 1e6:.0f} MB)")
    report.add_row("file in the end", f"{whole / 1e3:.0f} kB")
    report.add_row("rank error in the end", f"{first.calibration.rank_error:.3g}")
    show(report)


# -- a stream --------------------------------------------------------------------------------------


def batches(rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random batches, with only one of them in memory."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, rows, BATCH):
        size = min(BATCH, rows - start)
        yield torch.zeros(size), torch.empty(size).exponential_(generator=generator)


def stream(rows: int, error: float | None) -> tuple[float, float, int, float]:
    """Calibrate on a stream; return seconds, growth in MB, number of scores, rank error."""
    torch.set_num_threads(1)
    predictor = ffcp.CP(ffcp.Stored())
    predictor.calibrate(batches(BATCH), rank_error=error)  # warm-up
    with Resident() as memory:
        start = time.process_time()  # of this process only
        predictor.calibrate(batches(rows), rank_error=error)
        predictor.predict_interval(torch.zeros(1))
        seconds = time.process_time() - start
    calibration = predictor.calibration
    error = getattr(calibration, "rank_error", 0.0)
    return seconds, memory.grown, calibration.scores.numel(), error


def streaming() -> None:
    report = table(
        f"Calibrating on a stream, rank_error={ERROR:g}, each in a process of its own",
        "rows", "s", "MB", "scores kept", "rank error", "", "all scores: s", "MB",
    )  # fmt: skip
    for rows in STREAMED:
        few, everything = [_apart(stream, rows, error) for error in (ERROR, None)]
        seconds, memory, scores, error = few
        cells = f"{seconds:.2f}", f"{memory:.0f}", f"{scores:,}", f"{error:.2g}"
        is_flat = verdict(memory, FLAT)
        report.add_row(f"{rows:,}", *cells, is_flat, f"{everything[0]:.2f}", f"{everything[1]:.0f}")
    show(report)


def one_of_many() -> None:
    """Measure the work of one process of a large job, without running the model."""
    seconds, memory, scores, error = _apart(stream, SHARED // RANKS, ERROR / 2)
    report = table(
        f"One of {RANKS} processes that share {SHARED:,} rows, rank_error={ERROR:g}", "", ""
    )
    report.add_row("its rows", f"{SHARED // RANKS:,}")
    report.add_row("seconds of one core, without the model", f"{seconds:.1f}")
    report.add_row("MB for the summary on the way", f"{memory:.0f}")
    report.add_row("kB that it sends to each other process", f"{8 * scores / 1e3:.0f}")
    report.add_row("rank error of what it sends", f"{error:.2g}")
    report.add_row(f"seconds of one core to sort {SORTED:,} scores", f"{_apart(sorting):.1f}")
    show(report)


def sorting() -> float:
    """Return the seconds to sort all scores."""
    scores = torch.rand(SORTED, 1, dtype=torch.float64)
    start = time.process_time()
    Marginal().fit(scores).quantile(0.1)
    return time.process_time() - start


def _apart(work: Any, *arguments: Any) -> Any:
    """Run a function in a separate process."""
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
    held = [  # reused in a cycle
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
            if number:  # the first round is a warm-up
                times.append((time.perf_counter() - start, float(core)))
    if rank == 0:
        results.put([tuple(map(min, zip(*times, strict=True))) for times in spent.values()])
    dist.destroy_process_group()


def processes(rounds: int = 5) -> None:
    report = table(
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
        report.add_row(f"{rows:,}", f"{size}", *rates, verdict(ours / bare, SHARE), *cores)
    show(report)


def main() -> None:
    torch.set_num_threads(1)
    merging()
    streaming()
    one_of_many()
    processes()


if __name__ == "__main__":
    main()
