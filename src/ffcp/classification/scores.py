"""Nonconformity scores of labels, by a named rule or by a function of the user."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.batch import BatchOutput, Requires
from ffcp.classification import rules, tuning
from ffcp.classification.rules import (
    FEATURE,
    SOFTMAX,
    Cumulative,
    LabelRows,
    Rule,
    Threshold,
    blocks,
    in_order,
)
from ffcp.conformal.rank import exact_alpha
from ffcp.conformal.score import Score
from ffcp.conformal.selection import Aside, Selected, Selection
from ffcp.description import name_of
from ffcp.network.features import OUTPUT

FIT = "fit"
LAC, APS, RAPS, FFRAPS = RULES = ("lac", "aps", "raps", "ffraps")
#: The default settings, and which of them each rule has besides its temperature.
_DEFAULTS = {"lam": 0.01, "kreg": 5, "delta": 0.01}
_TAKES = {LAC: (), APS: (), RAPS: ("lam", "kreg"), FFRAPS: ("lam", "kreg", "delta")}


class LabelScore(Score):
    """Nonconformity score of every label of a row; the base class of all label scores.

    To define a score, override :meth:`of_all`, or wrap a function of :class:`ffcp.BatchOutput` in
    :class:`ffcp.scores.FunctionScore`.

    Attributes
    ----------
    randomized : bool
        Whether scores use the random number of a row, ``out.random``.
    other_labels : bool
        Whether a label may be none of the classes; it has the number after the last, and is in a
        set only if the threshold is infinite.

    Examples
    --------
    >>> import ffcp
    >>> class Margin(LabelScore):  # how far a logit is below the largest
    ...     def of_all(self, out):
    ...         return out.output.amax(dim=1, keepdim=True) - out.output
    >>> logits, y = torch.tensor([[2.0, 1.0, 0.0]]).repeat(9, 1), torch.tensor([0] * 5 + [1] * 4)
    >>> sets = ffcp.SetPredictor(torch.nn.Identity(), Margin()).calibrate(logits, y)
    >>> sets.predict_set(logits[:1], alpha=0.2).labels
    [tensor([0, 1])]
    """

    randomized: Any = False
    other_labels = False

    def requires(self) -> Requires:
        """Return the required features of the pass over the model."""
        return Requires(logits=True)

    def of_all(self, out: BatchOutput) -> Tensor:
        """Return the scores of every label of each row, (n, K): small where the label fits.

        Parameters
        ----------
        out : BatchOutput
            Output of the model for a batch.
        """
        raise NotImplementedError

    def _of_labels(self, out: BatchOutput, labels: Tensor) -> Tensor:
        """Return the score of one label of each row, (n,)."""
        return self.of_all(out).double().gather(1, labels[:, None])[:, 0]

    def score(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Return the score of the true label, (n, 1): infinity if it is none of the classes."""
        check_logits(out.output)
        labels = checked_labels(y, out, self.other_labels)
        is_other = labels >= out.output.shape[1]
        scores = self._of_labels(out, labels.masked_fill(is_other, 0))
        return scores.masked_fill(is_other, math.inf)[:, None]

    def mask(self, out: BatchOutput, threshold: Tensor, *, allow_empty: bool) -> Tensor:
        """Return a mask of the labels whose score is at most the threshold, (n, K)."""
        scores = self.of_all(out).double()
        inside = scores <= threshold.to(scores.device)
        if not allow_empty:
            empty = (~inside.any(dim=1)).nonzero()[:, 0]
            inside[empty, scores[empty].argmin(dim=1)] = True
        return inside

    def order(self, out: BatchOutput) -> Iterator[Tensor]:
        """Yield sort keys >= 0 of the labels, the largest first."""
        # Ranks, since differences of scores would be NaN where scores are infinite.
        ranks = self.of_all(out).argsort(dim=1, stable=True).argsort(dim=1)
        yield (ranks.shape[1] - ranks).double()


