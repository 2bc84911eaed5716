"""Learn quantiles of the residual from training rows, calibration rows, or both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ffcp.batch import BatchOutput, Requires
from ffcp.conformal.rank import exact_alpha
from ffcp.conformal.selection import Aside, LearningDivision, Selected, Selection
from ffcp.network import arrays
from ffcp.regression.intervals import as_float64, columns
from ffcp.regression.joint import BOTH, EACH, Joint, shared_out
from ffcp.regression.learned import boosting, network
from ffcp.regression.learned.feature_columns import FeatureColumns, On
from ffcp.regression.learned.learned_score import LearnedScore
from ffcp.regression.learned.learners import BOOSTING, NETWORK, MeanQuantiles
from ffcp.regression.learned.nested import LEVELS

MOST_ROWS = 20_000  # to learn from; more cost time and add little
_FOLDS = 3  # of cross-fitting
_JUDGED = 2000  # rows that are cross-fitted, about: more cost time and add little
_WEIGHT = 0.5  # of a training row; fresh rows have the weight 1
_STACKED = (0.5, 0.25, 0.75)  # weights of trees to choose from, in the mean with networks
_MISSES = 100  # how many calibration rows an interval should miss: 1,000 calibrate at alpha = 0.1
CROSS_FITTED = "cross-fitted quantiles"
TRAINING_ROWS, CALIBRATION_ROWS = "training rows", "calibration rows"


class Rows(NamedTuple):
    """Rows to learn from: columns (n, k), residuals (n, m) and how much each row counts (n,)."""

    columns: Tensor
    residuals: Tensor
    weights: Tensor

    @classmethod
    def of(cls, features: FeatureColumns, out: BatchOutput, y: Tensor) -> Rows:
        """Return the rows of a batch output and its targets."""
        target = columns(arrays.target_like(y, out.output)).double().cpu()
        residuals = target - as_float64(out.output).reshape(len(target), -1).cpu()
        return cls(features.columns(out), residuals, torch.ones(len(target)))

    def part(self, mask: Tensor) -> Rows:
        """Return some of the rows."""
        return Rows(self.columns[mask], self.residuals[mask], self.weights[mask])


def pooled(fresh: Rows, training: Rows | None) -> Rows:
    """Return fresh and training rows together.

    Residuals of training rows are too small, as the network has been fitted to them: they are
    rescaled by the ratio of medians, and have half the weight.

    >>> one = Rows(torch.zeros(2, 1), torch.tensor([[4.0], [-4.0]]), torch.ones(2))
    >>> both = pooled(one, Rows(torch.ones(1, 1), torch.tensor([[1.0]]), torch.ones(1)))
    >>> both.residuals[:, 0], both.weights
    (tensor([ 4., -4.,  4.]), tensor([1.0000, 1.0000, 0.5000]))
    """
    if training is None:
        return fresh
    size = fresh.residuals.abs().nanmedian(dim=0).values
    trained = training.residuals.abs().nanmedian(dim=0).values
    stretch = torch.where((size > 0) & (trained > 0), size / trained, torch.ones_like(size))
    return Rows(
        torch.cat([fresh.columns, training.columns]),
        torch.cat([fresh.residuals, training.residuals * stretch]),
        torch.cat([fresh.weights, _WEIGHT * training.weights]),
    )


@dataclass(frozen=True)
class QuantileFitter:
    """Learns quantiles of the residual from fresh rows and, if there are any, training rows.

    ``tail`` is the level of the outer quantiles.
    """

    features: FeatureColumns
    seed: int
    tail: float
    training: Rows | None = None

    def learned_score(
        self, kind: str, fresh: Rows, cross_fit: CrossFit | None = None, **config: Any
    ) -> LearnedScore:
        """Return the score learned from all rows, with the settings of ``cross_fit``."""
        rows = pooled(fresh, self.training)
        if cross_fit is None:
            learner, typical = self._fit(kind, rows)
        else:
            _, rounds, weight, hidden = cross_fit
            learner, typical = self._fit(kind, rows, None, rounds or None, weight, hidden)
        return LearnedScore(self.features, kind, **config, learner=learner, typical=typical)

    def _fit(
        self,
        kind: str,
        rows: Rows,
        held: Rows | None = None,
        rounds: list[int] | None = None,
        weight: float = 0.5,
        hidden: bool = True,
    ) -> tuple[Any, Tensor]:
        """Return a learner fitted to rows, and the typical sizes of their columns.

        Each quantile has as many trees as ``rounds`` says, or until rows that are ``held`` out get
        no better; ``weight`` is that of the trees, where both learn. Networks learn from hidden
        values in addition to the input of a table if ``hidden``.
        """
        typical = self.features.typical(rows.columns, rows.residuals.shape[1])
        columns = self.features.logarithmic(self.features.tied(rows.columns, typical), typical)
        visible = self.features.without_hidden(columns)
        targets = (rows.residuals, self.seed, rows.weights)
        if kind != NETWORK:
            validation = None
            if held is not None:
                validation = (self.features.logarithmic(held.columns, typical), held.residuals)
            trees = boosting.learn(
                columns, *targets, tail=self.tail, first=visible, held=validation, rounds=rounds
            )
            if kind == BOOSTING:
                return trees, typical
        networks = network.learn(columns if hidden else columns[:, :visible], *targets)
        if kind == NETWORK:
            return networks, typical
        return MeanQuantiles(networks, trees, weight), typical

    def cross_fitted(self, kind: str, fresh: Rows, step: Callable[[], object]) -> CrossFit:
        """Return cross-fitted quantiles: those of each fold are learned from all other rows.

        Networks learn with and without hidden values in addition to the input of a table: few
        rows are misled by so many columns. Those with the smaller pinball loss are returned.
        """
        has_hidden = self.features.without_hidden(fresh.columns) < fresh.columns.shape[1]
        choices = (True, False) if kind == NETWORK and has_hidden else (True,)
        empty = torch.empty(*fresh.residuals.shape, len(LEVELS), dtype=torch.float64)
        fits = [CrossFit(empty.clone(), [], hidden=hidden) for hidden in choices]
        fold, rounds = torch.arange(len(fresh.columns)) % _FOLDS, []
        for number in range(folds_of(len(fold))):
            held = fold == number
            others = pooled(fresh.part(~held), self.training)
            for fit in fits:
                learner, typical = self._fit(kind, others, fresh.part(held), hidden=fit.hidden)
                columns = self.features.logarithmic(fresh.columns[held], typical)
                fit.quantiles[held] = learner(columns)
            rounds.append(getattr(learner, "rounds", []))
            step()
        best = min(fits, key=lambda fit: _pinball(fit.quantiles, fresh.residuals))
        mean_rounds = [round(sum(counts) / len(counts)) for counts in zip(*rounds, strict=True)]
        return best._replace(rounds=mean_rounds)


class CrossFit(NamedTuple):
    """Cross-fitted quantiles (n, m, levels), and the settings selected on the way.

    ``rounds`` is the number of trees of each quantile, ``weight`` that of trees in the mean;
    ``hidden`` says whether networks learn from hidden values in addition to the input of a table.
    """

    quantiles: Tensor
    rounds: list[int]
    weight: float = 0.5
    hidden: bool = True


def stacked(networks: CrossFit, trees: CrossFit, residuals: Tensor) -> CrossFit:
    """Return the weighted mean of both with the smallest pinball loss on these residuals."""
    means = {weight: torch.lerp(networks.quantiles, trees.quantiles, weight) for weight in _STACKED}
    weight = min(means, key=lambda weight: _pinball(means[weight], residuals))
    return CrossFit(means[weight], trees.rounds, weight, networks.hidden)


def _pinball(quantiles: Tensor, residuals: Tensor) -> float:
    """Return the mean pinball loss in the cross-fitted folds, of outputs in units of their own."""
    used, unit = judged(len(residuals)), network.typical_size(residuals).double()
    error = (residuals[used][..., None] - quantiles[used]) / unit[:, None]
    return float(torch.maximum(LEVELS * error, (LEVELS - 1) * error).nanmean())


def folds_of(rows: int) -> int:
    """Return how many folds are cross-fitted.

    >>> folds_of(60), folds_of(3000), folds_of(9000)
    (3, 2, 1)
    """
    return min(_FOLDS, math.ceil(_JUDGED * _FOLDS / rows))


def judged(rows: int) -> Tensor:
    """Return a mask of the rows in cross-fitted folds."""
    return torch.arange(rows) % _FOLDS < folds_of(rows)


@dataclass(frozen=True)
class CrossFitted(LearnedScore):
    """A score by cross-fitted quantiles, which are stored among the values of a batch output."""

    def quantiles(self, out: BatchOutput) -> Tensor:
        """Return the quantiles of the residual, (n, m, levels)."""
        return out.values[CROSS_FITTED]


def tail_of(alpha: Any, side: str) -> float:
    """Return the level of the outer quantiles between which intervals of level alpha lie.

    >>> tail_of(0.1, "both"), tail_of(0.1, "lower")
    (0.05, 0.1)
    """
    exact = exact_alpha(alpha)
    return float(exact / 2 if side in (BOTH, EACH) else exact)


class LearningSelection(Selection):
    """The base of selections that learn quantiles of the residual from rows set aside."""

    side: str
    alpha: Any
    calibrate_rows: int | None

    def division(self, fraction: float, seed: int) -> LearningDivision:
        """Return the division of rows: enough calibrate for about a hundred misses."""
        wanted = math.ceil(_MISSES / shared_out(self.alpha, self.side, False, 1))
        return LearningDivision(wanted, seed, MOST_ROWS, self.calibrate_rows)


@dataclass(frozen=True)
class LearnedSelection(LearningSelection):
    """Learns the quantiles of the residual from calibration rows, which then do not calibrate."""

    on: Sequence[On] | None
    kind: str
    seed: int
    shape: str
    joint: Joint
    side: str
    alpha: Any
    calibrate_rows: int | None = None
    features: FeatureColumns | None = None
    what = "what is learned"

    def prepared(self, model: Any, x: Any) -> LearnedSelection:
        """Return the selection with the layers of the model to learn from."""
        return replace(self, features=FeatureColumns.of(model, x, self.on))

    def requires(self) -> Requires:
        """Return the features to learn from; none until the model is known."""
        return Requires() if self.features is None else self.features.requires()

    def select(self, aside: Aside) -> Selected:
        """Learn from the rows set aside."""
        assert self.features is not None
        fitter = QuantileFitter(self.features, self.seed, tail_of(self.alpha, self.side))
        config: dict[str, Any] = {"shape": self.shape, "joint": self.joint, "side": self.side}
        rows = Rows.of(self.features, aside.out, aside.y)
        learned = fitter.learned_score(self.kind, rows, source=CALIBRATION_ROWS, **config)
        return Selected(learned, aside.calibration, {})

    def accepts(self, score: Any) -> bool:
        """Whether this selection could have learned the score."""
        names = ("kind", "shape", "joint", "side")
        return isinstance(score, LearnedScore) and all(
            getattr(score, name) == getattr(self, name) for name in names
        )
