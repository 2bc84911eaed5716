"""One HTML page of a reproduction: claims, tables, figures and settings.

The page is a single file that loads nothing: style, script and figures are inside it, and its
Content-Security-Policy forbids everything else. Its texts and tags are in ``templates``, where
every value is escaped; this module computes the values.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import ffcp
from ffcp_paper.ffcp_internals import put
from ffcp_paper.page.run_files import (
    UNAVAILABLE,
    Column,
    Part,
    Run,
    Table,
    measured,
    read_figure,
    read_run,
    read_table,
    shorten,
)

TITLE = "Fast Feature Conformal Prediction: the paper's claims, checked"

_MISSING = "-"
_LONG = 25  # rows; more scroll inside their table, under its header


class _Status(NamedTuple):
    """Status of a claim, with a mark, so that colour is not the only cue."""

    kind: str
    mark: str
    words: str
    headline: str


_HOLDS = _Status("holds", "✓", "holds", "held in full")
_PART = _Status("part", "◐", "holds in part", "held in part")
_FAILS = _Status("fails", "✗", "does not hold", "did not hold")
_NONE = _Status("none", "○", "no data", "could not be checked")


def write(folder: Path, out: Path | None = None) -> Path:
    """Write the report of a run as one HTML file.

    Parameters
    ----------
    folder
        What the run wrote: ``settings.json``, ``tables/NAME.json``, and ``figures/NAME.json`` with
        ``NAME.svg`` or ``NAME.png``.
    out
        The file to write, by default ``report.html`` in the folder; written atomically.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    FileNotFoundError
        If the settings or a table is missing. A missing figure is a note in the page.
    ValueError
        If a file is damaged; the message names it.

    Examples
    --------
    >>> import json, tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> settings = {"command": "ffcp-paper reproduce", "seeds": 1, "quick": True, "versions": {},
    ...             "machine": {}, "started": "2024-05-01T10:00:00", "seconds": 3.0,
    ...             "earlier": [], "tables": [], "figures": []}
    >>> _ = (folder / "settings.json").write_text(json.dumps(settings))
    >>> write(folder).name
    'report.html'
    """
    folder = Path(folder)
    out = folder / "report.html" if out is None else Path(out)
    put(out, page(folder).encode())
    return out


def page(folder: Path) -> str:
    """Return the text of the page that :func:`write` writes."""
    run = read_run(folder)
    tables = [read_table(folder / "tables" / f"{name}.json", name) for name in run.tables]
    figures = [read_figure(folder / "figures", name) for name in run.figures]
    style, script = _resource("report.css"), _resource("report.js")
    return _environment().get_template("report.html").render(
        title=TITLE,
        policy=_policy(style, script),
        # Our own, and inside tags whose content is not escaped.
        style=Markup(style),
        script=Markup(script),
        run=run,
        taken=_taken(run),
        counts=_counts(tables),
        tables=[_shown(table) for table in tables],
        figures=figures,
        lists={
            "Machine": {_MACHINE.get(key, key): run.machine[key] for key in _ordered(run.machine)},
            "Versions": run.versions,
        },
        version=ffcp.__version__,
    )  # fmt: skip


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("ffcp_paper.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"moment": _moment, "value": _value}
    return environment


def _resource(name: str) -> str:
    return (resources.files("ffcp_paper.page") / "templates" / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Allow this style and this script, by their hashes, and images inside the page; no more."""

    def allowed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; style-src {allowed(style)}; script-src {allowed(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


# -- the run -----------------------------------------------------------------------------------

_MACHINE = {
    "system": "System",
    "processor": "Processor",
    "cores": "Cores",
    "memory_gb": "Memory in GB",
}


def _ordered(machine: Mapping[str, Any]) -> list[str]:
    return [key for key in _MACHINE if key in machine] + [k for k in machine if k not in _MACHINE]


def _value(value: object) -> str:
    if value is None or value == "":
        return "unknown"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _moment(started: str) -> str | None:
    """Return a timestamp in readable form; ``None`` if it is not a timestamp."""
    try:
        # Python 3.10 does not read the Z that others write for UTC.
        moment = datetime.fromisoformat(re.sub("Z$", "+00:00", started))
    except ValueError:
        return None
    return moment.strftime("%Y-%m-%d %H:%M") + (moment.strftime(" %Z") if moment.tzinfo else "")


def _taken(run: Run) -> str:
    taken = _duration(run.seconds + sum(run.earlier))
    return f"{taken} in {1 + len(run.earlier)} calls" if run.earlier else taken


def _duration(seconds: float) -> str:
    """Return a duration in readable form.

    >>> _duration(8.2), _duration(125), _duration(7320)
    ('8 s', '2 min 5 s', '2 h 2 min')
    """
    if not math.isfinite(seconds):
        return _MISSING
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


# -- tables ------------------------------------------------------------------------------------


def _status(table: Table) -> _Status:
    if not table.of:
        return _NONE
    if table.held == table.of:
        return _HOLDS
    return _PART if table.held else _FAILS


def _counts(tables: Sequence[Table]) -> dict[str, int]:
    """Count the claims by status."""
    result = [_status(table) for table in tables]
    return {status.headline: result.count(status) for status in (_HOLDS, _PART, _FAILS, _NONE)}


@dataclass(frozen=True)
class _Head:
    label: str
    kind: str
    name: str  # with whose numbers these are
    source: str | None  # shown beside a label that does not say it


@dataclass(frozen=True)
class _Cell:
    """Text and sort key of a cell; ``None`` if it has no value."""

    text: str
    sort: str | None
    spread: str | None = None
    runs: int | None = None
    status: _Status | None = None
    classes: str = ""


@dataclass(frozen=True)
class _Row:
    cells: list[_Cell]
    unavailable: bool
    note: str | None


@dataclass(frozen=True)
class _Shown:
    """A table as the page shows it."""

    table: Table
    status: _Status
    heads: list[_Head]
    rows: list[_Row]
    notes: list[str]
    long: bool


def _shown(table: Table) -> _Shown:
    counts = _run_counts(table)
    return _Shown(
        table,
        _status(table),
        [_head(column) for column in table.columns],
        [_row(table, row, len(counts) > 1) for row in table.rows],
        [*_count_note(table, counts), *table.notes],
        len(table.rows) > _LONG,
    )


def _run_counts(table: Table) -> set[int]:
    """Return the numbers of runs behind the table's own means."""
    result = set()
    for column in table.columns:
        if column.kind == "number" and column.source != "paper":
            result |= {measured(row, column.key).n for row in table.rows}
    return {n for n in result if n is not None}


def _count_note(table: Table, counts: set[int]) -> list[str]:
    if len(counts) != 1 or any(note.startswith("Ours:") for note in table.notes):
        return []  # every cell has its own, or a note of the table
    (n,) = counts
    return [f"Ours: mean ± standard deviation of {n} runs." if n > 1 else "Ours: a single run."]


def _head(column: Column) -> _Head:
    # A label that names the source already is not marked again.
    if column.source and not re.search(rf"\b{column.source}\b", column.label, re.IGNORECASE):
        name = f"{column.label} ({column.source})"
        return _Head(column.label, column.kind, name, column.source)
    return _Head(column.label, column.kind, column.label, None)


def _row(table: Table, row: Part, count: bool) -> _Row:
    note = row.content.get("note")
    if not note or any(column.key == "note" for column in table.columns):
        note = None
    cells = [_cell(row, column, count) for column in table.columns]
    return _Row(cells, _unavailable(row), None if note is None else str(note))


def _unavailable(row: Part) -> bool:
    return str(row.content.get("note") or "").startswith(UNAVAILABLE)


def _cell(row: Part, column: Column, count: bool) -> _Cell:
    classes = f"{column.kind} {column.source}" if column.source else column.kind
    if column.kind == "number":
        return _number_cell(row, column, count, classes)
    value = row.content.get(column.key)
    if column.kind == "claim":
        return _claim_cell(row, column, value, classes)
    if value is None or value == "":
        return _Cell(_MISSING, None, classes=classes)
    if isinstance(value, dict | list):
        raise row.error(column.key, f"must be text, not {shorten(value)}")
    text = number_text(value) if isinstance(value, float) else str(value)
    return _Cell(text, text, classes=classes)


def _number_cell(row: Part, column: Column, count: bool, classes: str) -> _Cell:
    result = measured(row, column.key)
    text = number_text(result.mean, column.digits, column.percent)
    if result.mean is None or math.isnan(result.mean):
        return _Cell(text, None, classes=classes)
    spread = None
    if result.sd is not None and not math.isnan(result.sd) and math.isfinite(result.mean):
        digits = _shared_digits(result.mean, column)
        spread = number_text(result.sd, digits, column.percent)
        text = number_text(result.mean, digits, column.percent).removesuffix(" %")
    sort = repr(result.mean).replace("inf", "Infinity")
    return _Cell(text, sort, spread, result.n if count else None, classes=classes)


def _shared_digits(mean: float, column: Column) -> int:
    """Return the decimals of the mean, which its standard deviation takes too."""
    if column.digits is not None:
        return column.digits
    return _decimals(100 * mean if column.percent else mean)


def _claim_cell(row: Part, column: Column, value: object, classes: str) -> _Cell:
    if value is None:  # some rows are only there to be compared with
        status = _NONE if _unavailable(row) else None
        return _Cell(_MISSING, None, status=status, classes=classes)
    if not isinstance(value, bool):
        raise row.error(column.key, f"must be true, false or null, not {shorten(value)}")
    return _Cell("", str(int(value)), status=_HOLDS if value else _FAILS, classes=classes)


# -- numbers -----------------------------------------------------------------------------------


def number_text(value: float | None, digits: int | None = None, percent: bool = False) -> str:
    """Write a number as the tables show it.

    Parameters
    ----------
    value
        The number; ``None`` and not-a-number are shown as missing.
    digits
        Decimals, by default as many as give four significant digits.
    percent
        Whether the value is a fraction to be shown in percent.

    Returns
    -------
    str
        The text.

    Examples
    --------
    >>> number_text(0.90126, digits=1, percent=True)
    '90.1 %'
    >>> number_text(1234.5, digits=0), number_text(0.00012345), number_text(7)
    ('1,234', '0.0001234', '7')
    >>> number_text(float("inf")), number_text(float("nan"))
    ('infinite', '-')
    """
    if value is None or math.isnan(value):
        return _MISSING
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    shown = 100 * value if percent else value
    if digits is None:
        digits = _decimals(shown)
    return f"{shown:,.{max(digits, 0)}f}{' %' if percent else ''}"


def _decimals(value: float) -> int:
    """Return the decimals that show four significant digits, none for a whole number."""
    if value == int(value):
        return 0
    return max(0, 3 - math.floor(math.log10(abs(value))))