@dataclass(frozen=True)
class FunctionScore(LabelScore):
    """A label score from a function of a batch output.

    Parameters
    ----------
    function : callable
        From :class:`ffcp.BatchOutput` to scores (n, K), small where the label fits.
    norms, values : sequence of str, default=()
        Layers whose gradient norms or values the function uses.
    name : str, default=None
        The name in saved files; the function's own name by default.
    other_labels : bool, default=False
        Whether labels outside the classes of the model can be in a set.

    Examples
    --------
    >>> import ffcp
    >>> below_top = FunctionScore(lambda out: out.output.amax(1, True) - out.output, name="gap")
    >>> logits, y = torch.tensor([[2.0, 1.0, 0.0]]).repeat(9, 1), torch.tensor([0] * 5 + [1] * 4)
    >>> sets = ffcp.SetPredictor(torch.nn.Identity(), below_top).calibrate(logits, y)
    >>> sets.predict_set(logits[:1], alpha=0.2).labels
    [tensor([0, 1])]
    """

    function: Callable[[BatchOutput], Tensor]
    norms: Sequence[str] = ()
    values: Sequence[str] = ()
    name: str | None = None
    other_labels: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                f"a score is 'auto' or a function, got {self.function!r}: use ffcp.RAPS?"
            )
        object.__setattr__(self, "name", self.name or name_of(self.function))

    def requires(self) -> Requires:
        """Return the layers that the function uses."""
        return Requires(norms=tuple(self.norms), values=tuple(self.values), logits=True)

    def of_all(self, out: BatchOutput) -> Tensor:
        """Return the function's scores, (n, K)."""
        scores = torch.as_tensor(self.function(out))
        if scores.shape != out.output.shape or bool(scores.isnan().any()):
            raise ValueError(
                f"label score {self.name!r} returned shape {tuple(scores.shape)}, the logits have "
                f"{tuple(out.output.shape)}: it must return one number per label, and no NaN"
            )
        return scores


