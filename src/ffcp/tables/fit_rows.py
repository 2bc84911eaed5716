"""Hashes of the rows of a fit, to detect a check on the same rows.

Rows are equal if their inputs of the network and their targets are. Some tables repeat rows, so
only the hashes of rows that occur once are stored: in any table, a new row equals one of these
with probability at most 1 / e, about 37 %, if there are many rows: a value of probability p occurs
once among n with probability n p (1 - p)^(n - 1), largest at p = 1 / n. Hence only a share of half
of the rows or more is evidence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.regression.learned.training_rows import row_hashes

MOST_OF_THEM = 0.5
_KEPT = 2**15  # hashes, 256 kB; of more rows the smallest hashes are stored, a random sample
_FEWEST = 10  # rows needed for an estimate from a sample of the hashes
_BLOCK = 20_000  # rows; all at once would need much memory


def hashes(x: Tensor, y: Tensor) -> Tensor:
    """Return a hash of the networks' inputs and the target of each row."""
    blocks = zip(x.split(_BLOCK), y.split(_BLOCK), strict=True)
    return torch.cat([row_hashes(inputs, targets) for inputs, targets in blocks])


def keep(hashes: Tensor, rows: np.ndarray[Any, Any]) -> Tensor:
    """Return the sorted hashes of these rows of a table, without rows that occur twice.

    >>> keep(torch.tensor([7, 5, 5, 3, 9]), np.array([0, 1, 3]))
    tensor([3, 7])
    """
    values, counts = hashes.unique(return_counts=True)
    occurs_once = (counts == 1) & torch.isin(values, hashes[torch.from_numpy(rows)])
    kept: Tensor = values[occurs_once][:_KEPT].clone()
    return kept


def share(kept: Tensor, hashes: Tensor) -> float:
    """Return the share of rows that are rows of the fit, estimated from the stored hashes.

    >>> share(torch.tensor([3, 7]), torch.tensor([7, 8, 3, 3]))
    0.75
    """
    if len(kept) == _KEPT:  # larger hashes were not stored
        hashes = hashes[hashes <= kept[-1]]
    if not len(hashes) or (len(kept) == _KEPT and len(hashes) < _FEWEST):
        return 0.0
    return float(torch.isin(hashes, kept).double().mean())
