"""Rows that wait for a choice: what one pass saw of them is noted, and can be seen again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ffcp.batch import BatchOutput
from ffcp.conformal.columns import Columns, prefixed, with_prefix
from ffcp.network import inputs


def noted(out: BatchOutput, y: Tensor, keeps_input: bool) -> dict[str, Any]:
    """Note what a pass saw of rows, and their targets.

    >>> out = BatchOutput(None, torch.ones(3, 1), {"0": torch.ones(3, 1)}, {}, range(3))
    >>> sorted(noted(out, torch.zeros(3, 1), keeps_input=False))
    ['norms.0', 'output', 'y']
    """
    columns = {"output": out.output, "y": y}
    if keeps_input:
        columns["x"] = next(tensor for _, tensor in inputs.leaves(out.x))
    columns |= prefixed("norms.", out.norms) | prefixed("values.", out.values)
    return {name: tensor.detach().cpu() for name, tensor in columns.items()}


def again(columns: Columns, groups: Any = None) -> tuple[BatchOutput, Tensor] | None:
    """Give what was seen of noted rows, and their targets; ``None`` if it was not noted."""
    if "y" not in columns:
        return None
    out = BatchOutput(
        columns.get("x"),
        columns["output"],
        with_prefix("norms.", columns),
        with_prefix("values.", columns),
        range(len(columns["y"])),
        groups,
    )
    return out, torch.as_tensor(columns["y"])
