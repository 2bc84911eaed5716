"""One threshold for all points: the conformal quantile of their scores."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.conformal.calibration import Calibration, known
from ffcp.conformal.columns import Columns
from ffcp.conformal.draws import Draws
from ffcp.conformal.rank import confident_rank, conformal_rank, exact_alpha
from ffcp.recipes import public

_MOST_LEVELS = 256  # whose thresholds are remembered
_MANY, _EVERY = 2**13, 64  # scores of which one in so many says where to look for a quantile
_SORTING = threading.Lock()


@public
class Marginal(Calibration):
    """One threshold for all points, with a guarantee on average over them.

    Scores are kept sorted, so that any alpha is a look-up. They are sorted when first looked at;
    the first level is found without.

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
    draws = False

    def __init__(self) -> None:
        super().__init__()
        # Whether each score is the size of a negative number; no columns where nobody can tell.
        self.register_buffer("signs", torch.empty(0, 0, dtype=torch.bool))

    def __getattr__(self, name: str) -> Any:
        """Give scores and signs sorted, whoever asks."""
        if name in ("scores", "signs"):
            self._sort()
        return super().__getattr__(name)

    def _sort(self) -> None:
        """Sort what was added; others may do so, or read, at the same time."""
        if self.__dict__.get("_unsorted", False):
            with _SORTING:
                if self._unsorted:
                    self._buffers.update(self._sorted(super().points()))
                    self._unsorted = False  # last: who sees it sees both

    _unsorted = False

    def points(self) -> dict[str, Tensor]:
        """Give all that is kept of the points, sorted."""
        self._sort()
        return super().points()

    def _save_to_state_dict(self, *args: Any) -> None:
        self._sort()
        super()._save_to_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        self._sort()
        return super().__getstate__()

    def add(self, scores: Tensor, notes: Columns | None = None) -> None:
        """Keep these scores, and their signs if they have any and all others have."""
        notes = dict(notes or {})
        if "signs" not in notes:
            notes["signs"] = _no_signs(len(scores))
        if len(self) and self.signs.shape[1:] != notes["signs"].shape[1:]:
            self.signs, notes["signs"] = _no_signs(len(self)), _no_signs(len(scores))
        super().add(scores, notes)
        self._unsorted = True

    def keep(self, points: Mapping[str, Tensor]) -> None:
        """Keep exactly these points; those saved before there were signs have none."""
        if "signs" not in points:
            points = {"signs": _no_signs(len(points["scores"])), **points}
        super().keep(points)
        self._unsorted = False

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
        self, alpha: Any, notes: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Look up the conformal quantile of each output, shape (m,)."""
        return sorted_quantile(self.scores, alpha)

    def thresholds(
        self, alphas: Sequence[Any], notes: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Look up the thresholds of several levels: (levels, 1, m)."""
        asked = [exact_alpha(alpha) for alpha in alphas]
        key = tuple([alpha.as_integer_ratio() for alpha in asked])  # fractions hash slowly
        kept = self._cache.setdefault("levels", {})  # the cache is exchanged with the points
        thresholds: Tensor | None = kept.get(key)
        if thresholds is None:
            is_first = self._unsorted and not kept and len(asked) == 1
            if is_first and math.isfinite(self._points("scores").sum().item()):  # no NaN
                quantiles = partitioned(self._points("scores").numpy(), asked[0])
                thresholds = torch.tensor([[quantiles]], dtype=torch.float64)
            else:
                scores = self.scores
                each = [sorted_quantile(scores, alpha) for alpha in asked]
                thresholds = torch.stack(each)[:, None]
            if len(kept) >= _MOST_LEVELS:
                kept.clear()
            kept[key] = thresholds
        return thresholds

    def confident_thresholds(
        self, alphas: Sequence[Any], pac: Any, notes: Columns | None = None
    ) -> Tensor:
        """Look up thresholds that cover 1 - alpha given these points, so surely: (levels, 1, m)."""
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

    @staticmethod
    def _sorted(points: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sort scores, and their signs along with them."""
        # Column-wise, in numpy: torch.sort would also hold an index per score. On a copy, since
        # others may read meanwhile.
        scores = points["scores"].numpy().copy()
        if not points["signs"].shape[1]:
            scores.sort(axis=0)
            return {**points, "scores": torch.from_numpy(scores)}
        # Sizes have no sign of their own: without it a bit is free, behind the last, for theirs.
        # Read as whole numbers, sizes are in the same order, and NaN comes last.
        bits = scores.view(np.uint64)
        bits <<= 1
        bits |= points["signs"].numpy()
        bits.sort(axis=0)
        signs = np.empty(bits.shape, dtype=bool)
        np.bitwise_and(bits, 1, out=signs, casting="unsafe")
        bits >>= 1
        return {"scores": torch.from_numpy(scores), "signs": torch.from_numpy(signs)}


def _no_signs(rows: int) -> Tensor:
    return torch.empty(rows, 0, dtype=torch.bool)


def partitioned(columns: np.ndarray, alpha: Any) -> list[float]:
    """Find the conformal quantile of each column, none of which has NaN, without sorting.

    >>> partitioned(np.array([[3.0], [1.0], [2.0]]), alpha=0.5)
    [2.0]
    """
    rank = conformal_rank(len(columns), alpha)
    if rank > len(columns):
        return [math.inf] * columns.shape[1]
    if len(columns) >= _MANY:
        return [_ranked(np.ascontiguousarray(column), rank) for column in columns.T]
    quantiles: list[float] = np.partition(columns, rank - 1, axis=0)[rank - 1].tolist()
    return quantiles


def _ranked(values: np.ndarray, rank: int) -> float:
    """Find the number of a rank, counted from 1, among many.

    Every 64th number says between which two it should lie, and only what lies between them is
    put in order. Where it lies elsewhere, all numbers are.

    >>> _ranked(np.arange(9000.0)[::-1].copy(), 17)
    16.0
    """
    sample, share = values[::_EVERY], rank / len(values)
    place = share * len(sample)
    spread = 2.5 * (len(sample) * share * (1 - share)) ** 0.5
    ends = max(0, int(place - spread) - 1), min(len(sample) - 1, int(place + spread) + 1)
    low, high = np.partition(sample, ends)[list(ends)]
    between = values >= low
    below = len(values) - int(np.count_nonzero(between))
    between &= values <= high
    near = values[between.nonzero()]
    if not 0 < rank - below <= len(near):
        near, below = values.copy(), 0
    near.partition(rank - below - 1)
    return float(near[rank - below - 1])


def sorted_quantile(scores: Tensor, alpha: Any, pac: Any = None) -> Tensor:
    """Look up the conformal quantile of each sorted column; NaN, at the end, are no scores.

    With ``pac`` it is the score that covers 1 - alpha given these scores, so surely.

    >>> sorted_quantile(torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, torch.nan]]), alpha=0.3)
    tensor([3., inf])
    """
    counts = known(scores)
    rank_of = conformal_rank if pac is None else partial(confident_rank, pac=pac)
    ranks = {count: rank_of(count, alpha) for count in counts.unique().tolist()}
    if len(ranks) == 1:
        ((count, rank),) = ranks.items()
        enough = 0 < rank <= count
        return scores[rank - 1] if enough else scores.new_full(scores.shape[1:], math.inf)
    place = torch.tensor([ranks[count] for count in counts.tolist()])
    quantiles = scores.gather(0, (place - 1).clamp(max=len(scores) - 1)[None])[0]
    return quantiles.masked_fill(place > counts, math.inf)
