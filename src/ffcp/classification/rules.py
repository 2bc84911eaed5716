"""The rules of LAC, APS, RAPS and FFRAPS: scores from weights, in exact arithmetic.

See :mod:`ffcp.classification.weights` for the formula.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ffcp.classification.weights import (
    Place,
    blocks,
    exact,
    filled,
    first_ties,
    graded,
    in_order,
    jacobian_norms,
    largest,
    ordered_places,
    places,
    probabilities,
)

SOFTMAX = "softmax"
FEATURE = "feature"
_FEW = 64  # most sets are smaller; finding this many largest is far cheaper than sorting all
_SORTED = 2**12  # so many numbers are sorted at once
# Smaller weights are replaced by how small they are. LAC needs no sums, and has no ties then.
_SMALLEST, _SMALLEST_LAC = 2.0**-40, 2.0**-20
_LIMIT = 2.0**11  # how much FFRAPS may add to the weights of a row before sums stop being exact


class LabelRows(NamedTuple):
    """What is known of some rows: logits (n, K), the share of the own weight, gradient norms."""

    logits: Tensor
    share: Tensor
    norms: Tensor | None = None

    def take(self, rows: slice | Tensor) -> LabelRows:
        """Select rows."""
        norms = None if self.norms is None else self.norms[rows]
        return LabelRows(self.logits[rows], self.share[rows], norms)


@dataclass(frozen=True)
class Threshold:
    """The score of LAC: one minus the label's probability.

    Probabilities below 1e-6, which 1 - p hardly tells apart, go on from 1 in nats.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, above_zero=True)

    def weights(self, logits: Tensor) -> Tensor:
        """Return the weight of each label, shape (n, K)."""
        weights = exact(probabilities(logits, self.temperature))
        return graded(weights, logits, self.temperature, _SMALLEST_LAC)

    def at(self, place: Place, rows: LabelRows) -> Tensor:
        """Score labels of which it is known where they stand."""
        return 1 - place.own if place.below is None else 1 - place.own + place.below

    def of_all(self, weights: Tensor, rows: LabelRows) -> Tensor:
        """Score every label of one block of rows."""
        return 1 - weights

    def admits(self, weights: Tensor, rows: LabelRows, threshold: Tensor, least: int) -> Tensor:
        """Mark the labels of one block whose score is at most the threshold of the row."""
        return filled(self.of_all(weights, rows) <= threshold, weights, rows.logits, least)


@dataclass(frozen=True)
class Cumulative:
    """The score of APS (``lam=0``), RAPS and FFRAPS (``delta > 0``).

    >>> rows = LabelRows(torch.tensor([[0.7, 0.1, 0.2]]).log(), share=torch.ones(1))
    >>> rule = Cumulative(lam=0.5, kreg=1)
    >>> rule.of_all(rule.weights(rows.logits), rows)  # 0.7, then 0.9 + 0.5, 1.0 + 2 * 0.5
    tensor([[0.7000, 2.0000, 1.4000]], dtype=torch.float64)
    """

    temperature: float = 1.0
    lam: float = 0.0
    kreg: int = 0
    delta: float = 0.0
    gradient: str = SOFTMAX

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, above_zero=True)
        _check_number("lam", self.lam)
        _check_number("delta", self.delta)
        _check_count("kreg", self.kreg)
        if self.gradient not in (SOFTMAX, FEATURE):
            raise ValueError(f"gradient must be {SOFTMAX!r} or {FEATURE!r}, got {self.gradient!r}")
        # The norms of a row add up to at most sqrt(2) / temperature.
        if self.gradient == SOFTMAX and 1.5 * self.delta / self.temperature > _LIMIT:
            raise ValueError(
                f"delta={self.delta:g} is too large at temperature {self.temperature:g}: beside it "
                "the probabilities are lost in rounding. Useful values are below 0.1"
            )

    def weights(self, logits: Tensor) -> Tensor:
        """Return the weight of each label, shape (n, K)."""
        p = probabilities(logits, self.temperature)
        if self.gradient == SOFTMAX and self.delta:
            p = jacobian_norms(p).mul_(self.delta / self.temperature).add_(p)
        return graded(exact(p), logits, self.temperature, _SMALLEST)

    def at(self, place: Place, rows: LabelRows) -> Tensor:
        """Score labels of which it is known where they stand.

        The only place where the terms are added: every sum here rounds, so their order counts.
        Rounding is monotone, so a score never falls as the rank grows.
        """
        columns = place.own.dim() == 2
        share = rows.share[:, None] if columns else rows.share
        scores = place.before + share * place.own
        if place.below is not None and not self.lam:  # else ranks order labels without weight
            scores = scores + place.below
        if self.lam:
            scores = scores + self.lam * (place.rank - self.kreg).clamp_min(0).double()
        if self.gradient == FEATURE and rows.norms is not None:
            extra = self.delta * rows.norms.to(torch.float64)
            scores = scores + (extra[:, None] if columns else extra)
        return scores

    def of_all(self, weights: Tensor, rows: LabelRows) -> Tensor:
        """Score every label of one block of rows."""
        ordered, labels = in_order(weights, rows.logits)
        scores = self.at(ordered_places(ordered), rows)
        return torch.empty_like(scores).scatter_(1, labels, scores)

    def admits(self, weights: Tensor, rows: LabelRows, threshold: Tensor, least: int) -> Tensor:
        """Mark the labels of one block whose score is at most the threshold: one, or (n, 1).

        Scores grow with the rank, so the set is the first few labels, and the sorted weights
        say how many. Which ones they are follows from the smallest weight among them.
        """
        # Few numbers are sorted in less time than it takes to begin another round.
        few = weights.shape[1] if weights.numel() <= _SORTED else min(_FEW, weights.shape[1])
        mask, ended = self._admits(weights, rows, threshold, least, few)
        while not bool(ended.all()):
            more = (~ended).nonzero()[:, 0]
            few = min(4 * few, weights.shape[1])
            own = threshold[more] if threshold.dim() else threshold
            mask[more], ended[more] = self._admits(weights[more], rows.take(more), own, least, few)
        return mask

    def _admits(
        self, weights: Tensor, rows: LabelRows, threshold: Tensor, least: int, few: int
    ) -> tuple[Tensor, Tensor]:
        """Find the sets among the largest ``few`` weights; say which rows' sets end there."""
        ordered = largest(weights, few)
        sizes = self.sizes(ordered, rows, threshold).clamp_min(least)
        # The last weight in the set and the first one outside, or a bound where there is none.
        edges = pad(pad(ordered, (1, 0), value=math.inf), (0, 1), value=-math.inf)
        last, following = edges.gather(1, torch.stack([sizes, sizes + 1], dim=1)).unbind(dim=1)
        mask = weights >= last[:, None]
        divided = (last == following).nonzero()[:, 0]  # equal weights, some in and some out
        if len(divided):
            mask[divided] = first_ties(weights[divided], rows.logits[divided], sizes[divided])
        return mask, (sizes < few) | (few == weights.shape[1])

    def sizes(self, ordered: Tensor, rows: LabelRows, threshold: Tensor) -> Tensor:
        """Count the labels with a score of at most the threshold, given weights in order."""
        return (self.at(ordered_places(ordered), rows) <= threshold).sum(dim=1)


