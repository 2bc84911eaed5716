"""Where points lie: rows of numbers that stand for inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ffcp.batch import BatchOutput, Requires

PREDICTION = "prediction"
On = str | Callable[[Any], Any]


def requires_of(on: On) -> Requires:
    """Ask for the values of the layer that points are embedded by, if it is one."""
    if callable(on):
        return Requires(input=True)
    return Requires() if on == PREDICTION else Requires(values=(on,))


def embedded(out: BatchOutput, on: On, dtype: torch.dtype = torch.float32) -> Tensor:
    """Give each row its place: rows (n, e) on the CPU.

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
