"""Tables in and out: CSV of any delimiter and encoding, compressed or not, and Parquet.

CSV is read as text, cell by cell: what a column holds is decided once, for the whole table
(:mod:`ffcp.tables.columns`), and not anew for every block of rows; and the rows are written
again as they were, ``007`` and all.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import itertools
import lzma
import os
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import pandas as pd

from ffcp import files
from ffcp.tables.errors import TableError

CHUNK = 20_000  # rows at a time, of files that may be larger than memory
_HEAD = 2**16  # characters that tell the delimiter
_DELIMITERS = ",;\t|"
_RARER = " :"  # taken only where none of the others divides, and all lines agree
_LONGEST = 2**24  # characters of a line with the names of columns
_MARKS = {
    b"\x1f\x8b": ".gz",
    b"\xfd7zXZ": ".xz",
    b"PK\x03\x04": ".zip or .xlsx",
    b"PAR1": ".parquet",
}
_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
_PARQUET = (".parquet", ".pq")
_INDEX = re.compile(r"__index_level_\d+__")  # where pandas writes an index without a name
_LETTER = re.compile("[^\x00-\x7f\udc80-\udcff]")  # of several bytes of UTF-8 ...
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # ... and a byte that is none
_DECIMAL_COMMA = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+),\d+$")
_DECIMAL_POINT = re.compile(r"[+-]?\d+\.\d+$")


_NAMES = {"\t": "tab", ",": "comma", ";": "semicolon", "|": "bar", " ": "blank", ":": "colon"}


@dataclass(frozen=True)
class Dialect:
    """How a text file is to be read."""

    delimiter: str
    encoding: str
    decimal: str
    skips_blank: bool  # lines; of one column, each is a row whose cell is missing

    def __str__(self) -> str:
        name = _NAMES.get(self.delimiter, repr(self.delimiter))
        comma = ", decimal commas" if self.decimal == "," else ""
        return f"{self.encoding}, divided by {name}{comma}"


def read(path: str | Path) -> pd.DataFrame:
    """Read a whole table; of CSV every cell is text."""
    parts = list(chunks(path))
    whole = parts[0] if len(parts) == 1 else pd.concat(parts, ignore_index=True)
    whole.attrs.update(parts[0].attrs)
    return whole


def chunks(path: str | Path, rows: int = CHUNK) -> Iterator[pd.DataFrame]:
    """Read a table some rows at a time; of a table without rows comes one part without rows."""
    for frame, _ in parts(path, rows):
        yield frame


def parts(path: str | Path, rows: int = CHUNK) -> Iterator[tuple[pd.DataFrame, Any]]:
    """Read a table some rows at a time; beside them those of Parquet as they are in the file."""
    path = Path(path)
    if not path.is_file():
        odd = path.exists() and not path.is_dir()
        how = "is read twice, so it must be a file on a disk" if odd else "is not a file"
        raise TableError(f"{path} {how}" if path.exists() else f"there is no file {path}")
    if is_parquet(path):
        yield from _parquet(path, rows)
    else:
        yield from ((frame, None) for frame in _csv(path, rows))


def is_parquet(path: Path) -> bool:
    """Say whether a table is Parquet, by its name."""
    return path.suffix.lower() in _PARQUET


def _parquet(path: Path, rows: int) -> Iterator[tuple[pd.DataFrame, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as missing:
        raise TableError(f"{path} needs pyarrow: pip install 'ffcp[tables]'") from missing
    try:
        with pq.ParquetFile(path) as file:
            count = 0
            for batch in file.iter_batches(batch_size=rows):
                count += 1
                yield _as_frame(pa.Table.from_batches([batch]), path)
            if not count:
                yield _as_frame(file.schema_arrow.empty_table(), path)
    except pa.ArrowException as error:
        raise TableError(f"{path} is damaged or not a Parquet file ({error})") from error


def _as_frame(table: Any, where: Path) -> tuple[pd.DataFrame, Any]:
    """Give rows of Parquet as a frame, too: an index that has a name is a column like others."""
    _check_names(table.column_names, where)
    unnamed = [name for name in table.column_names if _INDEX.fullmatch(name)]
    table = table.drop_columns(unnamed) if unnamed else table
    # Whole numbers beside missing ones stay whole: as floats, large ones would become equal.
    return table.to_pandas(ignore_metadata=True, integer_object_nulls=True), table


def _csv(path: Path, rows: int) -> Iterator[pd.DataFrame]:
    dialect = sniff(path)
    options: dict[str, Any] = {
        "sep": dialect.delimiter,
        "dtype": str,
        "keep_default_na": False,
        "chunksize": rows,
        "skipinitialspace": True,
        "index_col": False,  # or else cells beyond the names would push the others aside
        "skip_blank_lines": dialect.skips_blank,
    }
    try:
        with _text(path, dialect.encoding) as file, pd.read_csv(file, **options) as parts:
            while (part := _next(parts)) is not None:
                part.attrs.update(
                    delimiter=dialect.delimiter,
                    decimal=dialect.decimal,
                    decisions=[f"read as {dialect}"],
                )
                yield part.reset_index(drop=True)
    except pd.errors.ParserWarning as error:
        raise TableError(
            f"{path} has rows with more cells than its first line has names: name every column, or "
            "put quotes around cells that hold the delimiter"
        ) from error
    except pd.errors.ParserError as error:
        raise TableError(
            f"{path} cannot be divided into columns ({str(error).strip()}): put quotes around "
            "cells that hold the delimiter"
        ) from error
    except (UnicodeError, EOFError, OSError, lzma.LZMAError) as error:
        raise TableError(f"{path} cannot be read to its end ({error})") from error


def _next(parts: Iterator[pd.DataFrame]) -> pd.DataFrame | None:
    """Read more rows; that some of their cells have no name is an error, and no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        return next(parts, None)


