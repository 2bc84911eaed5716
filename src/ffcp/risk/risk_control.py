"""Risk control: sets that grow with a level, and the level at which the expected loss is small."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ffcp.batch import BatchOutput
from ffcp.conformal.columns import Table, take
from ffcp.conformal.rank import exact_alpha, refuse_unknown
from ffcp.conformal.risk import Losses
from ffcp.conformal.score import Score
from ffcp.network.inputs import RowBuffer
from ffcp.network.model_output import Output
from ffcp.predictor import Predictor, steady
from ffcp.warnings import warn

SIGMOID = "sigmoid"
_STEPS = 1000  # of the default grid of levels


class Controlled(NamedTuple):
    """Sets at the level that controls their risk, from :meth:`ffcp.RiskControl.predict_set`.

    Attributes
    ----------
    sets
        The sets, as the function that makes them gives them.
    level : Tensor
        The level of each row, (n,).

    Examples
    --------
    >>> import ffcp
    >>> _ = torch.manual_seed(0)
    >>> model, x = nn.Linear(4, 5), torch.randn(200, 4)  # five tags, each there or not
    >>> tags = torch.rand(200, 5) < model(x).detach().sigmoid()
    >>> risk = ffcp.RiskControl(model, "false_negatives").calibrate(x, tags)
    >>> controlled = risk.predict_set(x[:3], alpha=0.1)
    >>> controlled.sets.shape, controlled.level.shape
    (torch.Size([3, 5]), torch.Size([3]))
    """

    sets: Any
    level: Tensor


def sigmoid_sets(output: Tensor, level: float) -> Tensor:
    """Return the items whose probability is at least 1 - level; the model returns logits.

    >>> sigmoid_sets(torch.tensor([[0.0, 2.0, -2.0]]), 0.6)
    tensor([[ True,  True, False]])
    """
    # At level 1 all items, also those whose probability was rounded to 0.
    return output.detach().double().sigmoid() >= 1 - level


def false_negatives(mask: Tensor, y: Tensor) -> Tensor:
    """Return the share of the true items of each row that are not in its set, (n,).

    Parameters
    ----------
    mask
        Which items are in the sets, (n, ...).
    y
        Which items are true: booleans, or 0 and 1, in the same shape. A row without any loses
        nothing.

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
    """Return 1 for rows whose set misses a true item, else 0: its risk is plain miscoverage.

    >>> any_missed(torch.tensor([[True, False]]), torch.tensor([[1, 1]]))
    tensor([1.], dtype=torch.float64)
    """
    return (_items(mask, y) & ~mask).flatten(1).any(dim=1).double()


def _items(mask: Tensor, y: Tensor) -> Tensor:
    if y.shape != mask.shape:
        raise ValueError(
            f"targets have shape {tuple(y.shape)}, sets {tuple(mask.shape)}: say of every item "
            "whether it is true"
        )
    y = y.to(mask.device)
    if y.dtype != torch.bool and not bool(((y == 0) | (y == 1)).all()):
        raise ValueError("targets say of every item whether it is true, by 0 and 1")
    return y.bool()


NAMED = {"false_negatives": false_negatives, "any_missed": any_missed}


