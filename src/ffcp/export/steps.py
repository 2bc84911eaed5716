"""A calibrated predictor as a function of tensors: from inputs to bands, or to label sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from ffcp.classification.predictor import LabelSets
from ffcp.classification.rules import Rows
from ffcp.export.outward import Outward, near
from ffcp.export.share import Lookup, Share, Thresholds
from ffcp.export.thresholds import lookup_of
from ffcp.network import checks, jacobian, passes
from ffcp.network.features import OUTPUT, Cut
from ffcp.network.twin import twin_of, uncompiled
from ffcp.pieces import Seen
from ffcp.predictor import Predictor
from ffcp.regression.bases import columns
from ffcp.regression.family import SlackBands
from ffcp.regression.predictor import BandPredictor
from ffcp.regression.sides import ends_at

ALPHA, GROUP, RANDOM, ROUNDING = "alpha", "group", "random", "rounding"


class Given:
    """The values of the inputs besides the model's, by their names."""

    def __init__(self, x: Any, others: dict[str, Tensor]) -> None:
        self.x, self._others = x, others

    def get(self, name: str) -> Tensor | None:
        """Give one of them, if there is such an input."""
        return self._others.get(name)


class Steps:
    """What all predictors do: one pass over the model, and a look-up of thresholds.

    Parameters
    ----------
    predictor
        The calibrated predictor.
    alphas
        Shares of misses that are known; None if alpha is an input.
    columns
        How many thresholds a row has: one for each output or class, at most.
    """

    def __init__(
        self, predictor: Predictor, alphas: Sequence[Fraction] | None, columns: int
    ) -> None:
        lookup = lookup_of(predictor.calibration, columns)
        assert lookup is not None  # what has none was refused
        self._lookup: Lookup = lookup
        each = predictor.alpha_of_each(Fraction(1, 2), predictor.calibration.coordinates)
        self._parts = int(Fraction(1, 2) / each)
        self._known = None
        if alphas is not None:
            self._known = [lookup(Share(alpha, self._parts)) for alpha in alphas]
        self._needs = predictor._scorer.needs().joined(predictor.calibration.needs())
        twin = twin_of(uncompiled(predictor.model))
        if twin is None:
            raise ValueError(
                "the model is scripted, or has parts that cannot be copied, so torch cannot write "
                "down what it does: export a predictor of the original module. Nothing was written"
            )
        self.model: nn.Module = twin.to("cpu")

    def see(self, x: Any) -> Seen:
        """Run the model once; what is checked elsewhere is not looked at."""
        inner = [name for name in dict.fromkeys(self._needs.norms) if name != OUTPUT]
        with Cut(self.model, inner, values=self._needs.values) as cut:
            tap = cut(x)
            norms = jacobian.take_norms(self.model, x, tap, inner, self._needs)
        output = tap.prediction.detach()
        if OUTPUT in self._needs.norms:
            norms[OUTPUT] = passes._ones(output, self._needs)
        return Seen(x, output, norms, tap.values, range(0))

    def thresholds(self, given: Given, seen: Seen) -> list[Tensor]:
        """Look up the thresholds, for each alpha."""
        known: list[Thresholds] | None = self._known
        if known is None:
            alpha = given.get(ALPHA)
            assert alpha is not None
            known = [self._lookup(Share(alpha, self._parts))]
        return [thresholds(seen, given.get(GROUP)) for thresholds in known]


