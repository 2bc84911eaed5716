"""Label sets: how surprising each label of a row is, and which labels a threshold lets in.

With p = softmax(logits / temperature) every label j has a weight e_j, its probability or, for
FFRAPS, a little more. Labels stand in the order of their weights, largest first and equal ones by
index. The label at rank r has the score

    (weights of the labels before it) + share * e + lam * max(r - kreg, 0) + extra

with share = 1, or uniform in [0, 1) and the same for all labels of the row if randomised. LAC
has the score 1 - p_j. A set holds the labels with a score of at most the threshold.

All this is exact: weights are multiples of 2^-40, so that their sums, below 2^13, are the same
in float64 in whatever order they are taken. The score of a label is then one number, whether it
is found by comparing (calibration) or by sorting (prediction), in batches of any size; ties at
the threshold, common where the softmax is saturated, stay ties.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ffcp import metrics

SOFTMAX = "softmax"
FEATURE = "feature"

# Numbers per step: 2 MB in float64. Smaller steps are not faster with one thread, and with
# several they meet more often, which a busy machine punishes.
_BLOCK = 2**18
_FEW = 64  # most sets are smaller; finding this many largest is far cheaper than sorting all
_LIMIT = 2.0**11  # how much FFRAPS may add to the weights of a row before sums stop being exact


# -- weights -----------------------------------------------------------------------------------


def probabilities(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return softmax(logits / temperature) in float64; each row depends on nothing but itself.

    >>> probabilities(torch.tensor([[0.0, 0.0]], dtype=torch.float16))
    tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    values = logits.to(torch.float64).contiguous()
    if temperature != 1:
        # The largest first becomes 0: dividing by a small temperature cannot overflow it.
        values = (values - values.amax(dim=1, keepdim=True)) / temperature
    return values.softmax(dim=1)


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


def _exact(weights: Tensor) -> Tensor:
    """Round to multiples of 2^-40, the resolution of float64 between 2^12 and 2^13."""
    return weights.add_(2.0**12).sub_(2.0**12)


# -- scores ------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """What is known of some rows: logits (n, K), the share of the own weight, gradient norms."""

    logits: Tensor
    share: Tensor
    norms: Tensor | None = None

    def take(self, rows: slice | Tensor) -> Rows:
        """Select rows."""
        norms = None if self.norms is None else self.norms[rows]
        return Rows(self.logits[rows], self.share[rows], norms)

    @staticmethod
    def join(parts: Iterable[Rows]) -> Rows:
        """Put rows one below the other."""
        logits, shares, norms = zip(*parts, strict=True)
        return Rows(
            torch.cat(logits),
            torch.cat(shares),
            None if norms[0] is None else torch.cat([part for part in norms if part is not None]),
        )


class Place(NamedTuple):
    """Where a label stands in its row: the weights before it, its own, and its rank from 1."""

    before: Tensor
    own: Tensor
    rank: Tensor


@dataclass(frozen=True)
class Threshold:
    """The score of LAC: one minus the label's probability."""

    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("temperature", self.temperature)

    def weights(self, logits: Tensor) -> Tensor:
        """Return the weight of each label, shape (n, K)."""
        return _exact(probabilities(logits, self.temperature))

    def at(self, place: Place, rows: Rows) -> Tensor:
        """Score labels of which it is known where they stand."""
        return 1 - place.own

    def of_all(self, weights: Tensor, rows: Rows) -> Tensor:
        """Score every label of one block of rows."""
        return 1 - weights

    def admits(self, weights: Tensor, rows: Rows, threshold: Tensor, least: int) -> Tensor:
        """Mark the labels of one block whose score is at most one threshold for all."""
        return _filled(self.of_all(weights, rows) <= threshold, weights, least)


