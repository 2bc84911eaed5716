"""One HTML page of a reproduction: what held, the tables, the figures, the settings.

The page is a single file that loads nothing: style, script and figures are inside it, and its
Content-Security-Policy forbids everything else.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any
from xml.etree import ElementTree

import ffcp
from ffcp_paper.core import put

TITLE = "Fast Feature Conformal Prediction: the paper's claims, checked"

UNAVAILABLE = "data not available"
"""A row whose ``note`` begins so is shown greyed."""

_MISSING = "-"
_LONG = 25  # rows; more scroll inside their table, under its header
_LARGEST_SVG = 4_000_000  # bytes; a larger drawing is slow to show, and its PNG is taken

# What a claim is called, with a mark, so that nothing is said by colour alone.
_HOLDS = ("holds", "✓", "holds")
_PART = ("part", "◐", "holds in part")
_FAILS = ("fails", "✗", "does not hold")
_NONE = ("none", "○", "no data")


def write(folder: Path, out: Path | None = None) -> Path:
    """Write the report of a run as one HTML file.

    Parameters
    ----------
    folder
        What the run wrote: ``settings.json``, ``tables/NAME.json``, and ``figures/NAME.json`` with
        ``NAME.svg`` or ``NAME.png``.
    out
        The file to write, by default ``report.html`` in the folder. It appears complete, or the
        old one stays.

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
    >>> import tempfile
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
    run = _read_run(folder)
    tables = [_read_table(folder / "tables" / f"{name}.json", name) for name in run.tables]
    figures = [_read_figure(folder / "figures", name) for name in run.figures]
    style, script = _resource("report.css"), _resource("report.js")
    return Template(_resource("report.html")).substitute(
        policy=escape(_policy(style, script)),
        title=escape(TITLE),
        style=style,
        script=script,
        lead=_lead(run),
        warning=_warning(run),
        summary=_summary(tables),
        tables="\n".join(map(_table, tables)) or "<p>This run made no tables.</p>",
        figures=_figures(figures),
        run=_run(run),
        version=escape(ffcp.__version__),
    )


