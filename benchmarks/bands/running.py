"""What is not known yet is measured, in processes of their own, and kept as it is found."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import NamedTuple

from benchmarks.bands.methods import GROUPS, Measured, known, library, measure, timed
from ffcp_paper.experiments import Study
from ffcp_paper.works import TRAINED, Settings


class Task(NamedTuple):
    """Methods to measure in one go, on one data set and seed."""

    data: str
    seed: int
    methods: tuple[str, ...]
    label: str


def missing(
    data: Sequence[str], seeds: Sequence[int], label: str, absent: Sequence[str]
) -> Iterator[Task]:
    """Give what is not known yet, the most important methods of every data set first."""
    for group in GROUPS:
        wanted = [name for name in group if library(name) not in absent]
        for name in data:
            for seed in seeds:
                unknown = [m for m in wanted if known(name, seed, m, label) is None]
                if unknown:
                    yield Task(name, seed, tuple(unknown), label)


def run(tasks: Sequence[Task], jobs: int, threads: int) -> int:
    """Do all tasks, saying what was found; give the number of those that failed."""
    if not tasks:
        return 0
    _trained(tasks)
    # Read by OpenMP when a process starts, and by joblib: a method must not take all cores.
    for name in ("OMP_NUM_THREADS", "LOKY_MAX_CPU_COUNT"):
        os.environ[name] = str(threads)
    failed = done = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting: dict[Future[list[str]], Task] = {pool.submit(_work, task): task for task in tasks}
        for future in as_completed(waiting):
            done += 1
            task = waiting.pop(future)
            error = future.exception()
            failed += error is not None
            lines = future.result() if error is None else traceback.format_exception(error)
            for line in lines:
                print(f"[{done}/{len(tasks)}] {task.data} {task.seed} {line}", flush=True)
    return failed


def _trained(tasks: Sequence[Task]) -> None:
    """Train the networks that are not in the cache, before anyone asks for them."""
    for data in dict.fromkeys(task.data for task in tasks):
        print(f"{data}: looking for networks", flush=True)
        seeds = list(dict.fromkeys(task.seed for task in tasks if task.data == data))
        Study(data, Settings()).networks(TRAINED, seeds)


def _work(task: Task) -> list[str]:
    result = {method: measure(task.data, task.seed, method, task.label) for method in task.methods}
    return [f"{method}: {_said(one)}" for method, one in result.items()]


def run_timed(data: str, seed: int, label: str, threads: int) -> None:
    """Time Auto on one data set, in a process of its own with so many threads."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        outcome = pool.submit(timed, data, seed, label, threads).result()
    print(f"{data}: learned from {outcome.rows:,} rows and calibrated in {outcome.seconds:.1f} s")


def _said(one: Measured) -> str:
    chosen = f", chose {one.chosen}" if one.chosen else ""
    return (
        f"score {one.score:.4g}, length {one.length:.4g}, coverage {one.coverage:.1%}, worst third "
        f"{one.worst:.1%}; processor {one.learn_busy:.1f} + {one.predict_busy:.1f} s{chosen}"
    )
