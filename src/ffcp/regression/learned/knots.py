"""Few levels in place of many: quantiles at knots, and a line from each to the next."""

from __future__ import annotations

import torch
from torch import Tensor

from ffcp.regression.learned.nested import LEVELS

#: The levels of the knots; those between them are interpolated, those outside go on.
KNOTS = torch.tensor([0.01, 0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99], dtype=torch.float64)


def _to_levels() -> Tensor:
    """Give the matrix from knots to levels: lines between knots, over quantiles of the normal."""
    knots, levels = torch.special.ndtri(KNOTS), torch.special.ndtri(LEVELS)
    right = torch.searchsorted(knots, levels).clamp(1, len(knots) - 1)
    share = (levels - knots[right - 1]) / (knots[right] - knots[right - 1])
    matrix = torch.zeros(len(KNOTS), len(LEVELS), dtype=torch.float64)
    places = torch.arange(len(LEVELS))
    matrix[right - 1, places] = 1 - share
    matrix[right, places] += share
    return matrix


_TO_LEVELS = _to_levels()


def at_levels(knots: Tensor, apart: Tensor | float) -> Tensor:
    """Give quantiles (..., levels) from those at knots, in any order, so far apart at least.

    >>> knots = torch.special.ndtri(KNOTS)
    >>> torch.allclose(at_levels(knots.flip(-1), 0.0), torch.special.ndtri(LEVELS))
    True
    """
    steps = torch.arange(len(LEVELS), dtype=torch.float64)
    return knots.double().sort(dim=-1).values @ _TO_LEVELS + apart * steps
