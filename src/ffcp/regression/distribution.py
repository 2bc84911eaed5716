"""Conformal predictive systems: all quantiles of the target at once, from signed scores.

Where the score of a target is the size of one number that grows with it, a = (y - f(x)) / s(x), the
n numbers a_i of the calibration rows say how the target of a new row is spread: with
C_i = f(x) + s(x) a_i, in order, each of the n + 1 gaps between them holds it with probability
1 / (n + 1). So 1 / (n + 1) of the mass lies at each infinity: below C_1 and above C_n nothing more
is known. The *finite part* is the rest, which the points C_1, ..., C_n stand for, 1 / n each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import exact_alphas
from ffcp.network import arrays
from ffcp.regression.support import Support

_TIES, _SAMPLE = 4, 5  # streams of random numbers
_BLOCK = 2**20  # numbers worked on at once


class Distribution:
    """The distribution of each row's target, from ``predict_distribution``.

    Of n calibration rows 1 / (n + 1) of the mass lies at each infinity: quantiles of levels
    below 1 / (n + 1) and above n / (n + 1) are infinite, and ``crps`` and ``sample`` are those of
    the finite part.

    Attributes
    ----------
    prediction : Tensor
        The point prediction, in the shape of the calibration targets.

    Examples
    --------
    >>> import ffcp
    >>> model, x = torch.nn.Linear(2, 1), torch.randn(99, 2)  # yours is trained
    >>> y = model(x).detach()[:, 0] + torch.arange(99.0)
    >>> system = ffcp.CP(model).calibrate(x, y).predict_distribution(x[:1])
    >>> (system.quantile((0.1, 0.5, 0.9)) - system.prediction).flatten().round()
    tensor([ 9., 49., 89.])
    >>> system.cdf(system.prediction + 9.5)
    tensor([0.1050], dtype=torch.float64)
    """

    def __init__(
        self,
        family: Any,  # a score with ``signed(curve, y)`` and ``at(curve, signed)``
        curve: Mapping[str, Tensor],
        prediction: Tensor,
        tables: Sequence[Tensor],
        group: Tensor,
        numbers: Tensor,
        entropy: int,
        support: Support | None = None,
    ) -> None:
        self.prediction = prediction
        self._family, self._curve, self._support = family, curve, support
        self._tables, self._group = tables, group
        self._numbers, self._entropy = numbers, entropy

    def __len__(self) -> int:
        return len(self.prediction)

    def __repr__(self) -> str:
        sizes = sorted({len(table) for table in self._tables})
        points = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        return f"Distribution({len(self)} rows, from {points} calibration rows)"

    # -- quantiles, probabilities and samples -----------------------------------------------

    def quantile(self, levels: Any) -> Tensor:
        """Return quantiles, in the shape and type of the prediction.

        Several levels add a first dimension. Below one half a quantile is rounded down, to the
        next C_k, and above it up, so that (0.05, 0.95) are the ends of the intervals of
        ``side="each"`` at alpha = 0.1.
        """
        asked, are_many = exact_alphas(levels, "level")
        scores = torch.empty(len(asked), len(self), self._outputs, dtype=torch.float64)
        for rows, output, column in self._parts():
            for number, level in enumerate(asked):
                scores[number, rows, output] = _score_at(column, level)
        return self._targets_at(scores) if are_many else self._targets_at(scores)[0]

    def cdf(self, y: Any) -> Tensor:
        """Return the probability of targets up to y: (k + 1/2) / (n + 1) after the k-th C.

        ``y`` has the shape of the prediction, or one dimension more before it.
        """
        return self._shares(y, 0.5)

    def p_value(self, y: Any) -> Tensor:
        """Return the mass below y, with a random share of that of its gap.

        Over new rows these numbers are exactly uniform on [0, 1]. Random numbers belong to the
        rows: they are the same in every call.
        """
        draws = Draws(self._entropy, _TIES)
        return self._shares(y, draws.uniform(self._numbers, self._outputs))

    def crps(self, y: Any) -> Tensor:
        """Return the continuous ranked probability score of the finite part; smaller is better.

        It integrates the squared distance between the distribution and the step at y. The work
        grows with rows times calibration rows.
        """
        target = self._targets(y)
        result = torch.empty(target.shape, dtype=torch.float64)
        for rows, output, scores in self._parts():
            n = len(scores)
            spread = (2 * torch.arange(1, n + 1) - n - 1) / n**2
            for block in rows.split(max(1, _BLOCK // n)):
                curve = {k: c[block][:, output : output + 1] for k, c in self._curve.items()}
                atoms = self._family.at(curve, scores.expand(len(block), n).T[..., None])[..., 0].T
                atoms = self._cut(atoms)
                miss = (atoms - target[:, block, output, None]).abs().mean(dim=-1)
                result[:, block, output] = miss - atoms @ spread.double()
        return self._shaped(result, y)

    def sample(self, n: int) -> Tensor:
        """Draw n targets of each row from the finite part: a first dimension of n."""
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
            raise ValueError(f"'n' must be an integer of at least 1, got n={n!r}")
        n = int(n)  # that of numpy ends at 64 bits
        drawn = Draws(self._entropy, _SAMPLE).uniform(self._numbers, n * self._outputs)
        drawn = drawn.view(len(self), n, self._outputs).movedim(1, 0)
        scores = torch.empty_like(drawn)
        for rows, output, column in self._parts():
            scores[:, rows, output] = column[(drawn[:, rows, output] * len(column)).long()]
        return self._targets_at(scores)

    # -- computation --------------------------------------------------------------------------

    @property
    def _outputs(self) -> int:
        return self.prediction[0].numel()

    def _parts(self) -> Iterator[tuple[Tensor, int, Tensor]]:
        """Yield rows of a group, an output, and the group's sorted signed scores of that output."""
        for number, table in enumerate(self._tables):
            rows = (self._group == number).nonzero()[:, 0]
            for output, column in enumerate(table.unbind(dim=1)):
                yield rows, output, column[~column.isnan()]

    def _targets_at(self, scores: Tensor) -> Tensor:
        """Return the targets with signed scores (k, n, m), in the shape of the prediction."""
        values = self._cut(self._family.at(self._curve, scores)).to(self.prediction.dtype)
        return values.reshape(len(scores), *self.prediction.shape)

    def _shares(self, y: Any, inside: Tensor | float) -> Tensor:
        """Return the mass below y, and a share of that of its own gap."""
        target = self._targets(y)
        signed = self._family.signed(self._curve, target)
        result = torch.empty(signed.shape, dtype=torch.float64)
        for rows, output, scores in self._parts():
            values = signed[:, rows, output].contiguous()
            first = torch.searchsorted(scores, values)
            last = torch.searchsorted(scores, values, right=True)
            share = inside[rows, output] if isinstance(inside, Tensor) else inside
            below = first.double() + share * (last - first + 1)
            result[:, rows, output] = below / (len(scores) + 1)
        if self._support is not None and not isinstance(inside, Tensor):
            result = result.masked_fill(target >= self._support.high, 1.0)
            result = result.masked_fill(target < self._support.low, 0.0)
        return self._shaped(result, y)

    def _targets(self, y: Any) -> Tensor:
        """Return targets as (k, n, m) in float64."""
        target = arrays.target_tensor(y).detach().cpu()
        arrays.check_finite(target, "y")
        if self._are_several(target):
            return target.double().reshape(len(target), len(self), -1)
        return arrays.target_like(target, self.prediction).double().reshape(1, len(self), -1)

    def _shaped(self, values: Tensor, y: Any) -> Tensor:
        """Return values (k, n, m) in the shape of the prediction, or with one more dimension."""
        shaped = values.reshape(len(values), *self.prediction.shape)
        return shaped if self._are_several(arrays.target_tensor(y)) else shaped[0]

    def _are_several(self, target: Tensor) -> bool:
        """Whether there are several targets for each row, in a first dimension."""
        shape = self.prediction.shape
        return target.dim() == len(shape) + 1 and target.shape[1:] == shape

    def _cut(self, values: Tensor) -> Tensor:
        return values if self._support is None else values.clamp(*self._support)


def _score_at(scores: Tensor, level: Fraction) -> float:
    """Return the signed score of a level: below one half rounded down, and above it up."""

    def score(rank: int) -> float:
        if rank < 1:
            return -math.inf
        return math.inf if rank > len(scores) else float(scores[rank - 1])

    rank = (len(scores) + 1) * level
    below, above = score(math.floor(rank)), score(math.ceil(rank))
    if 2 * level == 1:
        return (below + above) / 2
    return below if 2 * level < 1 else above
