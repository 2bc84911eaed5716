"""Reading and writing of tables: CSV of any delimiter and encoding, and Parquet.

CSV is read as text, cell by cell: the kind of a column is decided once, for the whole table
(:mod:`ffcp.tables.columns`), and not for every block of rows; and rows are written back
unchanged, including leading zeros like ``007``.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import csv
import gzip
import io
import itertools
import lzma
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pandas as pd

from ffcp import files
from ffcp.tables.errors import TableError

CHUNK = 20_000  # rows at a time, as files may be larger than memory
_LINES = 200  # lines from which the delimiter is detected
_DELIMITERS = ",;\t|"
_RARER = " :"  # used only if none of the others occurs, and all lines agree
_BINARY = re.compile(rb"[\0-\x08\x0e-\x1f]|\APAR1|\ABZh[1-9]1AY&SY")  # not in text files
_NOT_WINDOWS = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_PARQUET = (".parquet", ".pq")
_INDEX = re.compile(r"__index_level_\d+__")  # the column of an index without a name
_DECIMAL_COMMA = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+),\d+$")
_DECIMAL_POINT = re.compile(r"[+-]?\d+\.\d+$")


@dataclass(frozen=True)
class Dialect:
    """The delimiter, encoding and decimal sign of a text file."""

    delimiter: str
    encoding: str
    decimal: str
    skips_blank: bool  # with one column, a blank line is a row with a missing cell


def read(path: str | Path) -> pd.DataFrame:
    """Return a whole table; every cell of a CSV file is text."""
    frames = [frame for frame, _ in parts(path)]
    whole = frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True)
    whole.attrs.update(frames[0].attrs)
    return whole


def parts(path: str | Path, rows: int = CHUNK) -> Iterator[tuple[pd.DataFrame, Any]]:
    """Yield a table in parts, each with the original rows of a Parquet file, or None.

    A table without rows yields one part without rows.
    """
    path = Path(path)
    if not path.is_file():
        raise TableError(f"there is no file {path}")
    if is_parquet(path):
        yield from _parquet(path, rows)
    else:
        yield from ((frame, None) for frame in _csv(path, rows))


def is_parquet(path: Path) -> bool:
    """Whether a table is a Parquet file, by its name."""
    return path.suffix.lower() in _PARQUET


def _parquet(path: Path, rows: int) -> Iterator[tuple[pd.DataFrame, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            tables = (pa.Table.from_batches([part]) for part in file.iter_batches(batch_size=rows))
            first = next(tables, file.schema_arrow.empty_table())
            for table in itertools.chain([first], tables):
                _check_names(table.column_names, path)
                unnamed = [name for name in table.column_names if _INDEX.fullmatch(name)]
                kept = table.drop_columns(unnamed) if unnamed else table
                # Integers with missing values stay integers: as floats, large ones could be equal.
                yield kept.to_pandas(ignore_metadata=True, integer_object_nulls=True), kept
    except pa.ArrowException as error:
        raise TableError(f"{path} is damaged or not a Parquet file ({error})") from error


def _csv(path: Path, rows: int) -> Iterator[pd.DataFrame]:
    dialect = sniff(path)
    decision = f"read as {dialect.encoding}, delimiter {dialect.delimiter!r}"
    if dialect.decimal == ",":
        decision += ", decimal commas"
    signs = {"delimiter": dialect.delimiter, "decimal": dialect.decimal}
    options: dict[str, Any] = {
        "sep": dialect.delimiter,
        "dtype": str,
        "keep_default_na": False,
        "chunksize": rows,
        "skipinitialspace": True,
        "skip_blank_lines": dialect.skips_blank,
    }
    try:
        with _text(path, dialect.encoding) as file, pd.read_csv(file, **options) as blocks:
            for block in blocks:
                if not isinstance(block.index, pd.RangeIndex):  # pandas made one of extra cells
                    raise pd.errors.ParserError("in all rows")
                block.attrs.update(signs, decisions=[decision])
                yield block.reset_index(drop=True)
    except pd.errors.ParserError as error:
        if "EOF inside string" in str(error):
            raise TableError(
                f"{path} has a quotation mark that is not closed ({str(error).strip()}): close it, "
                "or double a mark that belongs to a cell"
            ) from error
        raise TableError(
            f"{path} has rows with more cells than names ({str(error).strip()}): name every "
            "column, and quote cells that hold the delimiter"
        ) from error
    except (UnicodeError, EOFError, OSError, lzma.LZMAError) as error:
        raise TableError(f"{path} cannot be read completely ({error})") from error


def sniff(path: str | Path) -> Dialect:
    """Return the delimiter, the encoding and the decimal sign of a text file."""
    path = Path(path)
    try:
        encoding = _encoding(path)
        with _text(path, encoding) as file:
            lines = list(itertools.islice(file, _LINES))
        delimiter = _delimiter(lines)
        rows = [row for row in _split(lines, delimiter) if any(row) or len(row) > 1]
    except (EOFError, OSError, lzma.LZMAError, zipfile.BadZipFile, csv.Error) as error:
        raise TableError(f"{path} cannot be read ({error})") from error
    if not rows:
        raise TableError(f"{path} is empty: expected a line with the names of the columns")
    _check_names(rows[0], path)
    skips_blank = len(rows[0]) > 1 or not lines[0].strip()
    return Dialect(delimiter, encoding, _decimal(rows[1:], delimiter), skips_blank)


def _split(lines: list[str], delimiter: str) -> Iterator[list[str]]:
    return csv.reader(lines, delimiter=delimiter, skipinitialspace=True)


def _delimiter(lines: list[str]) -> str:
    """Return the sign that splits all lines into the same, and the largest, number of cells."""
    first, every = {}, {}  # the number of cells of the first line; of every line, 1 if they differ
    for sign in _DELIMITERS + _RARER:
        with contextlib.suppress(csv.Error):  # a cell is longer than the limit of csv
            widths = [len(row) for row in _split(lines, sign) if row] or [1]
            agree = len(set(widths)) == 1 and len(lines) > 1
            first[sign], every[sign] = widths[0], widths[0] if agree else 1
    for signs, cells in ((_DELIMITERS, every), (_DELIMITERS, first), (_RARER, every)):
        best = max(signs, key=lambda sign: cells.get(sign, 1))
        if cells.get(best, 1) > 1:
            return best
    return ","


def _decimal(rows: list[list[str]], delimiter: str) -> str:
    """Return the decimal sign: a comma if some cells need one, and none has a decimal point."""
    if delimiter == ",":
        return "."
    cells = [cell.strip() for row in rows for cell in row]
    has_commas = any(_DECIMAL_COMMA.match(cell) for cell in cells)
    return "," if has_commas and not any(_DECIMAL_POINT.match(cell) for cell in cells) else "."


def _encoding(path: Path) -> str:
    """Return the encoding: by the byte order mark, else UTF-8, else that of Windows or Latin-1.

    If only some letters are UTF-8, any encoding would misread the file, and an error is raised.
    """
    with _bytes(path) as file:
        start = file.read(2**16)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if start.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    if _BINARY.search(start):
        raise TableError(
            f"{path} is not a text file: save it as CSV in UTF-8, or give it the file name "
            "extension of its format"
        )
    fallback, has_utf8, bad = "cp1252", False, ""
    with _bytes(path) as file:
        for number, line in enumerate(file, 1):
            has_utf8 = has_utf8 or not line.decode(errors="ignore").isascii()
            try:
                line.decode()
            except UnicodeDecodeError as error:
                bad = bad or f"line {number} has the byte 0x{line[error.start]:02X}"
                fallback = "latin-1" if _NOT_WINDOWS.search(line) else fallback
    if bad and has_utf8:
        raise TableError(f"{path} is UTF-8, but {bad}, which is not: save it again as UTF-8")
    return fallback if bad else "utf-8"


def _bytes(path: Path) -> IO[bytes]:
    """Return a file opened for reading, decompressed by its ending."""
    suffix = path.suffix.lower()
    if suffix == ".zip":
        archive = zipfile.ZipFile(path)
        names = [name for name in archive.namelist() if not name.endswith("/")]
        if len(names) != 1:
            raise TableError(f"{path} has {len(names)} files, expected one: archive a single table")
        return archive.open(names[0])
    file: IO[bytes] = _OPENERS.get(suffix, open)(path, "rb")
    return file


def _text(path: Path, encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(_bytes(path), encoding=encoding, newline="")


def _check_names(names: list[str], where: Any) -> None:
    index = pd.Index(names)
    if index.has_duplicates:
        twice = index[index.duplicated()][0]
        raise TableError(f"{where} has several columns named {twice!r}: rename all but one")


def as_given(table: Any) -> Any:
    """Return a path or a frame as it is, those of polars and pyarrow as frames of pandas."""
    if isinstance(table, (str, Path, pd.DataFrame)):
        return table
    if hasattr(table, "to_pandas"):
        return table.to_pandas()
    kind = type(table).__name__
    raise TableError(f"expected a file or a frame, got {kind!r}: give pandas.DataFrame(...)")


def named(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame with strings as names of the columns, checked to be distinct."""
    renamed = frame.copy(deep=False)
    renamed.columns = [str(name) for name in frame.columns]
    _check_names(list(renamed.columns), "the frame")
    return renamed


