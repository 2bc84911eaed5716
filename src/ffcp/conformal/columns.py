"""Tables of what is kept of rows: columns by name, filled batch by batch.

A column is a tensor with a row for every row, or a list (the labels of groups).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Columns = Mapping[str, Any]


def take(columns: Columns, rows: Tensor) -> dict[str, Any]:
    """Select rows of every column, by a mask or by numbers.

    >>> columns = {"score": torch.arange(3), "group": ["a", "b", "c"]}
    >>> take(columns, torch.tensor([True, False, True]))
    {'score': tensor([0, 2]), 'group': ['a', 'c']}
    """
    numbers = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
    return {
        name: column[numbers.to(column.device)]
        if isinstance(column, Tensor)
        else [column[number] for number in numbers.tolist()]
        for name, column in columns.items()
    }


def prefixed(prefix: str, columns: Columns) -> dict[str, Any]:
    """Put a word before all names, so that two tables can share one."""
    return {prefix + name: column for name, column in columns.items()}


def with_prefix(prefix: str, columns: Columns) -> dict[str, Any]:
    """Give the columns whose name starts with a word, without it.

    >>> with_prefix("a.", prefixed("a.", {"x": 1}) | prefixed("b.", {"y": 2}))
    {'x': 1}
    """
    return {n.removeprefix(prefix): c for n, c in columns.items() if n.startswith(prefix)}


def joined(parts: Sequence[Columns]) -> dict[str, Any]:
    """Put columns of the same names below each other.

    >>> joined([{"a": [1], "b": torch.zeros(1)}, {"a": [2], "b": torch.ones(1)}])
    {'b': tensor([0., 1.]), 'a': [1, 2]}
    """
    table = Table()
    for part in parts:
        table.add(part)
    return table.columns


class Table:
    """Columns that grow batch by batch.

    Tensors double when they are full: a list of small ones would be kept between the large
    intermediates of the batches, and hold the heap open far beyond its own size.

    >>> table = Table()
    >>> table.add({"score": torch.zeros(2, 1), "group": ["a", "b"]})
    >>> table.add({"score": torch.ones(1, 1), "group": ["a"]})
    >>> len(table), table.columns["score"][:, 0], table.columns["group"]
    (3, tensor([0., 0., 1.]), ['a', 'b', 'a'])
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._lists: dict[str, list[Any]] = {}
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, columns: Columns) -> None:
        """Append rows to every column."""
        end = self._rows + max(map(len, columns.values()))
        for name, column in columns.items():
            if not isinstance(column, Tensor):
                self._lists.setdefault(name, []).extend(column)
                continue
            old = self._tensors.get(name, column[:0])
            if end > len(old):
                size = max(end, 2 * len(old))
                self._tensors[name] = column.new_empty((size, *column.shape[1:]))
                self._tensors[name][: self._rows] = old[: self._rows]
            self._tensors[name][self._rows : end] = column.detach()
        self._rows = end

    @property
    def columns(self) -> dict[str, Any]:
        """All columns so far, without the room behind them."""
        filled = {
            name: tensor if len(tensor) == self._rows else tensor[: self._rows].clone()
            for name, tensor in self._tensors.items()
        }
        return {**filled, **self._lists}
