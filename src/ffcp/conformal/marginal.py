"""One threshold for all rows: the conformal quantile of their scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.conformal.calibration import Calibration, Traits, known
from ffcp.conformal.columns import Columns
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import conformal_rank, pac_rank


@dataclass(frozen=True)
class Marginal(Calibration):
    """One threshold for all rows, with a guarantee on average over them.

    Examples
    --------
    >>> scores = Marginal().fit(torch.tensor([[4.0], [1.0], [3.0], [2.0]]))
    >>> scores.quantile(0.5)
    tensor([3.], dtype=torch.float64)
    """

    traits = Traits(missing=True, signs=True)

    def fit(self, scores: Tensor, metadata: Columns | None = None) -> Marginal:
        """Return this calibration with these scores, sorted, and their signs if all have one."""
        filled = super().fit(scores, {n: c for n, c in (metadata or {}).items() if n == "signs"})
        values, signs = filled.scores.numpy(), filled.rows.get("signs")
        # By numpy, which sorts in a tenth of torch's time; a sorted column costs next to nothing.
        if signs is None:
            return super().fit(torch.from_numpy(np.sort(values, axis=0)))
        if signs.shape != filled.scores.shape or bool((filled.scores < 0).any()):
            raise ValueError("signs go with scores that are sizes, one for each")
        order = torch.from_numpy(np.argsort(values, axis=0))
        return super().fit(filled.scores.gather(0, order), {"signs": signs.gather(0, order)})

    @cached_property
    def signed(self) -> Tensor | None:
        """The signed scores (n, m), each column sorted; ``None`` where signs are not known."""
        signs = self.rows.get("signs")
        return None if signs is None else self.scores.where(~signs, -self.scores).sort(dim=0).values

    @cached_property
    def _counts(self) -> list[int]:
        return known(self.scores).tolist()

    def quantile(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Return the conformal quantile of each output, shape (m,)."""
        return ranked(self.scores, self._counts, partial(conformal_rank, alpha=alpha))

    def pac_quantiles(self, alphas: Sequence[Any], pac: Any, metadata: Columns) -> Tensor:
        """Return thresholds with PAC coverage, (levels, 1, m)."""
        rank_of = [partial(pac_rank, alpha=alpha, pac=pac) for alpha in alphas]
        return torch.stack([ranked(self.scores, self._counts, rank) for rank in rank_of])[:, None]


def ranked(scores: Tensor, counts: Sequence[int], rank_of: Callable[[int], int]) -> Tensor:
    """Return from each sorted column the score of a rank that depends on how many are known.

    >>> ranked(torch.tensor([[1.0, 4.0], [2.0, torch.nan]]), [2, 1], lambda count: count)
    tensor([2., 4.])
    """
    ranks = {count: rank_of(count) for count in set(counts)}
    place = torch.tensor([ranks[count] if ranks[count] <= count else 0 for count in counts])
    beyond = scores.new_full((1, len(counts)), math.inf)
    if len(ranks) == 1:
        return scores[place[0] - 1] if place[0] else beyond[0]
    return torch.cat([beyond, scores]).gather(0, place[None])[0]
