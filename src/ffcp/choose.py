"""Choosing the layer honestly: on rows that do not calibrate, plain CP among the candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ffcp.conformal.rank import exact_alpha
from ffcp.network.features import OUTPUT

# Enough to tell layers apart; beyond it a longer stream would only cost time and memory.
_ENOUGH_ROWS = 10_000
# A gradient that is the same everywhere gives the bands of plain CP, up to rounding.
_TIE = 1 - 1e-6


@dataclass(frozen=True)
class Candidate:
    """How one feature did on the rows set aside for choosing."""

    mean_length: float
    rank_correlation: float


@dataclass(frozen=True)
class Choice:
    """Which feature was chosen, and why.

    Attributes
    ----------
    feature
        The chosen feature; ``"output"`` means plain CP.
    candidates
        For each candidate its mean band length and the rank correlation between its slack and
        the residual (0 for plain CP, whose slack is constant).
    rows
        How many rows chose. They took no part in the calibration.
    alpha
        The level at which lengths were compared.
    """

    feature: str
    candidates: Mapping[str, Candidate]
    rows: int
    alpha: float

    def __str__(self) -> str:
        lines = [f"feature {self.feature!r}, chosen on {self.rows} rows at alpha={self.alpha}"]
        for name, candidate in sorted(self.candidates.items(), key=lambda c: c[1].mean_length):
            lines.append(
                f"  {name:<24} mean length {candidate.mean_length:<10.4g} "
                f"rank correlation {candidate.rank_correlation:+.2f}"
            )
        return "\n".join(lines)


class Trial(NamedTuple):
    """What one candidate says of some rows.

    ``scores`` has shape (n, m) for m outputs, or (n, 1) if one threshold serves them all;
    ``slacks`` is (n, m): how much the two sides together grow with the threshold.
    """

    scores: Tensor
    slacks: Tensor


def choose(widths: Tensor, trials: Mapping[str, Trial], alpha: Any) -> Choice:
    """Pick the feature with the shortest mean band; a tie goes to plain CP.

    Parameters
    ----------
    widths
        Width of the base band of the choosing rows (0 for point predictions), shape (n, m).
    trials
        Scores and slacks under each candidate; plain CP, ``"output"``, must be among them.
    alpha
        Level at which lengths are compared.

    Notes
    -----
    With several outputs, lengths count relative to those of plain CP, so that an output in
    large units does not decide alone.

    Examples
    --------
    >>> residuals = torch.tensor([[1.0], [2.0], [4.0]])
    >>> plain = Trial(residuals, 2 * torch.ones(3, 1))
    >>> knowing = Trial(torch.ones(3, 1), 2 * residuals)  # knows where the noise is
    >>> choose(torch.zeros(3, 1), {"output": plain, "trunk": knowing}, alpha=0.1).feature
    'trunk'
    """
    lengths = {name: _lengths(widths, trial, alpha) for name, trial in trials.items()}
    reference = lengths[OUTPUT].abs().clamp_min(torch.finfo(torch.float64).tiny)
    ratios = {name: float((length / reference).mean()) for name, length in lengths.items()}
    best = min(ratios, key=lambda name: ratios[name])
    if ratios[best] > _TIE * ratios[OUTPUT]:
        best = OUTPUT
    residuals = trials[OUTPUT].scores
    candidates = {
        name: Candidate(
            float(lengths[name].mean()),
            rank_correlation(residuals, _as_many(trial.slacks, residuals.shape[1])),
        )
        for name, trial in trials.items()
    }
    return Choice(best, candidates, len(widths), float(exact_alpha(alpha)))


def _as_many(slacks: Tensor, columns: int) -> Tensor:
    """Give one slack per score: the mean over the outputs that share one."""
    return slacks if slacks.shape[1] == columns else slacks.mean(dim=1, keepdim=True)


def _lengths(widths: Tensor, trial: Trial, alpha: Any) -> Tensor:
    """Mean band length per output, with the plain empirical quantile of these rows.

    No n + 1 here: the comparison needs no guarantee, and stays finite on few rows.
    """
    k = max(1, math.ceil(len(widths) * (1 - exact_alpha(alpha))))
    thresholds = trial.scores.kthvalue(k, dim=0).values
    return widths.mean(dim=0) + thresholds * trial.slacks.mean(dim=0)


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Return Spearman's rank correlation over all entries; 0 where one side is constant.

    >>> rank_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 4.0, 9.0]))
    1.0
    """
    a, b = _centred_ranks(a), _centred_ranks(b)
    scale = float(a.norm() * b.norm())
    return round(float(a @ b) / scale, 12) if scale > 0 else 0.0


