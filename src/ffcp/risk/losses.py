"""Losses of sets that shrink as sets grow, each between 0 and 1."""

from __future__ import annotations

import torch
from torch import Tensor


def false_negatives(mask: Tensor, y: Tensor) -> Tensor:
    """Return the share of the true items of each row that are not in its set, (n,).

    Parameters
    ----------
    mask
        Which items are in the sets, (n, ...).
    y
        Which items are true: booleans, or 0 and 1, in the same shape. A row without any loses
        nothing.

    Examples
    --------
    >>> mask = torch.tensor([[True, False, True], [False, False, False]])
    >>> false_negatives(mask, torch.tensor([[1, 1, 0], [0, 0, 0]]))
    tensor([0.5000, 0.0000], dtype=torch.float64)
    """
    true = _items(mask, y)
    missed = (true & ~mask).flatten(1).sum(dim=1)
    return missed.double() / true.flatten(1).sum(dim=1).clamp_min(1)


def any_missed(mask: Tensor, y: Tensor) -> Tensor:
    """Return 1 for rows whose set misses a true item, else 0: its risk is plain miscoverage.

    >>> any_missed(torch.tensor([[True, False]]), torch.tensor([[1, 1]]))
    tensor([1.], dtype=torch.float64)
    """
    return (_items(mask, y) & ~mask).flatten(1).any(dim=1).double()


def _items(mask: Tensor, y: Tensor) -> Tensor:
    if y.shape != mask.shape:
        raise ValueError(
            f"targets have shape {tuple(y.shape)}, sets {tuple(mask.shape)}: say of every item "
            "whether it is true"
        )
    y = y.to(mask.device)
    if y.dtype != torch.bool and not bool(((y == 0) | (y == 1)).all()):
        raise ValueError("targets say of every item whether it is true, by 0 and 1")
    return y.bool()


NAMED = {"false_negatives": false_negatives, "any_missed": any_missed}