@dataclass(frozen=True)
class Cumulative:
    """The score of APS (``lam=0``), RAPS and FFRAPS (``delta > 0``).

    >>> rows = Rows(torch.tensor([[0.7, 0.1, 0.2]]).log(), share=torch.ones(1))
    >>> all_scores(Cumulative(lam=0.5, kreg=1), rows)  # 0.7, then 0.9 + 0.5, 1.0 + 2 * 0.5
    tensor([[0.7000, 2.0000, 1.4000]], dtype=torch.float64)
    """

    temperature: float = 1.0
    lam: float = 0.0
    kreg: int = 0
    delta: float = 0.0
    gradient: str = SOFTMAX

    def __post_init__(self) -> None:
        _check_positive("temperature", self.temperature)
        _check_not_negative("lam", self.lam)
        _check_not_negative("delta", self.delta)
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
        return _exact(p)

    def at(self, place: Place, rows: Rows) -> Tensor:
        """Score labels of which it is known where they stand.

        The only place where the terms are added: every sum here rounds, so their order counts.
        Rounding is monotone, so a score never falls as the rank grows.
        """
        columns = place.own.dim() == 2
        share = rows.share[:, None] if columns else rows.share
        scores = place.before + share * place.own
        if self.lam:
            scores = scores + self.lam * (place.rank - self.kreg).clamp_min(0).double()
        if self.gradient == FEATURE and rows.norms is not None:
            extra = self.delta * rows.norms.to(torch.float64)
            scores = scores + (extra[:, None] if columns else extra)
        return scores

    def of_all(self, weights: Tensor, rows: Rows) -> Tensor:
        """Score every label of one block of rows."""
        ordered, labels = weights.sort(dim=1, descending=True, stable=True)
        scores = self.at(_places(ordered), rows)
        return torch.empty_like(scores).scatter_(1, labels, scores)

    def admits(self, weights: Tensor, rows: Rows, threshold: Tensor, least: int) -> Tensor:
        """Mark the labels of one block whose score is at most one threshold for all.

        Scores grow with the rank, so the set is the first few labels, and the sorted weights
        say how many. Which ones they are follows from the smallest weight among them.
        """
        few = min(_FEW, weights.shape[1])
        mask, ended = self._admits(weights, rows, threshold, least, few)
        while not bool(ended.all()):
            more = (~ended).nonzero()[:, 0]
            few = min(4 * few, weights.shape[1])
            mask[more], ended[more] = self._admits(
                weights[more], rows.take(more), threshold, least, few
            )
        return mask

    def _admits(
        self, weights: Tensor, rows: Rows, threshold: Tensor, least: int, few: int
    ) -> tuple[Tensor, Tensor]:
        """Find the sets among the largest ``few`` weights; say which rows' sets end there."""
        ordered = largest(weights, few)
        sizes = self.sizes(ordered, rows, threshold).clamp_min(least)
        # The last weight in the set and the first one outside, or a bound where there is none.
        edges = pad(pad(ordered, (1, 0), value=math.inf), (0, 1), value=-1.0)
        last, following = edges.gather(1, torch.stack([sizes, sizes + 1], dim=1)).unbind(dim=1)
        mask = weights >= last[:, None]
        divided = (last == following).nonzero()[:, 0]  # equal weights, some in and some out
        if len(divided):
            mask[divided] = _first(weights[divided], sizes[divided], last[divided])
        return mask, (sizes < few) | (few == weights.shape[1])

    def sizes(self, ordered: Tensor, rows: Rows, threshold: Tensor) -> Tensor:
        """Count the labels with a score of at most the threshold, given weights in order."""
        return (self.at(_places(ordered), rows) <= threshold).sum(dim=1)


Score = Threshold | Cumulative


def largest(weights: Tensor, count: int) -> Tensor:
    """Return the largest weights of each row, in descending order.

    >>> largest(torch.tensor([[1.0, 3.0, 2.0]]), 2)
    tensor([[3., 2.]])
    """
    if weights.device.type != "cpu":
        return weights.topk(count, dim=1).values
    # Only values are wanted: numpy's vectorised sort and partition are 5 times faster than
    # torch's, which carry an index along.
    array = weights.numpy()
    if count < array.shape[1]:
        array = np.partition(array, -count, axis=1)[:, -count:]
    return torch.from_numpy(np.sort(array, axis=1)).flip(1)


def _places(ordered: Tensor) -> Place:
    rank = torch.arange(1, ordered.shape[1] + 1, device=ordered.device)
    return Place(ordered.cumsum(dim=1) - ordered, ordered, rank)


def _first(weights: Tensor, sizes: Tensor, last: Tensor) -> Tensor:
    """Mark the first ``sizes`` labels where several weights equal the last one: lower index."""
    above, level = weights > last[:, None], weights == last[:, None]
    room = sizes - above.sum(dim=1)
    return above | (level & (level.cumsum(dim=1) <= room[:, None]))


def _filled(mask: Tensor, weights: Tensor, least: int) -> Tensor:
    """Give empty sets the label with the largest weight, if there must be at least one."""
    if least:
        empty = (~mask.any(dim=1)).nonzero()[:, 0]
        mask[empty, weights[empty].argmax(dim=1)] = True
    return mask


def places(weights: Tensor, labels: Tensor) -> Place:
    """Find where one label of each row stands, without sorting.

    >>> places(torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([2])).rank
    tensor([3])
    """
    own = weights.gather(1, labels[:, None])
    index = torch.arange(weights.shape[1], device=weights.device)
    earlier = (weights > own) | ((weights == own) & (index < labels[:, None]))
    before = (weights * earlier).sum(dim=1)
    return Place(before, own[:, 0], earlier.sum(dim=1) + 1)


# -- all rows, block by block ------------------------------------------------------------------


