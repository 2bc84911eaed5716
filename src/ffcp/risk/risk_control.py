"""Risk control: sets that depend on a level, and levels at which expected losses are small."""

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
from ffcp.predictor import Predictor, steady
from ffcp.risk.losses import BINARY, NAMED, SETS, SIGMOID, AnyLoss, LossScore, MonotoneLoss
from ffcp.warnings import warn

Loss = Callable[[Any, Tensor], Any] | str
_STEPS, _TESTED_STEPS = 1000, 100  # of the default grids of levels


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


class RiskControl(Predictor):
    """Sets whose expected loss is at most alpha: of one loss that sets only reduce, or of any.

    Parameters
    ----------
    model
        A trained network.
    loss
        What is lost: ``"false_negatives"``, the share of a row's true items that its set misses;
        ``"any_missed"``, whether it misses one; ``"wrong_answers"``, whether an answer is wrong,
        among the rows that are answered; or a function ``loss(sets, y)`` to one number per row,
        (n,). Without ``pac`` it must never grow when the set does. With ``pac`` it may be any,
        NaN stands for a row that does not count, and several losses may be given.
    sets
        How sets follow from the model's output at a level: ``"sigmoid"``, the items whose
        probability is at least 1 - level, of a model of logits (n, ...), the classes of a
        multi-label classifier or the pixels of a mask; ``"answers"``, the most likely class where
        its probability is at least the level, else -1; or a function ``sets(output, level)``.
        Without ``pac`` its sets grow with the level, and at the last level lose nothing.
    grid
        The levels; by default 0 to 1 in steps of 0.001, with ``pac`` of 0.01. A constant, not
        looked up in the calibration data. Without ``pac`` they ascend; with it they come in the
        order in which you prefer them: the first that is certified is used.
    bound
        The largest loss there can be; with several losses one number for all, or one for each.
    pac
        The probability, over calibration sets, with which every risk is controlled (Learn then
        Test). Without it the risk is controlled on average over calibration sets.
    binary
        With ``pac``: whether losses of your own are 0 and 1 only, for all or for each. The exact
        binomial test is then taken in place of that of Hoeffding and Bentkus.
    correction
        With ``pac``: ``"fixed_sequence"`` tests one level after the other until one fails, in an
        order that some of the calibration rows choose, which then do not test; ``"bonferroni"``
        tests each level at (1 - pac) / levels with all rows.
    selection_fraction, seed, batch_size, output
        As in :class:`ffcp.SetPredictor`.

    Notes
    -----
    Promised without ``pac``, for exchangeable rows: the expected loss of a new row is at most
    alpha, on average over calibration sets too. With ``pac``, for independent rows: with this
    probability all of :meth:`certified` levels have expected losses of at most alpha. Both are
    means: single rows may lose everything.

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
                f"sets must be one of {', '.join(map(repr, SETS))} or a function, got {sets!r}"
            )
        self.loss, self.sets, self.bound = loss, sets, bound
        self.pac, self.binary, self.correction = pac, binary, correction
        steps = _STEPS if pac is None else _TESTED_STEPS
        self.grid = [step / steps for step in range(steps + 1)] if grid is None else list(grid)
        losses = _losses(loss)
        bounds = _checked_bounds(bound, len(losses))
        made = SETS[sets] if isinstance(sets, str) else sets
        score: LossScore
        calibration: Calibration
        if pac is None:
            if len(losses) > 1:
                raise ValueError(f"{len(losses)} losses are controlled with pac= only: 0.9, say")
            score = MonotoneLoss(losses, made, self.grid, bounds)
            calibration = Losses(self.grid)
        else:
            are = _for_each(binary, len(losses), "binary")
            kinds = tuple(bool(is_) or one in BINARY for is_, one in zip(are, losses, strict=True))
            calibration = LearnThenTest(self.grid, kinds, pac, correction)
            score = AnyLoss(losses, made, self.grid, bounds, correction == FIXED_SEQUENCE)
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
        x
            Inputs, as the model takes them, or a loader of them.
        alpha
            The mean loss allowed, between 0 and the bound; of several losses one number for all,
            or one for each. Any value, without calibrating again.
        groups
            The group of each row, if the calibration had groups.

        Returns
        -------
        Controlled
            ``(sets, level)``. Where no level is known to do, the last one is taken, the level is
            infinite, and a warning says why.

        Raises
        ------
        RuntimeError
            With ``pac``, if no level is certified.
        """
        refuse_unknown(unknown)
        given = self.rows(x)
        if self.pac is not None:
            level = self._certified_level(alpha)
            buffer = RowBuffer(None)
            for out, *_ in self.batch_outputs(given, groups):
                levels = torch.full((len(out.output),), level, dtype=torch.float64)
                buffer.add({"sets": self._sets(out, levels), "level": levels})
            return Controlled(buffer["sets"], buffer["level"])
        (exact,) = self._shares(alpha)
        calibration = self.calibrated().calibration
        buffer = RowBuffer(None)
        lost: list[Columns] = []
        for out, metadata, draws, _ in self.batch_outputs(given, groups):
            thresholds = calibration.quantile(exact, metadata, draws)
            levels = thresholds.reshape(-1, 1).expand(len(out.output), 1)[:, 0].clone()
            if bool(levels.isinf().any()):
                rows = {"number": torch.tensor(out.rows), **metadata}
                lost.append(take(rows, levels.isinf()))
            buffer.add({"sets": self._sets(out, levels), "level": levels})
        if lost:
            rows = joined(lost)
            warn(
                f"the risk of {len(rows['number'])} of {given.count} sets is not controlled"
                f"{self.explain_infinite(exact, rows)}"
            )
        return Controlled(buffer["sets"], buffer["level"])

    @steady
    def certified(self, alpha: Any = 0.1) -> Certified:
        """Return all levels that control the risks, with ``pac``; none, if there are none.

        Parameters
        ----------
        alpha
            As in :meth:`predict_set`, which uses the first of these levels.

        Returns
        -------
        Certified
            The levels, their p-values, and what calibration rows lose at each: its mean, and the
            share of rows that count in it.
        """
        return self._certified(alpha)

    def _certified(self, alpha: Any) -> Certified:
        state = self.calibrated()
        tests, score = state.calibration, state.score
        if not isinstance(tests, LearnThenTest):
            raise RuntimeError("levels are certified with pac=...: RiskControl(..., pac=0.9)")
        shares = self._shares(alpha)
        found = tests.certified(shares, score.order(shares, tests.binary))
        return found._replace(risks=found.risks * torch.tensor(score.bounds, dtype=torch.float64))

    def _certified_level(self, alpha: Any) -> float:
        found = self._certified(alpha)
        if not len(found.levels):
            raise RuntimeError(
                f"no level controls the risks at alpha={alpha} with probability {self.pac}, as far "
                f"as {len(self.calibration)} calibration rows can tell: nothing is returned. Give "
                "more rows, a larger alpha, a smaller pac, or levels at which less is lost"
            )
        return float(found.levels[0])

    def _shares(self, alpha: Any) -> list[Fraction]:
        """Return the mean loss allowed of each risk, in units of its bound."""
        bounds = [Fraction(str(bound)) for bound in self._state.score.bounds]
        result = []
        for one, bound in zip(_for_each(alpha, len(bounds), "alpha"), bounds, strict=True):
            if isinstance(one, bool) or not 0 < one < bound:
                raise ValueError(
                    f"alpha must lie between 0 and the largest loss, {float(bound):g}, got {one}"
                )
            result.append(exact_alpha(one if bound == 1 else Fraction(str(one)) / bound))
        return result

    def _sets(self, out: BatchOutput, levels: Tensor) -> Tensor:
        """Return the sets of rows, of which groups may have levels of their own."""
        scorer = self._state.score
        each = levels.unique().tolist()
        made = [torch.as_tensor(scorer.sets(out.output, min(t, max(self.grid)))) for t in each]
        sets = made[0].clone()
        for level, own in zip(each, made, strict=True):
            rows = (levels == level).to(sets.device)
            sets[rows] = own[rows]
        return sets

    @steady
    def losses(self, x: Any, y: Any = None) -> Tensor:
        """Return what rows with known targets lose at every level.

        Of one loss (n, levels), of several (n, losses, levels).
        """
        score = self._state.score
        parts = [score.score(out, part) for out, part in self.targeted(x, y)]
        bounds = torch.tensor(score.bounds, dtype=torch.float64)
        losses = torch.cat(parts).view(-1, len(bounds), len(self.grid)) * bounds[:, None]
        return losses[:, 0] if len(bounds) == 1 else losses


