"""Random numbers pinned to rows, for tests that compare two calls.

Randomised methods draw on from call to call. Here every call draws the numbers of its seed, 0 by
default, from row 0 on: what ``seed=0`` and ``first_row=0`` give.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

import ffcp
from ffcp.conformal.random_numbers import Stream
from ffcp.predictor import Predictor


def _from_row(predictor: Predictor, seen: ffcp.BatchOutput, first_row: int | None) -> Tensor:
    if first_row is not None and first_row < 0:
        raise ValueError(f"first_row counts from 0, got {first_row}")
    return torch.arange(seen.rows.start, seen.rows.stop) + (first_row or 0)


@contextmanager
def pinned() -> Iterator[None]:
    with (
        patch.object(Stream, "entropy", lambda self, pinned=False: self.seed or 0),
        patch.object(Predictor, "_row_numbers", _from_row),
    ):
        yield