def base_name(path: str | Path) -> str:
    """Return the name of a table without the endings of its format and compression.

    >>> base_name("data/houses.csv.gz")
    'houses'
    """
    name = Path(path).name
    endings = (*_OPENERS, *_PARQUET, ".zip", ".csv", ".tsv", ".txt", ".data")
    while (stem := Path(name)).suffix.lower() in endings:
        name = stem.stem
    return name


Add = Callable[..., None]


@contextlib.contextmanager
def writer(path: str | Path) -> Iterator[Add]:
    """Write a table in parts; the file appears when all of it is written, or not at all.

    Yields a function that writes rows of a frame and their new columns. Its third argument is the
    original rows of a Parquet file, which keep their types. Text is written with the delimiter and
    the decimal sign of the text that was read.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise TableError(f"{path} exists and is not a file: use another name")
    if path.suffix.lower() == ".zip":
        raise TableError(f"{path}: zip archives cannot be written: use .csv.gz")
    temporary = files.temporary(path)
    adder = _parquet_adder if is_parquet(path) else _text_adder
    try:
        with files.naming(path, temporary):
            file = _OPENERS.get(path.suffix.lower(), open)(temporary, "wb")
        with file, adder(file) as add:
            yield add
        with files.naming(path, temporary):
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def _text_adder(file: IO[bytes]) -> Iterator[Add]:
    has_names = False

    def add(frame: pd.DataFrame, new: pd.DataFrame, original: Any = None) -> None:
        nonlocal has_names
        delimiter, decimal = frame.attrs.get("delimiter", ","), frame.attrs.get("decimal", ".")
        if delimiter not in _DELIMITERS:  # blanks cannot separate empty cells
            delimiter = ";" if decimal == "," else ","
        both = pd.concat([frame, new], axis=1)
        options = {"sep": delimiter, "decimal": decimal, "index": False, "header": not has_names}
        text = both.to_csv(lineterminator="\n", **options)
        if "\r" in text:  # it would end a row, and the csv module does not quote it
            text = both.to_csv(lineterminator="\n", quoting=csv.QUOTE_ALL, **options)
        file.write(text.encode())
        has_names = True

    yield add


@contextlib.contextmanager
def _parquet_adder(file: IO[bytes]) -> Iterator[Add]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with contextlib.ExitStack() as stack:
        parquet: Any = None

        def add(frame: pd.DataFrame, new: pd.DataFrame, original: Any = None) -> None:
            nonlocal parquet
            table = original
            if original is None:
                table = pa.Table.from_pandas(frame, preserve_index=False)
            for name in new.columns:  # types do not depend on the first rows
                kind = pa.float64() if pd.api.types.is_numeric_dtype(new[name]) else pa.string()
                cells = pa.array(new[name].tolist(), kind, from_pandas=True)
                table = table.append_column(name, cells)
            table = table.replace_schema_metadata(None)
            parquet = parquet or stack.enter_context(pq.ParquetWriter(file, table.schema))
            parquet.write_table(table.cast(parquet.schema))

        yield add
