"""Conformal p-values, and the Benjamini-Hochberg procedure."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ffcp.conformal.columns import Columns
from ffcp.conformal.rank import exact_alpha


class TailCounts(NamedTuple):
    """How many calibration scores are above each new score, how many equal it, and of how many."""

    above: Tensor
    equal: Tensor
    rows: Tensor

    def p_values(self, share: Tensor | None = None) -> Tensor:
        """Return the p-values: how often a score would be as large or larger.

        All equal scores count, the new one included; or a random ``share`` of them (smoothed
        p-values).

        >>> counts = TailCounts(torch.tensor([1, 3]), torch.tensor([1, 0]), torch.tensor(3))
        >>> counts.p_values().tolist(), counts.p_values(torch.tensor(0.5)).tolist()
        ([0.75, 1.0], [0.5, 0.875])
        """
        tied = self.equal.double() + 1
        return (self.above + (tied if share is None else share * tied)) / (self.rows + 1)


def counts_beyond(scores: Tensor, values: Tensor) -> TailCounts:
    """Count among scores in ascending order those above some values, and those equal to them.

    >>> counts_beyond(torch.tensor([1.0, 2.0, 2.0]), torch.tensor([2.0, 0.0]))[:2]
    (tensor([0, 3]), tensor([2, 0]))
    """
    values, count = values.contiguous(), len(scores)
    up_to = torch.searchsorted(scores, values, right=True)
    below = torch.searchsorted(scores, values)
    return TailCounts(count - up_to, up_to - below, torch.full_like(below, count))


def tail_counts(calibration: Any, scores: Tensor, metadata: Columns) -> TailCounts:
    """Return the counts for new scores (n, labels); raise ValueError without ranks."""
    if not hasattr(calibration, "tail_counts"):
        raise ValueError(
            f"{type(calibration).__name__} has no p-values: calibrate with "
            "ffcp.calibrations.Marginal, Mondrian or ByLabel, without compress"
        )
    counts: TailCounts = calibration.tail_counts(scores, metadata)
    return counts


def benjamini_hochberg(ranks: Tensor, of: int, fdr: Any) -> Tensor:
    """Mark the hypotheses that are rejected at a false discovery rate.

    Their p-values are ``ranks / of``, whole numbers (n,), so that nothing is rounded: of m the
    r smallest are rejected, with the largest r whose p-value is at most fdr r / m.

    >>> benjamini_hochberg(torch.tensor([1, 40, 6, 100]), 100, 0.1)
    tensor([ True, False, False, False])
    >>> benjamini_hochberg(torch.tensor([1, 40, 5, 100]), 100, 0.1)
    tensor([ True, False,  True, False])
    """
    level: Fraction = exact_alpha(fdr, "fdr")
    count = len(ranks)
    most = [level.numerator * r * of // (level.denominator * count) for r in range(1, count + 1)]
    small = (ranks.sort().values <= torch.tensor(most)).nonzero()
    return ranks <= most[int(small[-1])] if len(small) else torch.zeros_like(ranks).bool()