def sniff(path: str | Path) -> Dialect:
    """Tell the delimiter, the encoding and the decimal sign of a text file."""
    path = Path(path)
    try:
        _must_be_text(path)
        encoding = _encoding(path)
        with _text(path, encoding) as file:
            head = file.read(_HEAD)
            whole = len(head) < _HEAD
            if "\n" not in head and "\r" not in head:
                head += file.readline(_LONGEST)
    except (EOFError, OSError, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise TableError(f"{path} cannot be read ({error})") from error
    if not head.strip():
        raise TableError(f"{path} is empty: a table has at least a line with the columns' names")
    if "\0" in head:
        raise TableError(f"{path} is no text: save it as CSV in UTF-8, or as Parquet")
    lines = list(io.StringIO(head, newline=""))
    lines = lines if whole or len(lines) == 1 else lines[:-1]
    try:
        delimiter = _delimiter(lines)
        cells = [row for row in _divided(lines, delimiter) if any(row) or len(row) > 1]
    except csv.Error as error:
        raise TableError(f"{path} cannot be divided into columns ({error})") from error
    _check_names(cells[0], path)
    skips_blank = len(cells[0]) > 1 or not lines[0].strip()
    return Dialect(delimiter, encoding, _decimal(cells[1:], delimiter), skips_blank)


def _must_be_text(path: Path) -> None:
    """Refuse files whose first bytes say that they are something else than their name says."""
    with _bytes(path) as file:
        start = file.read(10)
    kinds = [kind for mark, kind in _MARKS.items() if start.startswith(mark)]
    if kinds or re.match(rb"BZh[1-9]1AY&SY", start):
        raise TableError(
            f"{path} is no text, but a file of the kind {(kinds or ['.bz2'])[0]}: name it so, or "
            "unpack it"
        )


def _divided(lines: list[str], delimiter: str) -> Iterator[list[str]]:
    return csv.reader(lines[:200], delimiter=delimiter, skipinitialspace=True)


def _delimiter(lines: list[str]) -> str:
    """Take the sign that divides all lines into the same number of cells, and into most."""

    def cells(sign: str) -> tuple[bool, int]:
        try:
            widths = [len(row) for row in _divided(lines, sign) if row]
        except csv.Error:  # a cell longer than any
            return False, 1
        return len(set(widths)) == 1, widths[0]

    counts = {sign: cells(sign) for sign in _DELIMITERS}
    steady = {sign: count for sign, (same, count) in counts.items() if same and count > 1}
    loose = {sign: count for sign, (_, count) in counts.items() if count > 1}
    candidates = steady or loose
    if not candidates and len(lines) > 1:
        rarer = {sign: cells(sign) for sign in _RARER}
        candidates = {sign: count for sign, (same, count) in rarer.items() if same and count > 1}
    return max(candidates, key=lambda sign: candidates[sign]) if candidates else ","


def _decimal(rows: list[list[str]], delimiter: str) -> str:
    if delimiter == ",":
        return "."
    cells = [cell.strip() for row in rows for cell in row]
    commas = any(_DECIMAL_COMMA.match(cell) for cell in cells)
    return "," if commas and not any(_DECIMAL_POINT.match(cell) for cell in cells) else "."


def _encoding(path: Path) -> str:
    """Return the encoding: by its first bytes, UTF-8 if all of it is, Windows' if none of it is."""
    with _bytes(path) as file:
        block = file.read(2**20)
        for mark, name in (
            (codecs.BOM_UTF8, "utf-8-sig"),
            (codecs.BOM_UTF32_LE, "utf-32"),
            (codecs.BOM_UTF32_BE, "utf-32"),
            (codecs.BOM_UTF16_LE, "utf-16"),
            (codecs.BOM_UTF16_BE, "utf-16"),
        ):
            if block.startswith(mark):
                return name
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            while block:
                decoder.decode(block)
                block = file.read(2**20)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            _must_not_be_mixed(path)
            return "cp1252" if _decodes(path, "cp1252") else "latin-1"
    return "utf-8"


def _must_not_be_mixed(path: Path) -> None:
    """Refuse a file in which some letters are UTF-8 and some are not: any encoding misreads it."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    is_utf8, bad, line, place = False, "", 1, 1
    with _bytes(path) as file:
        for block in itertools.chain(iter(lambda: file.read(2**20), b""), [b""]):
            text = decoder.decode(block, final=not block)
            is_utf8 = is_utf8 or _LETTER.search(text) is not None
            if not bad:
                found = _NOT_UTF8.search(text)
                before = text[: found.start() if found else None]
                line += before.count("\n")
                place += len(before.encode("utf-8", "surrogateescape"))
                bad = f"the byte 0x{ord(found[0]) - 0xDC00:02X}, byte {place:,}" if found else ""
            if is_utf8 and bad:
                raise TableError(
                    f"{path} is UTF-8, but line {line} has {bad} of the file, which is not: "
                    "correct it, or save the file again as UTF-8"
                )


def _decodes(path: Path, encoding: str) -> bool:
    try:
        with _text(path, encoding) as file:
            while file.read(2**20):
                pass
    except UnicodeDecodeError:
        return False
    return True


def _bytes(path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".zip":
        archive = zipfile.ZipFile(path)
        names = [name for name in archive.namelist() if not name.endswith("/")]
        if len(names) != 1:
            raise TableError(f"{path} holds {len(names)} files: give an archive of one table")
        return archive.open(names[0])
    opened: IO[bytes] = _OPENERS[suffix](path) if suffix in _OPENERS else path.open("rb")
    return opened


def _text(path: Path, encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(_bytes(path), encoding=encoding, newline="")


def _check_names(names: list[str], where: Any) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise TableError(f"{where} has several columns called {twice[0]!r}: rename all but one")


def named(frame: pd.DataFrame, where: Any = "the frame") -> pd.DataFrame:
    """Give a frame whose columns are called by words, each by another."""
    made = frame.copy(deep=False)
    made.columns = [str(name) for name in frame.columns]
    _check_names(list(made.columns), where)
    return made


def base_name(path: str | Path) -> str:
    """Give the name of a table without the endings of its format and compression.

    >>> base_name("data/houses.csv.gz")
    'houses'
    """
    name = Path(path).name
    endings = (*_OPENERS, *_PARQUET, ".zip", ".csv", ".tsv", ".txt", ".data")
    while (stem := Path(name)).suffix.lower() in endings:
        name = stem.stem
    return name


def _signs(attrs: Mapping[Any, Any]) -> dict[str, str]:
    """Give the signs to write text with: those it was read with, if all can be read again.

    >>> _signs({"delimiter": ";", "decimal": ","}), _signs({})
    ({'sep': ';', 'decimal': ','}, {'sep': ',', 'decimal': '.'})
    """
    delimiter, decimal = attrs.get("delimiter", ","), attrs.get("decimal", ".")
    if delimiter not in _DELIMITERS:  # with blanks between them, empty cells are none
        delimiter = ";" if decimal == "," else ","
    return {"sep": delimiter, "decimal": decimal}


def _has_return(frame: pd.DataFrame) -> bool:
    """Whether a cell or a name holds a carriage return, which the csv module does not quote."""
    numeric = frame.select_dtypes("number").columns
    words = (frame[name].astype(str) for name in frame.columns.difference(numeric))
    return "\r" in "".join(frame.columns) or any(
        column.str.contains("\r", regex=False).any() for column in words
    )


class Writer:
    """Writes a table part by part; the file appears when all of it is written, or not at all."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._parquet: Any = None
        self._rows = 0
        self._file: Any = None

    def __enter__(self) -> Writer:
        if self.path.exists() and not self.path.is_file():
            raise TableError(f"{self.path} is there and is not a file: give another name")
        if self.path.suffix.lower() == ".zip":
            raise TableError(f"{self.path}: archives are read, not written; .csv.gz is")
        self._temporary = files.temporary(self.path)
        opener: Any = _OPENERS.get(self.path.suffix.lower(), Path.open)
        with files.said_of(self.path, self._temporary):
            if is_parquet(self.path):  # not by pyarrow, whose errors name the temporary file
                self._file = self._temporary.open("wb")
            else:
                self._file = opener(self._temporary, "wt", encoding="utf-8", newline="")
        return self

    def add(self, frame: pd.DataFrame, made: pd.DataFrame, original: Any = None) -> None:
        """Write more rows, and beside them what was made of them.

        ``original`` are the rows as they are in a Parquet file, which keeps their types. Text has
        the delimiter and the decimal sign of the text that the rows were read from.
        """
        if not is_parquet(self.path):
            both = pd.concat([frame, made], axis=1)
            quoting = csv.QUOTE_ALL if _has_return(both) else csv.QUOTE_MINIMAL
            options = {"lineterminator": "\n", "quoting": quoting, **_signs(frame.attrs)}
            both.to_csv(self._file, index=False, header=not self._rows, **options)
        else:
            self._add_parquet(frame, made, original)
        self._rows += len(frame) or 1  # the header is there now, even if no row is

    def _add_parquet(self, frame: pd.DataFrame, made: pd.DataFrame, original: Any) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pandas(frame, preserve_index=False) if original is None else original
        for name in made.columns:  # of one type, whatever the first rows hold
            kind = pa.float64() if pd.api.types.is_numeric_dtype(made[name]) else pa.string()
            cells = made[name].astype(object) if kind == pa.string() else made[name]
            table = table.append_column(name, pa.array(cells, kind, from_pandas=True))
        table = table.replace_schema_metadata(None)
        if self._parquet is None:
            self._parquet = pq.ParquetWriter(self._file, table.schema)
        self._parquet.write_table(table.cast(self._parquet.schema))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for open_file in (self._parquet, self._file):
                if open_file is not None:
                    open_file.close()
            if kind is None:
                with files.said_of(self.path, self._temporary):
                    os.replace(self._temporary, self.path)
        finally:
            self._temporary.unlink(missing_ok=True)
