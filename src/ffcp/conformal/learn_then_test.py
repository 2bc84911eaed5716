"""Learn then Test: levels that control expected losses, found by multiple testing.

For every level of a grid, "one of the risks exceeds its alpha" is a hypothesis with a p-value that
holds for finite samples of independent rows; which hypotheses are rejected is decided so that the
probability to reject any that is true is at most 1 - pac. The levels that are left all control all
risks, with probability pac, whatever the losses look like as functions of the level (Angelopoulos,
Bates, Candes, Jordan and Lei, 2025). Rows that are answered at a level are independent rows too,
given which are answered, so a mean over these is tested in the same way with their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ffcp.batch import BatchOutput
from ffcp.conformal.binomial import mean_p_values
from ffcp.conformal.calibration import Calibration, Traits
from ffcp.conformal.columns import Columns
from ffcp.conformal.rank import exact_alpha
from ffcp.conformal.risk import LOSS_UNIT, loss_sums

BONFERRONI, FIXED_SEQUENCE = CORRECTIONS = ("bonferroni", "fixed_sequence")


class Certified(NamedTuple):
    """The levels that control all risks, in the order of the grid.

    Attributes
    ----------
    levels : Tensor
        The certified levels, (k,); empty if there are none.
    p_values : Tensor
        The p-value of each, (k,): the largest of those of its risks.
    risks : Tensor
        The mean losses of calibration rows, (k, risks), in the units of the losses.
    shares : Tensor
        The share of calibration rows that count in each mean, (k, risks): those with an answer.

    Examples
    --------
    >>> import ffcp
    >>> _ = torch.manual_seed(0)
    >>> model, x = torch.nn.Linear(4, 3), torch.randn(900, 4)  # yours is trained
    >>> y = torch.distributions.Categorical(logits=4 * model(x)).sample()
    >>> risk = ffcp.RiskControl(model, "wrong_answers", sets="answers", pac=0.9).calibrate(x, y)
    >>> certified = risk.certified(alpha=0.3)
    >>> f"{float(certified.shares[0, 0]):.2f} answered, {float(certified.risks[0, 0]):.2f} wrong"
    '0.70 answered, 0.27 wrong'
    """

    levels: Tensor
    p_values: Tensor
    risks: Tensor
    shares: Tensor

    def __repr__(self) -> str:
        first = f", the first is {float(self.levels[0]):.4g}" if len(self.levels) else ""
        return f"Certified: {len(self.levels):,} levels{first}"


class LossTotals(NamedTuple):
    """How many rows count at each level, and the sums of their losses in whole units.

    Both are (risks, levels) tensors of integers.
    """

    counts: Tensor
    sums: Tensor

    @classmethod
    def of(cls, losses: Tensor, risks: int) -> LossTotals:
        """Add up losses (n, risks * levels); NaN stands for a row that does not count."""
        known = ~losses.isnan()
        shape = (risks, -1)
        return cls(known.sum(dim=0).view(shape), loss_sums(losses.nan_to_num(0.0)).view(shape))

    def p_values(self, alphas: Sequence[Fraction], binary: Sequence[bool]) -> Tensor:
        """Return the p-value of each level, (levels,): the largest of those of its risks."""
        p_values = [
            _level_p_values(tuple(counts), tuple(sums), alpha, is_binary)
            for counts, sums, alpha, is_binary in zip(
                self.counts.tolist(), self.sums.tolist(), alphas, binary, strict=True
            )
        ]
        return torch.tensor(p_values, dtype=torch.float64).amax(dim=0)


@lru_cache(maxsize=64)  # servers repeat a few levels
def _level_p_values(
    counts: tuple[int, ...], sums: tuple[int, ...], alpha: Fraction, binary: bool
) -> list[float]:
    """Return the p-value of one risk at each level."""
    result = [1.0] * len(counts)
    for n in set(counts):
        levels = [level for level, count in enumerate(counts) if count == n]
        totals = [Fraction(sums[level], LOSS_UNIT) for level in levels]
        for level, p_value in zip(levels, mean_p_values(totals, n, alpha, binary), strict=True):
            result[level] = p_value
    return result


@dataclass(frozen=True)
class LearnThenTest(Calibration):
    """Losses of calibration rows at each level, and which levels they certify.

    Parameters
    ----------
    grid : sequence of float
        The levels.
    binary : sequence of bool
        For each risk, whether its losses are 0 and 1 only.
    pac : float
        The probability with which all certified levels control all risks.
    correction : str
        ``"bonferroni"``: every level is tested at (1 - pac) / levels. ``"fixed_sequence"``:
        levels are tested at 1 - pac one after the other until one fails.

    Examples
    --------
    >>> losses = torch.tensor([[0.0, 1.0]] * 50 + [[1.0, 1.0]] * 2)  # of one risk, at two levels
    >>> tests = LearnThenTest([0.5, 1.0], (True,), 0.9, "bonferroni").fit(losses)
    >>> tests.certified([0.2]).levels
    tensor([0.5000], dtype=torch.float64)
    """

    grid: Sequence[float]
    binary: Sequence[bool]
    pac: Any
    correction: str
    traits = Traits()

    def __post_init__(self) -> None:
        exact_alpha(self.pac, "pac")
        levels = torch.as_tensor(self.grid, dtype=torch.float64)
        if levels.dim() != 1 or not len(levels) or len(levels.unique()) < len(levels):
            raise ValueError("'grid' must be a list of distinct levels")
        if self.correction not in CORRECTIONS:
            raise ValueError(
                f"'correction' must be one of {', '.join(map(repr, CORRECTIONS))}, got "
                f"{self.correction!r}"
            )

    def metadata(self, out: BatchOutput, y: Tensor | None = None) -> dict[str, Any]:
        """Return nothing; raise ValueError for groups."""
        if out.groups is not None:
            raise ValueError(
                "pac= certifies levels for all rows together: leave out groups=, or make a "
                "RiskControl for each group"
            )
        return {}

    def fit(self, scores: Tensor, metadata: Columns | None = None) -> LearnThenTest:
        """Return this calibration with these losses, (n, risks * levels); NaN do not count."""
        filled = super().fit(scores, metadata)
        losses = filled.scores
        columns = len(self.binary) * len(self.grid)
        if losses.shape[1] != columns or bool(((losses < 0) | (losses > 1)).any()):
            raise ValueError("expected losses from 0 to 1, one per level")
        for binary, part in zip(self.binary, losses.split(len(self.grid), dim=1), strict=True):
            if binary and bool(((part != 0) & (part != 1) & ~part.isnan()).any()):
                raise ValueError("expected losses of 0 and 1 for a binary risk")
        return filled

    @cached_property
    def totals(self) -> LossTotals:
        """How many rows count at each level, and the sums of their losses."""
        return LossTotals.of(self.scores, len(self.binary))

    def certified(self, alphas: Sequence[Any], order: Tensor | None = None) -> Certified:
        """Return the certified levels; ``order`` are the places of levels in a fixed sequence."""
        exact, doubt = [exact_alpha(alpha) for alpha in alphas], 1 - exact_alpha(self.pac, "pac")
        p_values = self.totals.p_values(exact, self.binary)
        if self.correction == BONFERRONI:
            passed = p_values <= float(doubt / len(self.grid))
        else:
            assert order is not None
            in_sequence = (p_values[order] <= float(doubt)).long().cumprod(dim=0).bool()
            passed = torch.zeros_like(in_sequence).scatter(0, order, in_sequence)
        counts = self.totals.counts.T[passed].double()
        means = self.totals.sums.T[passed].double() / LOSS_UNIT / counts
        levels = torch.as_tensor(self.grid, dtype=torch.float64)
        return Certified(levels[passed], p_values[passed], means, counts / len(self))
