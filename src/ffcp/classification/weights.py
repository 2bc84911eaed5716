"""Label scores: how surprising each label of a row is, and which labels a threshold lets in.

With p = softmax(logits / temperature) every label j has a weight e_j, its probability or, for
FFRAPS, a little more. Labels stand in the order of their weights, largest first, equal ones in the
order of their logits, and equal logits by index. The label at rank r has the score

    (weights of the labels before it) + share * e + lam * max(r - kreg, 0) + extra

with share uniform in [0, 1) and the same for all labels of the row. LAC has the score 1 - p_j. A
set holds the labels with a score of at most the threshold.

All this is exact: weights are multiples of 2^-40, so that their sums, below 2^13, are the same
in float64 in whatever order they are taken. The score of a label is then one number, whether it
is worked out by comparing (calibration) or by sorting (prediction), in batches of any size; ties at
the threshold, common where the softmax is saturated, stay ties.

A label whose probability is lost in rounding has no weight. In place of it stands how far it lies
below the smallest weight, in nats and as a negative number: it orders such labels, adds nothing to
sums, and, where ranks are free of charge (APS, LAC), is what their scores exceed the others' by.
Else all of them would have one score, and a threshold that lets one in would let all of them in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ffcp.batch import is_traced

# Numbers per step: 2 MB in float64. Smaller steps are not faster with one thread, and with
# several they meet more often, which a busy machine punishes.
_BLOCK = 2**18
# No label lies deeper, in nats, than this: logits of 1e308 would overflow.
_DEEPEST = 1e300


def probabilities(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return softmax(logits / temperature) in float64; each row depends on nothing but itself.

    >>> probabilities(torch.tensor([[0.0, 0.0]], dtype=torch.float16))
    tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    return _scaled(logits, temperature).softmax(dim=1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    values = logits.to(torch.float64).contiguous()
    if temperature != 1:
        # The largest first becomes 0: dividing by a small temperature cannot overflow it.
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
    """Replace weights below the smallest by how far the label lies below it: log p - log smallest.

    >>> logits = torch.tensor([[0.0, -50.0, -70.0]])
    >>> graded(exact(probabilities(logits)), logits, 1.0, smallest=2.0**-40)
    tensor([[  1.0000, -22.2741, -42.2741]], dtype=torch.float64)
    """
    if not is_traced() and float(weights.amin()) >= smallest:
        return weights
    lost = weights < smallest
    depths = _scaled(logits, temperature).log_softmax(dim=1).sub_(math.log(smallest))
    # Finite, whatever the logits; and not above 0, where rounding was in the label's disfavour.
    return torch.where(lost, depths.clamp_(-_DEEPEST, 0), weights)


class Place(NamedTuple):
    """Where a label stands in its row.

    The weights before it, its own, its rank from 1, and how far it lies below the smallest weight
    (``None`` where no label does).
    """

    before: Tensor
    own: Tensor
    rank: Tensor
    below: Tensor | None


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


def in_order(weights: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the labels of each row: their weights in order, and which labels they are.

    >>> in_order(torch.tensor([[0.2, 0.6, 0.2]]), torch.tensor([[1.0, 9.0, 2.0]]))[1]
    tensor([[1, 2, 0]])
    """
    labels = logits.sort(dim=1, descending=True, stable=True).indices
    ordered = weights.gather(1, labels)
    # Only FFRAPS may order them otherwise.
    if not is_traced() and not bool((ordered.diff(dim=1) > 0).any()):
        return ordered, labels
    ordered, again = ordered.sort(dim=1, descending=True, stable=True)
    return ordered, labels.gather(1, again)


def ordered_places(ordered: Tensor) -> Place:
    """Say where labels stand whose weights are given in descending order.

    >>> ordered_places(torch.tensor([[0.5, 0.25, 0.25, -3.0]])).before
    tensor([[0.0000, 0.5000, 0.7500, 1.0000]])
    """
    rank = torch.arange(1, ordered.shape[1] + 1, device=ordered.device)
    below = None
    if is_traced() or bool((ordered[:, -1] < 0).any()):
        below, ordered = ordered.neg().clamp_min_(0), ordered.clamp_min(0)
    return Place(ordered.cumsum(dim=1) - ordered, ordered, rank, below)


def first_ties(weights: Tensor, logits: Tensor, sizes: Tensor) -> Tensor:
    """Mark the first ``sizes`` labels of rows where equal weights are divided by the logits."""
    labels = in_order(weights, logits)[1]
    first = torch.arange(labels.shape[1], device=labels.device) < sizes[:, None]
    return torch.empty_like(first).scatter_(1, labels, first)


def filled(mask: Tensor, weights: Tensor, logits: Tensor, least: int) -> Tensor:
    """Give empty sets the first label, if there must be at least one."""
    if least:
        empty = (~mask.any(dim=1)).nonzero()[:, 0]
        mask[empty, in_order(weights[empty], logits[empty])[1][:, 0]] = True
    return mask


def places(weights: Tensor, logits: Tensor, labels: Tensor) -> Place:
    """Find where one label of each row stands, without sorting.

    >>> places(torch.tensor([[0.5, 0.2, 0.2]]), torch.tensor([[3.0, 2, 2]]), torch.tensor([2])).rank
    tensor([3])
    """
    own = weights.gather(1, labels[:, None])
    earlier, level = weights > own, weights == own
    tied = (level.sum(dim=1) > 1).nonzero()[:, 0]
    if len(tied):
        values, at = logits[tied], labels[tied][:, None]
        value = values.gather(1, at)
        index = torch.arange(weights.shape[1], device=weights.device)
        better = (values > value) | ((values == value) & (index < at))
        earlier[tied] |= level[tied] & better
    before = (weights.clamp_min(0) * earlier).sum(dim=1)
    own = own[:, 0]
    return Place(before, own.clamp_min(0), earlier.sum(dim=1) + 1, own.neg().clamp_min_(0))


def blocks(rows: int, classes: int) -> Iterator[slice]:
    """Cut rows so that what is computed on the way stays small beside the result."""
    size = max(1, _BLOCK // classes)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))
