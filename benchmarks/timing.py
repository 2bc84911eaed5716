"""Timing on noisy machines: interleave the contestants, keep the best of many rounds."""

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
    """Run all contestants once per round; give each one's best seconds.

    Interleaving lets a slow moment of the machine hit everyone, and the best of many rounds is
    the one that was disturbed least. Who works in one thread alone can give ``time.thread_time``
    as the clock, which stands still while others have the processor.
    """
    _settle_allocator()
    best = dict.fromkeys(contestants, float("inf"))
    order, shuffle = list(contestants), random.Random(0).shuffle
    for round_ in range(rounds + 1):
        shuffle(order)  # who comes before leaves its mark on caches and heap
        for name in order:
            start = clock()
            contestants[name]()
            seconds = clock() - start
            if round_:  # the first round warms up
                best[name] = min(best[name], seconds)
    return best


def _settle_allocator() -> None:
    """Make glibc keep freed memory instead of handing it back to the system.

    Its thresholds follow the largest block freed so far. Before that, the same code takes 25 or
    70 ms by the accident of who triggers the page faults, bare passes as often as ours.
    """
    block = torch.ones(7_500_000)
    del block


class Resident:
    """Watches how far the resident memory of this process rises, in MB (Linux)."""

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
        """The most it was above the beginning."""
        return self._most - self._start


def table(title: str, *columns: str) -> Table:
    """Make a plain table, first column to the left."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.caption = title  # printed by show(), above: rich would wrap a title to the table's width
    for index, name in enumerate(columns):
        made.add_column(name, justify="right" if index else "left")
    return made


def show(made: Table) -> None:
    """Print a table and an empty line."""
    console = Console()
    title, made.caption = made.caption, None
    console.print(title, style="italic", highlight=False)
    console.print(made)
    console.print()


def verdict(ratio: float, limit: float) -> str:
    """Say whether a ratio keeps its limit."""
    return "ok" if ratio <= limit else "ABOVE"