class BandSteps(Steps):
    """From inputs to the prediction and the ends of the bands of every alpha."""

    names = ("lower", "upper")

    def __init__(
        self, predictor: BandPredictor, alphas: Sequence[Fraction] | None, output: Tensor
    ) -> None:
        self._family, self._layout = predictor._scorer, predictor._layout
        # An end of the support, in the type of the bands, cuts off no target that lies on it.
        line = torch.tensor([-torch.inf, torch.inf], dtype=output.dtype)
        low, high = line if predictor.support is None else predictor.support.cut(*line)
        self._support = (float(low), float(high))
        super().__init__(predictor, alphas, predictor.calibration.coordinates)

    def __call__(self, given: Given) -> list[Tensor]:
        """Give the prediction, then a lower and an upper end for each alpha."""
        seen, rounding = self.see(given.x), given.get(ROUNDING)
        assert rounding is not None
        prediction = checks.like_target(self._family.prediction(seen.output), self._layout)
        results, ends_of = [prediction], self._ends(seen, prediction, rounding)
        for threshold in self.thresholds(given, seen):
            for end in ends_of(threshold):
                whole = end if prediction.dim() == 2 else end.reshape(prediction.shape)
                results.append(self._cut(whole))
        return results

    def _ends(self, seen: Seen, prediction: Tensor, rounding: Tensor) -> Callable[..., Any]:
        """Give the ends at thresholds, outward by as much as another machine can round."""
        if isinstance(self._family, SlackBands):
            outward = Outward(self._family, seen, rounding)
            return lambda threshold: ends_at(outward, seen, threshold)
        share = near(prediction.dtype)
        margin = columns(prediction.abs() * share + rounding)

        def of_levels(threshold: Tensor) -> tuple[Tensor, Tensor]:
            larger = threshold + threshold.abs() * share
            # Several levels are worked out at once.
            ends = ends_at(self._family, seen, larger.view(1, -1, threshold.shape[-1]))
            # What is far out, farther perhaps than in the example, is rounded by more.
            down, up = (margin + end[0].abs() * share for end in ends)
            return ends[0][0] - down, ends[1][0] + up

        return of_levels

    def _cut(self, end: Tensor) -> Tensor:
        return end if self._support == (-torch.inf, torch.inf) else end.clamp(*self._support)


class SetSteps(Steps):
    """From inputs to the logits, the mask of labels for every alpha, and the scores."""

    names = ("mask",)

    def __init__(
        self,
        predictor: LabelSets,
        alphas: Sequence[Fraction] | None,
        output: Tensor,
        random: float | None,
    ) -> None:
        self._score: Any = predictor._scorer
        self.rule: Any = predictor._scorer.rule  # type: ignore[attr-defined]
        self._allow_empty, self._random = predictor.allow_zero_sets, random
        self._other_labels = predictor.other_labels
        super().__init__(predictor, alphas, output.shape[1])

    def rows(self, seen: Seen, share: Tensor | None) -> Rows:
        """Give what scores are taken from."""
        if share is None:
            fixed = self._random if self._score.randomized else 1.0
            share = torch.full_like(seen.output[:, 0], fixed or 0.0, dtype=torch.float64)
        feature = self._score.feature
        return Rows(seen.output, share, None if feature is None else seen.norms[feature])

    def __call__(self, given: Given) -> list[Tensor]:
        """Give the logits, a mask for each alpha, and the scores, by which rounding is measured."""
        seen, rounding = self.see(given.x), given.get(ROUNDING)
        assert rounding is not None
        rows, rule = self.rows(seen, given.get(RANDOM)), self.rule
        weights = rule.weights(seen.output)
        scores = rule.of_all(weights, rows)
        places = torch.arange(weights.shape[1])
        # Of equal weights that of the larger logit comes first.
        below = weights < weights.amax(dim=1, keepdim=True)
        best = places == seen.output.masked_fill(below, -torch.inf).argmax(dim=1, keepdim=True)
        unknown = scores.isnan()  # a row that says nothing has all labels
        masks = []
        for threshold in self.thresholds(given, seen):
            mask = (scores <= threshold + rounding) | unknown
            if not self._allow_empty:
                mask = mask | (best & ~mask.any(dim=1, keepdim=True))
            if self._other_labels:
                everything = threshold.isinf() | unknown.any(dim=1, keepdim=True)
                mask = torch.cat([mask, everything], dim=1)
            masks.append(mask)
        return [seen.output, *masks, scores]
