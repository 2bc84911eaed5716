"""Calibrated predictors as functions of tensors: from inputs to intervals or prediction sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ffcp.batch import BatchOutput
from ffcp.classification.rules import LabelRows
from ffcp.conformal.by_label import ByLabel
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.mondrian import Mondrian
from ffcp.network import arrays, forward, jacobian
from ffcp.network.cut import Cut
from ffcp.network.features import OUTPUT
from ffcp.network.model import frozen_copy, uncompiled
from ffcp.predictor import Predictor
from ffcp.regression.intervals import columns
from ffcp.regression.joint import BOTH, EACH
from ffcp.regression.scaled_score import ScaledScore, TwoSidedScore

# The inputs of a graph besides those of the model.
GROUP, RANDOM, ROUNDING = "group", "random", "rounding"


class Steps:
    """Base class: one pass over the model, and a look-up of thresholds.

    Parameters
    ----------
    predictor : Predictor
        The calibrated predictor.
    alphas : sequence of Fraction
        The allowed shares of misses.
    columns : int
        The number of thresholds of a row: at most one for each output or class.
    """

    def __init__(self, predictor: Predictor, alphas: Sequence[Fraction], columns: int) -> None:
        self._state = predictor.calibrated()
        calibration = self._state.calibration
        alphas = [predictor.alpha_of_each(alpha, calibration.scores.shape[1]) for alpha in alphas]
        self._tables = [threshold_table(calibration, alpha, columns) for alpha in alphas]
        self.requires = self._state.requires
        frozen = frozen_copy(uncompiled(predictor.model), with_hooks=True)
        if frozen is None:
            raise ValueError(
                "the model is scripted or cannot be copied: export the original nn.Module"
            )
        self.model: nn.Module = frozen.to("cpu")

    def run(self, x: Any) -> BatchOutput:
        """Return the batch output of one pass, without the checks of the library."""
        inner = [name for name in dict.fromkeys(self.requires.norms) if name != OUTPUT]
        with Cut(self.model, inner, values=self.requires.values) as cut:
            tap = cut(x)
            if self.requires.logits:
                tap.prediction = forward.as_logits(tap.prediction)
            norms = jacobian.take_norms(self.model, x, tap, inner, self.requires)
        output = tap.prediction.detach()
        if OUTPUT in self.requires.norms:
            norms[OUTPUT] = forward.norms_of_output(output, self.requires)
        return BatchOutput(x, output, norms, tap.values, range(0))

    def thresholds(self, group: Tensor | None) -> list[Tensor]:
        """Return the thresholds of each alpha: (columns,), or (n, columns) by groups."""
        if group is None:
            return [table[0] for table in self._tables]
        unknown = len(self._tables[0]) - 1
        row = torch.where((group >= 0) & (group < unknown), group, unknown)
        return [table[row] for table in self._tables]

    @property
    def has_infinite(self) -> list[bool]:
        """Whether some output, class or group has an infinite threshold, for each alpha."""
        known = slice(None, -1 if isinstance(self._state.calibration, Mondrian) else None)
        return [bool(table[known].isinf().any()) for table in self._tables]


def threshold_table(calibration: Calibration, alpha: Fraction, columns: int) -> Tensor:
    """Return the thresholds of every group; the last row is for unknown groups.

    Without groups there is one row.

    Examples
    --------
    >>> scores = Mondrian().fit(torch.tensor([[1.0], [2.0]]), {"group": ["a", "a"]})
    >>> threshold_table(scores, Fraction(1, 2), 1)
    tensor([[2.],
            [inf]], dtype=torch.float64)
    """
    if not isinstance(calibration, Mondrian):
        return _of_columns(calibration, alpha, columns)[None]
    rows = [_of_columns(part, alpha, columns) for part in calibration.parts.values()]
    return torch.stack([*rows, torch.full_like(rows[0], torch.inf)])


def _of_columns(calibration: Calibration, alpha: Fraction, columns: int) -> Tensor:
    """Return the thresholds, infinite for classes without calibration rows."""
    thresholds = calibration.quantile(alpha)
    missing = columns - len(thresholds) if isinstance(calibration, ByLabel) else 0
    return pad(thresholds, (0, missing), value=torch.inf)


class IntervalSteps(Steps):
    """From inputs to the prediction and the ends of the intervals for every alpha."""

    names = ("lower", "upper")

    def __init__(self, predictor: Any, alphas: Sequence[Fraction], output: Tensor) -> None:
        super().__init__(predictor, alphas, predictor.calibration.scores.shape[1])
        self._score: Any = self._state.score
        self._support = None
        if predictor.support is not None:
            # Rounded to the type of the intervals, so that targets at its ends stay inside.
            line = torch.tensor([-torch.inf, torch.inf], dtype=output.dtype)
            self._support = [float(end) for end in predictor.support.cut(*line)]

    def _prediction(self, output: Tensor) -> Tensor:
        """Return the prediction in the shape of the targets."""
        return arrays.like_target(self._score.prediction(output), self._state.layout)

    def no_rounding(self, output: Tensor) -> Tensor:
        """Return the value of the input "rounding" that changes no interval."""
        prediction = self._prediction(output)
        return prediction.new_zeros(prediction.shape[1:])

    def __call__(self, x: Any, others: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the prediction, then a lower and an upper end for each alpha."""
        out, rounding = self.run(x), others[ROUNDING]
        prediction = self._prediction(out.output)
        results = [prediction]
        thresholds = [q.view(-1, q.shape[-1]) for q in self.thresholds(others.get(GROUP))]
        for lower, upper in zip(*self._ends(out, torch.stack(thresholds)), strict=True):
            lower, upper = lower.reshape(prediction.shape), upper.reshape(prediction.shape)
            for end in (lower - rounding, upper + rounding):
                end = end.to(prediction.dtype)
                results.append(end if self._support is None else end.clamp(*self._support))
        return results

    def _ends(self, out: BatchOutput, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends (levels, n, m), widened by the rounding of this machine."""
        share = rounding_share(out.output.dtype)
        larger = thresholds + thresholds.abs() * share
        if isinstance(self._score, ScaledScore):
            return Outward(self._score).region(out, larger)
        lower, upper = self._score.region(out, larger)
        margin = columns(self._score.prediction(out.output)).abs() * share
        # Large values, perhaps larger than in the example, have larger rounding errors.
        return lower - (margin + lower.abs() * share), upper + (margin + upper.abs() * share)


def rounding_share(dtype: torch.dtype) -> float:
    """Return the largest relative error of a few rounding steps."""
    return 8 * torch.finfo(dtype).eps


class Outward(TwoSidedScore):
    """Intervals of a base and a scale in float64, widened by the rounding of the model's type.

    Examples
    --------
    >>> from ffcp.scales import Constant
    >>> from ffcp.scores import Point
    >>> out = BatchOutput(None, torch.tensor([[3.0]]), {}, {}, range(1))
    >>> lower, upper = Outward(ScaledScore(Point(), Constant())).region(out, torch.tensor([2.0]))
    >>> bool(0.99999 < lower < 1) and bool(5 < upper < 5.00001)
    True
    """

    def __init__(self, score: ScaledScore) -> None:
        self.joint, self.side, self._score = score.joint, score.side, score

    def region_of_sides(
        self, out: BatchOutput, below: Tensor, above: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the interval (n, m) of targets with at most these one-sided scores."""
        ends, share = self._score.ends(out), rounding_share(out.output.dtype)
        if ends.is_symmetric and below is above:  # so the ends cannot cross
            step = below * ends.scale_lo + share * ends.lo.abs()
            return ends.lo - step, ends.lo + step
        lo, hi, scale_lo, scale_hi = (part.double() for part in ends)
        down, up = below * scale_lo, above * scale_hi
        # Intervals can shrink: an end beyond the largest number must stay finite. Not by
        # clamp_max, which in onnxruntime also replaces -inf by the smallest number.
        largest = torch.tensor(torch.finfo(out.output.dtype).max, dtype=torch.float64)
        lower, upper = torch.minimum(lo - down, largest), torch.maximum(hi + up, -largest)
        under, over = lo.abs() + down.abs(), hi.abs() + up.abs()
        if self.side in (BOTH, EACH):
            # An empty interval becomes a point, and whether it is empty depends on both ends.
            is_empty, middle = lower > upper, lower / 2 + upper / 2
            lower, upper = lower.where(~is_empty, middle), upper.where(~is_empty, middle)
            under = over = under + over
        return lower - share * under, upper + share * over


class SetSteps(Steps):
    """From inputs to the logits, the masks of labels for every alpha, and the scores."""

    names = ("mask",)

    def __init__(
        self, predictor: Any, alphas: Sequence[Fraction], output: Tensor, random: float | None
    ) -> None:
        super().__init__(predictor, alphas, output.shape[1])
        self._score = cast(Any, self._state.score)
        self.rule = self._score.rule
        self._allow_empty, self._other_labels = predictor.allow_zero_sets, predictor.other_labels
        self._random = random
        #: Whether the random numbers of rows are an input.
        self.takes_random = bool(self._score.randomized) and random is None

    def no_rounding(self, output: Tensor) -> Tensor:
        """Return the value of the input "rounding" that changes no threshold."""
        return torch.zeros((), dtype=torch.float64)

    def rows(self, out: BatchOutput, share: Tensor | None) -> LabelRows:
        """Return the logits, random shares and gradient norms for the rule."""
        if share is None:
            # As in the library without randomness: the label that crosses the threshold is in.
            share = torch.full_like(out.output[:, 0], self._random or 0.0, dtype=torch.float64)
        feature = self._score.feature
        return LabelRows(out.output, share, None if feature is None else out.norms[feature])

    def __call__(self, x: Any, others: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the logits, a mask for each alpha, and the scores, to measure rounding by."""
        out, rounding = self.run(x), others[ROUNDING]
        rows, rule = self.rows(out, others.get(RANDOM)), self.rule
        weights = rule.weights(out.output)
        scores = rule.of_all(weights, rows)
        labels = torch.arange(weights.shape[1])
        # Of equal weights the one with the larger logit comes first.
        below = weights < weights.amax(dim=1, keepdim=True)
        best = labels == out.output.masked_fill(below, -torch.inf).argmax(dim=1, keepdim=True)
        unknown = scores.isnan()  # rows with NaN get all labels
        masks = []
        for threshold in self.thresholds(others.get(GROUP)):
            mask = (scores <= threshold + rounding) | unknown
            if not self._allow_empty:
                mask = mask | (best & ~mask.any(dim=1, keepdim=True))
            if self._other_labels:
                everything = threshold.isinf() | unknown.any(dim=1, keepdim=True)
                mask = torch.cat([mask, everything], dim=1)
            masks.append(mask)
        return [out.output, *masks, scores]