def _resource(name: str) -> str:
    return (resources.files("ffcp_paper") / "page" / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Allow this style and this script, by their hashes, and images inside the page; no more."""

    def allowed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; style-src {allowed(style)}; script-src {allowed(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


# -- reading -----------------------------------------------------------------------------------


class _Part:
    """An object of a JSON file whose entries are checked when they are asked for."""

    def __init__(self, path: Path, content: Any, where: str = "") -> None:
        self.path, self.where = path, where
        if not isinstance(content, dict):
            raise self.error("", f"must be an object, not {_shorten(content)}")
        self.content: dict[str, Any] = content

    def error(self, key: str, problem: str) -> ValueError:
        place = ".".join(filter(None, (self.where, key))) or "its content"
        return ValueError(
            f"{self.path} is damaged: {place} {problem}. Run the command that wrote it again."
        )

    def get(self, key: str, *kinds: type, what: str) -> Any:
        if key not in self.content:
            raise self.error(key, "is missing")
        found = self.content[key]
        if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
            raise self.error(key, f"must be {what}, not {_shorten(found)}")
        return found

    def text(self, key: str) -> str:
        return str(self.get(key, str, what="text"))

    def whole(self, key: str) -> int:
        return int(self.get(key, int, what="a whole number"))

    def number(self, key: str) -> float:
        return float(self.get(key, int, float, what="a number"))

    def texts(self, key: str) -> list[str]:
        found = self.get(key, list, what="a list")
        for entry in found:
            if not isinstance(entry, str):
                raise self.error(key, f"must hold texts only, not {_shorten(entry)}")
        return list(found)

    def part(self, key: str) -> _Part:
        found = self.get(key, dict, what="an object")
        return _Part(self.path, found, ".".join(filter(None, (self.where, key))))

    def parts(self, key: str) -> list[_Part]:
        found = self.get(key, list, what="a list")
        return [_Part(self.path, entry, f"{key}[{i}]") for i, entry in enumerate(found)]


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _load(path: Path) -> _Part:
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {path}; name a folder that a finished run has written"
        )
    try:
        return _Part(path, json.loads(path.read_bytes()))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is damaged, it is not JSON ({error}). Run the command that wrote it again."
        ) from error


@dataclass(frozen=True)
class _Run:
    command: str
    seeds: int
    quick: bool
    versions: dict[str, Any]
    machine: dict[str, Any]
    started: str
    seconds: float
    earlier: list[float]
    tables: list[str]
    figures: list[str]


def _read_run(folder: Path) -> _Run:
    found = _load(Path(folder) / "settings.json")
    earlier = found.parts("earlier")
    return _Run(
        command=found.text("command"),
        seeds=found.whole("seeds"),
        quick=bool(found.get("quick", bool, what="true or false")),
        versions=found.part("versions").content,
        machine=found.part("machine").content,
        started=(earlier[0] if earlier else found).text("started"),
        seconds=found.number("seconds"),
        earlier=[call.number("seconds") for call in earlier],
        tables=_names(found, "tables"),
        figures=_names(found, "figures"),
    )


def _names(found: _Part, key: str) -> list[str]:
    """Return names without repetition; they become file names, so no folders in them."""
    names = list(dict.fromkeys(found.texts(key)))
    for name in names:
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise found.error(key, f"may hold letters, digits, '_', '-' and '.', not {name!r}")
    return names


@dataclass(frozen=True)
class _Column:
    key: str
    label: str
    kind: str
    digits: int | None
    percent: bool
    source: str | None


@dataclass(frozen=True)
class _Table:
    name: str
    title: str
    claim: str
    alpha: float | None
    held: int
    of: int
    verdict: str
    columns: list[_Column]
    rows: list[_Part]
    notes: list[str]

    @property
    def status(self) -> tuple[str, str, str]:
        if not self.of:
            return _NONE
        if self.held == self.of:
            return _HOLDS
        return _PART if self.held else _FAILS


def _read_table(path: Path, name: str) -> _Table:
    found = _load(path)
    verdict = found.part("verdict")
    held, of = verdict.whole("held"), verdict.whole("of")
    if not 0 <= held <= of:
        raise verdict.error("held", f"must lie between 0 and {of}, not {held}")
    columns = _pair([_read_column(column) for column in found.parts("columns")])
    if not columns:
        raise found.error("columns", "must not be empty")
    return _Table(
        name=name,
        title=found.text("title"),
        claim=found.text("claim"),
        alpha=None if found.content.get("alpha") is None else found.number("alpha"),
        held=held,
        of=of,
        verdict=verdict.text("text"),
        columns=columns,
        rows=found.parts("rows"),
        notes=found.texts("notes"),
    )


def _read_column(found: _Part) -> _Column:
    kind, source = found.text("kind"), found.content.get("source")
    if kind not in ("text", "number", "claim"):
        raise found.error("kind", f"must be text, number or claim, not {kind!r}")
    if source not in ("ours", "paper", None):
        raise found.error("source", f"must be ours, paper or null, not {_shorten(source)}")
    return _Column(
        key=found.text("key"),
        label=found.text("label"),
        kind=kind,
        digits=None if found.content.get("digits") is None else found.whole("digits"),
        percent=bool(found.content.get("percent")),
        source=source,
    )


def _pair(columns: Sequence[_Column]) -> list[_Column]:
    """Give a column called only "paper" the name of our column that it stands beside."""
    made = list(columns)
    for i, (before, column) in enumerate(itertools.pairwise(columns), 1):
        if column.source == "paper" and column.label.lower() == "paper" and before.source == "ours":
            made[i] = replace(column, label=before.label)
    return made


@dataclass(frozen=True)
class _Figure:
    name: str
    title: str
    caption: str
    alt: str
    address: str | None  # as a data URI
    absent: str = ""


def _read_figure(folder: Path, name: str) -> _Figure:
    """Read a figure; one that is missing must not cost the reader the rest of the page."""
    about = folder / f"{name}.json"
    if not about.is_file():
        return _Figure(name, name, "", "", None, f"figures/{about.name} is missing.")
    found = _load(about)
    address = _svg(folder / f"{name}.svg") or _png(folder / f"{name}.png")
    absent = f"figures/{name}.svg and {name}.png are missing or damaged." if not address else ""
    return _Figure(
        name, found.text("title"), found.text("caption"), found.text("alt"), address, absent
    )


def _svg(path: Path) -> str | None:
    if not path.is_file() or path.stat().st_size > _LARGEST_SVG:
        return None
    data = path.read_bytes()
    try:
        whole = ElementTree.fromstring(data).tag.endswith("svg")
    except ElementTree.ParseError:
        return None
    return _data_uri("image/svg+xml", data) if whole else None


def _png(path: Path) -> str | None:
    data = path.read_bytes() if path.is_file() else b""
    whole = data.startswith(b"\x89PNG\r\n\x1a\n") and b"IEND" in data[-12:]
    return _data_uri("image/png", data) if whole else None


def _data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


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


@dataclass(frozen=True)
class _Measured:
    mean: float | None
    sd: float | None = None
    n: int | None = None


def _measured(row: _Part, key: str) -> _Measured:
    value = row.content.get(key)
    if not isinstance(value, dict):
        return _Measured(_optional(row, key))
    inner = row.part(key)
    count = None if inner.content.get("n") is None else inner.whole("n")
    return _Measured(_optional(inner, "mean"), _optional(inner, "sd"), count)


def _optional(part: _Part, key: str) -> float | None:
    return None if part.content.get(key) is None else part.number(key)


# -- the page ----------------------------------------------------------------------------------


def _lead(run: _Run) -> str:
    seeds = "One seed" if run.seeds == 1 else f"{run.seeds} seeds"
    return f"{seeds}, started {_when(run.started)}, took {escape(_taken(run))}."


def _when(started: str) -> str:
    try:
        # Python 3.10 does not read the Z that others write for UTC.
        moment = datetime.fromisoformat(re.sub("Z$", "+00:00", started))
    except ValueError:
        return escape(started)
    zone = moment.strftime(" %Z") if moment.tzinfo else ""
    shown = moment.strftime("%Y-%m-%d %H:%M") + zone
    return f'<time datetime="{escape(started)}">{escape(shown)}</time>'


def _duration(seconds: float) -> str:
    """Write a time for people.

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


def _warning(run: _Run) -> str:
    if not run.quick:
        return ""
    return (
        '<p class="warning"><strong>A quick run.</strong> It does less than a full one, so its '
        "numbers are rough: they show that everything works, and may differ from the paper's for "
        "that reason alone.</p>"
    )


def _mark(status: tuple[str, str, str]) -> str:
    kind, mark, words = status
    return f'<span class="mark {kind}"><span aria-hidden="true">{mark}</span> {words}</span>'


def _summary(tables: Sequence[_Table]) -> str:
    if not tables:
        return '<p class="headline">This run checked no claims.</p>'
    items = "\n".join(map(_claim, tables))
    return f'<p class="headline">{_headline(tables)}</p>\n<ul class="claims">\n{items}\n</ul>'


def _headline(tables: Sequence[_Table]) -> str:
    """Count the claims by how they fared."""
    number = {
        status: sum(table.status == status for table in tables)
        for status in (_HOLDS, _PART, _FAILS, _NONE)
    }
    total = len(tables)
    ends = {_PART: "held in part", _FAILS: "did not hold", _NONE: "could not be checked"}
    rest = [f"{number[status]} {words}" for status, words in ends.items() if number[status]]
    start = f"Of {total} claim{'s' * (total > 1)} of the paper"
    full = f"<strong>{number[_HOLDS] or 'none'} held</strong> in full"
    return f"{', '.join([start, full, *rest])}."


def _claim(table: _Table) -> str:
    return (
        f"<li>{_mark(table.status)}"
        f'<div class="words"><p class="claim">{escape(table.claim)}</p>'
        f'<p class="text">{escape(table.verdict)}</p>'
        f'<p><a href="#table-{table.name}">{escape(table.title)}</a></p></div>'
        f"{_share(table)}</li>"
    )


def _share(table: _Table) -> str:
    if not table.of:
        return '<div class="share"></div>'
    return (
        f'<div class="share">{table.held} of {table.of}'
        '<svg viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="all" width="100" height="6"/>'
        f'<rect class="held" width="{100 * table.held / table.of:.1f}" height="6"/></svg></div>'
    )


def _table(table: _Table) -> str:
    label = f"title-{table.name}"
    counts = _counts(table)
    head = "".join(map(_head, table.columns))
    body = "\n".join(_row(table, row, len(counts) > 1) for row in table.rows)
    long = " long" if len(table.rows) > _LONG else ""
    notes = [*_count_note(table, counts), *table.notes]
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    rows = "1 row" if len(table.rows) == 1 else f"{len(table.rows)} rows"
    field = f"filter-{table.name}"
    return f"""<article id="table-{table.name}" aria-labelledby="{label}">
<h3 id="{label}">{escape(table.title)}</h3>
<p>Claim: {escape(table.claim)} {_mark(table.status)}</p>
<p class="about">{escape(table.verdict)}{_alpha(table.alpha)}</p>
<div class="controls"><label for="{field}" hidden>Filter the rows</label>
<input id="{field}" type="search" autocomplete="off" spellcheck="false" hidden>
<p class="count" role="status">{rows}</p></div>
<div class="scroll{long}" role="region" aria-labelledby="{label}">
<table aria-labelledby="{label}">
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
</div>
{f'<ul class="notes">{listed}</ul>' if listed else ""}
<p class="back"><a href="#summary">Back to the summary</a></p>
</article>"""


def _alpha(alpha: float | None) -> str:
    return "" if alpha is None else f" <span>alpha = {alpha:g}.</span>"


def _counts(table: _Table) -> set[int]:
    """Return the numbers of runs behind the table's own means."""
    found = set()
    for column in table.columns:
        if column.kind == "number" and column.source != "paper":
            found |= {_measured(row, column.key).n for row in table.rows}
    return {n for n in found if n is not None}


def _count_note(table: _Table, counts: set[int]) -> list[str]:
    if len(counts) != 1 or any(note.startswith("Ours:") for note in table.notes):
        return []  # every cell says its own, or the table does
    (n,) = counts
    return [f"Ours: mean ± standard deviation of {n} runs." if n > 1 else "Ours: a single run."]


def _head(column: _Column) -> str:
    source, name = "", column.label
    # A label that already says whose number it is needs no second word.
    if column.source and not re.search(rf"\b{column.source}\b", column.label, re.IGNORECASE):
        source = f' <span class="source">{column.source}</span>'
        name = f"{column.label} ({column.source})"
    return (
        f'<th scope="col" class="{column.kind}" data-kind="{column.kind}" '
        f'data-name="{escape(name)}" aria-sort="none">'
        f'<button type="button">{escape(column.label)}'
        f'<span class="arrow" aria-hidden="true"></span>{source}</button></th>'
    )


def _row(table: _Table, row: _Part, count: bool) -> str:
    note = _row_note(table, row)
    greyed = ' class="unavailable"' if _unavailable(row) else ""
    cells = "".join(
        _cell(row, column, first=i == 0, note=note if i == 0 else "", count=count)
        for i, column in enumerate(table.columns)
    )
    return f"<tr{greyed}>{cells}</tr>"


def _unavailable(row: _Part) -> bool:
    return str(row.content.get("note") or "").startswith(UNAVAILABLE)


def _row_note(table: _Table, row: _Part) -> str:
    note = row.content.get("note")
    if not note or any(column.key == "note" for column in table.columns):
        return ""
    return f' <span class="row-note">{escape(str(note))}</span>'


def _cell(row: _Part, column: _Column, *, first: bool, note: str, count: bool) -> str:
    text, key = _CONTENT[column.kind](row, column, count)
    tag, scope = ("th", ' scope="row"') if first else ("td", "")
    source = f" {column.source}" if column.source else ""
    sort = "" if key is None else f' data-sort="{escape(key)}"'
    return f'<{tag}{scope} class="{column.kind}{source}"{sort}>{text}{note}</{tag}>'


# Each of the three returns what the cell shows and what it is sorted by, None if it has no value.


def _text_cell(row: _Part, column: _Column, count: bool) -> tuple[str, str | None]:
    value = row.content.get(column.key)
    if value is None or value == "":
        return _MISSING, None
    if isinstance(value, dict | list):
        raise row.error(column.key, f"must be text, not {_shorten(value)}")
    if isinstance(value, float):
        value = number_text(value)
    return escape(str(value)), str(value)


def _number_cell(row: _Part, column: _Column, count: bool) -> tuple[str, str | None]:
    found = _measured(row, column.key)
    text = number_text(found.mean, column.digits, column.percent)
    if found.mean is None or math.isnan(found.mean):
        return text, None
    if found.sd is not None and not math.isnan(found.sd) and math.isfinite(found.mean):
        digits = _shared_digits(found.mean, column)
        spread = number_text(found.sd, digits, column.percent)
        mean = number_text(found.mean, digits, column.percent).removesuffix(" %")
        text = f'{mean} <span class="sd">± {spread}</span>'
    if count and found.n is not None:
        text += f' <span class="sd">(n = {found.n})</span>'
    return text, repr(found.mean).replace("inf", "Infinity")


def _shared_digits(mean: float, column: _Column) -> int:
    """Return the decimals of the mean, which its standard deviation takes too."""
    if column.digits is not None:
        return column.digits
    return _decimals(100 * mean if column.percent else mean)


def _claim_cell(row: _Part, column: _Column, count: bool) -> tuple[str, str | None]:
    value = row.content.get(column.key)
    if value is None:  # some rows are only there to be compared with
        return _mark(_NONE) if _unavailable(row) else _MISSING, None
    if not isinstance(value, bool):
        raise row.error(column.key, f"must be true, false or null, not {_shorten(value)}")
    return _mark(_HOLDS if value else _FAILS), "1" if value else "0"


_CONTENT = {"text": _text_cell, "number": _number_cell, "claim": _claim_cell}


def _figures(figures: Sequence[_Figure]) -> str:
    if not figures:
        return "<p>This run made no figures.</p>"
    return '<div class="figures">\n' + "\n".join(map(_figure, figures)) + "\n</div>"


def _figure(figure: _Figure) -> str:
    if figure.address is None:
        picture, button = f'<p class="absent">Not shown: {escape(figure.absent)}</p>', ""
    else:
        picture = f'<img src="{figure.address}" alt="{escape(figure.alt)}">'
        button = (
            '<button type="button" hidden>Enlarge '
            f'<span class="hear">{escape(figure.title)}</span></button>'
        )
    return (
        f'<figure id="figure-{figure.name}">{picture}<figcaption><h3>{escape(figure.title)}</h3>'
        f"<p>{escape(figure.caption)}</p>{button}</figcaption></figure>"
    )


_MACHINE = {
    "system": "System",
    "processor": "Processor",
    "cores": "Cores",
    "memory_gb": "Memory in GB",
}


def _run(run: _Run) -> str:
    settings = {
        "Command": f"<code>{escape(run.command)}</code>",
        "Seeds": str(run.seeds),
        "Kind": "quick" if run.quick else "full",
        "Started": _when(run.started),
        "Time taken": escape(_taken(run)),
    }
    machine = {_MACHINE.get(key, key): _value(run.machine[key]) for key in _ordered(run.machine)}
    versions = {name: _value(version) for name, version in run.versions.items()}
    parts = "\n".join(
        f"<div><h3>{title}</h3>\n{_list(entries)}</div>"
        for title, entries in (
            ("Settings", settings),
            ("Machine", machine),
            ("Versions", versions),
        )
    )
    return f'<div class="lists">{parts}</div>'


def _taken(run: _Run) -> str:
    taken = _duration(run.seconds + sum(run.earlier))
    return f"{taken} in {1 + len(run.earlier)} calls" if run.earlier else taken


def _ordered(machine: Mapping[str, Any]) -> list[str]:
    return [key for key in _MACHINE if key in machine] + [k for k in machine if k not in _MACHINE]


def _value(value: object) -> str:
    if value is None or value == "":
        return "unknown"
    return escape(f"{value:g}" if isinstance(value, float) else str(value))


def _list(entries: Mapping[str, str]) -> str:
    if not entries:
        return "<p>Not recorded.</p>"
    inside = "".join(f"<dt>{escape(name)}</dt><dd>{text}</dd>" for name, text in entries.items())
    return f"<dl>{inside}</dl>"
