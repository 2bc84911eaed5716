"""Where points lie: rows of numbers that stand for inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ffcp.pieces import Needs, Seen

PREDICTION = "prediction"
On = str | Callable[[Any], Any]


def needs_of(on: On) -> Needs:
    """Ask for the values of the layer that points are embedded by, if it is one."""
    return Needs(values=(on,)) if isinstance(on, str) and on != PREDICTION else Needs()


def embedded(seen: Seen, on: On) -> Tensor:
    """Give each row its place: rows (n, e) in float32 on the CPU.

    ``on`` is ``"prediction"``, a layer or ``"input"``, or a function of a batch of inputs.
    """
    rows = len(seen.rows)
    if callable(on):
        values = torch.as_tensor(on(seen.x))
    else:
        values = seen.output if on == PREDICTION else seen.values[on]
    if values.dim() == 0 or len(values) != rows:
        raise ValueError(
            f"the embedding has shape {tuple(values.shape)} for {rows} rows: it needs one row "
            "for each"
        )
    embedding = values.detach().reshape(rows, -1).to("cpu", torch.float32)
    bad = ~embedding.isfinite().all(dim=1)
    if bool(bad.any()):
        row = seen.rows[int(bad.nonzero()[0, 0])]
        raise ValueError(f"the embedding of row {row} is not finite: repair or remove it")
    return embedding
