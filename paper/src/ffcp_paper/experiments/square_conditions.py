"""Measurement of the square conditions of the paper's theorem on band lengths.

The theorem says that FFCP's bands are shorter than CP's where two conditions hold. Let V be the
residuals of n calibration rows, g the gradient norms there, Q the (1 - alpha) quantile, L and a
the constants of a Hölder condition, M the mean over rows and E that over calibration sets:

    expansion:   L E M |Q(V/g) - V/g|^a  <  E M [Q(V) - V] - 2 max(L, 1) (c/sqrt(n))^min(a, 1)
    stability:   E |Q(V'/g') - Q(V/g)|  <=  c/sqrt(n)   and   E |Q(V') - Q(V)|  <=  c/sqrt(n)

with V' and g' those of other rows. The proof uses the Hölder condition for a score times the
gradient norm, so that a = 1 and L is the largest norm. The paper checks expansion with L = 1 and
without its last term. E is the mean over seeds here, and the other rows are those of the test.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ffcp import CP, FFCP, conformal_quantile, gradient_norms
from ffcp_paper.networks.regression import SPLIT_POINTS


@dataclass(frozen=True)
class Spread:
    """Distances of scores from their quantile, in their own unit and in that of y.

    Parameters
    ----------
    method
        CP or FFCP.
    scores
        Calibration scores.
    quantile
        Their (1 - alpha) quantile Q, with the conformal rank.
    norm, largest
        Mean gradient norm over the same points, which takes a score to the unit of y, and the
        largest; 1 for CP.
    """

    method: str
    scores: Tensor
    quantile: float
    norm: float = 1.0
    largest: float = 1.0

    @property
    def distance(self) -> float:
        """Mean distance between Q and a score, the quantity of the paper's expansion condition."""
        return float((self.quantile - self.scores).abs().mean())

    @property
    def shortfall(self) -> float:
        """Mean of Q - score, which the condition has on CP's side."""
        return float((self.quantile - self.scores).mean())

    @property
    def scaled(self) -> float:
        """Mean distance between Q and a score, times the mean gradient norm: in the unit of y."""
        return self.norm * self.distance

    @property
    def half_length(self) -> float:
        """Mean half length of the bands at these points."""
        return self.norm * self.quantile


def spreads(
    model: nn.Module, x: Tensor, y: Tensor, alpha: float, splits: Sequence[int]
) -> list[Spread]:
    """Return scores and quantiles of CP and of FFCP at some split points, on the same rows.

    >>> from ffcp_paper.networks.regression import mlp
    >>> x, y = torch.rand(60, 2), torch.rand(60)
    >>> plain, fast = spreads(mlp(2), x, y, alpha=0.1, splits=[2])
    >>> plain.norm, bool((fast.scores >= 0).all())
    (1.0, True)
    """
    layers = [SPLIT_POINTS[split] for split in splits]
    _, norms = gradient_norms(model, x, layers)
    result = [_spread(CP(model), x, y, alpha, torch.ones(1))]
    for layer in layers:
        fast = FFCP(model, layer)
        result.append(_spread(fast, x, y, alpha, norms[layer].double().clamp_min(fast.floor)))
    return result


def _spread(predictor: CP | FFCP, x: Tensor, y: Tensor, alpha: float, norms: Tensor) -> Spread:
    scores = predictor.score(x, y).reshape(-1)
    quantile = float(conformal_quantile(scores, alpha))
    name = type(predictor).__name__
    return Spread(name, scores, quantile, float(norms.mean()), float(norms.max()))


@dataclass(frozen=True)
class Square:
    """The quantities of the square conditions, for one layer and one seed.

    Parameters
    ----------
    distance
        Mean of |Q - score| for FFCP, in the unit of its score.
    scaled
        The same times the mean gradient norm, in the unit of y.
    shortfall
        Mean of Q - score for CP.
    largest
        The largest gradient norm.
    feature_gap, output_gap
        How far Q of the calibration rows is from that of the test rows, for FFCP and for CP.
    """

    distance: float
    scaled: float
    shortfall: float
    largest: float
    feature_gap: float
    output_gap: float


def measure(
    model: nn.Module,
    calibration: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    alpha: float,
    splits: Sequence[int],
) -> list[Square]:
    """Measure the quantities of the conditions at some split points.

    >>> from ffcp_paper.networks.regression import mlp
    >>> rows = torch.rand(60, 2), torch.rand(60)
    >>> measure(mlp(2), rows, rows, alpha=0.1, splits=[0, 1])[1].feature_gap
    0.0
    """
    plain, *fast = spreads(model, *calibration, alpha, splits)
    plain_test, *fast_test = spreads(model, *test, alpha, splits)
    return [
        Square(
            one.distance,
            one.scaled,
            plain.shortfall,
            max(one.largest, other.largest),
            abs(one.quantile - other.quantile),
            abs(plain.quantile - plain_test.quantile),
        )
        for one, other in zip(fast, fast_test, strict=True)
    ]


def _mean(of: Sequence[Square], what: str) -> float:
    return statistics.fmean(getattr(one, what) for one in of)


def gap(of: Sequence[Square]) -> float:
    """Return the smallest c / sqrt(n) for which the quantiles of FFCP and of CP are stable."""
    return max(_mean(of, "feature_gap"), _mean(of, "output_gap"))


def holds_as_checked(of: Sequence[Square]) -> bool:
    """Whether expansion holds as the paper checks it: L = 1, without the last term."""
    return _mean(of, "distance") < _mean(of, "shortfall")


def holds_in_unit(of: Sequence[Square]) -> bool:
    """Whether expansion holds with the mean norm as L, which makes it independent of units.

    >>> one = Square(2.0, 0.5, 1.0, largest=3.0, feature_gap=0.0, output_gap=0.0)
    >>> holds_as_checked([one]), holds_in_unit([one]), holds_as_stated([one])
    (False, True, False)
    """
    return _mean(of, "scaled") < _mean(of, "shortfall")


def holds_as_stated(of: Sequence[Square]) -> bool:
    """Whether both conditions hold as they are stated, with the L that the proof needs.

    Stability holds with the smallest c that fulfils it; expansion must then hold with that c.
    """
    largest = max(one.largest for one in of)
    left = largest * _mean(of, "distance")
    return left < _mean(of, "shortfall") - 2 * max(largest, 1.0) * gap(of)
