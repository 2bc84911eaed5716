"""Tables and progress bars in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.table import Table

_WORDS = frozenset(["method", "layer", "split", "score", "guarantee", "name", "status", "about"])


def print_table(console: Console, columns: Sequence[str], rows: list[list[str]]) -> None:
    """Print a table with words left-aligned and numbers right-aligned."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in _WORDS else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def progress_bar(console: Console, *columns: ProgressColumn) -> Progress:
    """Return a bar that goes away in the end, and leaves no line in a log file."""
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
