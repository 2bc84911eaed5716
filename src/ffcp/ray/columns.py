"""Conversion of named columns of a dataset to inputs, targets, groups and weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from ray.data.block import BlockAccessor

#: The column of the file that a row is from, with include_paths=True.
PATH = "path"
#: The errors that wrong data or a wrong model raise.
WRONG = (ValueError, TypeError, RuntimeError, IndexError)


@dataclass(frozen=True)
class Names:
    """The names of the columns of inputs, targets, groups, weights and row numbers.

    ``x`` is a column (a tensor or a number for each row), a list of columns of numbers that are
    stacked, or a dict or tuple of these, for models with several inputs.
    """

    x: Any
    y: str | None = None
    groups: str | None = None
    weights: str | None = None
    id: str | None = None

    def __post_init__(self) -> None:
        """Raise TypeError unless all names are strings."""
        for argument, name in vars(self).items():
            if argument != "x" and name is not None and not isinstance(name, str):
                raise TypeError(f"{argument!r} must be the name of one column, got {name!r}")

    def all(self) -> list[str]:
        """Return all columns that are used."""
        names = [*self.inputs(), self.y, self.groups, self.weights, self.id]
        return list(dict.fromkeys(name for name in names if name is not None))

    def inputs(self) -> list[str]:
        """Return the columns of the input."""
        return list(dict.fromkeys(_column_names(self.x)))

    def read(self, table: pa.Table) -> Arguments:
        """Return some rows as arguments of a predictor."""
        return Arguments(
            _input(table, self.x),
            None if self.y is None else _array(table, self.y),
            None if self.groups is None else table.column(self.groups).to_pylist(),
            None if self.weights is None else _array(table, self.weights),
        )

    def located(self, error: Exception, table: pa.Table) -> Exception:
        """Return an error with the file and number of the row it is about.

        It is of a built-in type, which can be sent between processes.
        """
        kind = type(error) if type(error) in (ValueError, TypeError, IndexError) else RuntimeError
        match = re.search(r"\brow (\d+)", str(error))
        if match is None:
            return kind(str(error))
        row = min(int(match[1]), table.num_rows - 1)
        names = [name for name in (PATH, self.id) if name in table.column_names]
        where = ", ".join(f"{name}={table.column(name)[row]}" for name in names)
        where = where or "read the dataset with include_paths=True to see its file here"
        return kind(f"{error}, counted in one batch ({where})")


class Arguments(NamedTuple):
    """Some rows as arguments of a predictor."""

    x: Any
    y: Any
    groups: list[Any] | None
    weights: Any


def _column_names(x: Any) -> Iterator[str]:
    """Yield the names of the columns of the input."""
    if isinstance(x, str):
        yield x
    elif isinstance(x, (Mapping, list, tuple)) and x:
        for part in x.values() if isinstance(x, Mapping) else x:
            yield from _column_names(part)
    else:
        raise TypeError(
            f"'x' must name the columns of the input: a column, a list of columns of numbers, or a "
            f"dict or tuple of them; got {x!r}"
        )


def _input(table: pa.Table, x: Any) -> Any:
    """Return the input as the model takes it."""
    if isinstance(x, str):
        return _array(table, x)
    if isinstance(x, Mapping):
        return {key: _input(table, part) for key, part in x.items()}
    if isinstance(x, tuple):
        return tuple(_input(table, part) for part in x)
    arrays = {name: _array(table, name) for name in x}
    for name, array in arrays.items():
        if array.ndim > 1:
            raise ValueError(
                f"column {name!r} holds tensors of shape {array.shape[1:]}, which cannot be "
                "stacked with others: pass it alone, x='...', or in a dict"
            )
    # A frame: the calibration stores the order of its columns.
    return pd.DataFrame(arrays, copy=False)


def _array(table: pa.Table, name: str) -> Any:
    """Return one column as an array: numbers, strings or tensors."""
    array = BlockAccessor.for_block(table).to_numpy([name])[name]
    if array.dtype != object:
        return array
    shapes = [None if value is None else np.shape(value) for value in array]
    usual = next((shape for shape in shapes if shape), None)
    if usual is None:  # strings, or numbers with missing values: checked where they are read
        return array
    for row, shape in enumerate(shapes):
        if shape != usual:
            raise ValueError(
                f"column {name!r} has {'no value' if shape is None else f'shape {shape}'} in row "
                f"{row} (rows count from 0), others have shape {usual}: remove or repair these rows"
            )
    return np.stack(list(array))
