"""Run the missing measurements in separate processes, and store each result."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple

from benchmarks.intervals import methods
from benchmarks.intervals.cases import PROBLEMS, QUANTILES, SETTINGS, Case
from benchmarks.intervals.methods import CQR, GROUPS, ON_PROBLEMS, Measured, known, library, measure
from ffcp_paper.experiments.studies import Study
from ffcp_paper.experiments.tasks import TRAINED, Training


class Task(NamedTuple):
    """Methods to measure together, on one case."""

    case: Case
    methods: tuple[str, ...]
    label: str


def missing(
    cases: Sequence[Case], wanted: Sequence[str], label: str, absent: Sequence[str]
) -> Iterator[Task]:
    """Yield the missing measurements, the most important methods of every case first."""
    for group in GROUPS:
        names = [name for name in group if name in wanted and library(name) not in absent]
        for case in cases:
            own = [name for name in names if case.data not in PROBLEMS or name in ON_PROBLEMS]
            unknown = [name for name in own if known(case, name, label) is None]
            if unknown:
                yield Task(case, tuple(unknown), label)


def run(tasks: Sequence[Task], jobs: int, threads: int) -> int:
    """Train the networks that are missing, then do all tasks; return how many of them failed."""
    wanted: dict[tuple[str, Training], list[int]] = {}
    for task in tasks:
        trainings = [TRAINED, *([QUANTILES] if CQR in task.methods else [])]
        for training in trainings if task.case.data not in PROBLEMS else []:
            seeds = wanted.setdefault((task.case.data, training), [])
            seeds += [task.case.seed] if task.case.seed not in seeds else []
    # Read by OpenMP when a process starts, and by joblib: a method must not take all cores.
    for name in ("OMP_NUM_THREADS", "LOKY_MAX_CPU_COUNT"):
        os.environ[name] = str(threads)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        trained = {
            pool.submit(_train, data, training, seeds): f"{data}, networks of {training.kind}"
            for (data, training), seeds in wanted.items()
        }
        if failed := _done(trained):
            return failed
        return _done({pool.submit(_work, task): _named(task.case) for task in tasks})


def _done(waiting: dict[Future[list[str]], str]) -> int:
    """Print results as they complete; return how many failed."""
    failed = 0
    for done, future in enumerate(as_completed(waiting), 1):
        error = future.exception()
        failed += error is not None
        for line in future.result() if error is None else traceback.format_exception(error):
            print(f"[{done}/{len(waiting)}] {waiting[future]}: {line}", flush=True)
    return failed


def _named(case: Case) -> str:
    return f"{case.data} {case.seed}"


def _train(data: str, training: Training, seeds: list[int]) -> list[str]:
    """Train the networks of all seeds that are not in the cache at once."""
    Study(data, SETTINGS).networks(training, seeds)
    return [f"seeds {', '.join(map(str, seeds))}"]


def _work(task: Task) -> list[str]:
    result = {method: measure(task.case, method, task.label) for method in task.methods}
    return [f"{method}: {_summary(one)}" for method, one in result.items()]


def alone(function: Callable[..., Any], *arguments: Any, threads: int) -> Any:
    """Call a function in a separate process with a number of threads."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def run_timed(label: str, threads: int) -> methods.Timed:
    """Time fitting and calibrating Auto."""
    result: methods.Timed = alone(methods.timed, label, threads, threads=threads)
    return result


def _summary(one: Measured) -> str:
    chosen = f", chose {one.chosen}" if one.chosen else ""
    return (
        f"score {one.score:.4g}, length {one.length:.4g}, coverage {one.coverage:.1%}, worst third "
        f"{one.worst:.1%}; processor {one.learn:.1f} + {one.predict:.1f} s{chosen}"
    )
