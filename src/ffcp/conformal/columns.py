"""Tables of what is kept of rows: columns by name.

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
    {'a': [1, 2], 'b': tensor([0., 1.])}
    """
    return {
        name: torch.cat([part[name] for part in parts])
        if isinstance(column, Tensor)
        else [one for part in parts for one in part[name]]
        for name, column in parts[0].items()
    }
