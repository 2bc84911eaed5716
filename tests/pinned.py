"""Random numbers pinned to rows, for tests that compare two calls.

Randomised methods draw on from call to call. Here every call draws the numbers of its seed, 0 by
default, from row 0 on: what ``seed=0`` and ``first_row=0`` give.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import ffcp
from ffcp.conformal.random_numbers import Stream
from ffcp.predictor import Predictor


def _from_row(predictor: Predictor, out: ffcp.BatchOutput, first_row: int | None) -> int:
    if first_row is not None and first_row < 0:
        raise ValueError(f"first_row counts from 0, got {first_row}")
    return out.rows[0] + (first_row or 0)


@contextmanager
def pinned() -> Iterator[None]:
    with (
        patch.object(Stream, "entropy", lambda self, pinned=False: self.seed or 0),
        patch.object(Predictor, "first_number", _from_row),
    ):
        yield
