"""Guan's exact level of localized quantiles, see ``docs/localized.md`` for the proof.

Let L_i be the weighted share, around row i, of rows with a smaller score, the new row among them
with the score v. The interval contains every v at which fewer than k of the calibration rows have
an L_i below that of the new row, k the conformal rank. As v grows the new row's own share can only
grow and those of the others only fall, so the interval ends at one of the calibration scores, and
bisection finds it.

For any new row, L_i lies between a_i / (b_i + 1) and (a_i + 1) / (b_i + 1), with a_i and b_i the
sums over the calibration rows only. Between the k-th smallest of either, few rows are undecided:
only these are evaluated.

Sums are integers. A share is the quotient of two of them, rounded to a floating-point number in
the same way for every row, the new one included, so that comparisons are consistent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ffcp.conformal.kernel_weights import Entry, RunningSums, Surroundings
from ffcp.conformal.neighbours import NearestSums
from ffcp.conformal.rank import conformal_rank, exact_share

_MARGIN = 1e-12  # more than the rounding of a quotient, less than any difference of shares
Sums = RunningSums | NearestSums


@dataclass(frozen=True)
class Level:
    """How the scores of some calibration rows lie among those around them, without a new row.

    Parameters
    ----------
    rows : Tensor
        Which rows these are.
    left : Tensor
        How many scores of all are smaller than that of each.
    around : Surroundings
        The weight of smaller scores around each, and of all.
    own : int
        The weight 1.
    """

    rows: Tensor
    left: Tensor
    around: Surroundings
    own: int

    def shares(self) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest share that there can be with a new row."""
        smaller, all_rows = self.around.smaller, (self.around.all_rows + self.own).double()
        return smaller / all_rows, (smaller + self.own) / all_rows

    def bound(self, alpha: Any) -> Fraction | None:
        """Return a level that is enough for every new row; ``None`` if no level is."""
        k = conformal_rank(len(self.rows), alpha)
        if k > len(self.rows):
            return None
        row = int(self.shares()[1].argsort(stable=True)[k - 1])
        smaller, all_rows = int(self.around.smaller[row]), int(self.around.all_rows[row])
        return Fraction(smaller + self.own, all_rows + self.own)

    def at(self, alpha: Any, weights: Any) -> UndecidedRows | None:
        """Return the rows that decide at ``alpha``; ``None`` if there are too few rows."""
        k = conformal_rank(len(self.rows), alpha)
        if k > len(self.rows):
            return None
        least, most = self.shares()
        low = max(0.0, float(least.kthvalue(k).values) - _MARGIN)
        high = float(most.kthvalue(k).values) + _MARGIN
        below = most <= low - _MARGIN
        undecided = (~below & (least < high + _MARGIN)).nonzero()[:, 0]
        around = Surroundings(*(column[undecided] for column in self.around))
        return UndecidedRows(
            left=self.left[undecided, None],
            around=around,
            levels=(Fraction(low), Fraction(high)),
            entering=weights.entering(self.rows[undecided], around),
            missing=k - int(below.sum()),
        )


class UndecidedRows(NamedTuple):
    """Rows whose shares may be on either side of the level."""

    left: Tensor
    around: Surroundings
    levels: tuple[Fraction, Fraction]
    entering: Callable[[Any, Tensor], Entry]
    missing: int  # how many of these must be below the share of the new row

    def position(self, near: Any, sums: Sums, x: Tensor, total: Tensor) -> Tensor:
        """Return the position of the score that ends the interval of each of ``x``, or n.

        ``total`` is all the weight around each, its own included.
        """
        low, high = (sums.position(exact_share(total, level) + 1) for level in self.levels)
        if bool((low == high).all()):
            return high
        entry = self.entering(near, x)
        all_rows = self.around.all_rows[:, None].double() + entry.total
        smaller = self.around.smaller[:, None].double()
        if_smaller = (smaller + entry.if_smaller) / all_rows
        if_not = (smaller + entry.if_not) / all_rows
        while bool((low < high).any()):
            # Between the scores at this position and the next, one more is smaller.
            middle = torch.minimum((low + high) // 2, high - 1).clamp_min(0)
            share = sums.before(middle + 1).double() / total.double()
            shares = if_smaller.where(self.left > middle, if_not)
            ends = (shares < share).sum(dim=0) >= self.missing
            is_open = low < high
            high = middle.where(is_open & ends, high)
            low = (middle + 1).where(is_open & ~ends, low)
        return high
