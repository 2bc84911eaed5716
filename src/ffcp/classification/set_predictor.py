"""The predictor of prediction sets: a label score and a calibration, with predict_set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ffcp.arguments import Running, known_only
from ffcp.batch import BatchOutput, Requires
from ffcp.calibrated import Counts
from ffcp.calibration_loop import Batch, BatchRunner, Result
from ffcp.classification.names import checked_names, label_tensor
from ffcp.classification.score_selection import AUTO, LabelScoreSelection, ScoreChoice, score_of
from ffcp.classification.scores import (
    LabelScore,
    check_logits,
    refuse_probabilities,
    with_other_labels,
)
from ffcp.classification.sets import LabelSet
from ffcp.classification.tuning import SetChoice
from ffcp.conformal.calibration import Calibration, as_calibration
from ffcp.conformal.columns import Columns, joined, take
from ffcp.conformal.p_values import tail_counts
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import requested_alpha
from ffcp.network import forward, inputs
from ffcp.network.inputs import RowBuffer
from ffcp.predictor import Predictor, steady
from ffcp.warnings import warn

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Streams of random numbers.
_CALIBRATION, _PREDICTION, _SMOOTHING = 1, 2, 4


class SetPredictor(Predictor):
    """Prediction sets of labels, from a label score and a calibration.

    Parameters
    ----------
    model : nn.Module
        A trained network; forward returns logits of shape (n, K).
    score : LabelScore, callable or "auto"
        The label score: ``ffcp.scores.LAC()``, ``ffcp.scores.APS()``, ``ffcp.scores.RAPS()``,
        ``ffcp.scores.FFRAPS()``, or a function from :class:`ffcp.BatchOutput` to scores (n, K),
        small where the label fits. ``"auto"`` selects that of LAC, APS and RAPS with the smallest
        sets, at temperature 1 or a fitted one, on rows that are not used for calibration; LAC if
        there is no significant difference, or, with a warning, if there are fewer than 20 rows.
    calibration : Calibration, default=None
        How scores are kept and thresholds looked up: :class:`ffcp.calibrations.Marginal` (the
        default), :class:`ffcp.calibrations.Mondrian`, :class:`ffcp.calibrations.Local`, or
        :class:`ffcp.calibrations.ByLabel` for a threshold of each class.
    allow_zero_sets : bool, default=False
        Whether sets may be empty; if not, an empty set gets the label with the smallest score.
    selection_fraction : float, default=0.2
        If there is something to select: the share of the calibration rows that is set aside for
        it and not calibrated on.
    selection_alpha : float, default=0.1
        Level at which candidates are compared.
    seed : int, default=None
        Seed of the split and of random numbers. Without it the split is that of seed 0, and the
        operating system seeds the random numbers.
    batch_size : int, default=None
        Rows per pass over arrays; by default about 16 MB of input (2 MB of images), at most
        8,192 rows.
    output : str, int or callable, default=None
        Which part of the model's return value is the prediction, if it is a tuple, a dict or
        similar: a key (``"logits"``), an index, or a function.
    names : sequence of str, default=None
        Class names, in the order of the model's outputs. Labels may then be names as well as
        integers, and the labels of a set are names.
    other_labels : bool, default=False
        Whether a row's label may be none of the model's K classes: the number K, or a string that
        is not among the ``names``. Its score is infinite, so calibration rows with other labels
        raise the threshold, and the guarantee holds for all new rows, whatever their label. Sets
        have a last column, K, for "another label", which they hold, with all classes, where the
        threshold is infinite.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = nn.Linear(4, 3), torch.randn(200, 4), torch.randint(0, 3, (200,))
    >>> margin = lambda out: out.output.amax(dim=1, keepdim=True) - out.output
    >>> sets = SetPredictor(model, margin).calibrate(x[:100], y[:100]).predict_set(x[100:])
    >>> sets.mask.shape
    torch.Size([100, 3])
    """

    compared = ("names", "other_labels", "output")

    def __init__(
        self,
        model: nn.Module,
        score: Any,
        calibration: Calibration | None = None,
        *,
        allow_zero_sets: bool = False,
        names: Sequence[str] | None = None,
        other_labels: bool = False,
        **running: Unpack[Running],
    ) -> None:
        known_only(type(self), running, Running)
        self.names = None if names is None else checked_names(names)
        self.other_labels = other_labels
        self.allow_zero_sets = allow_zero_sets
        calibration = as_calibration(calibration)
        score = score_of(score, allow_zero_sets)
        if other_labels:
            _refuse_calibration_by_label(calibration)
            checked_names([*(self.names or ()), LabelSet.OTHER])  # a reserved name
            score = with_other_labels(score)
        super().__init__(model, score, calibration, **running)

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, but for the model."""
        score = AUTO if isinstance(self._given[0], LabelScoreSelection) else self._given[0]
        names = ("allow_zero_sets", "names", "other_labels")
        settings = {name: getattr(self, name) for name in names}
        return {"score": score, **settings, **super().config()}

    @property
    def choice(self) -> SetChoice | ScoreChoice | None:
        """The report of the selection of the settings, or of the score; None if there was none."""
        choice: SetChoice | ScoreChoice | None = self._state.report.get("sets")
        return choice or self._state.report.get("score")

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Whether sets depend on the random number of a row."""
        return bool(self._state.score.randomized)

    @property
    def classes(self) -> int | None:
        """The number of classes; ``None`` before the calibration."""
        return self._state.counts.classes

    def read_target(self, y: Any) -> Tensor:
        """Return the class number of each row."""
        return label_tensor(y, self.names, self.other_labels)

    def _runner(self, update: bool) -> BatchRunner:
        counts = self._state.counts if update else Counts()
        return _LabelRunner(
            self.model,
            self._state.score if update else self._given[0],
            counts,
            self._stream.entropy(),
            self.names,
        )

    # -- using the calibration --------------------------------------------------------------

    @steady
    def predict_set(
        self,
        /,
        x: Any,
        alpha: Any = None,
        *,
        confidence_level: Any = None,
        first_row: int | None = None,
        groups: Any = None,
        weights: Any = None,
        **unknown: NoReturn,
    ) -> LabelSet:
        """Return sets of labels that contain the true one with probability at least 1 - alpha.

        Parameters
        ----------
        x : array-like or loader
            Inputs, as the model takes them; or a loader of batches of inputs, whose sets are
            returned together. A loader may yield pairs ``(x, y)``, of which x is used, if the
            model has one argument; a model of two arguments takes both as inputs; where this is
            ambiguous an error is raised. A list is an input, never a loader.
        alpha : float, default=None
            Allowed share of misses, in (0, 1); 0.1 if neither is given. Any value, without
            calibrating again.
        confidence_level : float, default=None
            Instead of ``alpha``: the required coverage, 1 - alpha. 0.9 is alpha = 0.1.
        first_row : int, default=None
            To repeat a job exactly: the number of the first row of ``x`` in the job. Each row
            number then has its own random number, by the seed. By default the stream of random
            numbers continues from call to call.
        groups : array-like, default=None
            The group of each row, if the calibration had groups.
        weights : array-like, default=None
            The weight of each row, for ``ffcp.calibrations.Weighted("given")``.

        Returns
        -------
        LabelSet
            The mask of labels, their number and, when accessed, the labels in order.
        """
        exact = requested_alpha(alpha, confidence_level, unknown)
        calibration = self.calibrated().calibration
        score, rows, ordered = self._state.score, self.rows(x), []
        buffer, in_all = RowBuffer(rows.count), torch.tensor(False)
        infinite_rows: list[Columns] = []
        for out, metadata, draws in self._randomized(rows, first_row, groups, weights):
            thresholds = self._for_all_classes(calibration.quantiles([exact], metadata, draws)[0])
            infinite = thresholds.isinf()
            if bool(infinite.any()):
                in_all = in_all | infinite.any(dim=0)
                columns = {"number": torch.tensor(out.rows), **metadata}
                infinite_rows.append(take(columns, infinite.any(dim=1).expand(len(out.output))))
            thresholds = thresholds.expand(len(out.output), -1)
            mask = score.mask(out, thresholds, allow_empty=self.allow_zero_sets)
            if self.other_labels:
                mask = torch.cat([mask, thresholds.isposinf().to(mask.device)], dim=1)
            buffer.add({"mask": mask})
            if rows.whole is None:  # a loader need not yield the same rows again
                ordered += LabelSet(mask, partial(score.order, out)).ordered
        if bool(in_all.any()):
            assert rows.count is not None
            columns = joined(infinite_rows)
            message = _infinite_message(in_all, len(columns["number"]), rows.count)
            warn(f"{message}{self.explain_infinite(exact, columns)}")
        if rows.whole is None:
            return LabelSet(buffer["mask"], None, ordered, self.names, self.other_labels)
        order = partial(self._order, score, rows.whole)
        return LabelSet(buffer["mask"], order, None, self.names, self.other_labels)

    def forward(self, x: Any, alpha: Any = None, **options: Any) -> LabelSet:
        """Return sets of labels, as :meth:`predict_set` does: ``predictor(x)``."""
        return self.predict_set(x, alpha, **options)

    def _randomized(
        self, rows: inputs.Rows, first_row: int | None, groups: Any, weights: Any
    ) -> Iterator[tuple[BatchOutput, Columns, Draws | None]]:
        """Yield batch outputs, with random numbers if sets are randomised."""
        for out, metadata, draws, first in self.batch_outputs(rows, groups, first_row, weights):
            _check_classes(out.output, self.classes)
            yield self._with_random(out, first_row, first), metadata, draws

    def _with_random(self, out: BatchOutput, first_row: int | None, first: int) -> BatchOutput:
        """Return the batch output with random numbers of its rows, if sets are randomised."""
        if not self.draws:
            return out
        draws = Draws(self._stream.entropy(pinned=first_row is not None), _PREDICTION)
        return out._replace(random=draws.span(range(first, first + len(out.output)))[:, 0])

    def _for_all_classes(self, thresholds: Tensor) -> Tensor:
        """Return thresholds by class for all classes: those without rows are in every set."""
        if thresholds.shape[-1] == 1:
            return thresholds
        assert self.classes is not None
        return pad(thresholds, (0, self.classes - thresholds.shape[-1]), value=torch.inf)

    def _order(self, score: LabelScore, x: Any) -> Iterator[Tensor]:
        # Without groups: only the labels' order is needed.
        for batch in inputs.batches(x, self.rows_at_once(x)):
            yield from score.order(forward.run_batch(self.model, batch, self._state.requires))

    @steady
    def score(self, x: Any, y: Any = None, *, first_row: int | None = None) -> Tensor:
        """Return the score of one label per row, shape (n,), in float64.

        ``x`` may be a loader of pairs ``(x, y)``, passed without ``y``. Random numbers are those
        of :meth:`predict_set`, not of the calibration: none with ``randomized=False``.

        Parameters
        ----------
        x : array-like, frame, tuple, dict or loader
            Inputs, a row each; or a loader of pairs ``(x, y)``, passed alone.
        y : array-like, default=None
            Labels, unless ``x`` is a loader.
        first_row : int, default=None
            Number of the first row, which determines its random numbers.
        """
        self.must_be_settled()
        buffer = RowBuffer()
        for out, target in self.targeted(x, y):
            out = self._with_random(out, first_row, self.first_number(out, first_row))
            buffer.add({"scores": self._state.score.score(out, target)[:, 0]})
        return buffer["scores"]

    @steady
    def score_all(self, x: Any, *, first_row: int | None = None) -> Tensor:
        """Return the scores of every class, shape (n, K), in float64.

        Random numbers are those of :meth:`predict_set`, not of the calibration: none with
        ``randomized=False``.

        Parameters
        ----------
        x : array-like, frame, tuple or dict
            Inputs, a row each.
        first_row : int, default=None
            Number of the first row, which determines its random numbers.
        """
        self.must_be_settled()
        rows, row = self.rows(x), 0
        buffer = RowBuffer(rows.count)
        for batch in rows:
            out = forward.run_batch(self.model, batch, self._state.requires, row, now=self._weights)
            _check_classes(out.output, self.classes)
            out = self._with_random(out, first_row, self.first_number(out, first_row))
            row += len(out.rows)
            buffer.add({"scores": self._state.score.of_all(out).double()})
        return buffer["scores"]

    @steady
    def p_values(
        self, x: Any, *, smoothed: bool = False, first_row: int | None = None, groups: Any = None
    ) -> Tensor:
        """Return the conformal p-value of every label, (n, K), in float64.

        The p-value is the share of calibration rows, including the new one, whose score is at
        least that of the label: for the true label at most u with probability at most u. Labels
        with p-values above alpha are those of :meth:`predict_set`.

        Parameters
        ----------
        x : array-like, frame, tuple, dict or loader
            As in :meth:`predict_set`.
        groups : array-like, default=None
            As in :meth:`predict_set`. With groups or ``class_conditional=True`` rows are ranked
            among those of their group or of the label.
        smoothed : bool, default=False
            Count only a random share of equal scores: p-values of the true label are then
            uniform. There is one random number for each row.
        first_row : int, default=None
            To repeat random numbers, as in :meth:`predict_set`.
        """
        calibration, rows = self.calibrated().calibration, self.rows(x)
        buffer = RowBuffer(rows.count)
        draws = Draws(self._stream.entropy(pinned=first_row is not None), _SMOOTHING)
        for out, metadata, _ in self._randomized(rows, first_row, groups, None):
            scores = self._state.score.of_all(out).double().cpu()
            if self.other_labels:
                scores = pad(scores, (0, 1), value=torch.inf)
            share = None
            if smoothed:
                first = self.first_number(out, first_row)
                share = draws.span(range(first, first + len(scores)))
            counts = tail_counts(calibration, scores, metadata)
            buffer.add({"p_values": counts.p_values(share)})
        return buffer["p_values"]

    @property
    def draws_to_calibrate_only(self) -> bool:
        """Whether scores are randomised in the calibration but not in :meth:`score`."""
        score = self._state.score
        return bool(_draws(score) and not score.randomized)

    def check_scores(self) -> None:
        """Raise ValueError if a loaded calibration has impossible scores or labels."""
        super().check_scores()
        if len(self.calibration) and (self.classes or 0) < 2:
            raise ValueError(f"expected at least 2 classes, got {self.classes}")
        if len(self.calibration) and self.calibration.scores.shape[1] != 1:
            raise ValueError("expected one score per label, got several")
        for part in getattr(self.calibration, "parts", {None: self.calibration}).values():
            label = part.state().get("label", torch.zeros(0))
            if bool((label >= (self.classes or 0)).any()):
                raise ValueError(f"expected labels below {self.classes}, the number of classes")


class _LabelRunner(BatchRunner):
    """Runs a classifier on calibration rows: draws random numbers and checks the classes."""

    def __init__(
        self, model: nn.Module, score: Any, counts: Counts, entropy: int, names: Any
    ) -> None:
        super().__init__(model)
        self._score, self._classes, self._names = score, counts.classes, names
        self._rows_drawn = {seed: rows for seed, rows in counts.drawn}
        self._entropy = entropy

    def __call__(self, batch: Batch, requires: Requires) -> BatchOutput:
        """Return the batch output; raise if the number of classes differs."""
        out = super().__call__(batch, requires)
        check_logits(out.output)
        if getattr(self._score, "takes_logits", False) and not batch.row:
            refuse_probabilities(out.output)
        _check_classes(out.output, self._classes)
        classes = out.output.shape[1]
        if self._names is not None and len(self._names) != classes:
            raise ValueError(
                f"'names' has {len(self._names)} entries, the model {classes} classes: pass one "
                "name per class, in the order of the outputs"
            )
        self._classes = classes
        if not _draws(self._score):
            return out
        first = self._rows_drawn.get(self._entropy, 0)
        self._rows_drawn[self._entropy] = first + len(out.output)
        draws = Draws(self._entropy, _CALIBRATION)
        return out._replace(random=draws.span(range(first, first + len(out.output)))[:, 0])

    def finish(self, result: Result) -> Counts:
        """Return the number of classes and of random numbers drawn."""
        return Counts(self._classes, tuple(self._rows_drawn.items()))


def _draws(score: Any) -> bool:
    """Whether the calibration uses random numbers, even if sets are not randomised."""
    return bool(getattr(score, "draws", score.randomized))


def _check_classes(logits: Tensor, classes: int | None) -> None:
    """Raise ValueError unless there is a logit for each class of the calibration, if known."""
    if classes not in (None, logits.shape[-1]):
        raise ValueError(
            f"calibrated on {classes} classes, but the model now returns {logits.shape[-1]}: "
            "calibrate again"
        )


def _refuse_calibration_by_label(calibration: Calibration) -> None:
    """Raise ValueError for calibrations by label, which have no class for other labels.

    Thresholds of each class would put "another label" into every set, and rows with other labels
    would not calibrate any class; a label shift could not be estimated for them.
    """
    inner = getattr(calibration, "inner", calibration)
    if inner.traits.labels:
        raise ValueError(
            f"other_labels=True cannot be combined with {type(inner).__name__!r}, which groups "
            "rows by class: labels outside the model's classes have none. Leave out one of the "
            "two. With thresholds by class, leave rows of other labels out of calibrate(x, y); "
            "the guarantee then holds for rows of the model's classes only"
        )


def _infinite_message(in_all: Tensor, sets: int, rows: int) -> str:
    """Return a message of how many sets hold all labels, or how many classes are in all sets.

    >>> _infinite_message(torch.tensor([True]), 2, 5)
    '2 of 5 sets hold all labels'
    """
    if len(in_all) > 1:
        return f"{int(in_all.sum())} of {len(in_all)} classes are in every set"
    return f"{sets} of {rows} sets hold all labels" if sets < rows else "every set holds all labels"
