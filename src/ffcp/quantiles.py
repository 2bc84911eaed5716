"""The conformal rank, exact, and a store of scores that can grow, merge and be saved."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ffcp.checks import exact_alpha
from ffcp.errors import FFCPWarning


def conformal_rank(n: int, alpha: Any) -> int:
    """Return k = ceil((n + 1)(1 - alpha)), computed in exact rational arithmetic.

    The k-th smallest of n scores covers a new exchangeable score with probability at least
    1 - alpha. If k > n no finite threshold does.

    >>> conformal_rank(9, 0.7)  # in floating point this comes out as 4
    3
    """
    return math.ceil((n + 1) * (1 - exact_alpha(alpha)))


def points_needed(alpha: Any) -> int:
    """Return the smallest number of calibration points with a finite threshold at ``alpha``.

    >>> points_needed(0.1)
    9
    """
    exact = exact_alpha(alpha)
    return math.ceil((1 - exact) / exact)


def conformal_quantile(scores: Tensor, alpha: Any) -> Tensor:
    """Return the k-th smallest score, or infinity where k exceeds the number of scores.

    Parameters
    ----------
    scores
        Shape (n,) or (n, m) for m coordinates, each with its own quantile. Not sorted.
    alpha
        Share of misses allowed, in (0, 1).

    Examples
    --------
    >>> conformal_quantile(torch.tensor([3.0, 1.0, 2.0]), alpha=0.5)
    tensor(2.)
    >>> conformal_quantile(torch.tensor([3.0, 1.0, 2.0]), alpha=0.1)
    tensor(inf)
    """
    k = conformal_rank(len(scores), alpha)
    if k > len(scores):
        return scores.new_full(scores.shape[1:], math.inf)
    return scores.kthvalue(k, dim=0).values


class ScoreBuffer:
    """Scores that arrive batch by batch, in one tensor that doubles when it is full.

    A list of small tensors would be kept between the large intermediates of the batches, and
    hold the heap open far beyond its own size.

    >>> buffer = ScoreBuffer()
    >>> for part in torch.arange(5.0)[:, None].split(2):
    ...     buffer.extend(part)
    >>> buffer.scores[:, 0]
    tensor([0., 1., 2., 3., 4.], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self._room = torch.empty(0, 0, dtype=torch.float64)
        self._filled = 0

    def extend(self, scores: Tensor) -> None:
        """Append scores of shape (n, m)."""
        end = self._filled + len(scores)
        if end > len(self._room):
            more = torch.empty(max(end, 2 * len(self._room)), scores.shape[1], dtype=torch.float64)
            if self._filled:
                more[: self._filled] = self.scores
            self._room = more
        self._room[self._filled : end] = scores.detach()
        self._filled = end

    @property
    def scores(self) -> Tensor:
        """All scores so far, in the order they came."""
        return self._room[: self._filled]


class ScoreStore(nn.Module):
    """All calibration scores, sorted, in float64 on the CPU.

    Scores are a buffer, so ``state_dict`` carries them, but ``.to()`` and ``.half()`` leave
    them alone: a threshold is one number, and rounding it would break the guarantee.
    """

    scores: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scores", torch.empty(0, 0, dtype=torch.float64))

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def coordinates(self) -> int:
        """How many outputs have scores of their own."""
        return self.scores.shape[1]

    def replace(self, scores: Tensor) -> None:
        """Keep these scores, of shape (n, m), and no others."""
        kept = scores.detach().to("cpu", torch.float64, copy=True)
        # Column-wise sort in numpy, in place: torch.sort would also hold an index per score.
        kept.numpy().sort(axis=0)
        self.scores = kept

    def add(self, scores: Tensor) -> None:
        """Keep these scores as well."""
        if len(self) and scores.shape[1] != self.coordinates:
            raise ValueError(
                f"the store has scores for {self.coordinates} outputs, got {scores.shape[1]}"
            )
        scores = scores.detach().to("cpu", torch.float64)
        self.replace(torch.cat([self.scores, scores]) if len(self) else scores)

    def threshold(self, alpha: Any) -> Tensor:
        """Look up the conformal quantile, one per coordinate; warn where it is infinite."""
        k = conformal_rank(len(self), alpha)
        if k <= len(self):
            return self.scores[k - 1]
        warnings.warn(
            f"the band is infinite: alpha={float(alpha):g} needs at least {points_needed(alpha)} "
            f"calibration points and there are {len(self)}",
            FFCPWarning,
            stacklevel=3,
        )
        return self.scores.new_full((self.coordinates,), math.inf)

    def _apply(self, fn: Any, recurse: bool = True) -> ScoreStore:
        return self  # stays where it is, as it is

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # The saved scores may be of any number; the parent class insists on equal shapes.
        saved = state_dict.get(f"{prefix}scores")
        if saved is not None:
            self.scores = torch.empty(saved.shape, dtype=torch.float64)
        super()._load_from_state_dict(state_dict, prefix, *args)
