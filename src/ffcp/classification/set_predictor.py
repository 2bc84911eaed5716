"""Label sets from a label score and a calibration: calibrate, score, predict_set."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ffcp import files
from ffcp.batch import BatchOutput
from ffcp.calibration_loop import Batch, Calibrating
from ffcp.classification.names import checked_names, label_tensor
from ffcp.classification.score_selection import ScoreChoice, score_of
from ffcp.classification.scores import LabelScore, Shares, check_logits
from ffcp.classification.sets import LabelSet
from ffcp.classification.tuning import SetChoice
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Table, take
from ffcp.conformal.coverage_level import requested_alpha
from ffcp.conformal.density_ratio import ShiftChoice
from ffcp.conformal.marginal import Marginal
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.selection import Score
from ffcp.network.inputs import RowBuffer
from ffcp.predictor import Predictor, Running, known_only, steady
from ffcp.recipes import public
from ffcp.warnings import warn

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Streams of random numbers.
_CALIBRATION, _PREDICTION = 1, 2


@public
class SetPredictor(Predictor):
    """Sets of labels put together from pieces: a label score and a calibration.

    Parameters
    ----------
    model
        A trained network; forward returns logits of shape (n, K).
    score
        How surprising each label is: ``ffcp.scores.LAC()``, ``ffcp.scores.APS()``,
        ``ffcp.scores.RAPS()``, ``ffcp.scores.FFRAPS()``, or any function of what one pass saw
        (:class:`ffcp.BatchOutput`) to scores (n, K), the smaller the better a label fits.
        ``"auto"`` takes that of ``LACScore``, ``APSScore`` and ``RAPSScore`` whose sets are
        smallest, at the temperature 1 or the fitted one, compared on rows that then do not
        calibrate; where they tell no difference it is ``LACScore``, and with fewer than 20 of them
        too, which is said.
    calibration
        How scores are kept and thresholds looked up: :class:`ffcp.calibrations.Marginal` (the
        default), :class:`ffcp.calibrations.Mondrian`, :class:`ffcp.calibrations.Local`, or
        :class:`ffcp.calibrations.ByLabel` for a threshold of each class.
    allow_zero_sets
        Otherwise an empty set gets the label that fits best.
    selection_fraction, selection_alpha, seed
        Where something is left open: the share of the calibration rows that choose it and then
        do not calibrate, the level at which candidates are compared, and the seed of the
        division and of random numbers. Without a seed the division is that of 0, and the
        operating system seeds the random numbers.
    batch_size
        Rows per pass over arrays; by default about 16 MB of input (2 MB of images), at most
        8,192 rows.
    output
        Which part of what the model returns is the prediction, if it returns a tuple, a dict or
        the like: a key (``"logits"``), an index, or a function of what it returns.
    names
        The names of the classes, in the order of the model's outputs. Labels may then be names,
        and the labels of a set are names; integers are taken as before.
    other_labels
        Whether a row's label may be one that the model does not know, as with names of which new
        ones keep coming. Of K classes it has the number K, or is any string that is not among the
        ``names``. No score can be given to it but infinity, so calibration rows with such a label
        raise the threshold, and the guarantee holds for all new rows, whatever their label. Sets
        have a last column, K, for "another label": they hold it where the threshold is
        infinite, and then they hold everything.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = nn.Linear(4, 3), torch.randn(200, 4), torch.randint(0, 3, (200,))
    >>> margin = lambda out: out.output.amax(dim=1, keepdim=True) - out.output
    >>> sets = SetPredictor(model, margin).calibrate(x[:100], y[:100]).predict_set(x[100:])
    >>> sets.mask.shape
    torch.Size([100, 3])
    """

    task = "label sets"
    _scorer_draws = True

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
        calibration = Marginal() if calibration is None else calibration
        score = score_of(score, allow_zero_sets)
        if other_labels:
            _must_not_ask_for_labels(calibration)
            checked_names([*(self.names or ()), LabelSet.OTHER])  # which no class may be called
            score = score.with_other_labels()
        super().__init__(model, score, calibration, **running)

    @property
    def choice(self) -> SetChoice | ScoreChoice | None:
        """What the automatic choice of the settings, or of the score, saw and took."""
        choice: SetChoice | ScoreChoice | None = self._state.choices.get("sets")
        return choice or self._state.choices.get("score")

    @property
    def shift_choice(self) -> ShiftChoice | None:
        """What learning a density ratio saw, with :class:`ffcp.calibrations.Weighted`."""
        choice: ShiftChoice | None = self._state.choices.get("shift")
        return choice

    def setting(self, name: str) -> Any:
        """Give a setting of the score; ``None`` until it is chosen."""
        return self._scorer.settings().get(name)

    def _own_settings(self) -> dict[str, Any]:
        named = {} if self.names is None else {"names": self.names}
        return {**named, **({"other_labels": True} if self.other_labels else {})}

    # -- calibrating ------------------------------------------------------------------------

    def read_target(self, y: Any) -> Tensor:
        """Return the number of the class of each row."""
        return label_tensor(y, self.names, self.other_labels)

    def _calibrating(self, scorer: Score, calibration: Calibration, update: bool) -> Calibrating:
        assert isinstance(scorer, LabelScore)
        entropy = self._stream.entropy()
        start = self._drawn.get(entropy, 0) if update else 0
        if scorer.draws:
            scorer = scorer.drawing(Shares(Draws(entropy, _CALIBRATION), start))
        run = CalibratingLabels(self.model, scorer, calibration, self._choosing, update)
        run.classes, run.entropy, run.drawn = (self.classes if update else None), entropy, start
        run.names = self.names
        return run

    @property
    def classes(self) -> int | None:
        """How many classes the calibrated model has; ``None`` before it is calibrated."""
        classes: int | None = self._state.counts.get("classes")
        return classes

    @property
    def _drawn(self) -> Mapping[int, int]:
        """How many random numbers calibrations drew, by what they were drawn with."""
        drawn: Mapping[int, int] = self._state.counts.get("drawn", {})
        return drawn

    def _counts_of(self, run: Calibrating) -> dict[str, Any]:
        assert isinstance(run, CalibratingLabels)
        drawn = self._drawn if run.is_update else {}
        return {"classes": run.classes, "drawn": {**drawn, run.entropy: run.drawn}}

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
        """Give sets of labels that hold the true one with probability at least 1 - alpha.

        Parameters
        ----------
        x
            Inputs, as the model takes them; or a loader of such batches, whose sets come back in
            one piece. A loader may yield pairs ``(x, y)``, of which x is taken, if the model has
            one argument; a model of two arguments takes both as inputs, and where either could be
            meant that is an error. A list is an input, never a loader.
        alpha
            Share of misses allowed, in (0, 1); 0.1 if nothing is given. Any value, without
            calibrating again.
        confidence_level
            In place of ``alpha``: the coverage asked for, 1 - alpha. 0.9 is alpha = 0.1.
        first_row
            For a job that must be repeated exactly: the number of the first row of ``x`` in it.
            Each row number then has its own random number, by the seed. By default random numbers
            go on from call to call.
        groups
            The group of each point, if the calibration had groups.
        weights
            The weight of each point, for ``ffcp.calibrations.Weighted("given")``.

        Returns
        -------
        LabelSet
            The mask of labels, their number and, on request, the labels in order.
        """
        exact = requested_alpha(alpha, confidence_level, unknown)
        self._must_be_calibrated()
        given, ordered = self._rows(x), []
        buffer, lost, in_all = RowBuffer(given.count), Table(), torch.tensor(False)
        look_up = partial(self.calibration.thresholds, [exact])
        for out, metadata, thresholds in self._looked_up(
            given, look_up, groups, first_row, weights
        ):
            self._check_classes(out.output)
            score = self._drawing(first_row, int(metadata["row"][0]) - out.rows.start)
            thresholds = self._for_all_classes(thresholds[0])
            if thresholds.numel() > 1 or math.isinf(thresholds.item()):
                infinite = thresholds.isinf().reshape(-1, thresholds.shape[-1])
                in_all = in_all | infinite.any(dim=0)
                lost.add(take(metadata, infinite.any(dim=1).expand(len(out.rows))))
            levels = thresholds.expand(len(out.rows), -1)
            mask = score.mask(out, levels, allow_empty=self.allow_zero_sets)
            if self.other_labels:
                mask = torch.cat([mask, levels.isposinf().to(mask.device)], dim=1)
            buffer.add({"mask": mask})
            if given.whole is None:  # a loader need not yield the same rows again
                ordered += LabelSet(mask, partial(score.order, out)).ordered
        if len(lost):
            assert given.count is not None
            what = _what_is_infinite(in_all, len(lost), given.count)
            warn(f"{what}{self._why_infinite(exact, lost.columns)}")
        if given.whole is None:
            return LabelSet(buffer["mask"], None, ordered, self.names, self.other_labels)
        weights = partial(self._order, self._scorer, given.whole)
        return LabelSet(buffer["mask"], weights, None, self.names, self.other_labels)

    def forward(self, x: Any, alpha: Any = None, **options: Any) -> LabelSet:
        """Return sets of labels, as :meth:`predict_set` does: ``predictor(x)``."""
        return self.predict_set(x, alpha, **options)

    def _for_all_classes(self, thresholds: Tensor) -> Tensor:
        """Complete thresholds by class, if they are: classes without points are in every set."""
        if thresholds.shape[-1] == 1:
            return thresholds
        assert self.classes is not None
        return pad(thresholds, (0, self.classes - thresholds.shape[-1]), value=torch.inf)

    def _order(self, score: LabelScore, x: Any) -> Iterator[Tensor]:
        # No groups here: only the labels' order is asked for.
        run = self._pass()
        for batch in self.cut(x):
            yield from score.order(run(batch))

    @steady
    def score(self, x: Any, y: Any = None, *, first_row: int | None = None) -> Tensor:
        """Return the scores of one label per row, shape (n,), in float64.

        ``x`` may be a loader of pairs ``(x, y)``, passed alone. Random numbers are
        those of :meth:`predict_set`, not of the calibration: with ``randomized=False`` none.
        """
        self._must_be_settled()
        buffer = RowBuffer(None)
        for out, y_seen in self._targeted(x, y):
            score = self._drawing(first_row, self._start(out, first_row))
            buffer.add({"scores": score.of_truth(out, y_seen)})
        return buffer["scores"]

    @steady
    def score_all(self, x: Any, *, first_row: int | None = None) -> Tensor:
        """Return the scores of every class, shape (n, K), in float64.

        Random numbers are those of :meth:`predict_set`, not of the calibration: with
        ``randomized=False`` none.
        """
        self._must_be_settled()
        given = self._rows(x)
        buffer = RowBuffer(given.count)
        for out in self.batch_outputs(given):
            score = self._drawing(first_row, self._start(out, first_row))
            self._check_classes(out.output)
            buffer.add({"scores": score.of_all(out).double()})
        return buffer["scores"]

    @property
    def draws_to_calibrate_only(self) -> bool:
        """Whether scores are randomised in the calibration, and not in :meth:`score`."""
        return self._scorer.draws and not self._scorer.randomized

    def _drawing(self, first_row: int | None, first_number: int) -> LabelScore:
        score: LabelScore = self._scorer
        if not score.randomized:
            return score.drawing(None)
        draws = Draws(self._stream.entropy(pinned=first_row is not None), _PREDICTION)
        return score.drawing(Shares(draws, first_number))

    def _start(self, out: BatchOutput, first_row: int | None) -> int:
        """Give the number of the call's first row, as far as a batch can tell."""
        return int(self._row_numbers(out, first_row)[0]) - out.rows.start

    def _check_classes(self, logits: Tensor) -> None:
        if self.classes is not None and logits.shape[-1] != self.classes:
            raise ValueError(
                f"calibrated on {self.classes} classes, but the model now gives {logits.shape[-1]}"
            )

    def _must_be_settled(self) -> None:
        if self._scorer.is_open:
            names = ", ".join(self._scorer.open_settings)
            raise RuntimeError(
                f"{names} not chosen yet: call calibrate(x, y) first, or give values"
            )

    # -- sharing the calibration ------------------------------------------------------------

    def _check_merge(self, other: Any) -> None:
        shared = sorted(self._drawn.keys() & other.calibrated().counts["drawn"].keys())
        if self._scorer.draws and shared:
            raise ValueError(
                f"both predictors drew their random numbers with seed {shared[0]}, so their "
                "points share them: give each worker its own seed"
            )
        if self.classes not in (None, other.classes):
            raise ValueError(
                f"calibrated on {self.classes} classes, the predictor to merge on {other.classes}"
            )

    def _merged_counts(self, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
        drawn = {**mine.get("drawn", {}), **theirs["drawn"]}
        return {"classes": theirs["classes"], "drawn": drawn}

    def _remembered(self) -> dict[str, Any]:
        own = {"classes": self.classes, "drawn": list(self._drawn.items())}
        return {**super()._remembered(), **own}

    def _recalled_counts(self, saved: Mapping[str, Any], scores: int) -> dict[str, Any]:
        drawn = files.rebuilt(tuple[tuple[int, ...], ...], saved["drawn"])
        return {
            "classes": files.count(saved["classes"], least=2) if scores else None,
            "drawn": {seed: files.count(rows) for seed, rows in drawn},  # a seed has any size
        }

    def check_scores(self) -> None:
        """Refuse, by ValueError, a loaded calibration with scores or labels that cannot be."""
        super().check_scores()
        points = self.calibration.points()
        if len(self.calibration) and points["scores"].shape[1] != 1:
            raise ValueError("it has several scores for each label")
        if bool((points.get("label", torch.zeros(0)) >= (self.classes or 0)).any()):
            raise ValueError(f"it has labels beyond its {self.classes} classes")


class CalibratingLabels(Calibrating):
    """A calibration of label sets under way: it counts classes and random numbers."""

    names: list[str] | None = None
    entropy: int  # what random numbers are drawn with
    drawn = 0  # how many are

    def see(self, batch: Batch) -> BatchOutput:
        """Run the model on a batch of rows; refuse another number of classes."""
        out = super().see(batch)
        check_logits(out.output)
        self.count(len(out.rows), out.output.shape[1])
        if self.names is not None and len(self.names) != out.output.shape[1]:
            raise ValueError(
                f"there are {len(self.names)} names, and the model has {out.output.shape[1]} "
                "classes: give one name for each, in the order of the outputs"
            )
        return out

    def draw_from(self, row: int) -> None:
        """Let random numbers be those from this row on."""
        assert isinstance(self.scorer, LabelScore)
        if self.scorer.shares is not None:
            self.scorer = self.scorer.drawing(self.scorer.shares._replace(first_row=row))

    def count(self, rows: int, classes: int | None) -> None:
        """Count rows, each of which draws a random number; refuse other classes."""
        super().count(rows, classes)
        self.drawn += rows


def _must_not_ask_for_labels(calibration: Calibration) -> None:
    """Refuse calibrations by label: of labels that the model does not know they can know nothing.

    Thresholds of each class would put another label into every set, and rows that have one would
    calibrate nothing; of a shift of labels nobody could say how much more frequent they became.
    """
    inner = getattr(calibration, "inner", calibration)
    if inner.looks_at_labels:
        raise ValueError(
            f"other_labels=True does not go with {type(inner).__name__}, which counts rows by "
            "their class, and labels that the model does not know have none: leave out one of the "
            "two. With a threshold of each class, rows of other labels calibrate nothing: leave "
            "them out of calibrate(x, y), and the promise is about rows of the classes alone"
        )


def _what_is_infinite(in_all: Tensor, sets: int, rows: int) -> str:
    """Say which sets hold all labels, or how many classes, of those marked, are in all sets.

    >>> _what_is_infinite(torch.tensor([True]), 2, 5)
    '2 of 5 sets hold all labels'
    """
    if len(in_all) > 1:
        return f"{int(in_all.sum())} of {len(in_all)} classes are in every set"
    return f"{sets} of {rows} sets hold all labels" if sets < rows else "every set holds all labels"
