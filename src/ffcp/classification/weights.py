"""Label scores: how surprising each label of a row is, and which labels a threshold lets in.

With p = softmax(logits / temperature) every label j has a weight e_j, its probability or, for
FFRAPS, a little more. Labels stand in the order of their weights, largest first and equal ones by
index. The label at rank r has the score

    (weights of the labels before it) + share * e + lam * max(r - kreg, 0) + extra

with share = 1, or uniform in [0, 1) and the same for all labels of the row if randomised. LAC
has the score 1 - p_j. A set holds the labels with a score of at most the threshold.

All this is exact: weights are multiples of 2^-40, so that their sums, below 2^13, are the same
in float64 in whatever order they are taken. The score of a label is then one number, whether it
is worked out by comparing (calibration) or by sorting (prediction), in batches of any size; ties at
the threshold, common where the softmax is saturated, stay ties.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Numbers per step: 2 MB in float64. Smaller steps are not faster with one thread, and with
# several they meet more often, which a busy machine punishes.
_BLOCK = 2**18


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


def exact(weights: Tensor) -> Tensor:
    """Round to multiples of 2^-40, the resolution of float64 between 2^12 and 2^13."""
    return weights.add_(2.0**12).sub_(2.0**12)


class Place(NamedTuple):
    """Where a label stands in its row: the weights before it, its own, and its rank from 1."""

    before: Tensor
    own: Tensor
    rank: Tensor


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


def ordered_places(ordered: Tensor) -> Place:
    """Say where labels stand whose weights are given in descending order.

    >>> ordered_places(torch.tensor([[0.5, 0.25, 0.25]])).before
    tensor([[0.0000, 0.5000, 0.7500]])
    """
    rank = torch.arange(1, ordered.shape[1] + 1, device=ordered.device)
    return Place(ordered.cumsum(dim=1) - ordered, ordered, rank)


def first_ties(weights: Tensor, sizes: Tensor, last: Tensor) -> Tensor:
    """Mark the first ``sizes`` labels where several weights equal the last one: lower index."""
    above, level = weights > last[:, None], weights == last[:, None]
    room = sizes - above.sum(dim=1)
    return above | (level & (level.cumsum(dim=1) <= room[:, None]))


def filled(mask: Tensor, weights: Tensor, least: int) -> Tensor:
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


def blocks(rows: int, classes: int) -> Iterator[slice]:
    """Cut rows so that what is computed on the way stays small beside the result."""
    size = max(1, _BLOCK // classes)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))
