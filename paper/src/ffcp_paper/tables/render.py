"""Rendering of tables as JSON, CSV, Markdown, LaTeX and text for a terminal."""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ffcp_paper.ffcp_internals import put

Row = dict[str, Any]
Table = dict[str, Any]


def cell(value: Any, column: dict[str, Any], spread: bool = True, short: bool = False) -> str:
    """Return a value as text.

    >>> column = {"kind": "number", "digits": 1, "percent": True}
    >>> cell({"mean": 0.9012, "sd": 0.005, "n": 5}, column)
    '90.1 ± 0.5'
    >>> cell(True, {"kind": "claim"}), cell(None, {"kind": "text"})
    ('yes', '')
    >>> cell(577.8132, {"kind": "number"}), cell(5.7732, {"kind": "number"})
    ('577.8', '5.773')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    middle, sd = (value["mean"], value["sd"]) if isinstance(value, dict) else (value, None)
    scale, digits = 100 if column.get("percent") else 1, column.get("digits", 3)
    if abs(middle) >= 100:
        digits = 0 if short else min(1, digits)  # keeps the column narrow
    shown = f"{scale * middle:.{digits}f}"
    if spread and sd is not None:
        shown += f" ± {scale * sd:.{digits}f}"
    return shown


def _headings(table: Table) -> list[str]:
    return [
        f"{column['label']} %" if column.get("percent") else str(column["label"])
        for column in table["columns"]
    ]


def _has_notes(table: Table) -> bool:
    return any(row.get("note") for row in table["rows"])


def _cells(table: Table, row: Row, layout: _Layout | None = None) -> list[str]:
    used = layout or _Layout(("ours", "paper", None))
    return [
        cell(row[c["key"]], c, c["source"] in used.spread, used.short) for c in table["columns"]
    ]


def to_csv(table: Table) -> str:
    """Write a table as CSV: full numbers, a column each for mean, deviation and count."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads: list[str] = []
    for column in table["columns"]:
        key = column["key"]
        heads += [key, f"{key}_sd", f"{key}_n"] if column["kind"] == "number" else [key]
    writer.writerow([*heads, "note"])
    for row in table["rows"]:
        cells: list[Any] = []
        for column in table["columns"]:
            value = row[column["key"]]
            if column["kind"] != "number":
                cells.append(cell(value, column))
            elif isinstance(value, dict):
                cells += [value["mean"], value["sd"], value["n"]]
            else:
                cells += [value, None, None]
        writer.writerow([*cells, row.get("note", "")])
    return out.getvalue()


def to_markdown(table: Table) -> str:
    """Write a table as Markdown, with its claim, verdict and notes."""
    notes = _has_notes(table)
    heads = [*_headings(table), *(["note"] if notes else [])]
    right = [c["kind"] == "number" for c in table["columns"]] + [False] * notes
    lines = [
        f"# {table['title']}",
        "",
        f"Claim: {table['claim']} {table['verdict']['text']}",
        "",
        _pipes(heads),
        _pipes(["--:" if number else "---" for number in right]),
    ]
    for row in table["rows"]:
        cells = _cells(table, row)
        lines.append(_pipes([*cells, *([row.get("note", "")] if notes else [])]))
    return "\n".join([*lines, "", *(f"- {note}" for note in table["notes"]), ""])


def _pipes(cells: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"


_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
}


def escape(text: str) -> str:
    r"""Escape text for LaTeX.

    >>> print(escape("a_b & 90 %"))
    a\_b \& 90 \%
    """
    return "".join(_LATEX.get(sign, sign) for sign in text)


def to_latex(table: Table) -> str:
    """Write a table as a LaTeX ``table`` that needs no package."""
    notes = _has_notes(table)
    heads = [*_headings(table), *(["note"] if notes else [])]
    places = "".join("r" if c["kind"] == "number" else "l" for c in table["columns"])
    lines = [
        r"\begin{table}",
        rf"\caption{{{escape(table['title'])}. {escape(table['claim'])} "
        rf"{escape(table['verdict']['text'])}}}",
        rf"\label{{tab:{table['name']}}}",
        rf"\begin{{tabular}}{{{places}{'l' if notes else ''}}}",
        r"\hline",
        " & ".join(map(escape, heads)) + r" \\",
        r"\hline",
    ]
    for row in table["rows"]:
        cells = _cells(table, row)
        cells += [row.get("note", "")] if notes else []
        lines.append(" & ".join(map(escape, cells)) + r" \\")
    return "\n".join([*lines, r"\hline", r"\end{tabular}", r"\end{table}", ""])


