"""Which rows had a part in a fit, kept as hashes: a check with the same rows says so.

Rows are the same if all that the network sees of them is, and the target. Some tables repeat rows
by themselves, so only those that a table holds once are kept: whatever the table, a fresh row
equals one of these with probability 1 / e at most, about 37 %, if there are many rows: a value of
probability p is there once among n with probability n p (1 - p)^(n - 1), greatest at p = 1 / n.
Hence half of the rows, and no less, tell.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.regression.learned.training_rows import row_hashes

MOST_OF_THEM = 0.5
_KEPT = 2**15  # hashes, 256 kB; of more rows the smallest are kept, which are some by chance
_FEWEST = 10  # rows that tell of a table, where the hashes are those of some rows only
_BLOCK = 20_000  # rows; all at once would need much memory


def hashes(x: Tensor, y: Tensor) -> Tensor:
    """Hash what the networks see of each row, and its target."""
    parts = zip(x.split(_BLOCK), y.split(_BLOCK), strict=True)
    return torch.cat([row_hashes(*part) for part in parts])


def keep(hashes: Tensor, rows: np.ndarray[Any, Any]) -> Tensor:
    """Return the hashes of these rows of a table, in order; not of rows that it holds twice.

    >>> keep(torch.tensor([7, 5, 5, 3, 9]), np.array([0, 1, 3]))
    tensor([3, 7])
    """
    values, counts = hashes.unique(return_counts=True)
    own = values[(counts == 1) & torch.isin(values, hashes[torch.from_numpy(rows)])]
    kept: Tensor = own[:_KEPT].clone()
    return kept


def share(kept: Tensor, hashes: Tensor) -> float:
    """Return the share of rows that are among those of which some, or all, were kept.

    >>> share(torch.tensor([3, 7]), torch.tensor([7, 8, 3, 3]))
    0.75
    """
    if len(kept) == _KEPT:  # of greater hashes nobody knows
        hashes = hashes[hashes <= kept[-1]]
    if not len(hashes) or (len(kept) == _KEPT and len(hashes) < _FEWEST):
        return 0.0
    return float(torch.isin(hashes, kept).double().mean())
