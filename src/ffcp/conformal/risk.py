"""Conformal risk control: the smallest level at which the expected loss is at most alpha.

Sets grow with a level, and the loss of a set, at most ``bound``, never grows with it. With the
losses of n exchangeable rows at level t, take the smallest t with

    (sum of losses at t + bound) / (n + 1) <= alpha;

the loss of a new row at this level is then at most alpha in expectation (Angelopoulos, Bates,
Fisch, Lei and Schuster, 2024). With the loss "y is not in the set" this is the conformal quantile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ffcp.conformal.calibration import Calibration, Traits
from ffcp.conformal.columns import Columns
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import exact_alpha, rows_needed

LOSS_UNIT = 2**32  # losses are counted in 1 / LOSS_UNIT of the bound, rounded up


def loss_sums(losses: Tensor) -> Tensor:
    """Return the exact sum of each column, in units, for any order of rows."""
    return (losses * LOSS_UNIT).ceil().long().sum(dim=0)


@dataclass(frozen=True)
class Losses(Calibration):
    """Losses of calibration rows at each level of a grid, in units of the largest possible loss.

    Parameters
    ----------
    grid : sequence of float
        The levels, ascending. A constant: chosen by the data it would break exchangeability.

    Examples
    --------
    >>> rows = torch.tensor([[1.0, 0.5, 0.0]] * 3 + [[1.0, 0.0, 0.0]] * 6)
    >>> Losses([0.0, 0.5, 1.0]).fit(rows).quantile(0.25)  # (1.5 + 1) / 10
    tensor([0.5000], dtype=torch.float64)
    """

    grid: Sequence[float]
    traits = Traits()

    def __post_init__(self) -> None:
        steps = torch.as_tensor(self.grid, dtype=torch.float64)
        if steps.dim() != 1 or len(steps) < 2 or not bool((steps.diff() > 0).all()):
            raise ValueError("the grid of levels must be at least two numbers in ascending order")

    def fit(self, scores: Tensor, metadata: Columns | None = None) -> Losses:
        """Return this calibration with these losses, (n, levels)."""
        filled = super().fit(scores, metadata)
        losses = filled.scores
        inside = bool(((losses >= 0) & (losses <= 1)).all())
        if losses.shape[1] != len(self.grid) or not inside:
            raise ValueError("expected losses from 0 to 1, one per level")
        if bool((losses.diff(dim=1) > 0).any()):
            raise ValueError("losses must not increase with the level")
        return filled

    @cached_property
    def _sums(self) -> Tensor:
        return loss_sums(self.scores)

    def quantile(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Return the level, (1,); infinite if even the last one does not control the risk."""
        budget = exact_alpha(alpha) * (len(self) + 1) - 1
        grid = torch.as_tensor(self.grid, dtype=torch.float64)
        enough = grid[self._sums <= math.floor(budget * LOSS_UNIT)]
        return enough[:1] if len(enough) else torch.full((1,), math.inf, dtype=torch.float64)

    def explain(self, alpha: Any, metadata: Columns) -> str:
        """Explain why no level controls the risk."""
        needed = rows_needed(alpha)
        if len(self) < needed:
            return (
                f": alpha={float(alpha):g} of the largest loss needs at least {needed} "
                f"calibration rows and there are {len(self)}"
            )
        mean = float(self.scores[:, -1].mean())
        return (
            f": even at the last level the mean loss is {mean:.3g} of the largest: use a "
            "function 'sets' that has no loss there"
        )