def _losses(loss: Loss | Sequence[Loss]) -> tuple[Callable[[Any, Tensor], Any], ...]:
    """Return the functions of one loss or of several, of which some have names."""
    given = [loss] if isinstance(loss, str) or callable(loss) else list(loss)
    for one in given:
        if not callable(one) and one not in NAMED:
            raise ValueError(f"unknown loss {one!r}: choose one of {', '.join(NAMED)}")
    if not given:
        raise ValueError("there is no loss: give a name, a function or several of them")
    return tuple(NAMED[one] if isinstance(one, str) else one for one in given)


def _for_each(given: Any, risks: int, what: str) -> list[Any]:
    """Return one value for each risk, of one for all or of a sequence.

    >>> _for_each(0.1, 2, "alpha"), _for_each((0.1, 0.2), 2, "alpha")
    ([0.1, 0.1], [0.1, 0.2])
    """
    if not isinstance(given, Sequence) or isinstance(given, str):
        return [given] * risks
    if len(given) != risks:
        raise ValueError(f"{what} has {len(given)} values for {risks} losses")
    return list(given)


def _checked_bounds(bound: Any, risks: int) -> tuple[float, ...]:
    bounds = _for_each(bound, risks, "bound")
    for one in bounds:
        if isinstance(one, bool) or not 0 < one < math.inf:
            raise ValueError(f"bound must be a positive number, got {one!r}")
    return tuple(float(one) for one in bounds)
