"""Measure Auto beside its candidates and other libraries; show which limits hold.

On fifteen data sets, two series and three synthetic problems, with the paper's networks and
division of the rows. Each result is stored in the cache (``FFCP_CACHE``), so that a killed run can
be resumed:

    python -m benchmarks.intervals --seeds 100,101 --data com,bike --jobs 2
    python -m benchmarks.intervals --seeds 100 --methods Auto --label changed   # Auto alone, again
    python -m benchmarks.intervals --seeds 100,101 --stored --write FOLDER      # measures nothing
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.intervals import page, picture
from benchmarks.intervals.cases import DATA, PROBLEMS, SERIES, Case
from benchmarks.intervals.comparison import Results, limits
from benchmarks.intervals.methods import METHODS, Timed, known, missing_peers, time_key
from benchmarks.intervals.running import missing, run, run_timed
from benchmarks.timing import show, table
from ffcp_paper.data import result_cache as runs
from ffcp_paper.experiments.studies import available

_ALL = (*DATA, *SERIES, *PROBLEMS)
_PROBLEM_SEEDS = 20  # from the first seed on
_CORES = 2  # on which learning is timed
_DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    asked = _asked()
    absent = [name for name in asked.data if name not in PROBLEMS and not available(name)]
    for name in absent:
        print(f"{name} is left out: its files are not there (ffcp-paper data)")
    peers = missing_peers()
    for name in peers:
        print(f"{name} is left out: it is not installed (pip install {name})")
    cases = [
        Case(name, seed)
        for name in asked.data
        if name not in absent
        for seed in _seeds_of(name, asked.seeds)
    ]
    failed = 0
    if not asked.stored:
        failed = run(list(missing(cases, asked.methods, asked.label, peers)), asked.jobs, 1)
    if asked.time:
        run_timed(asked.label, _CORES)
    results, times = _stored(cases, asked.label), _known_time(asked.label)
    _print(results, times)
    if asked.write:
        (asked.write / "bands.md").write_text(page.text(results, times))
        picture.draw(asked.write / "bands.png")
        print(f"written: {asked.write / 'bands.md'} and bands.png")
    sys.exit(1 if failed else 0)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.intervals",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seeds",
        required=True,
        type=_numbers,
        help=f"separated by commas; problems take {_PROBLEM_SEEDS} from the first",
    )
    parser.add_argument(
        "--data",
        default=_ALL,
        type=_names,
        help=f"of {','.join(DATA + SERIES)} and the problems, by default all",
    )
    parser.add_argument(
        "--methods",
        default=list(METHODS),
        type=_methods,
        help=f"separated by semicolons: {';'.join(METHODS)}",
    )
    parser.add_argument("--jobs", default=1, type=int, help="processes at once")
    parser.add_argument("--time", action="store_true", help="time learning with two threads, alone")
    parser.add_argument("--label", default="", help="store results of a changed ffcp separately")
    parser.add_argument(
        "--stored", action="store_true", help="measure nothing, show stored results"
    )
    parser.add_argument("--write", nargs="?", const=_DOCS, type=Path, metavar="FOLDER",
                        help="write bands.md and its picture, by default into docs")  # fmt: skip
    asked = parser.parse_args()
    for given, there in ((asked.data, _ALL), (asked.methods, METHODS)):
        if unknown := [name for name in given if name not in there]:
            parser.error(f"unknown {unknown[0]!r}: choose from {'; '.join(there)}")
    return asked


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def _names(text: str) -> list[str]:
    """Read names of data sets; ``problems`` stands for those, which have commas in their names."""
    listed = [list(PROBLEMS) if name == "problems" else [name] for name in text.split(",")]
    return [name for names in listed for name in names]


def _methods(text: str) -> list[str]:
    return [name.strip() for name in text.split(";")]


def _seeds_of(name: str, seeds: Sequence[int]) -> Sequence[int]:
    return range(seeds[0], seeds[0] + _PROBLEM_SEEDS) if name in PROBLEMS else seeds


# -- showing -----------------------------------------------------------------------------------


def _stored(cases: Sequence[Case], label: str) -> Results:
    """Return all stored results."""
    results: Results = {}
    for case in cases:
        found = {method: known(case, method, label) for method in METHODS}
        if some := {method: one for method, one in found.items() if one is not None}:
            results.setdefault(case.data, {})[case.seed] = some
    return results


def _known_time(label: str) -> Timed | None:
    found = runs.known("interval_seconds", time_key(label, _CORES))
    return None if found is None else Timed(**found)


def _print(results: Results, times: Timed | None) -> None:
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "200")  # rich would fold everything to 80
    for heading, *rows in page.tables(results):
        made = table(heading[0], *heading[1:])
        for row in rows:
            made.add_row(*row)
        show(made)
    made = table("Limits", "what", "measured", "limit", "")
    for one in limits(results, times):
        made.add_row(one.about, one.measured, one.limit, page.verdict(one))
    show(made)


if __name__ == "__main__":
    main()
