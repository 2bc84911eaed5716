"""Selection of the scale on rows that do not calibrate, a constant one among the candidates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ffcp.batch import Requires
from ffcp.conformal.rank import exact_alpha, plain_quantile, rows_needed
from ffcp.conformal.selection import Aside, Selected, Selection
from ffcp.description import Described
from ffcp.network import forward, inputs
from ffcp.network.features import OUTPUT
from ffcp.notebooks import Ranking, ShownAsTable, number
from ffcp.regression.joint import (
    AUTO,
    BOTH,
    EACH,
    LOWER,
    UPPER,
    extent,
    growth,
    kept_scores,
    learned_output_scales,
    reach_explained,
    two_sided,
    with_output_scales,
)
from ffcp.regression.scales import Scale, ends_of

_MOST_OUTPUTS = 4096  # of a model whose scale is selected
_NUMBERS = 10**6  # scores of the rows that select; with many outputs, fewer rows
# A gradient that is the same everywhere gives the intervals of plain CP, up to rounding.
_TIE = 1 - 1e-6
_USED = "a constant scale is used, as by CP and CQR"


class ScaleSelection(Selection):
    """Selects the scale with the shortest mean interval, and learns the scales of outputs.

    ``score`` is a :class:`ffcp.regression.scaled_score.ScaledScore` that leaves either open.
    """

    is_optional = True

    def __init__(self, score: Any, scales: Mapping[str, Scale] | None = None) -> None:
        self.score, self.scales = score, dict(scales or {})
        self.what = getattr(score.scale, "what", "the scale of each output")

    @property
    def _is_open(self) -> bool:
        return bool(getattr(self.score.scale, "is_open", False))

    def prepared(self, model: nn.Module, x: Any) -> Any:
        """Find the candidate scales, and whether outputs are to be scaled."""
        # Two rows: on a single one batch statistics raise an unrelated error.
        first = forward.run_batch(model, inputs.take(x, slice(0, 2)))
        score, prediction = self.score, self.score.prediction(first.output)
        outputs = prediction[0].numel()
        # A single output needs no scale, and the outputs of a map, whose size may change from row
        # to row, have one unit.
        if score.output_scales == AUTO and not (
            1 < outputs <= _MOST_OUTPUTS and prediction.dim() == 2
        ):
            score = replace(score, output_scales=None)
        if self._is_open and outputs > _MOST_OUTPUTS:
            raise ValueError(
                f"the model has {outputs} outputs: name {self.what} above {_MOST_OUTPUTS} outputs"
            )
        if not self._is_open and score.output_scales != AUTO:
            return score
        options = score.scale.options(model, x) if self._is_open else {OUTPUT: score.scale}
        prepared = ScaleSelection(score, options)
        prepared.most_rows = max(1000, min(10_000, _NUMBERS // outputs))
        return prepared

    def requires(self) -> Requires:
        """Return what any candidate requires."""
        scales = self.scales.values() or [self.score.scale]
        return reduce(Requires.joined, (scale.requires() for scale in scales))

    def select(self, aside: Aside) -> Selected:
        """Learn scales of outputs, and select the scale with the shortest mean interval.

        For one-sided intervals, that with the smallest mean reach.
        """
        score, side = self.score, self.score.side
        target = score.target(aside.out, aside.y)
        trials, output_scales = {}, {}
        for name, scale in self.scales.items():
            ends, factors = ends_of(score.base, scale, aside.out), score.output_scales
            if factors == AUTO:
                alone = two_sided(kept_scores(ends, target, side, False).cpu(), side)
                factors = learned_output_scales(alone, aside.alpha)
            output_scales[name] = factors
            ends = ends if factors is None else with_output_scales(ends, factors)
            width, growths = growth(ends, side)
            scores = kept_scores(ends, target, side, score.joint)
            trials[name] = Trial(scores.cpu(), growths.cpu())
        if not self._is_open:
            settled = replace(score, output_scales=output_scales[OUTPUT])
            return Selected(settled, aside.calibration, {})
        exact = exact_alpha(aside.alpha)
        thresholds = trials[OUTPUT].scores.shape[1]
        choice = choose(width.cpu(), trials, aside.alpha_of_each(exact, thresholds))
        choice = replace(choice, alpha=float(exact), side=side)
        name = choice.feature
        warning = why_plain(choice, self.what.removeprefix("the ")) if name == OUTPUT else None
        settled = replace(score, scale=self.scales[name], output_scales=output_scales[name])
        return Selected(settled, aside.calibration, {"layer": choice}, warning)

    def without_rows(self, rows: int, alpha: Any) -> Selected:
        """Return a constant scale without setting rows aside; outputs are not scaled."""
        plain = replace(self.score, scale=self.scales[OUTPUT], output_scales=None)
        what = self.what.removeprefix("the ")
        warning = why_no_choice(rows, alpha, what) if self._is_open else None
        return Selected(plain, None, {}, warning)


@dataclass(frozen=True)
class Candidate(Described):
    """The result of one feature on the rows set aside.

    Attributes
    ----------
    mean_length : float
        The mean length of its intervals; with ``side="lower"`` or ``"upper"`` their mean reach,
        how far that limit lies beyond the prediction, negative on its other side; with ``"each"``
        half of the length.
    rank_correlation : float
        That of its scale and the residual: near 1 if the scale is large where errors are.

    Examples
    --------
    >>> Candidate(mean_length=1.5, rank_correlation=0.7).mean_length
    1.5
    """

    mean_length: float
    rank_correlation: float


@dataclass(frozen=True)
class Choice(ShownAsTable, Described):
    """Which feature was chosen, and why.

    Attributes
    ----------
    feature : str
        The chosen feature; ``"output"`` means plain CP.
    candidates : dict
        For each candidate its mean interval length and the rank correlation between its scale and
        the residual (0 for plain CP, whose scale is constant).
    rows : int
        How many rows chose. They took no part in the calibration.
    alpha : float
        The level at which lengths were compared.
    side : str, default="both"
        Which side of intervals is promised; for one side reaches are compared, see
        :class:`ffcp.regression.layer_selection.Candidate`.

    Examples
    --------
    >>> import ffcp
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> x = 3 * torch.randn(500, 1)  # known up to noise; and your model is trained
    >>> y = model(x + 0.5 * torch.randn(500, 1)).detach()
    >>> choice = ffcp.FFCP(model, seed=0).calibrate(x, y).choice
    >>> print(str(choice).splitlines()[0])  # and a line for every candidate, the best first
    feature 'input', chosen on 100 rows at alpha=0.1
    >>> choice.candidates[choice.feature].mean_length < choice.candidates["output"].mean_length
    True
    """

    feature: str
    candidates: Mapping[str, Candidate]
    rows: int
    alpha: float
    side: str = BOTH

    @property
    def what_is_compared(self) -> str:
        """What candidates are compared by."""
        return "half length" if self.side == EACH else f"mean {extent(self.side)}"

    def ranking(self) -> Ranking:
        """Return all features, the best first."""
        first = f"feature {self.feature!r}, chosen on {self.rows} rows at alpha={self.alpha}"
        ranked = sorted(self.candidates, key=lambda name: self.candidates[name].mean_length)
        chosen = ranked.index(self.feature)
        rows = []
        for name in ranked:
            candidate = self.candidates[name]
            shown = "output: a constant scale" if name == OUTPUT else name
            correlation = f"{candidate.rank_correlation:+.2f}"
            rows.append((shown, number(candidate.mean_length), correlation))
        mark = "> marks the chosen one."
        if chosen > 0:
            mark += " Differences within rounding do not count: the constant scale is then taken."
        below = [
            mark,
            "Correlation: of the ranks of scale and residual, +1 if the scale is largest where the "
            "model errs most.",
        ]
        names = ("feature", self.what_is_compared, "correlation")
        return Ranking([first + reach_explained(self.side)], names, rows, chosen, below)


class Trial(NamedTuple):
    """Scores and scales of one candidate on some rows.

    ``scores`` has shape (n, m) for m outputs, or (n, 1) if they share one threshold; ``scales`` is
    (n, m): how fast the interval grows with the threshold. Where each side has its own threshold
    both are twice as wide, those of the lower side first.
    """

    scores: Tensor
    scales: Tensor


def choose(widths: Tensor, trials: Mapping[str, Trial], alpha: Any) -> Choice:
    """Select the feature with the shortest mean interval; a tie goes to plain CP.

    Parameters
    ----------
    widths : Tensor
        Widths of the base intervals of these rows (0 for point predictions), shape (n, m).
    trials : dict
        Scores and scales under each candidate; plain CP, ``"output"``, must be among them.
    alpha : float
        Level at which lengths are compared.

    Notes
    -----
    With several outputs, lengths are relative to those of plain CP, so that an output in large
    units does not decide alone.

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
    ratios = {name: float((length / reference).nanmean()) for name, length in lengths.items()}
    best = min(ratios, key=lambda name: ratios[name])
    if not ratios[best] <= _TIE * ratios[OUTPUT]:  # also where no score is known
        best = OUTPUT
    residuals = trials[OUTPUT].scores
    # One scale per score: the mean over the outputs that share one.
    shape = (len(widths), residuals.shape[1], -1)
    scales = [trial.scales.reshape(shape).mean(dim=2) for trial in trials.values()]
    related = rank_correlations(residuals, scales)
    candidates = {
        name: Candidate(float(lengths[name].nanmean()), correlation)
        for name, correlation in zip(trials, related, strict=True)
    }
    return Choice(best, candidates, len(widths), float(exact_alpha(alpha)))


