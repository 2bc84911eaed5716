"""Row metadata: columns by name, and the embedding by which rows are near each other.

A column is a tensor with a row for every row, or a list (the labels of groups).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ffcp.batch import BatchOutput, Requires

Columns = Mapping[str, Any]
PREDICTION = "prediction"
On = str | Callable[[Any], Any]  # what rows are embedded by


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
    """Return the columns with a prefix before their names."""
    return {prefix + name: column for name, column in columns.items()}


def with_prefix(prefix: str, columns: Columns) -> dict[str, Any]:
    """Return the columns whose names have a prefix, without it.

    >>> with_prefix("a.", prefixed("a.", {"x": 1}) | prefixed("b.", {"y": 2}))
    {'x': 1}
    """
    return {n.removeprefix(prefix): c for n, c in columns.items() if n.startswith(prefix)}


def joined(parts: Sequence[Columns]) -> dict[str, Any]:
    """Concatenate columns of the same names.

    >>> joined([{"a": [1], "b": torch.zeros(1)}, {"a": [2], "b": torch.ones(1)}])
    {'a': [1, 2], 'b': tensor([0., 1.])}
    """
    return {
        name: torch.cat([part[name] for part in parts])
        if isinstance(column, Tensor)
        else [entry for part in parts for entry in part[name]]
        for name, column in parts[0].items()
    }


def requires_of(on: On) -> Requires:
    """Return what an embedding requires: the values of its layer, or the input."""
    if callable(on):
        return Requires(input=True)
    return Requires() if on == PREDICTION else Requires(values=(on,))


def embedded(out: BatchOutput, on: On, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the embedding of each row, (n, e) on the CPU.

    ``on`` is ``"prediction"``, a layer or ``"input"``, or a function of a batch of inputs.
    """
    rows = len(out.output)
    if callable(on):
        values = torch.as_tensor(on(out.x))
    else:
        values = out.output if on == PREDICTION else out.values[on]
    if values.dim() == 0 or len(values) != rows:
        raise ValueError(
            f"the embedding has shape {tuple(values.shape)} for {rows} rows: it needs one row "
            "for each"
        )
    embedding = values.detach().reshape(rows, -1).to("cpu", dtype)
    bad = ~embedding.isfinite().all(dim=1)
    if bool(bad.any()):
        row = out.rows[int(bad.nonzero()[0, 0])]
        raise ValueError(f"the embedding of row {row} is not finite: repair or remove it")
    return embedding