Rule = Threshold | Cumulative


# -- all rows, block by block ------------------------------------------------------------------


def label_scores(rule: Rule, rows: LabelRows, labels: Tensor) -> Tensor:
    """Score one label of each row, shape (n,)."""
    scores = torch.empty(len(labels), dtype=torch.float64, device=rows.logits.device)
    for block in blocks(*rows.logits.shape):
        part = rows.take(block)
        scores[block] = rule.at(places(rule.weights(part.logits), part.logits, labels[block]), part)
    return scores


def all_scores(rule: Rule, rows: LabelRows) -> Tensor:
    """Score every label of each row, shape (n, K)."""
    scores = torch.empty(rows.logits.shape, dtype=torch.float64, device=rows.logits.device)
    for block in blocks(*rows.logits.shape):
        part = rows.take(block)
        scores[block] = rule.of_all(rule.weights(part.logits), part)
    return scores


def label_mask(rule: Rule, rows: LabelRows, threshold: Tensor, *, allow_empty: bool) -> Tensor:
    """Mark the labels whose score is at most the threshold, shape (n, K).

    Parameters
    ----------
    rule, rows
        How to score, and what.
    threshold
        One number; one for each row, (n, 1); for each label, (K,); or for both, (n, K).
    allow_empty
        Otherwise an empty set gets the label that stands first.

    Examples
    --------
    >>> rows = LabelRows(torch.tensor([[0.7, 0.1, 0.2]]).log(), share=torch.ones(1))
    >>> label_mask(Cumulative(), rows, torch.tensor(0.95), allow_empty=True)
    tensor([[ True, False,  True]])
    """
    threshold = threshold.to(rows.logits.device)
    least = 0 if allow_empty else 1
    mask = torch.empty(rows.logits.shape, dtype=torch.bool, device=rows.logits.device)
    for block in blocks(*rows.logits.shape):
        part, own = rows.take(block), threshold[block] if threshold.dim() == 2 else threshold
        weights = rule.weights(part.logits)
        if own.dim() and own.shape[-1] > 1:
            inside = rule.of_all(weights, part) <= own
            mask[block] = filled(inside, weights, part.logits, least)
        else:
            mask[block] = rule.admits(weights, part, own, least)
    return mask


# -- checks ------------------------------------------------------------------------------------


def _check_number(name: str, value: Any, above_zero: bool = False) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf or (above_zero and not value):
        what = "a positive number" if above_zero else "a number and not negative"
        raise ValueError(f"{name} must be {what}, got {value!r}")


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, a number of labels, got {value!r}")
    if int(value) < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
