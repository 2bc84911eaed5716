"""The scores of LAC, APS, RAPS and FFRAPS, and the sets of labels below a threshold.

With p = softmax(logits / temperature) every label j has a weight e_j, its probability or, for
FFRAPS, a little more. Labels are sorted by their weights, largest first, equal weights by their
logits, and equal logits by index. The label at rank r has the score

    (weights of the labels before it) + share * e + lam * max(r - kreg, 0) + extra

with share uniform in [0, 1) and the same for all labels of the row. LAC has the score 1 - p_j. A
set holds the labels with a score of at most the threshold.

The arithmetic is exact: weights are multiples of 2^-40, so that their sums, below 2^13, are the
same in float64 in any order of summation. The score of a label is then the same number, whether
it is computed by comparing (calibration) or by sorting (prediction), in batches of any size; ties
at the threshold, common where the softmax is saturated, stay ties.

A label whose probability is lost in rounding has no weight. Instead its weight is a negative
number: how far it lies below the smallest weight, in nats. It orders these labels, adds nothing to
sums, and, where ranks have no penalty (APS, LAC), is added to their scores. Otherwise all of them
would have the same score, and a threshold that includes one of them would include them all.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ffcp.batch import is_traced

SOFTMAX = "softmax"
FEATURE = "feature"
_FEW = 64  # most sets are smaller; finding this many largest is far cheaper than sorting all
_SORTED = 2**12  # up to this many numbers, all are sorted at once
# Smaller weights are replaced by their logarithm. LAC needs no sums, so it has no ties then.
_SMALLEST, _SMALLEST_LAC = 2.0**-40, 2.0**-20
_LIMIT = 2.0**11  # how much FFRAPS may add to the weights of a row before sums stop being exact
# Numbers per step: 2 MB in float64. Smaller steps are not faster with one thread, and several
# threads have to synchronise more often, which is slow on a busy machine.
_BLOCK = 2**18
# Limit, in nats, of how far a label lies below the smallest weight: 1e308 would overflow.
_DEEPEST = 1e300


# -- weights of labels, in exact arithmetic ----------------------------------------------------


def probabilities(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return softmax(logits / temperature) in float64; each row depends on nothing but itself.

    >>> probabilities(torch.tensor([[0.0, 0.0]], dtype=torch.float16))
    tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    return _scaled(logits, temperature).softmax(dim=1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    values = logits.to(torch.float64).contiguous()
    if temperature != 1:
        # With the largest at 0, dividing by a small temperature cannot overflow it.
        values = (values - values.amax(dim=1, keepdim=True)) / temperature
    return values


def jacobian_norms(p: Tensor) -> Tensor:
    """Return the norm of each row of the softmax's Jacobian in the logits, in closed form.

    Row j is the gradient of p_j, which is p_j (1[j = k] - p_k) for k = 1, 2, ..., so its norm
    is p_j sqrt(1 - 2 p_j + sum p^2). At a temperature T it is divided by T.

    >>> jacobian_norms(torch.tensor([[0.5, 0.5]]))
    tensor([[0.3536, 0.3536]])
    """
    # Squares as multiples of the resolution in [1, 2): their sum is then exact in any order.
    total = (p * p).add_(1).sub_(1).sum(dim=1, keepdim=True)
    return (p * -2).add_(total + 1).clamp_min_(0).sqrt_().mul_(p)


def exact(weights: Tensor) -> Tensor:
    """Round to multiples of 2^-40, the resolution of float64 between 2^12 and 2^13."""
    return weights.add_(2.0**12).sub_(2.0**12)


def graded(weights: Tensor, logits: Tensor, temperature: float, smallest: float) -> Tensor:
    """Return weights with those below ``smallest`` replaced by log p - log smallest.

    >>> logits = torch.tensor([[0.0, -50.0, -70.0]])
    >>> graded(exact(probabilities(logits)), logits, 1.0, smallest=2.0**-40)
    tensor([[  1.0000, -22.2741, -42.2741]], dtype=torch.float64)
    """
    if not is_traced() and float(weights.amin()) >= smallest:
        return weights
    lost = weights < smallest
    depths = _scaled(logits, temperature).log_softmax(dim=1).sub_(math.log(smallest))
    # Finite, whatever the logits; and not above 0, which rounding could otherwise cause.
    return torch.where(lost, depths.clamp_(-_DEEPEST, 0), weights)


class Place(NamedTuple):
    """The position of a label in the sorted row.

    The sum of the weights before it, its own weight, its rank from 1, and how far it lies below
    the smallest weight (``None`` where no label does).
    """

    before: Tensor
    weight: Tensor
    rank: Tensor
    below: Tensor | None


def largest(weights: Tensor, count: int) -> Tensor:
    """Return the largest weights of each row, in descending order.

    >>> largest(torch.tensor([[1.0, 3.0, 2.0]]), 2)
    tensor([[3., 2.]])
    """
    if weights.device.type != "cpu":
        return weights.topk(count, dim=1).values
    # Only values are needed: numpy's vectorised sort and partition are 5 times faster than
    # torch's, which carry an index along.
    array = weights.numpy()
    if count < array.shape[1]:
        array = np.partition(array, -count, axis=1)[:, -count:]
    return torch.from_numpy(np.sort(array, axis=1)).flip(1)


def in_order(weights: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of each row in descending order, and the labels they belong to.

    >>> in_order(torch.tensor([[0.2, 0.6, 0.2]]), torch.tensor([[1.0, 9.0, 2.0]]))[1]
    tensor([[1, 2, 0]])
    """
    labels = logits.sort(dim=1, descending=True, stable=True).indices
    ordered = weights.gather(1, labels)
    # Only FFRAPS may order them otherwise.
    if not is_traced() and not bool((ordered.diff(dim=1) > 0).any()):
        return ordered, labels
    ordered, order = ordered.sort(dim=1, descending=True, stable=True)
    return ordered, labels.gather(1, order)


