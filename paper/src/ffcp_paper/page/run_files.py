"""Reading and checking of the files that a reproduction writes.

A missing or damaged file raises an error that names it and the wrong entry.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

UNAVAILABLE = "data not available"
"""A row whose ``note`` begins so is shown greyed."""

_LARGEST_SVG = 4_000_000  # bytes; a larger drawing is slow to show, and its PNG is taken


class Part:
    """An object of a JSON file whose entries are checked when they are read."""

    def __init__(self, path: Path, content: Any, where: str = "") -> None:
        self.path, self.where = path, where
        if not isinstance(content, dict):
            raise self.error("", f"must be an object, not {shorten(content)}")
        self.content: dict[str, Any] = content

    def error(self, key: str, problem: str) -> ValueError:
        """Return an error that names the file and the wrong entry."""
        place = ".".join(filter(None, (self.where, key))) or "its content"
        return ValueError(
            f"{self.path} is damaged: {place} {problem}. Run the command that wrote it again."
        )

    def get(self, key: str, *kinds: type, what: str) -> Any:
        """Return an entry if it is of one of the types, which ``what`` names."""
        if key not in self.content:
            raise self.error(key, "is missing")
        result = self.content[key]
        if not isinstance(result, kinds) or (isinstance(result, bool) and bool not in kinds):
            raise self.error(key, f"must be {what}, not {shorten(result)}")
        return result

    def text(self, key: str) -> str:
        """Return an entry that must be a text."""
        return str(self.get(key, str, what="text"))

    def whole(self, key: str) -> int:
        """Return an entry that must be a whole number."""
        return int(self.get(key, int, what="a whole number"))

    def number(self, key: str) -> float:
        """Return an entry that must be a number."""
        return float(self.get(key, int, float, what="a number"))

    def texts(self, key: str) -> list[str]:
        """Return an entry that must be a list of texts."""
        result = self.get(key, list, what="a list")
        for entry in result:
            if not isinstance(entry, str):
                raise self.error(key, f"must hold texts only, not {shorten(entry)}")
        return list(result)

    def part(self, key: str) -> Part:
        """Return an entry that must be an object."""
        result = self.get(key, dict, what="an object")
        return Part(self.path, result, ".".join(filter(None, (self.where, key))))

    def parts(self, key: str) -> list[Part]:
        """Return an entry that must be a list of objects."""
        result = self.get(key, list, what="a list")
        return [Part(self.path, entry, f"{key}[{i}]") for i, entry in enumerate(result)]


def shorten(value: object) -> str:
    """Return a wrong value as one short line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _load(path: Path) -> Part:
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {path}; pass a folder that a finished run has written"
        )
    try:
        return Part(path, json.loads(path.read_bytes()))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is damaged, it is not JSON ({error}). Run the command that wrote it again."
        ) from error


@dataclass(frozen=True)
class Run:
    """Settings of a run, from ``settings.json``; ``earlier`` has the seconds of previous calls."""

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


def read_run(folder: Path) -> Run:
    """Read the settings of a run from its folder."""
    result = _load(Path(folder) / "settings.json")
    earlier = result.parts("earlier")
    return Run(
        command=result.text("command"),
        seeds=result.whole("seeds"),
        quick=bool(result.get("quick", bool, what="true or false")),
        versions=result.part("versions").content,
        machine=result.part("machine").content,
        started=(earlier[0] if earlier else result).text("started"),
        seconds=result.number("seconds"),
        earlier=[call.number("seconds") for call in earlier],
        tables=_names(result, "tables"),
        figures=_names(result, "figures"),
    )


def _names(result: Part, key: str) -> list[str]:
    """Return names without repetition; they become file names, so no folders in them."""
    names = list(dict.fromkeys(result.texts(key)))
    for name in names:
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise result.error(key, f"may hold letters, digits, '_', '-' and '.', not {name!r}")
    return names


@dataclass(frozen=True)
class Column:
    """A column of a table: its key in the rows, and how it is shown."""

    key: str
    label: str
    kind: str
    digits: int | None
    percent: bool
    source: str | None


@dataclass(frozen=True)
class Table:
    """A table, with the claim it checks and in how many rows that held."""

    name: str
    title: str
    claim: str
    alpha: float | None
    held: int
    of: int
    verdict: str
    columns: list[Column]
    rows: list[Part]
    notes: list[str]


def read_table(path: Path, name: str) -> Table:
    """Read a table."""
    result = _load(path)
    verdict = result.part("verdict")
    held, of = verdict.whole("held"), verdict.whole("of")
    if not 0 <= held <= of:
        raise verdict.error("held", f"must lie between 0 and {of}, not {held}")
    columns = _pair([_read_column(column) for column in result.parts("columns")])
    if not columns:
        raise result.error("columns", "must not be empty")
    return Table(
        name=name,
        title=result.text("title"),
        claim=result.text("claim"),
        alpha=None if result.content.get("alpha") is None else result.number("alpha"),
        held=held,
        of=of,
        verdict=verdict.text("text"),
        columns=columns,
        rows=result.parts("rows"),
        notes=result.texts("notes"),
    )


def _read_column(result: Part) -> Column:
    kind, source = result.text("kind"), result.content.get("source")
    if kind not in ("text", "number", "claim"):
        raise result.error("kind", f"must be text, number or claim, not {kind!r}")
    if source not in ("ours", "paper", None):
        raise result.error("source", f"must be ours, paper or null, not {shorten(source)}")
    return Column(
        key=result.text("key"),
        label=result.text("label"),
        kind=kind,
        digits=None if result.content.get("digits") is None else result.whole("digits"),
        percent=bool(result.content.get("percent")),
        source=source,
    )


def _pair(columns: Sequence[Column]) -> list[Column]:
    """Rename columns called only "paper" to the name of our column beside them."""
    renamed = list(columns)
    for i, (before, column) in enumerate(itertools.pairwise(columns), 1):
        if column.source == "paper" and column.label.lower() == "paper" and before.source == "ours":
            renamed[i] = replace(column, label=before.label)
    return renamed


@dataclass(frozen=True)
class Figure:
    """A figure; without an address, ``absent`` says why it is not shown."""

    name: str
    title: str
    caption: str
    alt: str
    address: str | None  # as a data URI
    absent: str = ""


def read_figure(folder: Path, name: str) -> Figure:
    """Read a figure; a missing one must not prevent the rest of the page."""
    about = folder / f"{name}.json"
    if not about.is_file():
        return Figure(name, name, "", "", None, f"figures/{about.name} is missing.")
    result = _load(about)
    address = _svg(folder / f"{name}.svg") or _png(folder / f"{name}.png")
    absent = f"figures/{name}.svg and {name}.png are missing or damaged." if not address else ""
    return Figure(
        name, result.text("title"), result.text("caption"), result.text("alt"), address, absent
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


@dataclass(frozen=True)
class Measured:
    """A number of a table: its mean over n runs, with their standard deviation."""

    mean: float | None
    sd: float | None = None
    n: int | None = None


def measured(row: Part, key: str) -> Measured:
    """Read a number of a row: plain, or with its spread."""
    value = row.content.get(key)
    if not isinstance(value, dict):
        return Measured(_optional(row, key))
    inner = row.part(key)
    count = None if inner.content.get("n") is None else inner.whole("n")
    return Measured(_optional(inner, "mean"), _optional(inner, "sd"), count)


def _optional(part: Part, key: str) -> float | None:
    return None if part.content.get(key) is None else part.number(key)
