"""Label scores: how surprising each label of a row is, by a rule or by a function of your own."""

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
#: What each rule has besides its temperature, and the values that are taken if none are given.
_DEFAULTS = {"lam": 0.01, "kreg": 5, "delta": 0.01}
_TAKES = {LAC: (), APS: (), RAPS: ("lam", "kreg"), FFRAPS: ("lam", "kreg", "delta")}


class LabelScore(Score):
    """How surprising each label of a row is; the base of all label scores.

    A score of your own defines :meth:`of_all`; or give a function of :class:`ffcp.BatchOutput`, of
    which :class:`ffcp.scores.FunctionScore` makes one.

    Attributes
    ----------
    randomized : bool
        Whether scores use the random number of a row, ``out.random``.
    other_labels : bool
        Whether a label may be none of the classes; it has the number behind the last, and no
        threshold but an infinite one lets it in.

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
        """Return what the pass over the model must bring."""
        return Requires(logits=True)

    def of_all(self, out: BatchOutput) -> Tensor:
        """Score every label of each row: (n, K), the smaller the better a label fits."""
        raise NotImplementedError

    def _of_labels(self, out: BatchOutput, labels: Tensor) -> Tensor:
        """Score one label of each row, (n,)."""
        return self.of_all(out).double().gather(1, labels[:, None])[:, 0]

    def score(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Score the true label of each row, (n, 1): infinity if it is none of the classes."""
        check_logits(out.output)
        labels = checked_labels(y, out, self.other_labels)
        beyond = labels >= out.output.shape[1]
        scores = self._of_labels(out, labels.masked_fill(beyond, 0))
        return scores.masked_fill(beyond, math.inf)[:, None]

    def mask(self, out: BatchOutput, threshold: Tensor, *, allow_empty: bool) -> Tensor:
        """Mark the labels whose score is at most the threshold, (n, K)."""
        scores = self.of_all(out).double()
        inside = scores <= threshold.to(scores.device)
        if not allow_empty:
            empty = (~inside.any(dim=1)).nonzero()[:, 0]
            inside[empty, scores[empty].argmin(dim=1)] = True
        return inside

    def order(self, out: BatchOutput) -> Iterator[Tensor]:
        """Yield numbers of at least 0 by which labels are listed, the largest first."""
        # Places, since differences of scores would be NaN where scores are infinite.
        places = self.of_all(out).argsort(dim=1, stable=True).argsort(dim=1)
        yield (places.shape[1] - places).double()