@dataclass(frozen=True)
class RuleScore(LabelScore):
    """A score by one of the named rules; settings may be left out, to be tuned.

    Parameters
    ----------
    name : str
        ``"lac"``, ``"aps"``, ``"raps"`` or ``"ffraps"``.
    temperature : float or str, default=1.0
        Logits are divided by it; ``"fit"`` fits it.
    lam : float, default=None
    kreg : int, default=None
    delta : float, default=None
        Settings of the rule: ``None`` for those to be tuned, or for the default.
    gradient : str, default="softmax"
    feature : str, default=None
        Where FFRAPS takes its gradient, as in :func:`ffcp.scores.FFRAPS`.
    tune : str, default=None
        ``None``, ``"size"`` or ``"coverage"``.
    randomized : bool, default=True
        Whether only a random share of a label's own weight counts. With ``False`` that is so in
        calibration only, and sets hold every label that some share would include.
    allow_empty : bool, default=False
        Whether sets may be empty when candidates are compared.
    """

    name: str
    temperature: Any = 1.0
    lam: float | None = None
    kreg: int | None = None
    delta: float | None = None
    gradient: str = SOFTMAX
    feature: str | None = None
    tune: str | None = None
    randomized: bool = True
    allow_empty: bool = False
    other_labels: bool = False
    lowest = 0.0
    #: Outputs are logits: probabilities are refused.
    takes_logits = True

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise ValueError(f"unknown rule {self.name!r}: choose one of {', '.join(RULES)}")
        if self.tune not in (None, tuning.SIZE, tuning.COVERAGE):
            raise ValueError(
                f"'tune' must be None, {tuning.SIZE!r} or {tuning.COVERAGE!r}, got {self.tune!r}"
            )
        if isinstance(self.temperature, str | None) and self.temperature != FIT:
            raise ValueError(
                f"'temperature' must be a positive number or {FIT!r}, got {self.temperature!r}"
            )
        missing = [name for name in self._takes if getattr(self, name) is None]
        if not self.tune:
            for name in missing:
                object.__setattr__(self, name, _DEFAULTS[name])
        for name in ("temperature", *self._takes):
            value = getattr(self, name)
            if isinstance(value, np.generic):  # plain numbers: they are saved as JSON
                object.__setattr__(self, name, value.item())
        self._check_feature()
        defaults = {name: _DEFAULTS[name] for name in missing}
        temperature = 1.0 if self.temperature == FIT else self.temperature
        self._rule(temperature=temperature, **defaults)  # which refuses values out of range

    def _check_feature(self) -> None:
        """Refuse a missing ``feature``, or one that the gradient does not use."""
        if self.gradient == SOFTMAX and self.feature is not None:
            raise ValueError(
                f"'feature' is {self.feature!r}, but gradient={SOFTMAX!r} is taken with respect to "
                f"the logits: leave it out, or use gradient={FEATURE!r}"
            )
        if self.gradient == FEATURE and self.feature in (None, OUTPUT):
            raise ValueError(
                f"gradient={FEATURE!r} needs a layer before the output: pass 'feature', a dotted "
                "module name, a module or 'input'"
            )

    @property
    def _takes(self) -> Sequence[str]:
        return _TAKES[self.name]

    def _rule(self, **replaced: Any) -> Rule:
        """Return the rule with these settings, some of them replaced."""
        settings = {name: getattr(self, name) for name in ("temperature", *self._takes)} | replaced
        if self.name == LAC:
            return Threshold(**settings)
        return Cumulative(**settings, gradient=self.gradient)

    @property
    def rule(self) -> Rule | None:
        """The rule; ``None`` until all settings are known."""
        return None if self.open_settings else self._rule()

    @property
    def takes_infinity(self) -> bool:  # type: ignore[override]
        """Whether a score may be infinite, as for labels that are none of the classes."""
        return self.other_labels

    @property
    def draws(self) -> bool:
        """Whether the calibration uses random numbers."""
        return self.name != LAC

    @property
    def open_settings(self) -> list[str]:
        """The names of settings that are still to be tuned."""
        missing = [name for name in self._takes if getattr(self, name) is None]
        return [*(["temperature"] if self.temperature == FIT else []), *missing]

    def config(self) -> dict[str, Any]:
        """Return the arguments, without those of a tuning that is complete."""
        tuned = () if self.open_settings else ("tune", "allow_empty")
        return {name: value for name, value in super().config().items() if name not in tuned}

    def selection(self) -> Selection | None:
        """Return the selection that tunes the settings left out; None if there are none."""
        return _Tuning(self) if self.open_settings else None

    def requires(self) -> Requires:
        """Return the required features: logits, and the top label's gradient if used."""
        if self.feature is None:
            return Requires(logits=True)
        return Requires((self.feature,), of=top_probability, logits=True)

    # -- scores -----------------------------------------------------------------------------

    def label_rows(self, out: BatchOutput) -> LabelRows:
        """Return the logits, random shares and gradient norms for the rule."""
        check_logits(out.output)
        # With a share of 0 the label that crosses the threshold is in the set, so the set
        # contains those of all shares, and covers at least as often.
        share = out.random
        if share is None:
            share = torch.zeros(len(out.output), dtype=torch.float64)
        norms = None if self.feature is None else out.norms[self.feature]
        return LabelRows(out.output, share.to(out.output.device), norms)

    def of_all(self, out: BatchOutput) -> Tensor:
        """Return the scores of every label of each row, (n, K)."""
        return rules.all_scores(self._rule(), self.label_rows(out))

    def _of_labels(self, out: BatchOutput, labels: Tensor) -> Tensor:
        """Return the score of one label of each row, (n,)."""
        return rules.label_scores(self._rule(), self.label_rows(out), labels)

    def mask(self, out: BatchOutput, threshold: Tensor, *, allow_empty: bool) -> Tensor:
        """Return a mask of the labels whose score is at most the threshold, (n, K)."""
        rows = self.label_rows(out)
        return rules.label_mask(self._rule(), rows, threshold, allow_empty=allow_empty)

    def order(self, out: BatchOutput) -> Iterator[Tensor]:
        """Yield, for each label, how many labels rank below it."""
        below = torch.arange(out.output.shape[1], device=out.output.device).flip(0).double()
        for block in blocks(*out.output.shape):
            logits = out.output[block]
            labels = in_order(self._rule().weights(logits), logits)[1]
            yield torch.empty(logits.shape, dtype=below.dtype, device=logits.device).scatter_(
                1, labels, below.expand(len(logits), -1)
            )


class _Tuning(Selection):
    """Fits the temperature and tunes the penalties of a rule."""

    def __init__(self, score: RuleScore) -> None:
        self.score, self.what = score, ", ".join(score.open_settings)

    def requires(self) -> Requires:
        """Return the required features of the rule."""
        return self.score.requires()

    def select(self, aside: Aside) -> Selected:
        """Return the score with the settings whose sets are smallest, or cover most evenly."""
        rows, labels, level = known_rows(self.score, aside)
        temperature = self.score.temperature
        if temperature == FIT:
            temperature = tuning.fit_temperature(rows.logits, labels)
        score = replace(self.score, temperature=temperature)
        count, alpha = len(aside.y), float(aside.alpha)
        if score.tune:
            choice = replace(_tuned(score, rows, labels, level), rows=count, alpha=alpha)
            tuned: dict[str, Any] = dict.fromkeys(_DEFAULTS)
            tuned |= {name: getattr(choice, name) for name in _TAKES[score.name]}
            score = replace(score, **tuned)
        else:
            choice = tuning.SetChoice(
                temperature, score.kreg, score.lam, score.delta, count, alpha, None, ()
            )
        return Selected(score, aside.calibration, {"sets": choice})


