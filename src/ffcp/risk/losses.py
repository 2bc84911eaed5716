"""Named losses and set functions, and the scores of risk control: losses at every level."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ffcp.batch import BatchOutput
from ffcp.conformal.learn_then_test import LossTotals
from ffcp.conformal.risk import LOSS_UNIT
from ffcp.conformal.score import Score
from ffcp.conformal.selection import Aside, Selected, Selection

SIGMOID, ANSWERS = "sigmoid", "answers"
NO_ANSWER = -1


def sigmoid_sets(output: Tensor, level: float) -> Tensor:
    """Return the items whose probability is at least 1 - level; the model returns logits.

    >>> sigmoid_sets(torch.tensor([[0.0, 2.0, -2.0]]), 0.6)
    tensor([[ True,  True, False]])
    """
    # At level 1 all items, even those whose probability is rounded to 0.
    return output.detach().double().sigmoid() >= 1 - level


def false_negatives(mask: Tensor, y: Tensor) -> Tensor:
    """Return the share of the true items of each row that are not in its set, (n,).

    Parameters
    ----------
    mask : Tensor
        Which items are in the sets, (n, ...).
    y : Tensor
        Which items are true: booleans, or 0 and 1, in the same shape. A row without true items has
        loss 0.

    Examples
    --------
    >>> mask = torch.tensor([[True, False, True], [False, False, False]])
    >>> false_negatives(mask, torch.tensor([[1, 1, 0], [0, 0, 0]]))
    tensor([0.5000, 0.0000], dtype=torch.float64)
    """
    true = _items(mask, y)
    missed = (true & ~mask).flatten(1).sum(dim=1)
    return missed.double() / true.flatten(1).sum(dim=1).clamp_min(1)


def any_missed(mask: Tensor, y: Tensor) -> Tensor:
    """Return 1 for rows whose set misses a true item, else 0: its risk is the miscoverage.

    >>> any_missed(torch.tensor([[True, False]]), torch.tensor([[1, 1]]))
    tensor([1.], dtype=torch.float64)
    """
    return (_items(mask, y) & ~mask).flatten(1).any(dim=1).double()


def _items(mask: Tensor, y: Tensor) -> Tensor:
    """Return which items are true, as booleans in the shape of the sets."""
    if y.shape != mask.shape:
        raise ValueError(
            f"targets have shape {tuple(y.shape)}, sets {tuple(mask.shape)}: pass for every item "
            "whether it is true"
        )
    y = y.to(mask.device)
    if y.dtype != torch.bool and not bool(((y == 0) | (y == 1)).all()):
        raise ValueError("targets must be 0 or 1: pass True or False for every item")
    return y.bool()


def answers(output: Tensor, level: float) -> Tensor:
    """Return the most likely class where its probability is at least the level, else -1.

    The model returns logits (n, K); one logit, (n,) or (n, 1), is that of class 1 against class 0.

    >>> answers(torch.tensor([[0.0, 2.0], [0.1, 0.0]]), 0.8)
    tensor([ 1, -1])
    """
    logits = output.detach().double().reshape(len(output), -1)
    if logits.shape[1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], dim=1)
    top, labels = logits.softmax(dim=1).max(dim=1)
    return labels.masked_fill(top < level, NO_ANSWER)


def wrong_answers(labels: Tensor, y: Tensor) -> Tensor:
    """Return 1 for wrong answers and 0 for right ones, NaN where there is no answer.

    Its mean is the share of wrong answers among the answered rows. It is at most alpha if and
    only if E[(error - alpha) answered] <= 0.

    >>> wrong_answers(torch.tensor([2, 1, -1]), torch.tensor([2, 0, 0]))
    tensor([0., 1., nan], dtype=torch.float64)
    """
    y = y.to(labels.device)
    if y.shape != labels.shape or y.is_floating_point():
        raise ValueError(
            f"targets are {y.dtype} of shape {tuple(y.shape)}: 'wrong_answers' needs one class "
            "number per row"
        )
    return (labels != y).double().masked_fill(labels == NO_ANSWER, math.nan)


NAMED = {
    "false_negatives": false_negatives,
    "any_missed": any_missed,
    "wrong_answers": wrong_answers,
}
#: The losses that are 0 or 1 for each row.
BINARY = (any_missed, wrong_answers)
SETS: dict[str, Callable[[Tensor, float], Any]] = {SIGMOID: sigmoid_sets, ANSWERS: answers}


@dataclass(frozen=True)
class LossScore(Score):
    """The losses of each row at every level, for one or several losses."""

    losses: Sequence[Callable[[Any, Tensor], Any]]
    sets: Callable[[Tensor, float], Any]
    grid: Sequence[float]
    bounds: Sequence[float]

    def __post_init__(self) -> None:
        are_numbers = isinstance(self.bounds, (list, tuple)) and all(
            type(bound) is float and 0 < bound < math.inf for bound in self.bounds
        )
        if not are_numbers or len(self.bounds) != len(self.losses):
            raise ValueError(f"expected a positive bound for each loss, got {self.bounds!r}")

    def score(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Return the losses (n, risks * levels), in units of their bounds."""
        levels = []
        for level in self.grid:
            sets = self.sets(out.output, level)
            pairs = zip(self.losses, self.bounds, strict=True)
            losses = [self._checked(out, loss(sets, y), bound) for loss, bound in pairs]
            levels.append(torch.stack(losses, dim=1))
        return torch.stack(levels, dim=2).flatten(1)

    def _checked(self, out: BatchOutput, values: Any, bound: float) -> Tensor:
        """Return the values of a loss, one for each row, in units of its bound."""
        losses = torch.as_tensor(values).detach().to("cpu", torch.float64)
        if losses.shape != (len(out.output),):
            raise ValueError(
                f"'loss' returned shape {tuple(losses.shape)} for {len(out.output)} rows: it must "
                "return one number per row"
            )
        bad = self._are_impossible(losses, bound)
        if bool(bad.any()):
            row = int(bad.nonzero()[0, 0])
            raise ValueError(
                f"the loss of row {out.rows[row]} is {float(losses[row]):g}, outside 0 to "
                f"{bound:g}: pass the largest loss as bound=; NaN (does not count) needs pac="
            )
        return losses / bound

    def _are_impossible(self, losses: Tensor, bound: float) -> Tensor:
        return ~((losses >= 0) & (losses <= bound))


