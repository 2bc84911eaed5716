"""Columns of a dataset, by name, become what a predictor takes: inputs, targets, groups."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from ray.data.block import BlockAccessor

#: Where Ray puts the name of the file that a row is from, if it is asked for.
PATH = "path"
#: What data or a model can be wrong by.
WRONG = (ValueError, TypeError, RuntimeError, IndexError)


@dataclass(frozen=True)
class Names:
    """Which columns are what.

    ``x`` is a column (a tensor or a number for each row), a list of columns of numbers that are
    put side by side, or a dict or tuple of such, for models with several inputs.
    """

    x: Any
    y: str | None = None
    groups: str | None = None
    weights: str | None = None
    id: str | None = None

    def __post_init__(self) -> None:
        """Refuse what is no name of a column."""
        for what, name in vars(self).items():
            if what != "x" and name is not None and not isinstance(name, str):
                raise TypeError(f"{what} is the name of one column, got {name!r}")

    def all(self) -> list[str]:
        """Return all columns that are looked at."""
        given = [*self.inputs(), self.y, self.groups, self.weights, self.id]
        return list(dict.fromkeys(name for name in given if name is not None))

    def inputs(self) -> list[str]:
        """Return the columns of the input."""
        return list(dict.fromkeys(_named(self.x)))

    def read(self, table: pa.Table) -> Given:
        """Return some rows as a predictor takes them on one machine."""
        return Given(
            _input(table, self.x),
            None if self.y is None else _array(table, self.y),
            None if self.groups is None else table.column(self.groups).to_pylist(),
            None if self.weights is None else _array(table, self.weights),
        )

    def located(self, error: Exception, table: pa.Table) -> Exception:
        """Return an error about a row with what is known of it: its file and its number.

        It is of a plain kind, which any process can make again.
        """
        kind = type(error) if type(error) in (ValueError, TypeError, IndexError) else RuntimeError
        found = re.search(r"\brow (\d+)", str(error))
        if found is None:
            return kind(str(error))
        known = [name for name in (PATH, self.id) if name in table.column_names]
        row = min(int(found[1]), table.num_rows - 1)
        where = [f"{name}={table.column(name)[row]}" for name in known]
        if not where:
            where = ["read the dataset with include_paths=True, and its file is named here"]
        return kind(f"{error}, counted in one batch ({', '.join(where)})")


class Given(NamedTuple):
    """What a predictor is given of some rows."""

    x: Any
    y: Any
    groups: list[Any] | None
    weights: Any


def _named(x: Any) -> Iterator[str]:
    if isinstance(x, str):
        yield x
    elif isinstance(x, (Mapping, list, tuple)) and x:
        for part in x.values() if isinstance(x, Mapping) else x:
            yield from _named(part)
    else:
        raise TypeError(
            f"x names the columns of the input: a column, a list of columns of numbers, or a dict "
            f"or tuple of them; got {x!r}"
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
                f"column {name!r} holds tensors of shape {array.shape[1:]}, which cannot stand "
                "side by side with others: give it alone, x='...', or in a dict"
            )
    # A frame: the order of its columns is remembered with the calibration.
    return pd.DataFrame(arrays, copy=False)


def _array(table: pa.Table, name: str) -> Any:
    """Return one column: numbers, words or tensors, a row for each row."""
    array = BlockAccessor.for_block(table).to_numpy([name])[name]
    if array.dtype != object:
        return array
    shapes = [None if value is None else np.shape(value) for value in array]
    usual = next((shape for shape in shapes if shape), None)
    if usual is None:  # words, or numbers with holes: what they mean is said where they are read
        return array
    for row, shape in enumerate(shapes):
        if shape != usual:
            raise ValueError(
                f"{name} has {'no value' if shape is None else f'shape {shape}'} in row {row} "
                f"(rows count from 0), and others have shape {usual}: remove or repair such rows"
            )
    return np.stack(list(array))