def blocks(rows: int, classes: int) -> Iterator[slice]:
    """Cut rows so that what is computed on the way stays small beside the result."""
    size = max(1, _BLOCK // classes)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def label_scores(score: Score, rows: Rows, labels: Tensor) -> Tensor:
    """Score one label of each row, shape (n,)."""
    scores = torch.empty(len(labels), dtype=torch.float64, device=rows.logits.device)
    for block in blocks(*rows.logits.shape):
        part = rows.take(block)
        scores[block] = score.at(places(score.weights(part.logits), labels[block]), part)
    return scores


def all_scores(score: Score, rows: Rows) -> Tensor:
    """Score every label of each row, shape (n, K)."""
    scores = torch.empty(rows.logits.shape, dtype=torch.float64, device=rows.logits.device)
    for block in blocks(*rows.logits.shape):
        part = rows.take(block)
        scores[block] = score.of_all(score.weights(part.logits), part)
    return scores


def label_mask(score: Score, rows: Rows, threshold: Tensor, *, allow_empty: bool) -> Tensor:
    """Mark the labels whose score is at most the threshold, shape (n, K).

    Parameters
    ----------
    score, rows
        How to score, and what.
    threshold
        One number, or one for each label.
    allow_empty
        Otherwise an empty set gets the label with the largest weight.

    Examples
    --------
    >>> rows = Rows(torch.tensor([[0.7, 0.1, 0.2]]).log(), share=torch.ones(1))
    >>> label_mask(Cumulative(), rows, torch.tensor(0.95), allow_empty=True)
    tensor([[ True, False,  True]])
    """
    mask = torch.empty(rows.logits.shape, dtype=torch.bool, device=rows.logits.device)
    threshold = threshold.to(mask.device)
    least = 0 if allow_empty else 1
    for block in blocks(*mask.shape):
        part = rows.take(block)
        weights = score.weights(part.logits)
        if threshold.dim():
            inside = score.of_all(weights, part) <= threshold
            mask[block] = _filled(inside, weights, least)
        else:
            mask[block] = score.admits(weights, part, threshold, least)
    return mask


def uniforms(seed: int, stream: int, first_row: int, rows: int) -> Tensor:
    """Draw a number in [0, 1) for each of some consecutive rows.

    Row i of a stream gets the same number however the rows are cut into batches.

    >>> whole, part = uniforms(0, 1, 0, 10), uniforms(0, 1, 7, 3)
    >>> torch.equal(whole[7:], part)
    True
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, stream]))
    bits.advance(first_row)  # a number takes one step
    return torch.from_numpy(np.random.Generator(bits).random(rows))


# -- the result --------------------------------------------------------------------------------


class LabelSet:
    """The labels that are possible for each row.

    Parameters
    ----------
    mask
        Shape (n, K): whether label j is in the set of row i.
    weights
        Yields the labels' weights, block after block of rows; called when :attr:`labels` is
        first looked at. Without it labels are listed by index.

    Examples
    --------
    >>> found = LabelSet(torch.tensor([[True, False, True], [False, True, False]]))
    >>> found
    LabelSet(2 rows, 3 classes, mean size 1.5)
    >>> found.sizes
    tensor([2, 1])
    >>> found.labels
    [tensor([0, 2]), tensor([1])]
    >>> found.coverage([2, 2])
    0.500 [0.095, 0.905]
    """

    def __init__(self, mask: Tensor, weights: Callable[[], Iterator[Tensor]] | None = None) -> None:
        self.mask = mask
        self._weights = weights
        self._labels: list[Tensor] | None = None

    def __len__(self) -> int:
        return len(self.mask)

    def __repr__(self) -> str:
        rows, classes = self.mask.shape
        mean = f"{metrics.mean_set_size(self):.4g}" if rows else "nan"
        return f"LabelSet({rows} rows, {classes} classes, mean size {mean})"

    @property
    def sizes(self) -> Tensor:
        """How many labels each set holds, shape (n,)."""
        return self.mask.sum(dim=1)

    @property
    def labels(self) -> list[Tensor]:
        """The labels of each set, best first.

        Weights are not kept with the mask, as they are far larger: asking for the order the
        first time runs the model once more, on the input, which is not copied.
        """
        if self._labels is None:
            given = iter([self.mask.double()]) if self._weights is None else self._weights()
            self._labels = [labels for block in self._in_order(given) for labels in block]
        return self._labels

    def _in_order(self, given: Iterator[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        start = 0
        for weights in given:
            mask = self.mask[start : start + len(weights)]
            outside = weights.masked_fill(~mask, -1)
            order = outside.sort(dim=1, descending=True, stable=True).indices
            sizes = mask.sum(dim=1)
            inside = torch.arange(mask.shape[1], device=mask.device) < sizes[:, None]
            yield order[inside].split(sizes.tolist())
            start += len(weights)

    def coverage(self, y: Any) -> metrics.Coverage:
        """Measure the share of rows whose true label is in the set."""
        return metrics.set_coverage(self, y)


# -- checks ------------------------------------------------------------------------------------


def _check_positive(name: str, value: Any) -> None:
    if not (_is_number(value) and 0 < value < math.inf):
        raise ValueError(f"{name} must be a positive number, got {value!r}")


def _check_not_negative(name: str, value: Any) -> None:
    if not (_is_number(value) and 0 <= value < math.inf):
        raise ValueError(f"{name} must be a number and not negative, got {value!r}")


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, a number of labels, got {value!r}")
    if int(value) < 0:
        raise ValueError(f"{name} must not be negative, got {value}")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