@dataclass(frozen=True)
class MonotoneLoss(LossScore):
    """A loss that never increases with the level."""

    def score(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Return the losses (n, levels), in units of the bound; raise if one increases."""
        losses = super().score(out, y)
        growing = losses.diff(dim=1) > 0
        if bool(growing.any()):
            row, level = (int(i) for i in growing.nonzero()[0])
            raise ValueError(
                f"the loss of row {out.rows[row]} increases from level {self.grid[level]:g} to "
                f"{self.grid[level + 1]:g}: sets must grow with the level, and the loss must not "
                "increase with the set. For other losses pass 'pac'"
            )
        return losses


@dataclass(frozen=True)
class AnyLoss(LossScore):
    """Losses of any kind; NaN marks a row that does not count."""

    takes_order: bool
    #: Losses of the rows set aside, which determine the order of a fixed sequence.
    totals: LossTotals | None = field(default=None, compare=False, kw_only=True)

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments."""
        return {name: value for name, value in super().config().items() if name != "totals"}

    def _are_impossible(self, losses: Tensor, bound: float) -> Tensor:
        return (losses < 0) | (losses > bound)

    def selection(self) -> Selection | None:
        """Return the selection of the order of a fixed sequence; None if not needed."""
        return _Ordering(self) if self.takes_order and self.totals is None else None

    def state(self) -> dict[str, Tensor]:
        """Return the total losses of the rows set aside."""
        return {} if self.totals is None else self.totals._asdict()

    def with_state(self, state: Mapping[str, Tensor]) -> AnyLoss:
        """Return this score with the tensors of a file."""
        if not state and not self.takes_order:
            return self
        totals = LossTotals(state["counts"], state["sums"])
        if not _could_be(totals, (len(self.losses), len(self.grid))):
            raise ValueError("expected losses of the levels of 'grid', to order them")
        return replace(self, totals=totals)

    def order(self, alphas: Sequence[Any], binary: Sequence[bool]) -> Tensor | None:
        """Return the positions of the levels, those most likely to pass their test first.

        Of equally likely levels the last comes first: users prefer the others.
        """
        if self.totals is None:
            return None
        backwards = self.totals.p_values(alphas, binary).flip(0).argsort(stable=True)
        return len(self.grid) - 1 - backwards


class _Ordering(Selection):
    """Orders the levels of a fixed sequence by the losses of rows set aside."""

    what = "the order of the levels"

    def __init__(self, score: AnyLoss) -> None:
        self.score = score

    def select(self, aside: Aside) -> Selected:
        """Return the score with the losses of the rows set aside."""
        losses = self.score.score(aside.out, aside.y)
        totals = LossTotals.of(losses, len(self.score.losses))
        return Selected(replace(self.score, totals=totals), aside.calibration, {})


def _could_be(totals: LossTotals, shape: tuple[int, int]) -> bool:
    """Whether loaded totals of losses are possible."""
    if any(tensor.dtype != torch.int64 or tuple(tensor.shape) != shape for tensor in totals):
        return False
    counts, sums = totals.counts, totals.sums
    if bool(((counts < 0) | (counts > _Ordering.most_rows)).any()):
        return False
    return bool(((sums >= 0) & (sums <= counts * LOSS_UNIT)).all())