def ordered_places(ordered: Tensor) -> Place:
    """Return the places of labels whose weights are given in descending order.

    >>> ordered_places(torch.tensor([[0.5, 0.25, 0.25, -3.0]])).before
    tensor([[0.0000, 0.5000, 0.7500, 1.0000]])
    """
    rank = torch.arange(1, ordered.shape[1] + 1, device=ordered.device)
    below = None
    if is_traced() or bool((ordered[:, -1] < 0).any()):
        below, ordered = ordered.neg().clamp_min_(0), ordered.clamp_min(0)
    return Place(ordered.cumsum(dim=1) - ordered, ordered, rank, below)


def first_ties(weights: Tensor, logits: Tensor, sizes: Tensor) -> Tensor:
    """Return a mask of the first ``sizes`` labels of rows, equal weights ordered by the logits."""
    labels = in_order(weights, logits)[1]
    first = torch.arange(labels.shape[1], device=labels.device) < sizes[:, None]
    return torch.empty_like(first).scatter_(1, labels, first)


def filled(mask: Tensor, weights: Tensor, logits: Tensor, least: int) -> Tensor:
    """Return the mask with the first label added to empty sets, unless ``least`` is 0."""
    if least:
        empty = (~mask.any(dim=1)).nonzero()[:, 0]
        mask[empty, in_order(weights[empty], logits[empty])[1][:, 0]] = True
    return mask


def places(weights: Tensor, logits: Tensor, labels: Tensor) -> Place:
    """Return the place of one label of each row, without sorting.

    >>> places(torch.tensor([[0.5, 0.2, 0.2]]), torch.tensor([[3.0, 2, 2]]), torch.tensor([2])).rank
    tensor([3])
    """
    weight = weights.gather(1, labels[:, None])
    earlier, equal = weights > weight, weights == weight
    tied = (equal.sum(dim=1) > 1).nonzero()[:, 0]
    if len(tied):
        tied_logits, tied_labels = logits[tied], labels[tied][:, None]
        logit = tied_logits.gather(1, tied_labels)
        index = torch.arange(weights.shape[1], device=weights.device)
        precedes = (tied_logits > logit) | ((tied_logits == logit) & (index < tied_labels))
        earlier[tied] |= equal[tied] & precedes
    before = (weights.clamp_min(0) * earlier).sum(dim=1)
    weight = weight[:, 0]
    return Place(before, weight.clamp_min(0), earlier.sum(dim=1) + 1, weight.neg().clamp_min_(0))


