"""The predictor for risk control: sets at the level that bounds their expected loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ffcp.batch import BatchOutput
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Columns, joined, take
from ffcp.conformal.learn_then_test import FIXED_SEQUENCE, Certified, LearnThenTest
from ffcp.conformal.rank import exact_alpha, refuse_unknown
from ffcp.conformal.risk import Losses
from ffcp.network.inputs import RowBuffer
from ffcp.network.model_output import Output
from ffcp.notebooks import number
from ffcp.predictor import Predictor, steady
from ffcp.risk.losses import BINARY, NAMED, SETS, SIGMOID, AnyLoss, LossScore, MonotoneLoss
from ffcp.warnings import warn

Loss = Callable[[Any, Tensor], Any] | str
_STEPS, _TESTED_STEPS = 1000, 100  # sizes of the default grids of levels


class Controlled(NamedTuple):
    """Sets at the level that controls their risk, from :meth:`ffcp.RiskControl.predict_set`.

    Attributes
    ----------
    sets : LabelSet or array-like
        The return value of the function ``sets``.
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
    >>> controlled
    Controlled: sets of 3 rows, level 0.587
    """

    sets: Any
    level: Tensor

    def __repr__(self) -> str:
        levels = [number(float(level)) for level in (self.level.min(), self.level.max())]
        listed = " to ".join(dict.fromkeys(levels))
        return f"Controlled: sets of {len(self.level):,} rows, level {listed}"


class RiskControl(Predictor):
    """Sets whose expected loss is at most alpha, for one monotone loss, or, with ``pac``, any.

    Parameters
    ----------
    model : nn.Module
        A trained network.
    loss : Loss or sequence of Loss, default="false_negatives"
        The loss: ``"false_negatives"``, the share of a row's true items that its set misses;
        ``"any_missed"``, whether it misses one; ``"wrong_answers"``, whether an answer is wrong,
        among the answered rows; or a function ``loss(sets, y)`` to one number per row, (n,).
        Without ``pac`` it must never increase when the set grows. With ``pac`` it may be any, NaN
        marks a row that does not count, and several losses may be given.
    sets : callable or str, default="sigmoid"
        The sets at a level, from the model's output: ``"sigmoid"``, the items whose probability is
        at least 1 - level, for logits (n, ...), such as the classes of a multi-label classifier or
        the pixels of a mask; ``"answers"``, the most likely class if its probability is at least
        the level, else -1; or a function ``sets(output, level)``. Without ``pac`` its sets grow
        with the level, and have loss 0 at the last level.
    grid : sequence of float, default=None
        The levels; by default 0 to 1 in steps of 0.001, with ``pac`` of 0.01. They must not depend
        on the calibration data. Without ``pac`` they ascend; with it they are in order of
        preference: the first certified level is used.
    bound : float or sequence of float, default=1.0
        The largest possible loss; with several losses one number for all, or one for each.
    pac : float, default=None
        The probability, over calibration sets, with which every risk is controlled (Learn then
        Test). Without it the risk is controlled on average over calibration sets.
    binary : bool or sequence of bool, default=False
        With ``pac``: whether user-defined losses are only 0 and 1, for all or for each. The exact
        binomial test then replaces that of Hoeffding and Bentkus.
    correction : str, default="fixed_sequence"
        With ``pac``: ``"fixed_sequence"`` tests one level after another until one fails, in an
        order determined on calibration rows that are set aside and not tested; ``"bonferroni"``
        tests each level at (1 - pac) / levels with all rows.
    selection_fraction : float, default=0.2
        As in :class:`ffcp.SetPredictor`.
    seed, batch_size : int, default=None
        As in :class:`ffcp.SetPredictor`.
    output : str, int or callable, default=None
        As in :class:`ffcp.SetPredictor`.

    Notes
    -----
    Guarantee without ``pac``, for exchangeable rows: the expected loss of a new row is at most
    alpha, on average also over calibration sets. With ``pac``, for independent rows: with this
    probability all :meth:`certified` levels have expected losses of at most alpha. Both concern
    means: single rows may have the largest loss.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model, x = nn.Linear(4, 6), torch.randn(400, 4)  # yours is trained
    >>> y = torch.rand(400, 6) < model(x).sigmoid()
    >>> risk = RiskControl(model, "false_negatives").calibrate(x[:300], y[:300])
    >>> controlled = risk.predict_set(x[300:], alpha=0.1)
    >>> controlled.sets.shape
    torch.Size([100, 6])

    At most 20 % of the answers are wrong, with probability 0.9:

    >>> label = torch.distributions.Categorical(logits=10 * model(x)).sample()
    >>> risk = RiskControl(model, "wrong_answers", sets="answers", pac=0.9).calibrate(x, label)
    >>> answered = risk.predict_set(x, alpha=0.2).sets >= 0
    >>> print(f"{answered.double().mean():.2f} answered")
    0.85 answered
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | Sequence[Loss] = "false_negatives",
        *,
        sets: Callable[[Tensor, float], Any] | str = SIGMOID,
        grid: Sequence[float] | None = None,
        bound: float | Sequence[float] = 1.0,
        pac: Any = None,
        binary: bool | Sequence[bool] = False,
        correction: str = FIXED_SEQUENCE,
        selection_fraction: float = 0.2,
        seed: int | None = None,
        batch_size: int | None = None,
        output: Output = None,
    ) -> None:
        if isinstance(sets, str) and sets not in SETS:
            raise ValueError(
                f"'sets' must be one of {', '.join(map(repr, SETS))} or a function, got {sets!r}"
            )
        losses = _losses(loss)
        self.loss, self.sets, self.bound = loss, sets, bound
        self.pac, self.binary, self.correction = pac, binary, correction
        steps = _STEPS if pac is None else _TESTED_STEPS
        self.grid = [step / steps for step in range(steps + 1)] if grid is None else list(grid)
        bounds = _checked_bounds(bound, len(losses))
        set_function = SETS[sets] if isinstance(sets, str) else sets
        score: LossScore
        calibration: Calibration
        if pac is None:
            if binary is not False or correction != FIXED_SEQUENCE:
                raise ValueError("'binary' and 'correction' need 'pac': pass it, or leave them out")
            if len(losses) > 1:
                raise ValueError(
                    f"'loss' has {len(losses)} losses, which needs 'pac': pass pac=0.9, for example"
                )
            score = MonotoneLoss(losses, set_function, self.grid, bounds)
            calibration = Losses(self.grid)
        else:
            pairs = zip(losses, _for_each(binary, len(losses), "binary"), strict=True)
            are_binary = tuple(bool(is_binary) or loss in BINARY for loss, is_binary in pairs)
            calibration = LearnThenTest(self.grid, are_binary, pac, correction)
            score = AnyLoss(losses, set_function, self.grid, bounds, correction == FIXED_SEQUENCE)
        super().__init__(
            model,
            score,
            calibration,
            selection_fraction=selection_fraction,
            seed=seed,
            batch_size=batch_size,
            output=output,
        )
        self.takes_nan = pac is not None

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, but for the model."""
        tested = () if self.pac is None else ("pac", "binary", "correction", "selection_fraction")
        names = ("loss", "sets", "grid", "bound", *tested, "seed", "batch_size", "output")
        return {name: getattr(self, name) for name in names}

    @steady
    def predict_set(
        self, /, x: Any, alpha: Any = 0.1, *, groups: Any = None, **unknown: NoReturn
    ) -> Controlled:
        """Return sets whose expected loss is at most ``alpha``, in the units of the loss.

        Parameters
        ----------
        x : array-like or loader
            Inputs, as the model takes them, or a loader of inputs.
        alpha : float or sequence of float, default=0.1
            The allowed mean loss, between 0 and the bound; with several losses one number for all,
            or one for each. Any value, without calibrating again.
        groups : array-like, default=None
            The group of each row, if the calibration had groups.

        Returns
        -------
        Controlled
            ``(sets, level)``. If no level controls the risk, the sets are those of the last level,
            ``level`` is infinite, and a warning explains why.

        Raises
        ------
        RuntimeError
            With ``pac``, if no level is certified.
        """
        refuse_unknown(unknown)
        rows, buffer = self.rows(x), RowBuffer()
        if self.pac is not None:
            level = self._certified_level(alpha)
            for out, *_ in self.batch_outputs(rows, groups):
                levels = torch.full((len(out.output),), level, dtype=torch.float64)
                buffer.add({"sets": self._sets(out, levels), "level": levels})
            return Controlled(buffer["sets"], buffer["level"])
        (exact,) = self._shares(alpha)
        calibration = self.calibrated().calibration
        infinite_rows: list[Columns] = []
        for out, metadata, draws, _ in self.batch_outputs(rows, groups):
            thresholds = calibration.quantile(exact, metadata, draws)
            levels = thresholds.reshape(-1, 1).expand(len(out.output), 1)[:, 0].clone()
            if bool(levels.isinf().any()):
                columns = {"number": torch.tensor(out.rows), **metadata}
                infinite_rows.append(take(columns, levels.isinf()))
            buffer.add({"sets": self._sets(out, levels), "level": levels})
        if infinite_rows:
            columns = joined(infinite_rows)
            warn(
                f"the risk of {len(columns['number'])} of {rows.count} sets is not controlled"
                f"{self.explain_infinite(exact, columns)}"
            )
        return Controlled(buffer["sets"], buffer["level"])

    @steady
    def certified(self, alpha: Any = 0.1) -> Certified:
        """Return all levels that control the risks, with ``pac``; there may be none.

        Parameters
        ----------
        alpha : float, default=0.1
            As in :meth:`predict_set`, which uses the first of these levels.

        Returns
        -------
        Certified
            The levels, their p-values, the mean loss of calibration rows at each level, and the
            share of rows that count.
        """
        return self._certified(alpha)

    def _certified(self, alpha: Any) -> Certified:
        state = self.calibrated()
        tests, score = state.calibration, state.score
        if not isinstance(tests, LearnThenTest):
            raise RuntimeError("certified levels need 'pac': use RiskControl(..., pac=0.9)")
        shares = self._shares(alpha)
        certified = tests.certified(shares, score.order(shares, tests.binary))
        bounds = torch.tensor(score.bounds, dtype=torch.float64)
        return certified._replace(risks=certified.risks * bounds)

    def _certified_level(self, alpha: Any) -> float:
        """Return the first certified level; raise RuntimeError if there is none."""
        certified = self._certified(alpha)
        if not len(certified.levels):
            raise RuntimeError(
                f"no level is certified to control the risks at alpha={alpha} with probability "
                f"{self.pac} by {len(self.calibration)} calibration rows: use more rows, a larger "
                "'alpha', a smaller 'pac', or a 'grid' with levels of smaller loss"
            )
        return float(certified.levels[0])

    def _shares(self, alpha: Any) -> list[Fraction]:
        """Return the allowed mean of each loss, in units of its bound."""
        bounds = [Fraction(str(bound)) for bound in self._state.score.bounds]
        shares = []
        for risk, bound in zip(_for_each(alpha, len(bounds), "alpha"), bounds, strict=True):
            if isinstance(risk, bool) or not 0 < risk < bound:
                raise ValueError(
                    f"'alpha' must lie between 0 and the largest loss, {float(bound):g}, got {risk}"
                )
            shares.append(exact_alpha(risk if bound == 1 else Fraction(str(risk)) / bound))
        return shares

    def _sets(self, out: BatchOutput, levels: Tensor) -> Tensor:
        """Return the sets of rows, whose levels may differ between groups."""
        score, last = self._state.score, max(self.grid)
        sets = None
        for level in levels.unique().tolist():
            at_level = torch.as_tensor(score.sets(out.output, min(level, last)))
            sets = at_level.clone() if sets is None else sets
            rows = (levels == level).to(sets.device)
            sets[rows] = at_level[rows]
        assert sets is not None  # there are rows
        return sets

    @steady
    def losses(self, x: Any, y: Any = None) -> Tensor:
        """Return the losses of rows at every level.

        With one loss (n, levels), with several (n, losses, levels).

        Parameters
        ----------
        x : array-like, frame, tuple, dict or loader
            Inputs, a row each; or a loader of pairs ``(x, y)``, passed alone.
        y : array-like, default=None
            Targets, unless ``x`` is a loader.
        """
        score = self._state.score
        scores = torch.cat([score.score(out, target) for out, target in self.targeted(x, y)])
        bounds = torch.tensor(score.bounds, dtype=torch.float64)
        losses = scores.view(-1, len(bounds), len(self.grid)) * bounds[:, None]
        return losses[:, 0] if len(bounds) == 1 else losses


def _losses(loss: Loss | Sequence[Loss]) -> tuple[Callable[[Any, Tensor], Any], ...]:
    """Return the functions of one loss or of several, given as functions or names."""
    losses = [loss] if isinstance(loss, str) or callable(loss) else list(loss)
    for loss in losses:
        if isinstance(loss, nn.Module):
            raise TypeError("'loss' must be a name or a function, got a module; the model is first")
        if not callable(loss) and loss not in NAMED:
            raise ValueError(f"unknown loss {loss!r}: choose one of {', '.join(NAMED)}")
    if not losses:
        raise ValueError("'loss' is empty: pass a name, a function or several of them")
    return tuple(NAMED[loss] if isinstance(loss, str) else loss for loss in losses)


def _for_each(values: Any, risks: int, name: str) -> list[Any]:
    """Return one value for each loss, from one for all or from a sequence.

    >>> _for_each(0.1, 2, "alpha"), _for_each((0.1, 0.2), 2, "alpha")
    ([0.1, 0.1], [0.1, 0.2])
    """
    if not isinstance(values, Sequence) or isinstance(values, str):
        return [values] * risks
    if len(values) != risks:
        raise ValueError(f"{name!r} has {len(values)} values, expected one per loss: {risks}")
    return list(values)


def _checked_bounds(bound: Any, risks: int) -> tuple[float, ...]:
    """Return the largest value of each loss."""
    bounds = _for_each(bound, risks, "bound")
    for value in bounds:
        if isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"'bound' must be a positive number, got {value!r}")
    return tuple(float(value) for value in bounds)
