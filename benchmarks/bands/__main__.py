"""Measure Auto beside its candidates, an opponent and other libraries; say which limits hold.

On seven data sets, with the paper's networks and division. Results are kept one by one in the
cache (``FFCP_CACHE``), so that a run that was killed goes on where it was:

    python -m benchmarks.bands --seeds 100,101 --data com,bike --jobs 2
    python -m benchmarks.bands --write      # all of them; then docs/bands.md and its picture
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bands import page, picture
from benchmarks.bands.comparison import Results, limits, unmeasured
from benchmarks.bands.methods import (
    DATA,
    METHODS,
    Measured,
    Timed,
    known,
    known_time,
    missing_peers,
)
from benchmarks.bands.running import missing, run, run_timed
from benchmarks.timing import show, table
from ffcp_paper.experiments import available

_SEEDS = "5,6,7,8,9"  # which nothing was decided on: see "How it was decided" in docs/bands.md
_LARGEST, _CORES = "blog", 2  # where learning is timed: more than 20,000 training rows
_DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    asked = _asked()
    absent = [data for data in asked.data if not available(data)]
    for data in absent:
        print(f"{data} is left out: its files are not there (ffcp-paper fetch)")
    peers = missing_peers()
    for name in peers:
        print(f"{name} is left out: it is not installed (pip install {name})")
    data = [name for name in asked.data if name not in absent]
    tasks = list(missing(data, asked.seeds, asked.label, peers))
    failed = 0 if asked.stored else run(tasks, asked.jobs, asked.threads)
    if asked.time and not asked.stored and _LARGEST in data:
        run_timed(_LARGEST, asked.seeds[0], asked.label, _CORES)
    results = _stored(data, asked.seeds, asked.label)
    times = known_time(_LARGEST, asked.seeds[0], asked.label, _CORES)
    _print(results, times)
    if asked.write:
        (asked.write / "bands.md").write_text(page.text(results, times))
        picture.draw(asked.write / "bands.png")
        print(f"written: {asked.write / 'bands.md'} and bands.png")
    sys.exit(1 if failed else 0)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.bands",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", default=_SEEDS, type=_numbers, help=f"by default {_SEEDS}")
    parser.add_argument("--data", default=DATA, type=_names, help=f"by default {','.join(DATA)}")
    parser.add_argument("--jobs", default=1, type=int, help="processes at once")
    parser.add_argument("--threads", default=1, type=int, help="threads of each process")
    parser.add_argument("--time", action="store_true", help="time learning with two threads, alone")
    parser.add_argument("--label", default="", help="keep results of a changed ffcp apart")
    parser.add_argument("--stored", action="store_true", help="measure nothing, show what is known")
    parser.add_argument("--write", nargs="?", const=_DOCS, type=Path, metavar="FOLDER",
                        help="write bands.md and its picture, by default into docs")  # fmt: skip
    asked = parser.parse_args()
    if unknown := sorted(set(asked.data) - set(DATA)):
        parser.error(f"there is no data set {', '.join(unknown)}; there are {', '.join(DATA)}")
    return asked


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


# -- showing -----------------------------------------------------------------------------------


def _stored(data: Sequence[str], seeds: Sequence[int], label: str) -> Results:
    """Give all that is known."""
    results: dict[str, dict[int, dict[str, Measured]]] = {}
    for name in data:
        for seed in seeds:
            result = {method: known(name, seed, method, label) for method in METHODS}
            if some := {method: one for method, one in result.items() if one is not None}:
                results.setdefault(name, {})[seed] = some
    return results


def _print(results: Results, times: Timed | None) -> None:
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "200")  # rich would fold everything to 80
    for heading, *rows in page.tables(results):
        made = table(heading[0], *heading[1:])
        for row in rows:
            made.add_row(*row)
        show(made)
    for name in unmeasured(results):
        print(f"{name}: compared by Auto, but not among the candidates here (methods.py)")
    made = table("Limits", "what", "measured", "limit", "")
    for one in limits(results, times):
        made.add_row(one.about, one.measured, one.limit, page.verdict(one))
    show(made)


if __name__ == "__main__":
    main()
