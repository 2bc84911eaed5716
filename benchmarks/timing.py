"""Timing and memory measurement on noisy machines, and tables of the results."""

from __future__ import annotations

import random
import resource
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table


def best_of(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the best seconds of each contestant, all run once per round.

    Interleaving spreads a slow moment of the machine over all contestants, and the best of many
    rounds is the least disturbed one. Code of one thread can be timed with ``time.thread_time``,
    which does not count while other processes run.
    """
    _settle_allocator()
    best = dict.fromkeys(contestants, float("inf"))
    order, shuffle = list(contestants), random.Random(0).shuffle
    for round_ in range(rounds + 1):
        shuffle(order)  # the previous contestant affects caches and heap
        for name in order:
            start = clock()
            contestants[name]()
            seconds = clock() - start
            if round_:  # the first round warms up
                best[name] = min(best[name], seconds)
    return best


def _settle_allocator() -> None:
    """Configure glibc to keep freed memory instead of returning it to the system.

    Its thresholds follow the largest block freed so far. Before that, the same code takes 25 or
    70 ms, depending on which contestant triggers the page faults.
    """
    block = torch.ones(7_500_000)
    del block


class Resident:
    """Measures how much the resident memory of this process grows, in MB (Linux)."""

    def __enter__(self) -> Resident:
        self._start = self._most = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self._most = max(self._most, self._now())

    @staticmethod
    def _now() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20

    @property
    def grown(self) -> float:
        """Largest growth since the start."""
        return self._most - self._start


def table(title: str, *columns: str) -> Table:
    """Return an empty table whose first column is left-aligned."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    result.caption = title  # printed by show(), above: rich would wrap a title to the table's width
    for index, name in enumerate(columns):
        result.add_column(name, justify="right" if index else "left")
    return result


def show(report: Table) -> None:
    """Print a table and an empty line."""
    console = Console()
    title, report.caption = report.caption, None
    console.print(title, style="italic", highlight=False)
    console.print(report)
    console.print()


def verdict(ratio: float, limit: float) -> str:
    """Return "ok" if a ratio is within its limit, else "ABOVE"."""
    return "ok" if ratio <= limit else "ABOVE"