def blocks(rows: int, classes: int) -> Iterator[slice]:
    """Yield blocks of rows small enough that temporary tensors need little memory."""
    size = max(1, _BLOCK // classes)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


# -- rules -------------------------------------------------------------------------------------


class LabelRows(NamedTuple):
    """Some rows: logits (n, K), the random share of the own weight, and gradient norms."""

    logits: Tensor
    share: Tensor
    norms: Tensor | None = None

    def take(self, rows: slice | Tensor) -> LabelRows:
        """Return a selection of the rows."""
        norms = None if self.norms is None else self.norms[rows]
        return LabelRows(self.logits[rows], self.share[rows], norms)


@dataclass(frozen=True)
class Threshold:
    """The score of LAC: one minus the label's probability.

    Probabilities below 1e-6, which 1 - p hardly distinguishes, continue from 1 in nats.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, above_zero=True)

    def weights(self, logits: Tensor) -> Tensor:
        """Return the weight of each label, shape (n, K)."""
        weights = exact(probabilities(logits, self.temperature))
        return graded(weights, logits, self.temperature, _SMALLEST_LAC)

    def at(self, place: Place, rows: LabelRows) -> Tensor:
        """Return the scores of labels whose places are known."""
        return 1 - place.weight if place.below is None else 1 - place.weight + place.below

    def of_all(self, weights: Tensor, rows: LabelRows) -> Tensor:
        """Return the scores of every label of one block of rows."""
        return 1 - weights

    def admits(self, weights: Tensor, rows: LabelRows, threshold: Tensor, least: int) -> Tensor:
        """Return a mask of the labels of one block whose score is at most the row's threshold."""
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
            raise ValueError(
                f"'gradient' must be {SOFTMAX!r} or {FEATURE!r}, got {self.gradient!r}"
            )
        # The norms of a row add up to at most sqrt(2) / temperature.
        if self.gradient == SOFTMAX and 1.5 * self.delta / self.temperature > _LIMIT:
            raise ValueError(
                f"'delta' is {self.delta:g}, too large at temperature {self.temperature:g}: the "
                "probabilities would be lost in rounding. Use a value below 0.1"
            )

    def weights(self, logits: Tensor) -> Tensor:
        """Return the weight of each label, shape (n, K)."""
        p = probabilities(logits, self.temperature)
        if self.gradient == SOFTMAX and self.delta:
            p = jacobian_norms(p).mul_(self.delta / self.temperature).add_(p)
        return graded(exact(p), logits, self.temperature, _SMALLEST)

    def at(self, place: Place, rows: LabelRows) -> Tensor:
        """Return the scores of labels whose places are known.

        The terms are added here only: every sum rounds, so their order matters.
        Rounding is monotone, so a score never falls as the rank grows.
        """
        columns = place.weight.dim() == 2
        share = rows.share[:, None] if columns else rows.share
        scores = place.before + share * place.weight
        if place.below is not None and not self.lam:  # with lam, ranks order labels without weight
            scores = scores + place.below
        if self.lam:
            scores = scores + self.lam * (place.rank - self.kreg).clamp_min(0).double()
        if self.gradient == FEATURE and rows.norms is not None:
            extra = self.delta * rows.norms.to(torch.float64)
            scores = scores + (extra[:, None] if columns else extra)
        return scores

    def of_all(self, weights: Tensor, rows: LabelRows) -> Tensor:
        """Return the scores of every label of one block of rows."""
        ordered, labels = in_order(weights, rows.logits)
        scores = self.at(ordered_places(ordered), rows)
        return torch.empty_like(scores).scatter_(1, labels, scores)

    def admits(self, weights: Tensor, rows: LabelRows, threshold: Tensor, least: int) -> Tensor:
        """Return a mask of the labels of one block with scores at most the threshold.

        There is one threshold, or one for each row, (n, 1). Scores grow with the rank, so the set
        is the first few labels, and the sorted weights determine how many. Which labels these are
        follows from the smallest weight among them.
        """
        # Sorting a few numbers takes less time than a second round.
        few = weights.shape[1] if weights.numel() <= _SORTED else min(_FEW, weights.shape[1])
        mask, complete = self._admits(weights, rows, threshold, least, few)
        while not bool(complete.all()):
            rest = (~complete).nonzero()[:, 0]
            few = min(4 * few, weights.shape[1])
            level = threshold[rest] if threshold.dim() else threshold
            mask[rest], complete[rest] = self._admits(
                weights[rest], rows.take(rest), level, least, few
            )
        return mask

    def _admits(
        self, weights: Tensor, rows: LabelRows, threshold: Tensor, least: int, few: int
    ) -> tuple[Tensor, Tensor]:
        """Return sets among the largest ``few`` weights, and which rows' sets are complete."""
        ordered = largest(weights, few)
        sizes = self.sizes(ordered, rows, threshold).clamp_min(least)
        # The last weight in the set and the first one outside, infinite where there is none.
        edges = pad(pad(ordered, (1, 0), value=math.inf), (0, 1), value=-math.inf)
        last, following = edges.gather(1, torch.stack([sizes, sizes + 1], dim=1)).unbind(dim=1)
        mask = weights >= last[:, None]
        divided = (last == following).nonzero()[:, 0]  # equal weights, some in and some out
        if len(divided):
            mask[divided] = first_ties(weights[divided], rows.logits[divided], sizes[divided])
        return mask, (sizes < few) | (few == weights.shape[1])

    def sizes(self, ordered: Tensor, rows: LabelRows, threshold: Tensor) -> Tensor:
        """Return the number of labels with a score of at most the threshold, by sorted weights."""
        return (self.at(ordered_places(ordered), rows) <= threshold).sum(dim=1)


Rule = Threshold | Cumulative


# -- all rows, block by block ------------------------------------------------------------------


def label_scores(rule: Rule, rows: LabelRows, labels: Tensor) -> Tensor:
    """Return the score of one label of each row, shape (n,)."""
    scores = torch.empty(len(labels), dtype=torch.float64, device=rows.logits.device)
    for block in blocks(*rows.logits.shape):
        part = rows.take(block)
        place = places(rule.weights(part.logits), part.logits, labels[block])
        scores[block] = rule.at(place, part)
    return scores


def all_scores(rule: Rule, rows: LabelRows) -> Tensor:
    """Return the scores of every label of each row, shape (n, K)."""
    scores = torch.empty(rows.logits.shape, dtype=torch.float64, device=rows.logits.device)
    for block in blocks(*rows.logits.shape):
        part = rows.take(block)
        scores[block] = rule.of_all(rule.weights(part.logits), part)
    return scores


def label_mask(rule: Rule, rows: LabelRows, threshold: Tensor, *, allow_empty: bool) -> Tensor:
    """Return a mask of the labels whose score is at most the threshold, shape (n, K).

    Parameters
    ----------
    rule : Rule
        How to score labels.
    rows : LabelRows
        The rows to score.
    threshold : Tensor
        One number; one for each row, (n, 1); for each label, (K,); or for both, (n, K).
    allow_empty : bool
        If ``False``, an empty set gets the first label.

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
        part = rows.take(block)
        level = threshold[block] if threshold.dim() == 2 else threshold
        weights = rule.weights(part.logits)
        if level.dim() and level.shape[-1] > 1:
            inside = rule.of_all(weights, part) <= level
            mask[block] = filled(inside, weights, part.logits, least)
        else:
            mask[block] = rule.admits(weights, part, level, least)
    return mask


# -- checks ------------------------------------------------------------------------------------


def _check_number(name: str, value: Any, above_zero: bool = False) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf or (above_zero and not value):
        expected = "a positive number" if above_zero else "a number >= 0"
        raise ValueError(f"{name!r} must be {expected}, got {value!r}")


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name!r} must be an integer, got {value!r}")
    if int(value) < 0:
        raise ValueError(f"{name!r} must be an integer >= 0, got {value}")