@dataclass(frozen=True)
class FunctionScore(LabelScore):
    """A label score from a function of what one pass saw.

    Parameters
    ----------
    function
        From :class:`ffcp.BatchOutput` to scores (n, K), the smaller the better a label fits.
    norms, values
        Layers whose gradient norms or values it looks at.
    name
        What saved settings call it; the function's own name by default.

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
            raise TypeError(f"a label score is a function of a BatchOutput, got {self.function!r}")
        object.__setattr__(self, "name", self.name or name_of(self.function))

    def requires(self) -> Requires:
        """Return the layers it looks at."""
        return Requires(norms=tuple(self.norms), values=tuple(self.values), logits=True)

    def of_all(self, out: BatchOutput) -> Tensor:
        """Call the function."""
        scores = torch.as_tensor(self.function(out))
        if scores.shape != out.output.shape or bool(scores.isnan().any()):
            raise ValueError(
                f"the label score has shape {tuple(scores.shape)}, the logits "
                f"{tuple(out.output.shape)}: it must give a number for every label, and no NaN"
            )
        return scores


@dataclass(frozen=True)
class RuleScore(LabelScore):
    """A score by one of the exact rules, whose settings may be left to be tuned.

    Parameters
    ----------
    name
        ``"lac"``, ``"aps"``, ``"raps"`` or ``"ffraps"``.
    temperature, lam, kreg, delta
        Settings of the rule: ``None`` for those to be tuned, ``temperature="fit"``.
    gradient, feature
        Where FFRAPS takes its gradient.
    tune
        ``None``, ``"size"`` or ``"coverage"``.
    randomized
        Whether only a random share of a label's own weight counts. If ``False`` so it is when
        calibrating only, and sets hold every label that some share would let in.
    allow_empty
        Whether sets may be empty, when settings are compared.
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
    #: Outputs are taken as logits, so that probabilities are refused.
    takes_logits = True

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise ValueError(f"unknown rule {self.name!r}: choose one of {', '.join(RULES)}")
        if self.tune not in (None, tuning.SIZE, tuning.COVERAGE):
            raise ValueError(
                f"tune must be None, {tuning.SIZE!r} or {tuning.COVERAGE!r}, got {self.tune!r}"
            )
        if isinstance(self.temperature, str | None) and self.temperature != FIT:
            raise ValueError(
                f"temperature must be a positive number or {FIT!r}, got {self.temperature!r}"
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
        known = {name: _DEFAULTS[name] for name in missing}
        fitted = 1.0 if self.temperature == FIT else self.temperature
        self._rule(temperature=fitted, **known)  # which refuses values out of range

    def _check_feature(self) -> None:
        """Refuse a layer that has no part in the gradient, or one that is missing."""
        if self.gradient == SOFTMAX and self.feature is not None:
            raise ValueError(
                f"feature={self.feature!r} has no part in gradient={SOFTMAX!r}, which is taken in "
                f"the logits: leave it out, or use gradient={FEATURE!r}"
            )
        if self.gradient == FEATURE and self.feature in (None, OUTPUT):
            raise ValueError(
                f"gradient={FEATURE!r} needs a layer before the output: give feature=, a dotted "
                "module name, a module or 'input'"
            )

    @property
    def _takes(self) -> Sequence[str]:
        return _TAKES[self.name]

    def _rule(self, **settings: Any) -> Rule:
        known = {name: getattr(self, name) for name in ("temperature", *self._takes)} | settings
        if self.name == LAC:
            return Threshold(**known)
        return Cumulative(**known, gradient=self.gradient)

    @property
    def rule(self) -> Rule | None:
        """The rule; ``None`` until all settings are known."""
        return None if self.open_settings else self._rule()

    @property
    def takes_infinity(self) -> bool:  # type: ignore[override]
        """Whether a score may be infinite: of labels that are none of the classes."""
        return self.other_labels

    @property
    def draws(self) -> bool:
        """Whether calibrating uses random numbers."""
        return self.name != LAC

    @property
    def open_settings(self) -> list[str]:
        """The names of settings that are still to be tuned."""
        missing = [name for name in self._takes if getattr(self, name) is None]
        return [*(["temperature"] if self.temperature == FIT else []), *missing]

    def config(self) -> dict[str, Any]:
        """Return the arguments; how it was tuned makes no difference to a score that is settled."""
        tuned = () if self.open_settings else ("tune", "allow_empty")
        return {name: value for name, value in super().config().items() if name not in tuned}

    def selection(self) -> Selection | None:
        """Return what tunes the settings that are left open."""
        return _Tuning(self) if self.open_settings else None

    def requires(self) -> Requires:
        """Return the gradient of the top label's probability, if the rule uses it."""
        if self.feature is None:
            return Requires(logits=True)
        return Requires((self.feature,), of=top_probability, logits=True)

    # -- scores -----------------------------------------------------------------------------

    def label_rows(self, out: BatchOutput) -> LabelRows:
        """Return what the rule looks at."""
        check_logits(out.output)
        # No share of its own weight: the label that crosses the threshold is in the set, so that
        # it holds those of all shares, and covers as they do.
        share = out.random
        if share is None:
            share = torch.zeros(len(out.output), dtype=torch.float64)
        norms = None if self.feature is None else out.norms[self.feature]
        return LabelRows(out.output, share.to(out.output.device), norms)

    def of_all(self, out: BatchOutput) -> Tensor:
        """Score every label of each row, (n, K)."""
        return rules.all_scores(self._rule(), self.label_rows(out))

    def _of_labels(self, out: BatchOutput, labels: Tensor) -> Tensor:
        """Score one label of each row, (n,)."""
        return rules.label_scores(self._rule(), self.label_rows(out), labels)

    def mask(self, out: BatchOutput, threshold: Tensor, *, allow_empty: bool) -> Tensor:
        """Mark the labels whose score is at most the threshold, (n, K)."""
        rows = self.label_rows(out)
        return rules.label_mask(self._rule(), rows, threshold, allow_empty=allow_empty)

    def order(self, out: BatchOutput) -> Iterator[Tensor]:
        """Yield how many labels stand behind each."""
        behind = torch.arange(out.output.shape[1], device=out.output.device).flip(0).double()
        for block in blocks(*out.output.shape):
            logits = out.output[block]
            labels = in_order(self._rule().weights(logits), logits)[1]
            yield torch.empty(logits.shape, dtype=behind.dtype, device=logits.device).scatter_(
                1, labels, behind.expand(len(logits), -1)
            )


class _Tuning(Selection):
    """Fits the temperature and tunes the penalties of a rule."""

    def __init__(self, score: RuleScore) -> None:
        self.score, self.what = score, ", ".join(score.open_settings)

    def requires(self) -> Requires:
        """Return what the rule requires."""
        return self.score.requires()

    def select(self, aside: Aside) -> Selected:
        """Return the score with the settings whose sets are smallest, or cover most evenly."""
        score, count = self.score, len(aside.y)
        rows, labels, level = known_rows(score, aside)
        temperature = score.temperature
        if temperature == FIT:
            temperature = tuning.fit_temperature(rows.logits, labels)
        score = replace(score, temperature=temperature)
        settings = {name: getattr(score, name) for name in ("kreg", "lam", "delta")}
        if score.tune:
            tuned = self._tuned(score, rows, labels, level)
            choice = replace(tuned, rows=count, alpha=float(aside.alpha))
            takes = _TAKES[score.name]
            settings = {name: getattr(choice, name) if name in takes else None for name in settings}
        else:
            choice = tuning.SetChoice(
                temperature, **settings, rows=count, alpha=float(aside.alpha),
                criterion=None, candidates=(),
            )  # fmt: skip
        return Selected(replace(score, **settings), aside.calibration, {"sets": choice})

    @staticmethod
    def _tuned(score: RuleScore, rows: LabelRows, labels: Tensor, alpha: Any) -> tuning.SetChoice:
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
    """Return the same score, or selection, for labels that may be none of the classes."""
    other = copy.copy(score)
    other.__dict__["other_labels"] = other.__dict__["takes_infinity"] = True
    return other


def as_score(score: Any) -> LabelScore:
    """Take a label score as it is; make one of a function."""
    return score if isinstance(score, LabelScore) else FunctionScore(score)


def top_probability(logits: Tensor) -> Tensor:
    """Return the probability of the most likely label of each row."""
    check_logits(logits)
    return logits.double().softmax(dim=1).amax(dim=1)


def known_rows(score: RuleScore, aside: Aside) -> tuple[LabelRows, Tensor, Any]:
    """Return rows set aside whose label is one of the classes, and the level to compare them at.

    A threshold over all rows leaves out the others first: of n rows, of which m are known, it is
    that of the m at the level that allows for n alpha - (n - m) misses. Where there are more
    others than that, it is infinite whatever is chosen.
    """
    rows, alpha = score.label_rows(aside.out), aside.alpha
    labels = checked_labels(aside.y, aside.out, score.other_labels)
    known = labels < rows.logits.shape[1]
    count = int(known.sum())
    if count == len(labels):
        return rows, labels, alpha
    if not count:
        raise ValueError(
            f"none of the {len(labels)} rows set aside to choose has a label that the model knows"
        )
    missed = 1 - (1 - exact_alpha(alpha)) * len(labels) / count
    return rows.take(known), labels[known], missed if missed > 0 else alpha


# -- checks ------------------------------------------------------------------------------------


def check_logits(logits: Tensor) -> None:
    """Refuse outputs that are not one number for each of several classes."""
    if logits.dim() != 2:
        raise ValueError(
            f"the model's output has shape {tuple(logits.shape)}; label sets need logits of shape "
            "(n, K), one for each of K classes"
        )
    if logits.shape[1] < 2:
        raise ValueError(
            "the model gives one logit: the label score must ask for two, by "
            "ffcp.Requires(logits=True) in requires()"
        )


def refuse_probabilities(logits: Tensor) -> None:
    """Refuse what is nonnegative and sums to 1 in every row: a softmax of it is not meant."""
    tolerance = max(1e-4, torch.finfo(logits.dtype).eps)
    if bool((logits >= 0).all() and ((logits.double().sum(dim=1) - 1).abs() <= tolerance).all()):
        raise ValueError(
            "the model's output looks like probabilities: all rows are nonnegative and sum to 1. "
            "Label sets start from logits: return them before the softmax, or torch.log of the "
            "probabilities"
        )


def checked_labels(y: Tensor, out: BatchOutput, other_labels: bool = False) -> Tensor:
    """Check the class labels of some rows."""
    rows, classes = out.output.shape
    if y.dim() != 1:
        hint = ": for one-hot rows use y.argmax(dim=1)" if y.shape[-1] == classes else ""
        raise ValueError(
            f"labels have shape {tuple(y.shape)}, expected one integer per row: {(rows,)}{hint}"
        )
    if y.is_floating_point() or y.dtype == torch.bool:
        raise TypeError(
            f"labels must be integers, the numbers of classes from 0, got {y.dtype}: "
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
