"""Printing of text and tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def say(text: str) -> None:
    """Print text without markup or highlighting; only a terminal breaks lines, between words."""
    console = Console()
    console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def print_table(title: str | None, names: Iterable[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; columns of numbers are aligned to the right."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name, cells in zip(names, zip(*rows, strict=True), strict=True):
        numbers = all(cell[:1].isdigit() for cell in cells)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)
