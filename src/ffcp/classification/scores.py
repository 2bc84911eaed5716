"""Label scores: how surprising each label of a row is, by a rule or by a function of one's own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ffcp import files
from ffcp.batch import BatchOutput, Requires, name_of
from ffcp.classification import rules, tuning
from ffcp.classification.rules import SOFTMAX, Cumulative, Rows, Rule
from ffcp.classification.weights import blocks, in_order
from ffcp.conformal.columns import Columns
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import exact_alpha
from ffcp.conformal.selection import Chosen, Score

FIT = "fit"
_DEFAULTS = {"lam": 0.01, "kreg": 5, "delta": 0.01}
Self = TypeVar("Self", bound="LabelScore")


class Shares(NamedTuple):
    """Random numbers in [0, 1) for the rows of a call, which stand somewhere in a stream."""

    draws: Draws
    first_row: int

    def __call__(self, rows: range) -> Tensor:
        """Give the numbers of some rows."""
        numbers = range(self.first_row + rows.start, self.first_row + rows.stop)
        return self.draws.span(numbers)[:, 0]


class LabelScore(Score):
    """How surprising each label of a row is; the base of all label scores.

    A score of one's own defines :meth:`of_all`; or give a function of :class:`ffcp.BatchOutput`, of
    which :class:`ffcp.scores.FunctionScore` makes one.

    Attributes
    ----------
    randomized : bool
        Whether sets use a random number per row.
    draws : bool
        Whether calibrating does.
    shares
        The random numbers; ``None`` where none are drawn.
    open_settings : sequence of str
        The names of settings that are still to be chosen.
    other_labels : bool
        Whether a label may be none of the classes; it has the number behind the last, and no
        threshold but an infinite one lets it in.

    Examples
    --------
    >>> import ffcp
    >>> class Margin(LabelScore):  # how far a logit is below the largest
    ...     def of_all(self, out):
    ...         return out.output.amax(dim=1, keepdim=True) - out.output
    ...
    ...     def settings(self):
    ...         return {"score": "margin"}
    >>> logits, y = torch.tensor([[2.0, 1.0, 0.0]]).repeat(9, 1), torch.tensor([0] * 5 + [1] * 4)
    >>> sets = ffcp.SetPredictor(torch.nn.Identity(), Margin()).calibrate(logits, y)
    >>> sets.predict_set(logits[:1], alpha=0.2).labels
    [tensor([0, 1])]
    """

    randomized = False
    draws = False
    shares: Shares | None = None
    open_settings: Sequence[str] = ()
    other_labels = False

    def of_all(self, out: BatchOutput) -> Tensor:
        """Score every label of each row: (n, K), the smaller the better a label fits."""
        raise NotImplementedError

    def of_labels(self, out: BatchOutput, labels: Tensor) -> Tensor:
        """Score one label of each row, (n,)."""
        return self.of_all(out).double().gather(1, labels[:, None])[:, 0]

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

    def note(self, out: BatchOutput, y: Any) -> dict[str, Any]:
        """Note the scores of the true labels."""
        check_logits(out.output)
        return {"score": self.of_truth(out, y)[:, None].cpu()}

    def of_truth(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Score the true label of each row, (n,): infinity if it is none of the classes."""
        labels = checked_labels(y, out, self.other_labels)
        return _infinite_beyond(labels, out.output.shape[1], partial(self.of_labels, out))

    def with_other_labels(self: Self) -> Self:
        """Give the same score for labels that may be none of the classes."""
        other = copy.copy(self)
        other.other_labels = other.takes_infinity = True
        return other

    def drawing(self: Self, shares: Shares | None) -> Self:
        """Give the same score with other random numbers, or without any."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)  # as copy.copy does, which looks at more on the way
        other.shares = shares
        return other


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

    def __init__(
        self,
        function: Callable[[BatchOutput], Tensor],
        norms: Sequence[str] = (),
        values: Sequence[str] = (),
        name: str | None = None,
    ) -> None:
        if not callable(function):
            raise TypeError(f"a label score is a function of what a pass saw, got {function!r}")
        self._function = function
        self._needs = Requires(norms=tuple(norms), values=tuple(values))
        self.name = name or name_of(function)

    def requires(self) -> Requires:
        """Ask for the layers it looks at."""
        return self._needs

    def settings(self) -> dict[str, Any]:
        """Say what it is: of the function only the name is known."""
        return {"score": self.name}

    def of_all(self, out: BatchOutput) -> Tensor:
        """Call the function."""
        scores = torch.as_tensor(self._function(out))
        if scores.shape != out.output.shape or bool(scores.isnan().any()):
            raise ValueError(
                f"the label score has shape {tuple(scores.shape)}, the logits "
                f"{tuple(out.output.shape)}: it must give a number for every label, and no NaN"
            )
        return scores


class RuleScore(LabelScore):
    """A score by one of the exact rules, whose settings may be left to be chosen.

    Parameters
    ----------
    name
        What saved settings call it.
    given
        Settings of the rule: ``None`` for those to be tuned, ``temperature="fit"``.
    rule
        What makes a rule of settings that are all known.
    tune
        ``None``, ``"size"`` or ``"coverage"``.
    randomized
        Whether only a random share of a label's own weight counts. If ``False`` so it is when
        calibrating only, and sets hold every label that some share would let in. ``None`` for a
        rule that uses no random numbers.
    allow_empty
        Whether sets may be empty, when settings are compared.
    feature
        The layer for ``gradient="feature"``.
    """

    lowest = 0.0
    takes_infinity = False

    def __init__(
        self,
        name: str,
        given: Mapping[str, Any],
        rule: Callable[..., Rule],
        *,
        tune: str | None = None,
        randomized: bool | None = None,
        allow_empty: bool = False,
        feature: str | None = None,
    ) -> None:
        self.name, self.tune, self.feature = name, tune, feature
        self.randomized, self.draws = bool(randomized), randomized is not None
        self._make, self._allow_empty = rule, allow_empty
        self._given = self._checked(given)
        self.open_settings = [k for k, v in self._given.items() if v is None or v == FIT]
        self.rule: Rule | None = None if self.open_settings else rule(**self._given)

    # -- settings ---------------------------------------------------------------------------

    def _checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in defaults where nothing is tuned, and refuse values out of range."""
        if self.tune not in (None, tuning.SIZE, tuning.COVERAGE):
            raise ValueError(
                f"tune must be None, {tuning.SIZE!r} or {tuning.COVERAGE!r}, got {self.tune!r}"
            )
        if isinstance(given["temperature"], str | None) and given["temperature"] != FIT:
            raise ValueError(
                f"temperature must be a positive number or {FIT!r}, got {given['temperature']!r}"
            )
        # Plain numbers: they are saved as JSON.
        known = {k: v.item() if isinstance(v, np.generic) else v for k, v in given.items()}
        missing = {key: _DEFAULTS[key] for key, value in given.items() if value is None}
        if self.tune and not missing:
            raise ValueError(
                f"tune={self.tune!r} has nothing to tune: leave out those of "
                f"{', '.join(key for key in given if key in _DEFAULTS)} that are to be chosen"
            )
        if not self.tune:
            known.update(missing)
        fitted = {"temperature": 1.0} if known["temperature"] == FIT else {}
        self._make(**{**known, **missing, **fitted})  # which raises for values out of range
        return known

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        """Whether settings are still to be chosen."""
        return self.rule is None

    def settings(self) -> dict[str, Any]:
        """Say what the rule is."""
        values = dict.fromkeys(self._given) if self.rule is None else asdict(self.rule)
        return {
            "score": self.name,
            **{key: values[key] for key in self._given},
            "feature": self.feature,
            "randomized": self.randomized,
        }

    def requires(self) -> Requires:
        """Ask for the gradient of the top label's probability, if the rule uses it."""
        return Requires() if self.feature is None else Requires((self.feature,), of=top_probability)

    def restored(self, settings: Mapping[str, Any]) -> RuleScore:
        """Take open settings as they were saved."""
        known = {**self._given, **{key: settings.get(key) for key in self.open_settings}}
        return self if None in known.values() else self._settled(known)

    def choices_from(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Build the choice of the settings again."""
        sets = saved.get("sets")
        return {} if sets is None else {"sets": files.rebuilt(tuning.SetChoice, sets)}

    def _settled(self, settings: Mapping[str, Any]) -> RuleScore:
        other = copy.copy(self)
        other.rule = self._make(**settings)
        return other

    # -- scores -----------------------------------------------------------------------------

    def _rows(self, out: BatchOutput) -> Rows:
        check_logits(out.output)
        # No share of its own weight: the label that crosses the threshold is in the set, so that
        # it holds those of all shares, and covers as they do.
        share = torch.zeros(len(out.rows), dtype=torch.float64)
        if self.shares is not None:
            share = self.shares(out.rows)
        norms = None if self.feature is None else out.norms[self.feature]
        return Rows(out.output, share.to(out.output.device), norms)

    def _known_rule(self) -> Rule:
        assert self.rule is not None
        return self.rule

    def of_all(self, out: BatchOutput) -> Tensor:
        """Score every label of each row, (n, K)."""
        return rules.all_scores(self._known_rule(), self._rows(out))

    def of_labels(self, out: BatchOutput, labels: Tensor) -> Tensor:
        """Score one label of each row, (n,)."""
        return rules.label_scores(self._known_rule(), self._rows(out), labels)

    def mask(self, out: BatchOutput, threshold: Tensor, *, allow_empty: bool) -> Tensor:
        """Mark the labels whose score is at most the threshold, (n, K)."""
        return rules.label_mask(
            self._known_rule(), self._rows(out), threshold, allow_empty=allow_empty
        )

    def order(self, out: BatchOutput) -> Iterator[Tensor]:
        """Yield how many labels stand behind each."""
        behind = torch.arange(out.output.shape[1], device=out.output.device).flip(0).double()
        for block in blocks(*out.output.shape):
            logits = out.output[block]
            labels = in_order(self._known_rule().weights(logits), logits)[1]
            yield torch.empty(logits.shape, dtype=behind.dtype, device=logits.device).scatter_(
                1, labels, behind.expand(len(logits), -1)
            )

    # -- choosing settings ------------------------------------------------------------------

    def note(self, out: BatchOutput, y: Any) -> dict[str, Any]:
        """Note the scores of the true labels; or, while settings are open, all they need."""
        check_logits(out.output)
        if not out.rows.start:
            refuse_probabilities(out.output)
        if not self.is_open:
            return super().note(out, y)
        rows = self._rows(out)
        labels = checked_labels(y, out, self.other_labels)
        noted = {"label": labels, "logits": rows.logits, "share": rows.share}
        return noted if rows.norms is None else {**noted, "norms": rows.norms}

    def scores(self, noted: Columns) -> Tensor:
        """Give the scores of rows that were noted, also while settings were open."""
        if "score" in noted:
            return torch.as_tensor(noted["score"])
        rows = _noted_rows(noted)
        score = partial(rules.label_scores, self._known_rule(), rows)
        return _infinite_beyond(noted["label"], rows.logits.shape[1], score)[:, None].cpu()

    def choose(
        self, aside: Columns, alpha: Any, left: int = 0, weights: Tensor | None = None
    ) -> Chosen:
        """Fit the temperature and tune what is open."""
        (rows, labels, level), settings = known_rows(aside, alpha), dict(self._given)
        if settings["temperature"] == FIT:
            settings["temperature"] = tuning.fit_temperature(rows.logits, labels)
        if self.tune:
            choice = replace(
                self._tuned(settings, rows, labels, level),
                rows=len(aside["label"]),
                alpha=float(alpha),
            )
            settings.update(kreg=choice.kreg, lam=choice.lam)
            if "delta" in settings:
                settings["delta"] = choice.delta
        else:
            kept = {key: settings.get(key) for key in ("kreg", "lam", "delta")}
            choice = tuning.SetChoice(
                settings["temperature"], **kept, rows=len(aside["label"]), alpha=float(alpha),
                criterion=None, candidates=(),
            )  # fmt: skip
        return Chosen(self._settled(settings), {"sets": choice})

    def _tuned(
        self, settings: Mapping[str, Any], rows: Rows, labels: Tensor, alpha: Any
    ) -> tuning.SetChoice:
        assert self.tune is not None
        lam, delta = settings["lam"], settings.get("delta", 0.0)
        return tuning.tune(
            rows,
            labels,
            Cumulative(settings["temperature"], gradient=settings.get("gradient", SOFTMAX)),
            kreg=settings["kreg"],
            lams=tuning.LAMS[self.tune] if lam is None else (lam,),
            deltas=tuning.DELTAS if delta is None else (delta,),
            criterion=self.tune,
            alpha=alpha,
            allow_empty=self._allow_empty,
            randomized=self.randomized,
        )


def as_score(score: Any) -> LabelScore:
    """Take a label score as it is; make one of a function."""
    return score if isinstance(score, LabelScore) else FunctionScore(score)


def top_probability(logits: Tensor) -> Tensor:
    """Give the probability of the most likely label of each row."""
    check_logits(logits)
    return logits.double().softmax(dim=1).amax(dim=1)


def _noted_rows(noted: Columns) -> Rows:
    return Rows(noted["logits"], noted["share"], noted.get("norms"))


def _infinite_beyond(labels: Tensor, classes: int, score: Callable[[Tensor], Tensor]) -> Tensor:
    """Score labels; those beyond the classes, which no rule can score, with infinity."""
    beyond = labels >= classes
    if not bool(beyond.any()):
        return score(labels)
    return score(labels.masked_fill(beyond, 0)).masked_fill(beyond, math.inf)


def known_rows(aside: Columns, alpha: Any) -> tuple[Rows, Tensor, Any]:
    """Give rows set aside whose label is one of the classes, and the level to compare them at.

    A threshold over all rows leaves out the others first: of n rows, of which m are known, it is
    that of the m at the level that allows for n alpha - (n - m) misses. Where there are more
    others than that, it is infinite whatever is chosen.
    """
    rows, labels = _noted_rows(aside), aside["label"]
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
            "the model gives one class only; a set needs at least two. For a binary classifier "
            "with one logit z return torch.cat([0 * z, z], dim=1)"
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