def _centred_ranks(values: Tensor) -> Tensor:
    _, inverse, counts = values.flatten().unique(return_inverse=True, return_counts=True)
    # Equal values share the mean of the ranks they take up.
    ranks = counts.cumsum(0).double() - (counts - 1).double() / 2
    spread: Tensor = ranks[inverse]
    return spread - spread.mean()


class RowSplit:
    """Send about a ``fraction`` of a stream of rows to choosing, the rest to calibrating.

    Every 1 / fraction consecutive rows give one row, picked at random. The split depends on
    the seed and the row's position only, so how the stream is cut into batches changes
    nothing, and neither part looks at the data: both stay exchangeable with new points.

    >>> split = RowSplit(fraction=0.25, seed=0)
    >>> int(split.mask(8).sum())
    2
    """

    def __init__(self, fraction: float, seed: int) -> None:
        self._fraction = fraction
        self._random = np.random.default_rng(seed)
        self._seen = 0
        self._strata = 0
        self._ahead = np.empty(0, dtype=np.int64)  # rows drawn but not reached yet

    def mask(self, rows: int) -> Tensor:
        """Mark which of the next ``rows`` rows choose."""
        end = self._seen + rows
        new = max(0, math.ceil(end * self._fraction) - self._strata)
        drawn = self._strata + np.arange(new) + self._random.random(new)
        picked = np.concatenate([self._ahead, (drawn / self._fraction).astype(np.int64)])
        here = picked[picked < end]
        mask = np.zeros(rows, dtype=bool)
        mask[here[here >= self._seen] - self._seen] = True
        self._ahead, self._strata, self._seen = picked[picked >= end], self._strata + new, end
        return torch.from_numpy(mask)


class Chooser:
    """Collects what candidates say of a stream until there are enough rows to choose."""

    def __init__(self, fraction: float, seed: int, alpha: Any) -> None:
        self._split = RowSplit(fraction, seed)
        self._alpha = alpha
        self._rows = 0
        self._parts: list[tuple[Tensor, Tensor, Mapping[str, Trial]]] = []

    def add(self, widths: Tensor, trials: Mapping[str, Trial]) -> None:
        """Take in the next rows (see :func:`choose`)."""
        mask = self._split.mask(len(widths))
        self._rows += int(mask.sum())
        self._parts.append((mask, widths, trials))

    @property
    def enough(self) -> bool:
        """Whether more rows would not change much."""
        return self._rows >= _ENOUGH_ROWS

    def choose(self) -> tuple[Choice, Tensor, Tensor]:
        """Choose; return the choice, the scores (n, m) of the rows that did not, and which."""
        mask = torch.cat([mask for mask, _, _ in self._parts])
        if mask.all() or not mask.any():
            raise ValueError(
                f"{len(mask)} rows cannot be divided into some that choose the layer and some "
                "that calibrate: give more rows, or name the feature"
            )
        widths = torch.cat([widths for _, widths, _ in self._parts])[mask]
        trials = {name: self._joined(name, mask) for name in self._parts[0][2]}
        choice = choose(widths, trials, self._alpha)
        return choice, self._joined(choice.feature, ~mask).scores, ~mask

    def _joined(self, name: str, mask: Tensor) -> Trial:
        columns = zip(*(trials[name] for _, _, trials in self._parts), strict=True)
        return Trial(*(torch.cat(column)[mask] for column in columns))
