"""The paper from beginning to end: train, measure, compare, write.

:func:`run` makes tables and figures one after the other and writes each when it is finished. All
that takes time is kept in the cache, so a run that was stopped goes on where it was, and a second
run only writes.
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
    Collected,
    LabelWork,
    Settings,
    Training,
    Work,
)
from ffcp_paper.ffcp_internals import put
from ffcp_paper.figures import paper_figures
from ffcp_paper.tables import paper_tables, render

Progress = Callable[[float, float, str], None]  # done, total, and what is being done


def settings_for(seeds: int | None = None, quick: bool = False) -> Settings:
    """Say how much is computed: the paper's protocol, or a quick run through everything.

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
    """Make tables and figures of the paper with our numbers; write each when it is finished.

    Parameters
    ----------
    names
        Which, of :data:`NAMES`; all that the data at hand allow if empty.
    seeds
        How many; 5 as in the paper, or 2 if quick, if not given.
    quick
        Few rows, epochs and data sets: a check that everything works, within 3 minutes.
    out
        The folder to write to: ``tables/NAME`` in five formats, ``figures/NAME`` in three,
        ``results.jsonl`` with the results of every seed, and ``settings.json``. Tables and
        figures that the same settings made there before stay listed.
    progress
        Called with what is done and what there is in total, in rough seconds, and with what is
        being done.
    settings
        How much is computed, in place of ``seeds`` and ``quick``.
    finished
        Called with each table when it is written.

    Returns
    -------
    list of dict
        The tables, as in their JSON files.

    Raises
    ------
    ValueError
        If a name is unknown or there are no seeds.

    Examples
    --------
    >>> made = run(["regression_bands"], out="somewhere")  # doctest: +SKIP
    >>> made[0]["verdict"]["text"]  # doctest: +SKIP
    'The claim holds in 8 of 14 rows (FFCP, best on test: 4 of 7; FFCP, auto: 4 of 7).'
    """
    check_names(names)
    chosen = settings_for(seeds, quick) if settings is None else settings
    wanted = names or (*paper_tables.NAMES, *paper_figures.at_hand(chosen))
    plan = _plan([name for name in paper_tables.NAMES if name in wanted], chosen)
    pictures = [name for name in paper_figures.FIGURES if name in wanted]
    costs = [cost for listed in plan.values() for _, cost in listed]
    bar = _Bar(progress, sum(costs) + sum(map(paper_figures.cost, pictures)))
    runner = _Runner(chosen, bar, [work for listed in plan.values() for work, _ in listed])
    log = _Log(Path(out), _command(names, seeds, quick), chosen, quick)
    made: list[render.Table] = []
    for name, listed in plan.items():
        for work, cost in listed:
            runner.do(work, cost)
            log.save(runner.result)
        table = paper_tables.build(name, runner.result, chosen)
        render.write(table, Path(out))
        made.append(table)
        log.add("tables", name)
        log.save(runner.result)
        finished(table)
    for name in pictures:
        bar.start(paper_figures.cost(name))
        paper_figures.write(
            [name], out, chosen, lambda done, total, text: bar.say(done / total, text)
        )
        bar.end(name)
        log.add("figures", name)
        log.save(runner.result)
    return made


#: The tables and figures that can be made.
NAMES = (*paper_tables.NAMES, *paper_figures.FIGURES)


def check_names(names: Sequence[str]) -> None:
    """Refuse a name that is neither a table nor a figure.

    >>> check_names(["regression_bands", "overview"])
    """
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        listed = ", ".join(NAMES)
        raise ValueError(f"there is no table or figure {unknown[0]!r}: choose from {listed}")


