"""Which file and row an error is about."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from ffcp.ray.columns import PATH, Names

#: What data or a model can be wrong by.
WRONG = (ValueError, TypeError, RuntimeError, IndexError)
_ROW = re.compile(r"\brow (\d+)")
_HINT = (
    " (rows are counted in one batch of the dataset here: read it with include_paths=True, and "
    "the file and row are named)"
)


def located(
    error: Exception,
    batch: pa.Table,
    names: Names,
    size: int,
    try_on: Callable[[pa.Table, int], Any],
    is_numbered: bool = False,
) -> Exception:
    """Give an error about a row again, with the name of the file and the row's place in it.

    The dataset knows the files of its rows if it was read with ``include_paths=True``. It does not
    say where in a file a row stood: the file is read from its beginning, and tried again.
    """
    kind = _kind(error)
    if not _ROW.search(str(error)):
        return kind(str(error))  # of all rows, or of the model
    if PATH not in batch.column_names or PATH in names.all():
        return kind(f"{error}{'' if is_numbered else _HINT}")
    paths = list(dict.fromkeys(batch.column(PATH).to_pylist()))
    for path in paths:
        row = 0
        try:
            for part in _parts(path, names, size):
                try_on(part, row)
                row += part.num_rows
        except (OSError, pa.ArrowException):
            continue  # a file of another kind, or out of reach from here
        except WRONG as named:
            return kind(f"{path}: {named}")
    return kind(f"{', '.join(paths)}: {error}")


def counted_from(row: int, error: Exception) -> Exception:
    """Let an error about some rows count them from the number of the first.

    >>> counted_from(100, ValueError("x holds nan in row 7 (rows count from 0)"))
    ValueError('x holds nan in row 107 (rows count from 0)')
    """
    later = _ROW.sub(lambda match: f"row {row + int(match[1])}", str(error))
    return _kind(error)(later)


def _kind(error: Exception) -> type[Exception]:
    """Give a plain kind of error, which any process can make again."""
    return type(error) if type(error) in (ValueError, TypeError, IndexError) else RuntimeError


def _parts(path: str, names: Names, size: int) -> Iterator[pa.Table]:
    """Read the columns that matter of a Parquet file, a batch at a time."""
    system, inside = (
        pyarrow.fs.FileSystem.from_uri(path)
        if "://" in path
        else (pyarrow.fs.LocalFileSystem(), path)
    )
    with system.open_input_file(inside) as file:
        for batch in pq.ParquetFile(file).iter_batches(batch_size=size, columns=names.all()):
            yield pa.Table.from_batches([batch])
