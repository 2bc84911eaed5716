"""Judging candidates on rows that do not calibrate: their interval score and length."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ffcp.batch import BatchOutput
from ffcp.conformal.bandwidth_selection import choose_bandwidth
from ffcp.conformal.columns import take
from ffcp.conformal.local import CHOOSING_ROWS, Local, Localizer
from ffcp.conformal.rank import conformal_quantile, exact_alpha, rows_needed
from ffcp.conformal.weighted import effective_size, weighted_quantile
from ffcp.description import Described
from ffcp.network import forward
from ffcp.regression.intervals import columns
from ffcp.regression.joint import has_own_thresholds, learned_output_scales
from ffcp.regression.learned.learned_score import LearnedScore
from ffcp.regression.scaled_score import RegressionScore, ScaledScore
from ffcp.regression.sides import (
    BOTH,
    LOWER,
    UPPER,
    extent,
    shared_out,
    two_sided,
    what_reach_is,
)

SCORE, LENGTH = CRITERIA = ("score", "length")
_FOLDS = 3  # rows that teach are judged by what the other folds taught


@dataclass(frozen=True)
class MethodTrial(Described):
    """How one candidate did on the rows set aside.

    Both numbers are relative to those of CP if there are several outputs, so that one in large
    units does not decide alone.
    """

    score: float
    length: float


@dataclass(frozen=True)
class AutoChoice(Described):
    """Which method was chosen, and how all candidates did.

    Attributes
    ----------
    method
        The one that was taken.
    trials
        For each candidate its interval score (length, plus 2 / alpha times the miss) and its
        length, averaged over the rows set aside. The best is taken if it beats CP, or the central
        quantiles of the model if it gives any, by more than a standard error.
    criterion
        Which of the two decided: ``"score"`` or ``"length"``.
    rows
        How many rows chose. They took no part in the calibration. 0: there were too few to choose
        on, all of them calibrate, and nothing was compared.
    alpha
        The level at which candidates were compared.
    side
        Which side of bands is promised. With ``"lower"`` or ``"upper"`` the place of the length
        is taken by the reach: how far that limit lies beyond the prediction, negative on its
        other side; and a miss counts 1 / alpha times.

    Examples
    --------
    >>> import ffcp
    >>> _ = torch.manual_seed(0)
    >>> x = torch.rand(300, 1)
    >>> auto = ffcp.Auto(torch.nn.Linear(1, 1), seed=0)  # yours is trained
    >>> choice = auto.calibrate(x, x[:, 0] * torch.randn(300)).choice
    >>> print(str(choice).splitlines()[0])  # and a line for every candidate, the best first
    Learned, ..., chosen by interval score on 115 rows at alpha=0.1
    >>> choice.trials[choice.method].score <= choice.trials["CP"].score
    True
    """

    method: str
    trials: Mapping[str, MethodTrial]
    criterion: str
    rows: int
    alpha: float
    side: str = BOTH

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.method}, compared with nothing: there are too few calibration rows"
        what = extent(self.side)
        by = "interval score" if self.criterion == SCORE else f"mean {what}"
        first = f"{self.method}, chosen by {by} on {self.rows} rows at alpha={self.alpha:g}"
        lines = [first + what_reach_is(self.side)]
        ranked = sorted(self.trials.items(), key=lambda trial: getattr(trial[1], self.criterion))
        for name, trial in ranked:
            lines.append(f"  {name:<42} score {trial.score:<10.4g} {what} {trial.length:.4g}")
        return "\n".join(lines)


class MethodCandidate(NamedTuple):
    """A method to choose: its bands on the rows set aside, and how it is made for good."""

    lower: Tensor
    upper: Tensor
    make: Callable[
        [], tuple[RegressionScore, float | None]
    ]  # the family, and its bandwidth if localized


class Comparison:
    """Compares bands on rows that do not calibrate.

    Where inputs move, these count by their density ratio, ``weights``; ``left`` rows calibrate.
    """

    def __init__(
        self,
        out: BatchOutput,
        y: Tensor,
        alpha: Any,
        side: str,
        weights: Tensor | None = None,
        left: int = 0,
    ) -> None:
        self._seen, self._y, self._alpha, self._side = out, y.double(), exact_alpha(alpha), side
        self.rows, self._left = len(y), max(left, 1)
        self.weights = weights
        self._shares = torch.ones(self.rows).double() if weights is None else weights

    @property
    def of_each(self) -> Any:
        """The level of one threshold."""
        return shared_out(self._alpha, self._side, False, 1)

    def scaled(self, family: ScaledScore) -> ScaledScore:
        """Bring outputs that share a threshold to one scale, learned here."""
        if has_own_thresholds(family.joint) or self._y.shape[1] == 1:
            return family
        scores = two_sided(self._scores(replace(family, joint=False)), family.side)
        return replace(family, output_scales=learned_output_scales(scores, self._alpha))

    def fixed(self, family: RegressionScore) -> MethodCandidate:
        """Give the bands of a family that nothing here was chosen for, at its own threshold."""
        lower, upper = self._bands(family, self._threshold(family, self._scores(family)))
        return MethodCandidate(lower, upper, lambda: (family, None))

    def _scores(self, family: RegressionScore) -> Tensor:
        return family.score(self._seen, self._y_as_given()).cpu()

    def _y_as_given(self) -> Tensor:
        return self._y.reshape(self._seen.output.shape)

    def _threshold(
        self, family: RegressionScore, scores: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Give the threshold of these scores, or of each row where they weigh unequally."""
        alpha = shared_out(self._alpha, family.side, family.joint, scores.shape[1])
        if self.weights is not None:
            weights = self.weights if rows is None else self.weights[rows]
            own = self._as_new(weights, self.rows)
            each = [weighted_quantile(column, weights, own, alpha) for column in scores.T]
            return torch.stack(each, dim=1)[None]
        known = [column[~column.isnan()] for column in scores.T]
        return torch.stack([conformal_quantile(column, alpha) for column in known])[None, None]

    def _as_new(self, weights: Tensor, among: int) -> Tensor:
        """Weigh rows as new ones, so that each is as much of these as of those that calibrate."""
        return weights * min(1.0, among / self._left)

    def _bands(self, family: RegressionScore, threshold: Tensor) -> tuple[Tensor, Tensor]:
        lower, upper = family.region(self._seen, threshold)
        return lower[0].double().cpu(), upper[0].double().cpu()

    def local(self, family: ScaledScore) -> MethodCandidate:
        """Judge LCP by halves, each with the thresholds of the other."""
        scores, left = self._scores(family), self._left
        alpha = shared_out(self._alpha, family.side, family.joint, scores.shape[1])
        near = Local("nearest")
        metadata, few = near.metadata(self._seen), slice(0, CHOOSING_ROWS)
        chosen = choose_bandwidth(
            near.kernel, scores.nan_to_num(0)[few], metadata["embedding"][few], alpha, left
        )
        halves = torch.arange(self.rows) % 2 == 0
        thresholds = torch.empty_like(scores)
        for half in (halves, ~halves):
            there = int((~half).sum())
            share = chosen.bandwidth * there / left
            neighbours = min(there, max(rows_needed(alpha) + 1, min(there, round(share))))
            part = Local(Localizer("nearest", bandwidth=neighbours))
            part = part.fit(scores[~half], take(metadata, ~half))
            thresholds[half] = part.quantile(alpha, take(metadata, half))
        lower, upper = self._bands(family, thresholds[None])
        return MethodCandidate(lower, upper, lambda: (family, chosen.bandwidth))

    def folds(self, teach: Callable[[Tensor], LearnedScore]) -> list[tuple[Tensor, LearnedScore]]:
        """Let every fold be seen by what the others taught."""
        fold = torch.arange(self.rows) % _FOLDS
        return [
            ((fold == i).nonzero()[:, 0], teach((fold != i).nonzero()[:, 0])) for i in range(_FOLDS)
        ]

    def crossed(
        self, folds: Sequence[tuple[Tensor, LearnedScore]], shape: str
    ) -> tuple[Tensor, Tensor]:
        """Give the bands of all folds at one threshold."""
        parts = [
            (rows, one.shaped(shape), forward.part_of(self._seen, rows)) for rows, one in folds
        ]
        y = self._y_as_given()
        scores = torch.cat([family.score(out, y[rows]).cpu() for rows, family, out in parts])
        order = torch.cat([rows for rows, _, _ in parts])
        threshold = self._threshold(parts[0][1], scores, order)
        lower, upper = torch.empty_like(self._y), torch.empty_like(self._y)
        for rows, family, out in parts:
            own = threshold if len(threshold[0]) == 1 else threshold[:, torch.isin(order, rows)]
            low, high = family.region(out, own)
            lower[rows], upper[rows] = low[0].double(), high[0].double()
        return lower, upper

    def trial(self, one: MethodCandidate, plain: MethodCandidate) -> MethodTrial:
        """Measure a candidate; of several outputs each relative to plain CP."""
        return MethodTrial(*(self._mean(rows) for rows in self._relative(one, plain)))

    def is_clearly_better(
        self, one: MethodCandidate, plain: MethodCandidate, criterion: str
    ) -> bool:
        """Say whether a candidate beats plain CP by more than a standard error, row by row."""
        if effective_size(self._shares) < rows_needed(self.of_each):
            return False  # hardly any row is like those to come
        place = CRITERIA.index(criterion)
        gain = self._relative(plain, plain)[place] - self._relative(one, plain)[place]
        return self._mean(gain) > self._standard_error(gain)

    def _mean(self, values: Tensor) -> float:
        """Average over rows, each by its weight; what is not known does not count."""
        known = ~values.isnan()
        return float(values[known] @ self._shares[known] / self._shares[known].sum())

    def _standard_error(self, values: Tensor) -> float:
        """Give the standard error of such a mean."""
        known = ~values.isnan()
        shares = self._shares[known] / self._shares[known].sum()
        excess, n = values[known] - self._mean(values), int(known.sum())
        return math.sqrt(float((shares * excess).square().sum()) * n / max(1, n - 1))

    def _relative(self, one: MethodCandidate, plain: MethodCandidate) -> tuple[Tensor, Tensor]:
        """Give interval score and length of every row."""
        mine, theirs = self._measured(one), self._measured(plain)
        if self.weights is not None:
            # So heavy that bands are infinite, whatever is chosen: it tells no difference.
            heavy = theirs[1].isinf()
            mine, theirs = (
                (score.masked_fill(heavy, torch.nan), length.masked_fill(heavy, torch.nan))
                for score, length in (mine, theirs)
            )
        if self._y.shape[1] == 1:
            return mine[0][:, 0], mine[1][:, 0]
        relative = [each / other.nanmean(dim=0) for each, other in zip(mine, theirs, strict=True)]
        return relative[0].nanmean(dim=1), relative[1].nanmean(dim=1)

    def _measured(self, one: MethodCandidate) -> tuple[Tensor, Tensor]:
        """Give interval score and length of every row and output; of unknown targets no score."""
        prediction = columns(self._seen.output).double().cpu()
        lower = prediction if self._side == UPPER else one.lower
        upper = prediction if self._side == LOWER else one.upper
        below = 0 if self._side == UPPER else (lower - self._y).clamp_min(0)
        above = 0 if self._side == LOWER else (self._y - upper).clamp_min(0)
        factor = (1 if self._side in (LOWER, UPPER) else 2) / float(self._alpha)
        length = upper - lower
        return length + factor * (below + above), length
