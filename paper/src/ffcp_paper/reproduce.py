"""Reproduction of the paper: train, measure, compare with the printed numbers, write.

:func:`run` makes tables and figures one after the other and writes each when it is finished.
Results are cached, so an interrupted run resumes, and a second run only writes.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from ffcp_paper.experiments import studies
from ffcp_paper.experiments.studies import Study
from ffcp_paper.experiments.tasks import (
    QUICK,
    ClassificationTask,
    RegressionTask,
    Results,
    Settings,
    Task,
    Training,
)
from ffcp_paper.ffcp_internals import put
from ffcp_paper.figures import paper_figures
from ffcp_paper.tables import paper_tables, render

Progress = Callable[[float, float, str], None]  # done, total, and a description


def settings_for(seeds: int | None = None, quick: bool = False) -> Settings:
    """Return the settings of the paper's protocol, or of a quick run.

    >>> settings_for().seeds, settings_for(quick=True).seeds, settings_for(3).seeds
    (5, 2, 3)
    """
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    chosen = QUICK if quick else Settings()
    return chosen if seeds is None else replace(chosen, seeds=seeds)


def run(
    names: Sequence[str] = (),
    seeds: int | None = None,
    quick: bool = False,
    out: str | Path = "reproduced",
    progress: Progress = lambda done, total, text: None,
    *,
    settings: Settings | None = None,
    finished: Callable[[render.Table], None] = lambda table: None,
) -> list[render.Table]:
    """Write tables and figures of the paper with our numbers, each when it is finished.

    Parameters
    ----------
    names
        Some of :data:`NAMES`; all that the present data allow if empty.
    seeds
        Number of seeds; by default 5 as in the paper, or 2 if quick.
    quick
        Few rows, epochs and data sets: a check of all steps, within 3 minutes.
    out
        The folder to write to: ``tables/NAME`` in five formats, ``figures/NAME`` in three,
        ``results.jsonl`` with the results of every seed, and ``settings.json``. Tables and
        figures that the same settings have written there before stay listed.
    progress
        Called with the estimated seconds done and in total, and a description.
    settings
        Size of the run, instead of ``seeds`` and ``quick``.
    finished
        Called with each table when it is written.

    Returns
    -------
    list of dict
        The tables, as in their JSON files.

    Raises
    ------
    ValueError
        If a name is unknown or the number of seeds is not positive.

    Examples
    --------
    >>> written = run(["regression_bands"], out="somewhere")  # doctest: +SKIP
    >>> written[0]["verdict"]["text"]  # doctest: +SKIP
    'The claim holds in 8 of 14 rows (FFCP, best on test: 4 of 7; FFCP, auto: 4 of 7).'
    """
    check_names(names)
    chosen = settings_for(seeds, quick) if settings is None else settings
    wanted = names or (*paper_tables.NAMES, *paper_figures.available_figures(chosen))
    plan = _plan([name for name in paper_tables.NAMES if name in wanted], chosen)
    pictures = [name for name in paper_figures.FIGURES if name in wanted]
    costs = [cost for listed in plan.values() for _, cost in listed]
    bar = _Bar(progress, sum(costs) + sum(map(paper_figures.cost, pictures)))
    runner = _Runner(chosen, bar, [task for listed in plan.values() for task, _ in listed])
    log = _Log(Path(out), _command(names, seeds, quick), chosen, quick)
    written: list[render.Table] = []
    for name, listed in plan.items():
        for task, cost in listed:
            runner.run(task, cost)
            log.save(runner.result)
        table = paper_tables.build(name, runner.result, chosen)
        render.write(table, Path(out))
        written.append(table)
        log.add("tables", name)
        log.save(runner.result)
        finished(table)
    for name in pictures:
        bar.start(paper_figures.cost(name))
        paper_figures.write(
            [name], out, chosen, lambda done, total, text: bar.update(done / total, text)
        )
        bar.end(name)
        log.add("figures", name)
        log.save(runner.result)
    return written


#: All tables and figures.
NAMES = (*paper_tables.NAMES, *paper_figures.FIGURES)


def check_names(names: Sequence[str]) -> None:
    """Raise on a name that is neither a table nor a figure.

    >>> check_names(["regression_bands", "overview"])
    """
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        listed = ", ".join(NAMES)
        raise ValueError(f"unknown table or figure {unknown[0]!r}: choose from {listed}")


class _Log:
    """Writes the settings of a run and the results of every seed so far.

    Output of an earlier call with as many seeds in the same folder stays listed, with its time:
    a run that was interrupted and resumed is one run.
    """

    def __init__(self, out: Path, command: str, settings: Settings, quick: bool) -> None:
        self._out, self._clock = out, time.monotonic()
        self._about: dict[str, Any] = {
            "command": command,
            "seeds": settings.seeds,
            "quick": quick,
            "versions": _versions(),
            "machine": _machine(),
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "tables": [],
            "figures": [],
            "earlier": [],
        }
        self._results: dict[str, Any] = {}  # by what identifies them, as JSON
        previous = _previous(out)
        if all(previous.get(key) == self._about[key] for key in ("seeds", "quick")):
            self._continue(previous)

    def _continue(self, previous: dict[str, Any]) -> None:
        call = {key: previous[key] for key in ("command", "started", "seconds")}
        self._about["earlier"] = [*previous.get("earlier", []), call]
        for kind in ("tables", "figures"):
            self._about[kind] = list(previous[kind])
        results = self._out / "results.jsonl"
        if results.is_file():
            self._keep(map(json.loads, results.read_text(encoding="utf-8").splitlines()))

    def _keep(self, records: Iterable[dict[str, Any]]) -> None:
        self._results.update((json.dumps(one["of"]), one) for one in records)

    def add(self, kind: str, name: str) -> None:
        """Record that a table or a figure is finished."""
        every = paper_tables.NAMES if kind == "tables" else tuple(paper_figures.FIGURES)
        self._about[kind] = [one for one in every if one in (*self._about[kind], name)]

    def save(self, result: Results) -> None:
        """Write all results so far."""
        self._about["seconds"] = round(time.monotonic() - self._clock, 1)
        self._keep(result.records())
        lines = "".join(f"{json.dumps(one)}\n" for one in self._results.values())
        put(self._out / "results.jsonl", lines.encode())
        put(self._out / "settings.json", (json.dumps(self._about, indent=1) + "\n").encode())


def _previous(out: Path) -> dict[str, Any]:
    """Return the settings that an earlier call wrote; empty if there are none."""
    try:
        result = json.loads((out / "settings.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    wanted = ("command", "started", "seconds", "tables", "figures")
    return result if isinstance(result, dict) and all(key in result for key in wanted) else {}


def _plan(names: Sequence[str], settings: Settings) -> dict[str, list[tuple[Task, float]]]:
    """Return the tasks of each table with their estimated seconds.

    The first task on a data set that needs a kind of training does all trainings of that kind.
    """
    listed = {name: paper_tables.tasks(name, settings) for name in names}
    trainings: dict[tuple[str, str], set[Training]] = {}
    for task in itertools.chain.from_iterable(listed.values()):
        if isinstance(task, RegressionTask):
            trainings.setdefault((task.data, task.training.kind), set()).add(task.training)

    def cost(task: Task) -> float:
        if isinstance(task, ClassificationTask):
            return task.cost
        return task.cost(settings, len(trainings.pop((task.data, task.training.kind), ())))

    return {name: [(task, cost(task)) for task in tasks] for name, tasks in listed.items()}


class _Bar:
    """Adds up the progress of tasks that differ in size."""

    def __init__(self, progress: Progress, total: float) -> None:
        self._progress, self._total = progress, total
        self._done = self._cost = self._share = 0.0

    def start(self, cost: float) -> None:
        self._cost, self._share = cost, 0.0

    def update(self, share: float, text: str) -> None:
        """Report the progress of a task; it never decreases."""
        self._share = max(self._share, min(1.0, share))
        self._progress(self._done + self._share * self._cost, self._total, text)

    def end(self, text: str) -> None:
        self._done += self._cost
        self._cost = 0.0
        self._progress(self._done, self._total, text)


class _Runner:
    """Runs tasks, with one data set in memory at a time."""

    def __init__(self, settings: Settings, bar: _Bar, planned: Sequence[Task] = ()) -> None:
        self.result = Results()
        self._settings, self._bar = settings, bar
        self._planned = [task for task in planned if isinstance(task, RegressionTask)]
        self._studies: dict[str, Study] = {}

    def run(self, task: Task, cost: float) -> None:
        self._bar.start(cost)
        if isinstance(task, ClassificationTask):
            studies.collect_labels(task, self._settings, self.result, self._bar.update)
            self._bar.end(task.network)
            return
        study = self._study(task.data)
        study.collect(task, self.result)
        self._bar.end(task.data)

    def _study(self, data: str) -> Study:
        if data not in self._studies:
            planned = [task.training for task in self._planned if task.data == data]
            self._studies[data] = Study(data, self._settings, self._bar.update, planned)
        for other, study in self._studies.items():
            if other != data:
                study.release()
        return self._studies[data]


# -- description of a run ----------------------------------------------------------------------


def _command(names: Sequence[str], seeds: int | None, quick: bool) -> str:
    """Return the command of a run, without its output folder."""
    parts = ["ffcp-paper", "reproduce", *names]
    parts += [] if seeds is None else ["--seeds", str(seeds)]
    parts += ["--quick"] if quick else []
    return shlex.join(parts)


def _versions() -> dict[str, str]:
    result = {"python": platform.python_version()}
    for package in ("ffcp", "ffcp-paper", "torch", "numpy", "scikit-learn", "scipy", "pandas"):
        try:
            result[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return result


def _machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": _memory_gb(),
    }


def _processor() -> str:
    """Return the name of the processor; only Linux gives more than its family."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _memory_gb() -> float | None:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on every system
        return None
    return round(size / 2**30, 1)
