"""Choosing the layer honestly: on rows that do not calibrate, plain CP among the candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ffcp.checks import exact_alpha
from ffcp.features import OUTPUT

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


def choose(residuals: Tensor, slacks: Mapping[str, Tensor], alpha: float) -> Choice:
    """Pick the feature with the shortest mean band; a tie goes to plain CP.

    Parameters
    ----------
    residuals
        Absolute residuals of the choosing rows, shape (n, m) for m outputs.
    slacks
        For each candidate its slack, broadcastable to the residuals.
    alpha
        Level at which lengths are compared.

    Notes
    -----
    With several outputs, lengths count relative to those of plain CP, so that an output in
    large units does not decide alone.

    Examples
    --------
    >>> residuals = torch.tensor([[1.0], [2.0], [4.0]])
    >>> slack = torch.tensor([[1.0], [2.0], [4.0]])  # knows where the noise is
    >>> choose(residuals, {"trunk": slack}, alpha=0.1).feature
    'trunk'
    """
    slacks = {OUTPUT: torch.ones_like(residuals), **slacks}
    lengths = {name: _lengths(residuals, slack, alpha) for name, slack in slacks.items()}
    reference = lengths[OUTPUT].clamp_min(torch.finfo(torch.float64).tiny)
    ratios = {name: float((length / reference).mean()) for name, length in lengths.items()}
    best = min(ratios, key=lambda name: ratios[name])
    if ratios[best] > _TIE * ratios[OUTPUT]:
        best = OUTPUT
    candidates = {
        name: Candidate(float(lengths[name].mean()), rank_correlation(residuals, slacks[name]))
        for name in slacks
    }
    return Choice(best, candidates, len(residuals), float(alpha))


def _lengths(residuals: Tensor, slack: Tensor, alpha: float) -> Tensor:
    """Mean band length per output, with the plain empirical quantile of these rows.

    No n + 1 here: the comparison needs no guarantee, and stays finite on few rows.
    """
    k = max(1, math.ceil(len(residuals) * (1 - exact_alpha(alpha))))
    thresholds = (residuals / slack).kthvalue(k, dim=0).values
    return 2 * thresholds * slack.mean(dim=0)


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
    """Collects residuals and slacks of a stream until there are enough rows to choose."""

    def __init__(self, names: Sequence[str], fraction: float, seed: int, alpha: float) -> None:
        self.names = names
        self._split = RowSplit(fraction, seed)
        self._alpha = alpha
        self._rows = 0
        self._parts: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []

    def add(self, residuals: Tensor, slacks: Mapping[str, Tensor]) -> None:
        """Take in the next rows: absolute residuals (n, m) and each candidate's slack (n, m)."""
        mask = self._split.mask(len(residuals))
        self._rows += int(mask.sum())
        self._parts.append((mask, residuals.cpu(), {k: v.cpu() for k, v in slacks.items()}))

    @property
    def enough(self) -> bool:
        """Whether more rows would not change much."""
        return self._rows >= _ENOUGH_ROWS

    def choose(self) -> tuple[Choice, Tensor]:
        """Choose, and return the scores (n, m) of the rows that did not, under the choice."""
        mask = torch.cat([mask for mask, _, _ in self._parts])
        residuals = torch.cat([residuals for _, residuals, _ in self._parts])
        slacks = {n: torch.cat([s[n] for _, _, s in self._parts]) for n in self.names}
        if mask.all() or not mask.any():
            raise ValueError(
                f"{len(mask)} rows cannot be divided into some that choose the layer and some "
                "that calibrate: give more rows, or name the feature"
            )
        choice = choose(residuals[mask], {n: s[mask] for n, s in slacks.items()}, self._alpha)
        rest = residuals[~mask]
        return choice, rest if choice.feature == OUTPUT else rest / slacks[choice.feature][~mask]
