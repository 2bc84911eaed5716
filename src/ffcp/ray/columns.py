"""Columns of a dataset, by name, become what a predictor takes: inputs, targets, groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from ray.data.block import BlockAccessor

#: Where Ray puts the name of the file that a row is from, if it is asked for.
PATH = "path"


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

    def all(self) -> list[str]:
        """List all columns that are looked at."""
        given = [*self.inputs(), self.y, self.groups, self.weights, self.id]
        return list(dict.fromkeys(name for name in given if name is not None))

    def inputs(self) -> list[str]:
        """List the columns of the input."""
        return list(dict.fromkeys(_named(self.x)))

    def __post_init__(self) -> None:
        """Refuse what is no name of a column."""
        for what, name in vars(self).items():
            if what != "x" and name is not None and not isinstance(name, str):
                raise TypeError(f"{what} is the name of one column, got {name!r}")

    def must_be_in(self, columns: list[str]) -> None:
        """Refuse names of columns that are not there."""
        missing = [name for name in self.all() if name not in columns]
        if missing:
            raise ValueError(
                f"the dataset has no column {', '.join(map(repr, missing))}: it has "
                f"{', '.join(map(repr, columns))}"
            )

    def read(self, table: pa.Table, first_row: int = 0) -> Given:
        """Give some rows as a predictor takes them on one machine; errors count from a number."""
        read = DatasetColumns(BlockAccessor.for_block(table), first_row)
        return Given(
            read.input(self.x),
            None if self.y is None else read.array(self.y),
            None if self.groups is None else table.column(self.groups).to_pylist(),
            None if self.weights is None else read.array(self.weights),
        )


class Given(NamedTuple):
    """What a predictor is given of some rows."""

    x: Any
    y: Any
    groups: list[Any] | None
    weights: Any


def _named(x: Any) -> Iterator[str]:
    if isinstance(x, str):
        yield x
    elif isinstance(x, Mapping):
        for part in x.values():
            yield from _named(part)
    elif isinstance(x, (list, tuple)) and x:
        for part in x:
            yield from _named(part)
    else:
        raise TypeError(
            f"x names the columns of the input: a column, a list of columns of numbers, or a dict "
            f"or tuple of them; got {x!r}"
        )


class DatasetColumns:
    """The columns of some rows, as arrays."""

    def __init__(self, block: BlockAccessor, first_row: int) -> None:
        self._block, self._first = block, first_row

    def input(self, x: Any) -> Any:
        """Put the input together."""
        if isinstance(x, str):
            return self.array(x)
        if isinstance(x, Mapping):
            return {key: self.input(part) for key, part in x.items()}
        if isinstance(x, tuple):
            return tuple(self.input(part) for part in x)
        # A frame: the order of its columns is remembered with the calibration.
        return pd.DataFrame({name: self._numbers(name) for name in x}, copy=False)

    def _numbers(self, name: str) -> Any:
        array = self.array(name)
        if array.ndim > 1:
            raise ValueError(
                f"column {name!r} holds tensors of shape {array.shape[1:]}, which cannot stand "
                "side by side with others: give it alone, x='...', or in a dict"
            )
        return array

    def array(self, name: str) -> Any:
        """Give one column: numbers, words or tensors, a row for each row."""
        array = self._block.to_numpy([name])[name]
        if array.dtype != object:
            return array
        shapes = [None if value is None else np.shape(value) for value in array]
        usual = next((shape for shape in shapes if shape), None)
        for row, shape in enumerate(shapes):
            if usual is not None and shape != usual:
                what = "no value" if shape is None else f"shape {shape}"
                raise ValueError(
                    f"{name} has {what} in row {self._first + row} (rows count from 0), and others "
                    f"have shape {usual}: remove or repair such rows"
                )
        # Words, or numbers with holes: what they mean is said where they are read.
        return array if usual is None else np.stack(list(array))