def to_text(table: Table, width: int = 80) -> str:
    """Write a table for a terminal; deviations are left out where they do not fit."""
    lines = textwrap.wrap(table["title"], width)
    lines += textwrap.wrap(f"Claim: {table['claim']} {table['verdict']['text']}", width)
    for layout in _LAYOUTS:
        body = _grid(table, layout)
        if max(map(len, body)) <= width:
            break
    lines += ["", *body, ""]
    for note in table["notes"]:
        lines += textwrap.wrap(note, width, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Layout:
    """How a table is compressed: whose deviations are shown, gaps, and the width of words."""

    spread: tuple[str | None, ...] = ("ours", "paper")
    gap: str = "  "
    words: int = 40
    short: bool = False


_LAYOUTS = (
    _Layout(),
    _Layout(("ours",)),
    _Layout(("ours",), " ", 14),
    _Layout(()),
    _Layout((), " ", 14),
    _Layout((), " ", 12, short=True),
    _Layout((), " ", 8, short=True),
)
_SHORT = {
    "coverage": "cov.",
    "feature": "feat.",
    "within": "in",
    "shorter": "short",
    "labels": "size",
}


def _grid(table: Table, layout: _Layout) -> list[str]:
    columns = table["columns"]
    right = [column["kind"] == "number" for column in columns]
    heads = [_heading(column, layout) for column in columns]
    height = max(map(len, heads))
    heads = [[""] * (height - len(head)) + head for head in heads]
    body = [
        [
            [text] if number else textwrap.wrap(text, layout.words, break_long_words=False) or [""]
            for text, number in zip(_cells(table, row, layout), right, strict=True)
        ]
        for row in table["rows"]
    ]
    widths = [
        max(map(len, sum([row[at] for row in body], heads[at]))) for at in range(len(columns))
    ]

    def lines(cells: Sequence[Sequence[str]]) -> list[str]:
        tall = max(map(len, cells))
        result = []
        for level in range(tall):
            words = [cell[level] if level < len(cell) else "" for cell in cells]
            placed = (
                text.rjust(size) if number else text.ljust(size)
                for text, size, number in zip(words, widths, right, strict=True)
            )
            result.append(layout.gap.join(placed).rstrip())
        return result

    grid = [*lines(heads), layout.gap.join("-" * size for size in widths)]
    noted = None
    for row, cells in zip(table["rows"], body, strict=True):
        known = sum(row[column["key"]] is not None for column in columns)
        name, note = row[columns[0]["key"]], row.get("note")
        if note and (name, note) != noted:  # once for all rows of a name
            grid.append(f"{name.ljust(widths[0])}{layout.gap}{note}")
        if not note or known > 1:  # more than the name
            grid += lines(cells)
        noted = name, note
    return grid


def _heading(column: dict[str, Any], layout: _Layout) -> list[str]:
    """Break a heading into short lines."""
    words = str(column["label"]).split(" ")
    if layout.short:
        words = [_SHORT.get(word, word) for word in words]
    if column.get("percent"):
        words[-1] += " %" if len(words[-1]) < 5 else ""
        words += [] if words[-1].endswith("%") else ["%"]
    return words


FORMATS: dict[str, Callable[[Table], str]] = {
    ".csv": to_csv,
    ".md": to_markdown,
    ".tex": to_latex,
    ".txt": to_text,
    ".json": lambda table: json.dumps(table, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
}


def write(table: Table, folder: Path) -> list[Path]:
    """Write a table into ``folder/tables`` in all formats, each file atomically."""
    places = []
    for suffix, render in FORMATS.items():  # JSON last: if it is there, the others are too
        place = Path(folder) / "tables" / f"{table['name']}{suffix}"
        put(place, render(table).encode())
        places.append(place)
    return places
