"""One threshold for all points: the conformal quantile of their scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.conformal.calibration import Calibration, known
from ffcp.conformal.columns import Columns
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import conformal_rank, pac_rank
from ffcp.recipes import public


@public
class Marginal(Calibration):
    """One threshold for all points, with a guarantee on average over them.

    Scores are kept sorted, so that any alpha is a look-up.

    Attributes
    ----------
    scores : Tensor
        The scores, sorted in every column: (n, m), or (n, 1) if outputs share a threshold.
    signs : Tensor
        Whether each score is the size of a negative number; no columns where nobody can tell.

    Examples
    --------
    >>> scores = Marginal()
    >>> scores.add(torch.tensor([[4.0], [1.0], [3.0], [2.0]]))
    >>> scores.threshold(0.5)
    tensor([3.], dtype=torch.float64)
    """

    signs: Tensor
    takes_missing = True
    keeps_signs = True

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Whether thresholds may take random numbers: those of a user's subclass may."""
        return type(self).threshold is not Marginal.threshold

    def __init__(self) -> None:
        super().__init__()
        # Whether each score is the size of a negative number; no columns where nobody can tell.
        self.register_buffer("signs", torch.empty(0, 0, dtype=torch.bool))

    def add(self, scores: Tensor, metadata: Columns | None = None) -> None:
        """Keep these scores, and their signs if they have any and all others have."""
        metadata = dict(metadata or {})
        if "signs" not in metadata:
            metadata["signs"] = _no_signs(len(scores))
        if len(self) and self.signs.shape[1:] != metadata["signs"].shape[1:]:
            self.signs, metadata["signs"] = _no_signs(len(self)), _no_signs(len(scores))
        super().add(scores, metadata)

    def arranged(self, points: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sort the scores of every column, and their signs along with them."""
        # By numpy, which sorts in a tenth of torch's time.
        scores, signs = points["scores"].numpy(), points["signs"]
        if not signs.shape[1]:
            return {**points, "scores": torch.from_numpy(np.sort(scores, axis=0))}
        order = np.argsort(scores, axis=0)
        arranged = torch.from_numpy(np.take_along_axis(scores, order, axis=0))
        return {"scores": arranged, "signs": signs.gather(0, torch.from_numpy(order))}

    def keep(self, points: Mapping[str, Tensor]) -> None:
        """Keep exactly these points; those saved before there were signs have none."""
        if "signs" not in points:
            points = {"signs": _no_signs(len(points["scores"])), **points}
        super().keep(points)

    def signed(self) -> Tensor | None:
        """Give the signed scores, each column sorted, NaN last; ``None`` where none are known.

        >>> scores = Marginal()
        >>> signs = torch.tensor([[True], [False], [True]])
        >>> scores.add(torch.tensor([[3.0], [1.0], [2.0]]), {"signs": signs})
        >>> scores.signed()[:, 0]
        tensor([-3., -2.,  1.], dtype=torch.float64)
        """
        if not self.signs.shape[1]:
            return None
        if "signed" not in self._cache:
            self._cache["signed"] = self.scores.where(~self.signs, -self.scores).sort(dim=0).values
        signed: Tensor = self._cache["signed"]
        return signed

    def threshold(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Look up the conformal quantile of each output, shape (m,)."""
        return sorted_quantile(self.scores, alpha)

    def pac_thresholds(
        self, alphas: Sequence[Any], pac: Any, metadata: Columns | None = None
    ) -> Tensor:
        """Return thresholds with PAC coverage, (levels, 1, m): a user's subclass has none."""
        if type(self).threshold is not Marginal.threshold:
            return super().pac_thresholds(alphas, pac, metadata)
        kept = [sorted_quantile(self.scores, alpha, pac) for alpha in alphas]
        return torch.stack(kept)[:, None]

    def check(self, points: Mapping[str, Tensor]) -> None:
        """Refuse scores that are not sorted, column by column, NaN last, and signs of others."""
        points = {"signs": _no_signs(len(points.get("scores", ()))), **points}
        super().check(points)
        scores, signs = points["scores"], points["signs"]
        if signs.dim() != 2 or signs.shape[1] not in (0, scores.shape[1]):
            raise ValueError(f"signs of shape {tuple(signs.shape)} stand beside the scores")
        if signs.shape[1] and bool((scores < 0).any()):
            raise ValueError("scores that have a sign are negative")
        later, earlier = scores[1:], scores[:-1]
        if not bool(((earlier <= later) | later.isnan()).all()):
            raise ValueError("scores are not sorted")


def _no_signs(rows: int) -> Tensor:
    return torch.empty(rows, 0, dtype=torch.bool)


def sorted_quantile(scores: Tensor, alpha: Any, pac: Any = None) -> Tensor:
    """Look up the conformal quantile of each sorted column; NaN, at the end, are no scores.

    With ``pac`` it is the score that covers 1 - alpha given these scores, so surely.

    >>> sorted_quantile(torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, torch.nan]]), alpha=0.3)
    tensor([3., inf])
    """
    counts = known(scores).tolist()
    rank_of = conformal_rank if pac is None else partial(pac_rank, pac=pac)
    ranks = {count: rank_of(count, alpha) for count in set(counts)}
    if len(ranks) == 1:
        ((count, rank),) = ranks.items()
        enough = 0 < rank <= count
        return scores[rank - 1] if enough else scores.new_full(scores.shape[1:], math.inf)
    place = torch.tensor([ranks[count] for count in counts])
    quantiles = scores.gather(0, (place - 1).clamp(max=len(scores) - 1)[None])[0]
    return quantiles.masked_fill(place > torch.tensor(counts), math.inf)
