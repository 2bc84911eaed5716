"""Tables of what is kept of rows: columns by name, filled batch by batch.

A column is a tensor with a row for every row, or a list (the labels of groups).
"""

from __future__ import annotations

from collections.abc import Mapping
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


class RowTensor:
    """Rows that arrive batch by batch, in one tensor that doubles when it is full.

    A list of small tensors would be kept between the large intermediates of the batches, and
    hold the heap open far beyond its own size.

    Rows that come all at once are not copied if it ``borrows`` them.

    >>> rows = RowTensor()
    >>> for part in torch.arange(5.0)[:, None].split(2):
    ...     rows.extend(part)
    >>> rows.filled[:, 0]
    tensor([0., 1., 2., 3., 4.])
    """

    def __init__(self, borrows: bool = False) -> None:
        self._borrows = borrows
        self._room: Tensor | None = None
        self._count = 0

    def extend(self, rows: Tensor) -> None:
        """Append rows."""
        rows = rows.detach() if rows.requires_grad else rows
        end = self._count + rows.shape[0]
        if self._room is None and self._borrows:  # the next ones find no room, and all are copied
            self._room, self._count = rows, end
            return
        if self._room is None:
            self._room = rows.new_empty((0, *rows.shape[1:]))
        if end > self._room.shape[0]:
            more = self._room.new_empty((max(end, 2 * self._room.shape[0]), *rows.shape[1:]))
            more[: self._count] = self._room[: self._count]
            self._room = more
        self._room[self._count : end] = rows
        self._count = end

    @property
    def filled(self) -> Tensor:
        """All rows so far, in the order they came."""
        assert self._room is not None
        if self._count == self._room.shape[0]:
            return self._room
        rows = self._room[: self._count]
        return rows.clone() if self._borrows else rows  # to be kept, without the room behind


class Table:
    """Columns that grow batch by batch.

    >>> table = Table()
    >>> table.add({"score": torch.zeros(2, 1), "group": ["a", "b"]})
    >>> table.add({"score": torch.ones(1, 1), "group": ["a"]})
    >>> len(table), table.columns["group"]
    (3, ['a', 'b', 'a'])

    Where nobody else writes to columns, it can borrow them, see :class:`RowTensor`.
    """

    def __init__(self, borrows: bool = False) -> None:
        self._borrows = borrows
        self._tensors: dict[str, RowTensor] = {}
        self._lists: dict[str, list[Any]] = {}
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, columns: Columns) -> None:
        """Append rows to every column."""
        rows = 0
        for name, column in columns.items():
            if isinstance(column, Tensor):
                if name not in self._tensors:
                    self._tensors[name] = RowTensor(self._borrows)
                self._tensors[name].extend(column)
                rows = column.shape[0]
            else:
                self._lists.setdefault(name, []).extend(column)
                rows = len(column)
        self._rows += rows

    @property
    def columns(self) -> dict[str, Any]:
        """All columns so far."""
        return {**{name: rows.filled for name, rows in self._tensors.items()}, **self._lists}
