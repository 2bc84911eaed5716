"""List of all data sets: which are present, and how to get the others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ffcp_paper.data import fetch
from ffcp_paper.data.datasets import DATASETS, FURTHER, DataSet
from ffcp_paper.data.files import DataFile, data_dir
from ffcp_paper.data.images import read

PRESENT, MISSING, DAMAGED, BUILT_IN = "present", "missing", "damaged", "built in"
COLUMNS = ("name", "status", "rows", "columns", "about")


@dataclass(frozen=True)
class Entry:
    """Description and status of one data set.

    Parameters
    ----------
    name, title
        Its name in the paper, and what it is about.
    status
        ``present``, ``missing``, ``damaged`` (only if files were checked) or ``built in``.
    rows, columns
        Samples and features, as in the papers.
    files
        Names of its files, of the ones that are missing or damaged if there are any.
    source
        Where these officially come from.
    place
        The folder that they belong into.
    todo
        One line on how to get them; ``None`` if all are present.
    """

    name: str
    title: str
    status: str
    rows: int
    columns: int
    files: tuple[str, ...]
    source: str
    place: Path
    todo: str | None


def entries(check: bool = False) -> list[Entry]:
    """List all data sets, the paper's in its order, then the others.

    Parameters
    ----------
    check
        Whether to read the files and compare their checksums, which takes a second or two.

    Examples
    --------
    >>> [entry.name for entry in entries()][:4]
    ['synthetic', 'com', 'fb1', 'fb2']
    >>> entries()[0].status
    'built in'
    """
    return [_entry(data, check) for data in (*DATASETS.values(), *FURTHER.values())]


def tabulate(listed: list[Entry]) -> list[list[str]]:
    """Format a line for each data set, in the order of :data:`COLUMNS`.

    >>> tabulate(entries())[0]
    ['synthetic', 'built in', '10,000', '100', 'a linear function with normal noise']
    """
    return [
        [entry.name, entry.status, f"{entry.rows:,}", f"{entry.columns:,}", entry.title]
        for entry in listed
    ]


def advice(listed: list[Entry]) -> list[str]:
    """Return one line for each missing or damaged data set that explains how to get it."""
    return [entry.todo for entry in listed if entry.todo is not None]


def _entry(data: DataSet, check: bool) -> Entry:
    damaged = [file for file in data.files if check and file.found and _damaged(file)]
    status, concerned = PRESENT, list(data.files)
    if not data.files:
        status = BUILT_IN
    elif data.missing:
        status, concerned = MISSING, data.missing
    elif damaged:
        status, concerned = DAMAGED, damaged
    sources = dict.fromkeys(file.source for file in concerned) or {data.source: None}
    return Entry(
        data.name,
        data.about,
        status,
        data.rows,
        data.columns,
        tuple(_name(file) for file in concerned),
        "; ".join(sources),
        concerned[0].place.parent if concerned else data_dir(),
        _todo(data, status, concerned) if status in (MISSING, DAMAGED) else None,
    )


def _todo(data: DataSet, status: str, concerned: list[DataFile]) -> str:
    ways = []
    if fetch.fetchable(data.name):
        # Files of unknown checksum are downloaded only on request.
        option = "" if fetch.verifiable(data.name) else " --unverified"
        ways.append(f"run 'ffcp-paper data fetch {data.name}{option}'")
    ways += [fetch.by_hand(file) for file in concerned]
    return f"{data.name} is {status}: {', or '.join(ways[:2])}" + "".join(
        f"; {way}" for way in ways[2:]
    )


def _name(file: DataFile) -> str:
    """Return the name of a file as it is on disk, or as it should be."""
    return (file.found or file.place).name


def _damaged(file: DataFile) -> bool:
    if file.sha256 is None:
        return False  # no checksum to compare
    try:
        read(file)
    except ValueError:
        return True
    return False