def _tuned(score: RuleScore, rows: LabelRows, labels: Tensor, alpha: Any) -> tuning.SetChoice:
    """Return the tuned settings, those that are given included."""
    assert score.tune is not None
    delta = score.delta if score.name == FFRAPS else 0.0
    return tuning.tune(
        rows,
        labels,
        Cumulative(score.temperature, gradient=score.gradient),
        kreg=score.kreg,
        lams=tuning.LAMS[score.tune] if score.lam is None else (score.lam,),
        deltas=tuning.DELTAS if delta is None else (delta,),
        criterion=score.tune,
        alpha=alpha,
        allow_empty=score.allow_empty,
        randomized=score.randomized,
    )


def with_other_labels(score: Any) -> Any:
    """Return a copy of the score, or selection, for labels that may be none of the classes."""
    other = copy.copy(score)
    other.__dict__["other_labels"] = True
    return other


def as_score(score: Any) -> LabelScore:
    """Return a label score, from a score or a function."""
    return score if isinstance(score, LabelScore) else FunctionScore(score)


def top_probability(logits: Tensor) -> Tensor:
    """Return the probability of the most likely label of each row."""
    check_logits(logits)
    return logits.double().softmax(dim=1).amax(dim=1)


def known_rows(score: RuleScore, aside: Aside) -> tuple[LabelRows, Tensor, Any]:
    """Return the rows whose label is one of the classes, and the level to compare them at.

    Rows with other labels are always missed. Of n rows, m of them with a known label, the
    threshold is that of the m rows at the level which allows n alpha - (n - m) misses. If that is
    negative, the threshold is infinite for every candidate.
    """
    rows, alpha = score.label_rows(aside.out), aside.alpha
    labels = checked_labels(aside.y, aside.out, score.other_labels)
    known = labels < rows.logits.shape[1]
    count = int(known.sum())
    if count == len(labels):
        return rows, labels, alpha
    if not count:
        raise ValueError(
            f"none of the {len(labels)} rows set aside for the selection has a label among the "
            "model's classes: pass more rows, or give all settings"
        )
    missed = 1 - (1 - exact_alpha(alpha)) * len(labels) / count
    return rows.take(known), labels[known], missed if missed > 0 else alpha


# -- checks ------------------------------------------------------------------------------------


def check_logits(logits: Tensor) -> None:
    """Raise ValueError unless outputs are logits of several classes, (n, K)."""
    if logits.dim() != 2:
        raise ValueError(
            f"the model's output has shape {tuple(logits.shape)}; prediction sets need logits "
            "of shape (n, K) for K classes"
        )
    if logits.shape[1] < 2:
        raise ValueError(
            "the model returns one logit, and the label score needs one per class: return "
            "ffcp.Requires(logits=True) from the score's requires()"
        )


def refuse_probabilities(logits: Tensor) -> None:
    """Raise ValueError if all rows are nonnegative and sum to 1: these are not logits."""
    tolerance = max(1e-4, torch.finfo(logits.dtype).eps)
    if bool((logits >= 0).all() and ((logits.double().sum(dim=1) - 1).abs() <= tolerance).all()):
        raise ValueError(
            "the model's output looks like probabilities: all rows are nonnegative and sum to 1. "
            "Prediction sets start from logits: return them before the softmax, or "
            "torch.log of the probabilities"
        )


def checked_labels(y: Tensor, out: BatchOutput, other_labels: bool = False) -> Tensor:
    """Return the class labels of some rows as int64, checked."""
    rows, classes = out.output.shape
    if y.dim() != 1:
        hint = ": for one-hot rows use y.argmax(dim=1)" if y.shape[-1] == classes else ""
        hint = ": give y[:, 0].long()" if y.shape == (rows, 1) else hint
        raise ValueError(
            f"labels 'y' have shape {tuple(y.shape)}, expected one integer per row: {(rows,)}{hint}"
        )
    if y.is_floating_point() or y.dtype == torch.bool:
        raise TypeError(
            f"labels 'y' must be integers, the numbers of classes from 0, got {y.dtype}: "
            "convert them, for example with y.long()"
        )
    y = y.long()
    last = classes if other_labels else classes - 1
    outside = (y < 0) | (y > last)
    if bool(outside.any()):
        row = int(outside.nonzero()[0, 0])
        also = f", and {last} is any other label" if other_labels else ""
        raise ValueError(
            f"label {int(y[row])} in row {out.rows[row]} is out of range: the model has "
            f"{classes} classes, so labels go from 0 to {classes - 1}{also}"
        )
    return y.to(out.output.device)
