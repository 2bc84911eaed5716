"""One threshold for all points: the conformal quantile of their scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ffcp.conformal.calibration import Calibration, known
from ffcp.conformal.columns import Columns
from ffcp.conformal.draws import Draws
from ffcp.conformal.rank import confident_rank, conformal_rank
from ffcp.recipes import public


@public
class Marginal(Calibration):
    """One threshold for all points, with a guarantee on average over them.

    Scores are kept sorted, so that any alpha is a look-up.

    >>> scores = Marginal()
    >>> scores.add(torch.tensor([[4.0], [1.0], [3.0], [2.0]]))
    >>> scores.threshold(0.5)
    tensor([3.], dtype=torch.float64)
    """

    takes_missing = True

    def threshold(
        self, alpha: Any, notes: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Look up the conformal quantile of each output, shape (m,)."""
        return sorted_quantile(self.scores, alpha)

    def confident_thresholds(
        self, alphas: Sequence[Any], confidence: Any, notes: Columns | None = None
    ) -> Tensor:
        """Look up thresholds that cover 1 - alpha given these points, so surely: (levels, 1, m)."""
        found = [sorted_quantile(self.scores, alpha, confidence) for alpha in alphas]
        return torch.stack(found)[:, None]

    def check(self, points: Mapping[str, Tensor]) -> None:
        """Refuse scores that are not sorted, column by column, NaN last."""
        super().check(points)
        scores = points["scores"]
        later, earlier = scores[1:], scores[:-1]
        if not bool(((earlier <= later) | later.isnan()).all()):
            raise ValueError("scores are not sorted")

    def arranged(self, points: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sort scores."""
        # Column-wise and in place, in numpy: torch.sort would also hold an index per score.
        points["scores"].numpy().sort(axis=0)
        return points


def sorted_quantile(scores: Tensor, alpha: Any, confidence: Any = None) -> Tensor:
    """Look up the conformal quantile of each sorted column; NaN, at the end, are no scores.

    With a confidence it is the score that covers 1 - alpha given these scores, so surely.

    >>> sorted_quantile(torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, torch.nan]]), alpha=0.3)
    tensor([3., inf])
    """
    counts = known(scores)
    rank_of = (
        conformal_rank if confidence is None else partial(confident_rank, confidence=confidence)
    )
    ranks = {count: rank_of(count, alpha) for count in counts.unique().tolist()}
    if len(ranks) == 1:
        ((count, rank),) = ranks.items()
        enough = 0 < rank <= count
        return scores[rank - 1] if enough else scores.new_full(scores.shape[1:], math.inf)
    place = torch.tensor([ranks[count] for count in counts.tolist()])
    quantiles = scores.gather(0, (place - 1).clamp(max=len(scores) - 1)[None])[0]
    return quantiles.masked_fill(place > counts, math.inf)
