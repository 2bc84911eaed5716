"""``ffcp fit`` compared with typical choices in other libraries: ``python -m benchmarks.tables``.

All methods use the same rows for training, calibration and test; ffcp stops its training early on
some of the training rows. Targets are divided by the mean absolute training target. Seconds, and
the minutes of ``ffcp fit``, are processor time, which other processes do not affect. Results are
stored as they are computed, those of a changed ffcp under a separate ``--label``; an interrupted
run resumes.

MAPIE and crepes run in the Python that ``--peers`` names, by default this one:

    pip install 'mapie==1.6.*' 'crepes==0.9.*'
    python -m benchmarks.tables --data star com bike --seeds 100 101
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pandas as pd
import torch

from benchmarks.intervals.cases import ALPHA, DATA, SETTINGS
from benchmarks.intervals.comparison import Limit, ratio
from ffcp import metrics, tables
from ffcp.tables import splitting, training, trees
from ffcp_paper.experiments.studies import Study, available

OURS = "ffcp fit"
FFCP, PEERS = "ffcp", ("mapie", "crepes")
# With many rows or columns a forest of 500 trees takes too long; the page reports the loss.
_TREES, _FEWER = 500, dict.fromkeys(("synthetic", "fb1", "blog", "king_county"), 100)
_MEAN = 0.90  # limit of the geometric mean of ratios to the best peer
_PAGE = Path(__file__).parents[1] / "docs" / "how_it_was_measured.md"
_MARKS = ("<!-- measured: python -m benchmarks.tables --write -->", "<!-- end of measured -->")
Array = np.ndarray[Any, Any]
Result = dict[str, Any]


class Task(NamedTuple):
    """One measurement: a library on a data set and seed."""

    data: str
    seed: int
    library: str
    label: str  # of a state of ffcp; none for peers
    minutes: float
    trees: int
    threads: int
    peers: str

    @property
    def key(self) -> tuple[str, int, str, str]:
        return (self.data, self.seed, self.library, self.label)


# -- measuring -------------------------------------------------------------------------------------


class Rows(NamedTuple):
    x: Array
    y: Array
    parts: splitting.RowSplit

    @property
    def learned(self) -> Array:
        return np.concatenate([self.parts.train, self.parts.stop])


def rows_of(name: str, seed: int, minutes: float) -> Rows:
    data = Study(name, SETTINGS).table(seed)
    most = splitting.most_rows(data.x.shape[1] + 1, 60 * minutes)  # as ffcp fit divides them
    parts = splitting.divide(len(data.y), ALPHA, seed, crossing=True, most=most)
    rows = Rows(data.x.astype(np.float64), data.y, parts)
    return rows._replace(y=data.y / np.abs(data.y[rows.learned]).mean())


def judged(ends: Array, rows: Rows, seconds: float) -> Result:
    interval = (torch.from_numpy(ends[:, 0].copy()), torch.from_numpy(ends[:, 1].copy()))
    target = torch.from_numpy(rows.y[rows.parts.test])
    return {
        "score": float(metrics.interval_score(interval, target, ALPHA)),
        "length": float(metrics.mean_length(interval)),
        "coverage": float(metrics.coverage(interval, target)),
        "worst third": float(metrics.group_coverage(interval, target).worst),
        "seconds": seconds,
        "calibrated": len(rows.parts.calibrate),
        "tested": len(target),
    }


def measure(task: Task) -> dict[str, Result]:
    """Return the metrics of all methods of a library, by name."""
    torch.set_num_threads(task.threads)
    rows = rows_of(task.data, task.seed, task.minutes)
    return ours(rows, task) if task.library == FFCP else theirs(rows, task)


def ours(rows: Rows, task: Task) -> dict[str, Result]:
    frame = pd.DataFrame(rows.x, columns=[f"c{n}" for n in range(rows.x.shape[1])])
    frame["target"] = rows.y
    clock = SimpleNamespace(monotonic=lambda: time.process_time() / task.threads)
    start = time.process_time()
    with mock.patch.object(training, "time", clock), mock.patch.object(trees, "time", clock):
        fitted = tables.fit(frame, "target", alpha=ALPHA, minutes=task.minutes, seed=task.seed)
    intervals = fitted.predict(frame.iloc[rows.parts.test])
    seconds = time.process_time() - start
    about = fitted.about
    lower, prediction, upper = (intervals[name] for name in ("lower", "prediction", "upper"))
    inside = (lower <= prediction) & (prediction <= upper)
    details = {
        "method": about.method,
        "training": training.training_summary(about.training),
        "outside": float(1 - inside.mean()),
        "calibrated": fitted.calibrated,
    }
    return {OURS: judged(intervals[["lower", "upper"]].to_numpy(), rows, seconds) | details}


def theirs(rows: Rows, task: Task) -> dict[str, Result]:
    parts = {"train": rows.learned, "cal": rows.parts.calibrate, "test": rows.parts.test}
    arrays = {f"x_{part}": rows.x[some] for part, some in parts.items()}
    arrays |= {f"y_{part}": rows.y[some] for part, some in parts.items()}
    options = {"alpha": ALPHA, "seed": task.seed, "trees": task.trees, "threads": task.threads}
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "rows.npz", Path(folder) / "intervals.npz"
        np.savez(source, **arrays)
        command = [task.peers, Path(__file__).with_name("tables_peers.py"), task.library]
        command += [source, out, *(f"--{name}={value}" for name, value in options.items())]
        subprocess.run([str(word) for word in command], check=True)
        with np.load(out) as result:
            return {
                name: judged(result[name], rows, float(result[f"seconds {name}"]))
                for name in result.files
                if not name.startswith("seconds ")
            }


# -- storing ---------------------------------------------------------------------------------------

StoredResults = dict[tuple[str, int, str, str], dict[str, Result]]


def stored(path: Path) -> StoredResults:
    """Return stored results by data set, seed, library and label; truncated lines are skipped."""
    known: StoredResults = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            one = json.loads(line)
        except json.JSONDecodeError:
            continue
        known[one["data"], one["seed"], one["library"], one["label"]] = one["methods"]
    return known


def store(path: Path, task: Task, methods: Mapping[str, Result]) -> None:
    about = {"data": task.data, "seed": task.seed, "library": task.library, "label": task.label}
    own = {"minutes": task.minutes} if task.library == FFCP else {"trees": task.trees}
    line = {**about, **own, "threads": task.threads, "methods": methods}
    with path.open("a+") as file:
        file.seek(0)
        whole = file.read().endswith("\n") or not file.tell()
        file.write(("" if whole else "\n") + json.dumps(line) + "\n")


def run(tasks: Sequence[Task], jobs: int, threads: int, out: Path) -> int:
    """Run all tasks in parallel; return the number of failures."""
    # Read by OpenMP when a process starts, and by joblib: limits the cores of a method.
    for name in ("OMP_NUM_THREADS", "LOKY_MAX_CPU_COUNT"):
        os.environ[name] = str(threads)
    failed = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting: dict[Future[dict[str, Result]], Task] = {
            pool.submit(measure, task): task for task in tasks
        }
        for done, future in enumerate(as_completed(waiting), 1):
            task = waiting[future]
            where = f"{time.strftime('%H:%M')} [{done}/{len(tasks)}] {task.data} {task.seed}"
            if error := future.exception():
                failed += 1
                print(where, task.library, *traceback.format_exception(error), flush=True)
                continue
            store(out, task, future.result())
            for name, result in future.result().items():
                print(where, f"{name}: {_summary(result)}", flush=True)
    return failed


def _summary(result: Result) -> str:
    numbers = (
        f"score {result['score']:.4g}, length {result['length']:.4g}, coverage "
        f"{result['coverage']:.1%}, worst third {result['worst third']:.1%}, "
        f"{result['seconds']:.0f} s"
    )
    own = [result[name].split("\n")[0] for name in ("method", "training") if name in result]
    return "; ".join([numbers, *own])


# -- showing ---------------------------------------------------------------------------------------

Runs = dict[str, list[dict[str, Result]]]  # of every data set, all methods of every seed


def together(known: StoredResults, names: Sequence[str], seeds: Sequence[int], label: str) -> Runs:
    """Return the methods of every data set and seed for which ours is known."""
    runs: Runs = {}
    for name in names:
        for seed in seeds:
            methods = dict(known.get((name, seed, FFCP, label), {}))
            for library in PEERS:
                methods |= known.get((name, seed, library, ""), {})
            if OURS in methods:
                runs.setdefault(name, []).append(methods)
    return runs


def means(seeds: Sequence[Mapping[str, Result]]) -> dict[str, dict[str, float]]:
    """Return means over seeds, of methods that all seeds have."""
    methods = [method for method in seeds[0] if all(method in one for one in seeds)]
    numbers = ("score", "length", "coverage", "worst third", "seconds")
    return {
        method: {key: float(np.mean([one[method][key] for one in seeds])) for key in numbers}
        for method in methods
    }


def show(runs: Runs) -> str:
    """Return a table of means over seeds, the best interval score of a data set in bold."""
    lines = [
        "| data (seeds) | method | interval score | length | coverage | worst third | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, seeds in runs.items():
        mean = means(seeds)
        best = min(mean, key=lambda method: mean[method]["score"])
        for method, one in mean.items():
            score = f"{one['score']:.3g}"
            score = f"**{score}**" if method == best else score
            lines.append(
                f"| {name} ({len(seeds)}) | {method} | {score} "
                f"| {one['length']:.3g} | {one['coverage']:.1%} | {one['worst third']:.1%} "
                f"| {one['seconds']:.0f} |"
            )
    return "\n".join(lines)


def ratios(runs: Runs) -> dict[str, list[float]]:
    """Return our interval scores divided by those of the best peer on a data set."""
    found = {}
    for name, seeds in runs.items():
        mean = means(seeds)
        others = [method for method in mean if method != OURS]
        if others:
            best = min(others, key=lambda method: mean[method]["score"])
            found[name] = [one[OURS]["score"] / one[best]["score"] for one in seeds]
    return found


def limits(runs: Runs) -> Iterator[Limit]:
    """Yield the limits, and whether they hold."""
    found = ratios(runs)
    if not found:
        return
    mean = ratio(list(found.values()))
    about = f"interval score / best peer, geometric mean of {len(found)} data sets"
    yield Limit(about, str(mean), f"{_MEAN:.2f}", mean.value <= _MEAN)
    paired = {name: ratio([each]) for name, each in found.items()}
    if not all(math.isnan(one.low) for one in paired.values()):  # one seed has no interval
        worse = [f"{name} {one}" for name, one in paired.items() if one.low > 1]
        about = "interval score / best peer: data sets whose paired interval lies wholly above 1.00"
        yield Limit(about, "; ".join(worse) or "none", "none", not worse)
    outside = max(one[OURS].get("outside", 0.0) for seeds in runs.values() for one in seeds)
    yield Limit("point predictions outside their interval", f"{outside:.1%}", "0.0%", not outside)


def verdict(runs: Runs) -> str:
    """Return where ours is best, where its coverage is lowest, and which limits hold."""
    found = {name: ratio([each]) for name, each in ratios(runs).items()}
    won = [name for name, one in found.items() if one.value < 1]
    listed = ", ".join(f"{name} {one}" for name, one in found.items())
    away = {name: deviations([one[OURS] for one in seeds]) for name, seeds in runs.items()}
    lowest = min(away, key=lambda name: away[name])
    held = "".join(
        f"\n- {one.about}: {one.measured}, limit {one.limit}: "
        f"{'holds' if one.holds else 'DOES NOT HOLD'}"
        for one in limits(runs)
    )
    return (
        f"`{OURS}` has the best mean interval score on {len(won)} of {len(found)} data sets; "
        f"divided by that of the best other, paired, with 95 % intervals: {listed}. Its coverage "
        f"is lowest on {lowest}, {away[lowest]:+.1f} standard deviations from {1 - ALPHA:.0%}.\n"
        f"{held}"
    )


def deviations(results: Sequence[Result]) -> float:
    """Return how many standard deviations of split CP the mean coverage is from its level.

    Rows used for selection do not calibrate, so the true deviation is slightly smaller.
    """
    away = math.fsum(one["coverage"] - (1 - ALPHA) for one in results)
    spread = math.fsum(1 / one["tested"] + 1 / one["calibrated"] for one in results)
    return away / math.sqrt(ALPHA * (1 - ALPHA) * spread)


def write(page: Path, text: str) -> None:
    """Write a text between the marks of a page."""
    before, rest = page.read_text().split(_MARKS[0])
    after = rest.split(_MARKS[1])[1]
    page.write_text(f"{before}{_MARKS[0]}\n\n{text}\n\n{_MARKS[1]}{after}")


def main() -> None:
    asked = _asked()
    known = stored(asked.out)
    tasks = [] if asked.stored else [one for one in _tasks(asked) if one.key not in known]
    failed = run(tasks, asked.jobs, asked.threads, asked.out) if tasks else 0
    runs = together(stored(asked.out), asked.data, asked.seeds, asked.label)
    if runs:
        seeds = f"Seeds {', '.join(map(str, asked.seeds))}."
        text = f"{show(runs)}\n\n{seeds} {verdict(runs)}"
        print(text)
        if asked.write:
            write(asked.write, text)
    sys.exit(1 if failed else 0)


def _tasks(asked: argparse.Namespace) -> Iterator[Task]:
    for name in filter(available, asked.data):
        trees = asked.trees or _FEWER.get(name, _TREES)
        given = (asked.minutes, trees, asked.threads, asked.peers)
        for seed in asked.seeds:
            for library in asked.libraries:
                label = asked.label if library == FFCP else ""
                yield Task(name, seed, library, label, *given)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=DATA)
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101, 102, 103, 104])
    parser.add_argument("--minutes", type=float, default=1.0, help="training time of ffcp fit")
    parser.add_argument(
        "--peers", default=sys.executable, help="the Python that has MAPIE and crepes"
    )
    parser.add_argument("--libraries", nargs="+", default=[FFCP, *PEERS], choices=[FFCP, *PEERS])
    parser.add_argument("--trees", type=int, help="number of trees; by default 500 or 100")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--label", default="", help="store results of a changed ffcp separately")
    parser.add_argument("--stored", action="store_true", help="show stored results only")
    parser.add_argument("--out", type=Path, default=Path("benchmarks_tables.jsonl"))
    parser.add_argument("--write", nargs="?", const=_PAGE, type=Path, metavar="PAGE",
                        help=f"put the table into a page, or docs/{_PAGE.name}")  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    main()