@dataclass(frozen=True)
class LossScore(Score):
    """What is lost of each row at every level."""

    loss: Callable[[Any, Tensor], Any]
    sets: Callable[[Tensor, float], Any]
    grid: Sequence[float]
    bound: float

    def score(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Return the losses (n, levels), in units of the bound."""
        columns = [self._losses(out, y, level) for level in self.grid]
        losses = torch.stack(columns, dim=1) / self.bound
        growing = losses.diff(dim=1) > 0
        if bool(growing.any()):
            row, level = (int(i) for i in growing.nonzero()[0])
            raise ValueError(
                f"the loss of row {out.rows[row]} grows from level {self.grid[level]:g} to "
                f"{self.grid[level + 1]:g}: sets must grow with the level, and a loss must never "
                "grow with the set"
            )
        return losses

    def _losses(self, out: BatchOutput, y: Tensor, level: float) -> Tensor:
        losses = torch.as_tensor(self.loss(self.sets(out.output, level), y)).detach()
        losses = losses.to("cpu", torch.float64)
        if losses.shape != (len(out.output),):
            raise ValueError(
                f"the loss has shape {tuple(losses.shape)} for {len(out.output)} rows: it needs "
                "one number for each"
            )
        bad = ~((losses >= 0) & (losses <= self.bound))
        if bool(bad.any()):
            row = int(bad.nonzero()[0, 0])
            raise ValueError(
                f"the loss of row {out.rows[row]} is {float(losses[row]):g}, and bound says that "
                f"losses lie between 0 and {self.bound:g}: give the largest there can be"
            )
        return losses


class RiskControl(Predictor):
    """Sets whose expected loss is at most alpha, for any bounded loss that sets only reduce.

    Parameters
    ----------
    model
        A trained network.
    loss
        What is lost: ``"false_negatives"``, the share of a row's true items that its set misses;
        ``"any_missed"``, whether it misses one; or a function ``loss(sets, y)`` to one number per
        row, (n,). It must never grow when the set does.
    sets
        How sets follow from the model's output at a level: ``"sigmoid"``, the items whose
        probability is at least 1 - level, of a model of logits (n, ...), the classes of a
        multi-label classifier or the pixels of a mask; or a function ``sets(output, level)``
        whose sets grow with the level, and at the last level lose nothing.
    grid
        The levels, ascending; by default 0 to 1 in steps of 0.001. A constant, not looked up in
        the calibration data.
    bound
        The largest loss there can be.
    seed, batch_size, output
        As in :class:`ffcp.SetPredictor`.

    Notes
    -----
    Promised, for exchangeable rows: the expected loss of a new row is at most alpha, on average
    over calibration sets too. It is a mean: single rows may lose everything.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model, x = nn.Linear(4, 6), torch.randn(400, 4)  # yours is trained
    >>> y = torch.rand(400, 6) < model(x).sigmoid()
    >>> risk = RiskControl(model, "false_negatives").calibrate(x[:300], y[:300])
    >>> controlled = risk.predict_set(x[300:], alpha=0.1)
    >>> controlled.sets.shape
    torch.Size([100, 6])
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Tensor], Any] | str = "false_negatives",
        *,
        sets: Callable[[Tensor, float], Any] | str = SIGMOID,
        grid: Sequence[float] | None = None,
        bound: float = 1.0,
        seed: int | None = None,
        batch_size: int | None = None,
        output: Output = None,
    ) -> None:
        if isinstance(loss, str) and loss not in NAMED:
            raise ValueError(f"unknown loss {loss!r}: choose one of {', '.join(NAMED)}")
        if isinstance(sets, str) and sets != SIGMOID:
            raise ValueError(f"sets must be {SIGMOID!r} or a function, got {sets!r}")
        if isinstance(bound, bool) or not 0 < bound < math.inf:
            raise ValueError(f"bound must be a positive number, got {bound!r}")
        levels = [step / _STEPS for step in range(_STEPS + 1)] if grid is None else list(grid)
        super().__init__(
            model,
            LossScore(
                NAMED[loss] if isinstance(loss, str) else loss,
                sigmoid_sets if isinstance(sets, str) else sets,
                levels,
                float(bound),
            ),
            Losses(levels),
            seed=seed,
            batch_size=batch_size,
            output=output,
        )

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, but for the model."""
        score, names = self._given[0], ("seed", "batch_size", "output")
        loss = next((name for name, one in NAMED.items() if one is score.loss), score.loss)
        sets = SIGMOID if score.sets is sigmoid_sets else score.sets
        own = {"loss": loss, "sets": sets, "grid": score.grid, "bound": score.bound}
        return {**own, **{name: getattr(self, name) for name in names}}

    @steady
    def predict_set(
        self, /, x: Any, alpha: Any = 0.1, *, groups: Any = None, **unknown: NoReturn
    ) -> Controlled:
        """Return sets whose expected loss is at most ``alpha``, in the units of the loss.

        Parameters
        ----------
        x
            Inputs, as the model takes them, or a loader of them.
        alpha
            The mean loss allowed, between 0 and the bound. Any value, without calibrating again.
        groups
            The group of each row, if the calibration had groups.

        Returns
        -------
        Controlled
            ``(sets, level)``. Where no level is known to do, the last one is taken, the level is
            infinite, and a warning says why.
        """
        refuse_unknown(unknown)
        exact = self._share(alpha)
        calibration, given = self.calibrated().calibration, self.rows(x)
        buffer, lost = RowBuffer(None), Table()
        for out, metadata, draws, _ in self.with_metadata(given, groups):
            thresholds = calibration.quantile(exact, metadata, draws)
            levels = thresholds.reshape(-1, 1).expand(len(out.output), 1)[:, 0].clone()
            if bool(levels.isinf().any()):
                rows = {"number": torch.tensor(out.rows), **metadata}
                lost.add(take(rows, levels.isinf()))
            buffer.add({"sets": self._sets(out, levels), "level": levels})
        if len(lost):
            warn(
                f"the risk of {len(lost)} of {given.count} sets is not controlled"
                f"{self.explain_infinite(exact, lost.columns)}"
            )
        return Controlled(buffer["sets"], buffer["level"])

    def _share(self, alpha: Any) -> Fraction:
        """Return alpha in units of the largest loss."""
        bound = Fraction(str(self._state.score.bound))
        if isinstance(alpha, bool) or not 0 < alpha < bound:
            raise ValueError(
                f"alpha must lie between 0 and the largest loss, {float(bound):g}, got {alpha}"
            )
        return exact_alpha(alpha if bound == 1 else Fraction(str(alpha)) / bound)

    def _sets(self, out: BatchOutput, levels: Tensor) -> Tensor:
        """Return the sets of rows, of which groups may have levels of their own."""
        scorer = self._state.score
        each = levels.unique().tolist()
        made = [torch.as_tensor(scorer.sets(out.output, min(t, scorer.grid[-1]))) for t in each]
        sets = made[0].clone()
        for level, own in zip(each, made, strict=True):
            rows = (levels == level).to(sets.device)
            sets[rows] = own[rows]
        return sets

    @steady
    def losses(self, x: Any, y: Any = None) -> Tensor:
        """Return what rows with known targets lose at every level, (n, levels)."""
        parts = [self._state.score.score(out, part) for out, part in self.targeted(x, y)]
        losses: Tensor = torch.cat(parts) * self._state.score.bound
        return losses
