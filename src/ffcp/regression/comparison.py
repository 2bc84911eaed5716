"""Compare candidates by interval score and length, on rows that do not calibrate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ffcp.batch import BatchOutput
from ffcp.conformal.rank import conformal_quantile, exact_alpha, rows_needed
from ffcp.conformal.weighted import effective_size, weighted_quantile
from ffcp.description import Described
from ffcp.notebooks import Ranking, ShownAsTable, number
from ffcp.regression.intervals import columns
from ffcp.regression.joint import (
    BOTH,
    LOWER,
    UPPER,
    Joint,
    columns_of,
    extent,
    has_own_thresholds,
    learned_output_scales,
    reach_explained,
    shared_out,
    two_sided,
)
from ffcp.regression.scaled_score import IntervalScore, ScaledScore

SCORE, LENGTH = CRITERIA = ("score", "length")


@dataclass(frozen=True)
class MethodTrial(Described):
    """Interval score and length of one candidate on the rows set aside.

    Both numbers are relative to those of CP if there are several outputs, so that one in large
    units does not decide alone.
    """

    score: float
    length: float


@dataclass(frozen=True)
class RowCounts(Described):
    """How many rows are learned from, compare candidates, and calibrate.

    Training rows and calibration rows are learned from; some of the latter also compare, by what
    was learned without them. Rows that calibrate do nothing else; of a stream there may be more.
    """

    learn: int
    compare: int
    calibrate: int

    def __str__(self) -> str:
        learn = f"{self.learn:,} rows to learn from"
        return f"{learn}, {self.compare:,} to compare, {self.calibrate:,} to calibrate"


@dataclass(frozen=True)
class AutoChoice(ShownAsTable, Described):
    """The selected method, and the results of all candidates.

    Attributes
    ----------
    method
        The selected one.
    trials
        For each candidate its interval score (length, plus 2 / alpha times the miss) and its
        length, averaged over the rows that compare. The best is selected if it beats CP, or the
        central quantiles of the model if it gives any, by more than a standard error, and the mean
        of trees and networks too, which is selected otherwise.
    criterion
        Which of the two decided: ``"score"`` or ``"length"``.
    rows
        How many rows are learned from, compare and calibrate. None compare where there are too
        few: all of them calibrate.
    alpha
        The level at which candidates were compared.
    side
        Which side of intervals is guaranteed. With ``"lower"`` or ``"upper"`` the length is
        the distance from the prediction to that limit, negative if the limit lies on the other
        side; and a miss counts 1 / alpha times.
    not_tried
        What was left out, and why: LightGBM may not be installed.

    Examples
    --------
    >>> import ffcp
    >>> _ = torch.manual_seed(0)
    >>> x = torch.rand(300, 1)
    >>> auto = ffcp.Auto(torch.nn.Linear(1, 1), seed=0)  # yours is trained
    >>> choice = auto.calibrate(x, x[:, 0] * torch.randn(300)).choice
    >>> print(choice)  # all candidates, the best first
    learned ..., chosen by interval score
    120 rows to learn from, 120 to compare, 180 to calibrate; alpha = 0.1
    ...
    >>> choice.trials[choice.method].score <= choice.trials["CP"].score
    True
    """

    method: str
    trials: Mapping[str, MethodTrial]
    criterion: str
    rows: RowCounts
    alpha: float
    side: str = BOTH
    not_tried: tuple[str, ...] = ()

    def in_units(self, unit: float) -> AutoChoice:
        """Return the same with numbers in the units of a target that was divided by this one."""
        trials = self.trials.items()
        scaled = {k: MethodTrial(unit * one.score, unit * one.length) for k, one in trials}
        return replace(self, trials=scaled)

    def ranking(self) -> Ranking:
        """Return all candidates, the best first."""
        if not self.rows.compare:
            few = "nothing was compared: there are too few calibration rows"
            return Ranking([f"{_explained(self.method)}; {few}"], (), (), 0)
        what = f"mean {extent(self.side)}"
        by = "interval score" if self.criterion == SCORE else what
        above = [
            f"{_explained(self.method)}, chosen by {by}",
            f"{self.rows}; alpha = {self.alpha:g}",
        ]
        ranked = sorted(self.trials, key=lambda name: getattr(self.trials[name], self.criterion))
        chosen = ranked.index(self.method)
        rows = []
        for name in ranked:
            trial = self.trials[name]
            rows.append((_explained(name), number(trial.score), number(trial.length)))
        mark = "> marks the chosen one."
        if chosen > 0:
            mark += (
                " Those above it are better by less than chance explains, a standard "
                "error over these rows; then the simplest is taken, or the mean of both learners."
            )
        factor = 1 if self.side in (LOWER, UPPER) else 2
        below = [
            mark,
            f"Interval score: {what}, plus {factor} / alpha times what lies outside; smaller is "
            "better. In the units of the target; of several outputs relative to CP"
            f"{reach_explained(self.side)}.",
            *(f"Not tried: {reason}" for reason in self.not_tried),
        ]
        return Ranking(above, ("method", "interval score", what), rows, chosen, below)


def _explained(name: str) -> str:
    """Return the name of a candidate as reports show it.

    >>> _explained("FFCP at 'backbone.3'"), _explained("FFCP at 'input'")
    ('FFCP at layer backbone.3', 'FFCP at the input')
    """
    if name == "CP":
        return "CP, one width for all rows"
    layer = name.removeprefix("FFCP at ")
    if layer == name:
        return name
    return "FFCP at the input" if layer == "'input'" else f"FFCP at layer {layer[1:-1]}"


class MethodCandidate(NamedTuple):
    """A candidate: its intervals on the rows set aside, and how to make its final score.

    ``is_mean``: central sets of the mean of all learners.
    """

    lower: Tensor
    upper: Tensor
    make: Callable[[], IntervalScore]
    is_mean: bool = False


class Comparison:
    """Compares intervals on rows that do not calibrate.

    Under covariate shift rows count by their density ratio, ``weights``; ``left`` rows calibrate.
    """

    def __init__(
        self,
        out: BatchOutput,
        y: Tensor,
        alpha: Any,
        side: str,
        joint: Joint,
        weights: Tensor | None = None,
        left: int = 0,
    ) -> None:
        self.out, self._y, self._alpha, self._side = out, y.double(), exact_alpha(alpha), side
        self.rows, self._left = len(y), max(left, 1)
        self.weights = weights
        self._shares = torch.ones(self.rows).double() if weights is None else weights
        self._prediction = columns(out.output).double().cpu()
        thresholds = columns_of(side, joint, y.shape[1])
        self._level = shared_out(self._alpha, side, joint, thresholds)
        #: How many rows a threshold of one output needs.
        self.rows_needed = rows_needed(shared_out(self._alpha, side, False, 1))

    def scaled(self, family: ScaledScore) -> ScaledScore:
        """Return the score with output scales learned here, if outputs share a threshold."""
        if has_own_thresholds(family.joint) or self._y.shape[1] == 1:
            return family
        scores = two_sided(self._scores(replace(family, joint=False), self.out), family.side)
        return replace(family, output_scales=learned_output_scales(scores, self._alpha))

    def fixed(self, family: IntervalScore, out: BatchOutput | None = None) -> MethodCandidate:
        """Return the intervals of a score that was not fitted to these rows."""
        out = self.out if out is None else out
        columns_of_scores = self._scores(family, out).T
        if self.weights is None:
            known = [column[~column.isnan()] for column in columns_of_scores]
            thresholds = torch.stack([conformal_quantile(c, self._level) for c in known])[None]
        else:  # each row as a new one, at its share among the rows that calibrate
            own = self.weights * min(1.0, self.rows / self._left)
            thresholds = torch.stack(
                [weighted_quantile(c, self.weights, own, self._level) for c in columns_of_scores],
                dim=1,
            )
        lower, upper = family.region(out, thresholds[None])
        return MethodCandidate(lower[0].double().cpu(), upper[0].double().cpu(), lambda: family)

    def _scores(self, family: IntervalScore, out: BatchOutput) -> Tensor:
        return family.score(out, self._y.reshape(self.out.output.shape)).cpu()

    def trial(self, candidate: MethodCandidate, plain: MethodCandidate) -> MethodTrial:
        """Return mean score and length of a candidate, relative to CP if outputs are several."""
        score, length = self._relative(candidate, plain)
        return MethodTrial(self._mean(score), self._mean(length))

    def is_clearly_better(
        self, candidate: MethodCandidate, plain: MethodCandidate, criterion: str
    ) -> bool:
        """Whether a candidate beats CP by more than a standard error of the paired gain."""
        size = self.rows if self.weights is None else effective_size(self.weights)
        if size < self.rows_needed:
            return False  # too few rows resemble the target distribution
        number = CRITERIA.index(criterion)
        gain = self._relative(plain, plain)[number] - self._relative(candidate, plain)[number]
        return self._mean(gain) > self._standard_error(gain)

    def _mean(self, values: Tensor) -> float:
        """Return the weighted mean over rows, without NaN."""
        known = ~values.isnan()
        return float(values[known] @ self._shares[known] / self._shares[known].sum())

    def _standard_error(self, values: Tensor) -> float:
        """Return the standard error of the weighted mean."""
        known = ~values.isnan()
        shares = self._shares[known] / self._shares[known].sum()
        excess, n = values[known] - self._mean(values), int(known.sum())
        return math.sqrt(float((shares * excess).square().sum()) * n / max(1, n - 1))

    def _relative(
        self, candidate: MethodCandidate, plain: MethodCandidate
    ) -> tuple[Tensor, Tensor]:
        """Return interval score and length of every row, relative to CP if outputs are several."""
        score, length = self._measured(candidate)
        plain_score, plain_length = self._measured(plain)
        if self.weights is not None:
            # Rows too heavy for any finite interval cannot distinguish candidates.
            heavy = plain_length.isinf()
            score, length, plain_score, plain_length = (
                values.masked_fill(heavy, torch.nan)
                for values in (score, length, plain_score, plain_length)
            )
        if self._y.shape[1] == 1:
            return score[:, 0], length[:, 0]
        score, length = score / plain_score.nanmean(dim=0), length / plain_length.nanmean(dim=0)
        return score.nanmean(dim=1), length.nanmean(dim=1)

    def _measured(self, candidate: MethodCandidate) -> tuple[Tensor, Tensor]:
        """Return interval score and length of every row and output; NaN for unknown targets."""
        lower = self._prediction if self._side == UPPER else candidate.lower
        upper = self._prediction if self._side == LOWER else candidate.upper
        below = 0 if self._side == UPPER else (lower - self._y).clamp_min(0)
        above = 0 if self._side == LOWER else (self._y - upper).clamp_min(0)
        factor = (1 if self._side in (LOWER, UPPER) else 2) / float(self._alpha)
        length = upper - lower
        return length + factor * (below + above), length