def _lengths(widths: Tensor, trial: Trial, alpha: Any) -> Tensor:
    """Return the mean interval length per output, with the empirical quantile of these rows.

    Without n + 1: a comparison needs no guarantee, and this is finite on few rows.
    """
    thresholds = plain_quantile(trial.scores, alpha)
    thresholds = thresholds.repeat_interleave(trial.scales.shape[1] // len(thresholds))
    return widths.mean(dim=0) + thresholds * trial.scales.mean(dim=0)


def rank_correlations(a: Tensor, others: Iterable[Tensor]) -> list[float]:
    """Return Spearman's rank correlations with others, over all known entries of ``a``.

    It is 0 where one side is constant.

    >>> numbers = torch.tensor([1.0, 2.0, 3.0])
    >>> rank_correlations(numbers, [numbers**2, -numbers, torch.ones(3)])
    [1.0, -1.0, 0.0]
    """
    known = ~a.isnan()
    ranks = _centred_ranks(a[known])
    correlations = []
    for other in others:
        other_ranks = _centred_ranks(other[known])
        scale = float(ranks.norm() * other_ranks.norm())
        correlations.append(round(float(ranks @ other_ranks) / scale, 12) if scale > 0 else 0.0)
    return correlations


def _centred_ranks(values: Tensor) -> Tensor:
    _, inverse, counts = np.unique(values.numpy(), return_inverse=True, return_counts=True)
    # Equal values share the mean of their ranks.
    ranks = torch.from_numpy((counts.cumsum() - (counts - 1) / 2)[inverse])
    return ranks - ranks.mean()


def why_plain(choice: Choice, what: str = "feature") -> str:
    """Explain why the constant scale was selected among others."""
    plain = choice.candidates[OUTPUT].mean_length
    others = {
        name: candidate
        for name, candidate in choice.candidates.items()
        # A scale that is the same everywhere is plain CP.
        if name != OUTPUT and abs(candidate.mean_length - plain) > 1e-6 * abs(plain)
    }
    if math.isnan(plain):
        return f"{_USED}: no row set aside has all targets, so none could be compared"
    if len(choice.candidates) == 1:
        return f"{_USED}: no layer of this model passes a gradient to the output"
    if not others:
        return f"{_USED}: at every {what} the scale is the same for all inputs"
    name = min(others, key=lambda key: others[key].mean_length)
    best = others[name]
    return (
        f"{_USED}: on {choice.rows} rows set aside no {what} "
        f"gave {'tighter limits' if choice.side in (LOWER, UPPER) else 'shorter intervals'} "
        f"(best: {name!r} with {choice.what_is_compared} {best.mean_length:.4g} against "
        f"{plain:.4g}). It says little about the noise here: its rank correlation with the "
        f"residual is {best.rank_correlation:+.2f}"
    )


def why_no_choice(rows: int, alpha: Any, what: str = "feature") -> str:
    """Explain why nothing was selected."""
    return (
        f"{_USED}: {rows} rows are too few to set some aside for selecting "
        f"the {what}, as alpha={float(exact_alpha(alpha)):g} needs "
        f"{rows_needed(alpha)} to calibrate. Pass more rows, or name the {what}"
    )
