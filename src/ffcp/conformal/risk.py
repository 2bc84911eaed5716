"""Conformal risk control: the smallest level at which the expected loss is at most alpha.

Sets grow with a level, and the loss of a set, at most ``bound``, never grows with it. With the
losses of n exchangeable points at level t, take the smallest t with

    (sum of losses at t + bound) / (n + 1) <= alpha;

the loss of a new point at this level is then at most alpha in expectation (Angelopoulos, Bates,
Fisch, Lei and Schuster, 2024). With the loss "y is not in the set" this is the conformal quantile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Columns
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import exact_alpha, rows_needed
from ffcp.recipes import public

_UNIT = 2**32  # losses are counted in 1 / _UNIT of the bound, rounded up


@public
class Losses(Calibration):
    """Losses of calibration points at each level of a grid, in units of the largest there can be.

    Parameters
    ----------
    grid
        The levels, ascending. A constant: chosen by the data it would break exchangeability.

    Examples
    --------
    >>> losses = Losses([0.0, 0.5, 1.0])
    >>> losses.add(torch.tensor([[1.0, 0.5, 0.0]] * 3 + [[1.0, 0.0, 0.0]] * 6))
    >>> losses.threshold(0.25)  # (1.5 + 1) / 10
    tensor([0.5000], dtype=torch.float64)
    """

    def __init__(self, grid: Sequence[float]) -> None:
        super().__init__()
        self.grid = torch.as_tensor(grid, dtype=torch.float64)
        if self.grid.dim() != 1 or len(self.grid) < 2 or not bool((self.grid.diff() > 0).all()):
            raise ValueError("the grid of levels must be at least two numbers in ascending order")

    def settings(self) -> dict[str, Any]:
        """Return what the grid is."""
        return {**super().settings(), "grid": self.grid.tolist()}

    def check(self, points: Mapping[str, Tensor]) -> None:
        """Refuse what are no losses."""
        super().check(points)
        losses = points["scores"]
        inside = bool(((losses >= 0) & (losses <= 1)).all())
        if len(losses) and (losses.shape[1] != len(self.grid) or not inside):
            raise ValueError("losses are not numbers from 0 to 1 for each level")
        if bool((losses.diff(dim=1) > 0).any()):
            raise ValueError("losses grow with the level")

    def threshold(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Look up the level, (1,); infinite where even the last one promises nothing."""
        if "sums" not in self._cache:
            self._cache["sums"] = (self.scores * _UNIT).ceil().long().sum(dim=0)
        budget = exact_alpha(alpha) * (len(self) + 1) - 1
        enough = self.grid[self._cache["sums"] <= math.floor(budget * _UNIT)]
        return enough[:1] if len(enough) else torch.full((1,), math.inf, dtype=torch.float64)

    def why_infinite(self, alpha: Any, metadata: Columns) -> str:
        """Return what is missing."""
        needed = rows_needed(alpha)
        if len(self) < needed:
            return (
                f": alpha={float(alpha):g} of the largest loss needs at least {needed} "
                f"calibration points and there are {len(self)}"
            )
        mean = float(self.scores[:, -1].mean())
        return (
            f": even at the last level the mean loss is {mean:.3g} of the largest: let the family "
            "end in sets that lose nothing"
        )