class _Log:
    """Writes what a run was and the results of every seed, as far as it has come.

    What an earlier call with as many seeds made in the same folder stays listed, with the time
    that it took: a run that was stopped and started again is one run.
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
        self._results: dict[str, Any] = {}  # by whose they are, as JSON
        before = _before(out)
        if all(before.get(key) == self._about[key] for key in ("seeds", "quick")):
            self._continue(before)

    def _continue(self, before: dict[str, Any]) -> None:
        call = {key: before[key] for key in ("command", "started", "seconds")}
        self._about["earlier"] = [*before.get("earlier", []), call]
        for kind in ("tables", "figures"):
            self._about[kind] = list(before[kind])
        results = self._out / "results.jsonl"
        if results.is_file():
            self._keep(map(json.loads, results.read_text(encoding="utf-8").splitlines()))

    def _keep(self, records: Iterable[dict[str, Any]]) -> None:
        self._results.update((json.dumps(one["of"]), one) for one in records)

    def add(self, kind: str, name: str) -> None:
        """Note that a table or a figure is made."""
        every = paper_tables.NAMES if kind == "tables" else tuple(paper_figures.FIGURES)
        self._about[kind] = [one for one in every if one in (*self._about[kind], name)]

    def save(self, result: Collected) -> None:
        """Write all that is found so far."""
        self._about["seconds"] = round(time.monotonic() - self._clock, 1)
        self._keep(result.records())
        lines = "".join(f"{json.dumps(one)}\n" for one in self._results.values())
        put(self._out / "results.jsonl", lines.encode())
        put(self._out / "settings.json", (json.dumps(self._about, indent=1) + "\n").encode())


def _before(out: Path) -> dict[str, Any]:
    """Read what an earlier call wrote; nothing if there is none, or another file of that name."""
    try:
        result = json.loads((out / "settings.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    wanted = ("command", "started", "seconds", "tables", "figures")
    return result if isinstance(result, dict) and all(key in result for key in wanted) else {}


def _plan(
    names: Sequence[str], settings: Settings
) -> dict[str, list[tuple[Work | LabelWork, float]]]:
    """List the work for each table, and guess its seconds.

    The first work on a data set that needs a kind of training has all of that kind done.
    """
    listed = {name: paper_tables.works(name, settings) for name in names}
    trainings: dict[tuple[str, str], set[Training]] = {}
    for work in itertools.chain.from_iterable(listed.values()):
        if isinstance(work, Work):
            trainings.setdefault((work.data, work.training.kind), set()).add(work.training)

    def cost(work: Work | LabelWork) -> float:
        if isinstance(work, LabelWork):
            return work.cost
        return work.cost(settings, len(trainings.pop((work.data, work.training.kind), ())))

    return {name: [(work, cost(work)) for work in works] for name, works in listed.items()}


class _Bar:
    """Adds up what is done, of pieces of work that differ in size."""

    def __init__(self, progress: Progress, total: float) -> None:
        self._progress, self._total = progress, total
        self._done = self._cost = self._share = 0.0

    def start(self, cost: float) -> None:
        self._cost, self._share = cost, 0.0

    def say(self, share: float, text: str) -> None:
        """Tell how far a piece of work is; it never goes back."""
        self._share = max(self._share, min(1.0, share))
        self._progress(self._done + self._share * self._cost, self._total, text)

    def end(self, text: str) -> None:
        self._done += self._cost
        self._cost = 0.0
        self._progress(self._done, self._total, text)


class _Runner:
    """Does pieces of work, with one data set in memory at a time."""

    def __init__(
        self, settings: Settings, bar: _Bar, coming: Sequence[Work | LabelWork] = ()
    ) -> None:
        self.result = Collected()
        self._settings, self._bar = settings, bar
        self._coming = [work for work in coming if isinstance(work, Work)]
        self._studies: dict[str, Study] = {}

    def do(self, work: Work | LabelWork, cost: float) -> None:
        self._bar.start(cost)
        if isinstance(work, LabelWork):
            studies.collect_labels(work, self._settings, self.result, self._bar.say)
            self._bar.end(work.network)
            return
        study = self._study(work.data)
        study.collect(work, self.result)
        self._bar.end(work.data)

    def _study(self, data: str) -> Study:
        if data not in self._studies:
            coming = [work.training for work in self._coming if work.data == data]
            self._studies[data] = Study(data, self._settings, self._bar.say, coming)
        for other, study in self._studies.items():
            if other != data:
                study.release()
        return self._studies[data]


# -- what a run was ----------------------------------------------------------------------------


def _command(names: Sequence[str], seeds: int | None, quick: bool) -> str:
    """Give the command of a run, without its folder, which says nothing about the results."""
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
    """Name the processor; only Linux tells more than its family."""
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
