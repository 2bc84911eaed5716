"""Label sets from a label score and a calibration: calibrate, score, predict_set."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ffcp import files
from ffcp.calibrating import Batch, Calibrating
from ffcp.classification.scores import (
    LabelScore,
    Shares,
    as_score,
    check_logits,
    checked_labels,
    refuse_probabilities,
)
from ffcp.classification.sets import LabelSet
from ffcp.classification.tuning import SetChoice
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Columns, take
from ffcp.conformal.marginal import Marginal
from ffcp.conformal.rank import exact_alpha
from ffcp.conformal.selection import Scorer
from ffcp.network import inputs
from ffcp.pieces import Seen
from ffcp.predictor import Predictor, steady
from ffcp.recipes import public

# Streams of random numbers. Not 0: numpy takes [seed, 0] for seed, which divides the rows.
_CALIBRATION, _PREDICTION = 1, 2


@public
class LabelSets(Predictor):
    """Sets of labels put together from pieces: a label score and a calibration.

    Parameters
    ----------
    model
        A trained network; forward returns logits of shape (n, K).
    score
        How surprising each label is: ``ffcp.Lac()``, ``ffcp.Aps()``, ``ffcp.Raps()``,
        ``ffcp.FFRaps()``, or any function of what one pass saw (:class:`ffcp.Seen`) to scores
        (n, K), the smaller the better a label fits.
    calibration
        How scores are kept and thresholds looked up: :class:`ffcp.Marginal` (the default),
        :class:`ffcp.Mondrian`, :class:`ffcp.Local`, or :class:`ffcp.ByLabel` for a threshold of
        each class.
    allow_zero_sets
        Otherwise an empty set gets the label that fits best.
    choose_fraction, choose_alpha, seed
        Where something is left open: the share of the calibration rows that choose it and then
        do not calibrate, the level at which candidates are compared, and the seed of the
        division and of random numbers.
    batch_size
        Rows per pass over arrays; by default about 16 MB of input (2 MB of images), at most
        8,192 rows.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = nn.Linear(4, 3), torch.randn(200, 4), torch.randint(0, 3, (200,))
    >>> margin = lambda seen: seen.output.amax(dim=1, keepdim=True) - seen.output
    >>> sets = LabelSets(model, margin).calibrate(x[:100], y[:100]).predict_set(x[100:])
    >>> sets.mask.shape
    torch.Size([100, 3])
    """

    task = "label sets"
    _scorer: LabelScore

    def __init__(
        self,
        model: nn.Module,
        score: Any,
        calibration: Calibration | None = None,
        *,
        allow_zero_sets: bool = False,
        choose_fraction: float = 0.2,
        choose_alpha: float = 0.1,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> None:
        self.allow_zero_sets = allow_zero_sets
        self.classes: int | None = None
        self._drawn: dict[int, int] = {}  # by seed, how many random numbers are used up
        super().__init__(
            model,
            as_score(score),
            Marginal() if calibration is None else calibration,
            choose_fraction=choose_fraction,
            choose_alpha=choose_alpha,
            seed=seed,
            batch_size=batch_size,
        )

    @property
    def choice(self) -> SetChoice | None:
        """What the automatic choice of the settings saw and took."""
        choice: SetChoice | None = self._choices.get("sets")
        return choice

    def setting(self, name: str) -> Any:
        """Give a setting of the score; ``None`` until it is chosen."""
        return self._scorer.settings().get(name)

    # -- calibrating ------------------------------------------------------------------------

    def _calibrating(self, scorer: Scorer, calibration: Calibration, update: bool) -> Calibrating:
        assert isinstance(scorer, LabelScore)
        start = self._drawn.get(self.seed, 0) if update else 0
        scorer = scorer.drawing(Shares(self.seed, _CALIBRATION, start))
        run = CalibratingLabels(self.model, scorer, calibration, self._choosing, update)
        run.classes, run.drawn = (self.classes if update else None), start
        return run

    def _take_over(self, run: Calibrating) -> None:
        assert isinstance(run, CalibratingLabels)
        super()._take_over(run)
        self.classes = run.classes
        self._drawn = {**(self._drawn if run.is_update else {}), self.seed: run.drawn}

    # -- using the calibration --------------------------------------------------------------

    @steady
    def predict_set(
        self, x: Any, alpha: Any = 0.1, *, first_row: int = 0, groups: Any = None
    ) -> LabelSet:
        """Give sets of labels that hold the true one with probability at least 1 - alpha.

        Parameters
        ----------
        x
            Inputs, as the model takes them.
        alpha
            Share of misses allowed, in (0, 1). Any value, without calibrating again.
        first_row
            The number of the first row of ``x`` in a stream that is predicted piece by piece.
            Each row number has its own random number; without counting on, a randomised
            method would use the same few for every piece.
        groups
            The group of each point, if the calibration had groups.

        Returns
        -------
        LabelSet
            The mask of labels, their number and, on request, the labels in order.
        """
        exact = exact_alpha(alpha)
        self._must_be_calibrated()
        x = self._checked_input(x, first_row)
        score = self._drawing(first_row)
        rows = inputs.row_count(x)
        buffer, infinite = inputs.RowBuffer(rows), _Infinite()
        for seen, notes, thresholds in self._looked_up(x, exact, groups):
            self._check_classes(seen.output)
            threshold = self._wide(thresholds)
            infinite.look(threshold, notes, len(seen.rows))
            mask = score.mask(seen, threshold, allow_empty=self.allow_zero_sets)
            buffer.add({"mask": mask})
        if infinite.notes is not None:
            what = infinite.described(rows)
            self._warn(f"{what}{self._why_infinite(exact, infinite.notes)}")
        return LabelSet(buffer["mask"], partial(self._order, score, x))

    def _wide(self, threshold: Tensor) -> Tensor:
        """Give one threshold, one per row (n, 1), or one per class, (K,) or (n, K)."""
        if threshold.shape[-1] == 1:
            return threshold[0] if threshold.dim() == 1 else threshold
        assert self.classes is not None
        # Classes behind the last one that has points are in every set.
        lacking = self.classes - threshold.shape[-1]
        return pad(threshold, (0, lacking), value=torch.inf)

    def _order(self, score: LabelScore, x: Any) -> Iterator[Tensor]:
        # No groups here: only the labels' order is asked for.
        for batch in self._cut(x):
            yield from score.order(self._see(batch))

    @steady
    def score(self, x: Any, y: Any, *, first_row: int = 0) -> Tensor:
        """Return the scores of one label per row, shape (n,), in float64.

        Random numbers are those of :meth:`predict_set`, not of the calibration.
        """
        self._must_be_settled()
        if y is None:
            raise TypeError("score(x, y) needs the labels y")
        ((x, y),) = inputs.pairs(x, y, self.model)
        buffer, score = inputs.RowBuffer(len(y)), self._drawing(first_row)
        for seen in self._seen(self._checked_input(x, first_row)):
            labels = checked_labels(y[seen.rows.start : seen.rows.stop], seen)
            buffer.add({"scores": score.of_labels(seen, labels)})
        return buffer["scores"]

    @steady
    def score_all(self, x: Any, *, first_row: int = 0) -> Tensor:
        """Return the scores of every label, shape (n, K), in float64.

        Random numbers are those of :meth:`predict_set`, not of the calibration.
        """
        self._must_be_settled()
        x, score = self._checked_input(x, first_row), self._drawing(first_row)
        buffer = inputs.RowBuffer(inputs.row_count(x))
        for seen in self._seen(x):
            self._check_classes(seen.output)
            buffer.add({"scores": score.of_all(seen)})
        return buffer["scores"]

    def _drawing(self, first_row: int) -> LabelScore:
        return self._scorer.drawing(Shares(self.seed, _PREDICTION, first_row))

    def _checked_input(self, x: Any, first_row: int) -> Any:
        if first_row < 0:
            raise ValueError(f"first_row counts from 0, got {first_row}")
        return inputs.to_tensors(x, self.model)

    def _check_classes(self, logits: Tensor) -> None:
        if self.classes is not None and logits.shape[-1] != self.classes:
            raise ValueError(
                f"calibrated on {self.classes} classes, but the model now gives {logits.shape[-1]}"
            )

    def _must_be_settled(self) -> None:
        if self._scorer.is_open:
            names = ", ".join(getattr(self._scorer, "open_settings", ["settings"]))
            raise RuntimeError(
                f"{names} not chosen yet: call calibrate(x, y) first, or give values"
            )

    # -- sharing the calibration ------------------------------------------------------------

    def _check_merge(self, other: Any) -> None:
        shared = sorted(self._drawn.keys() & other._drawn.keys())
        if self._scorer.randomized and shared:
            raise ValueError(
                f"both predictors drew their random numbers with seed {shared[0]}, so their "
                "points share them: give each worker its own seed"
            )
        if self.classes not in (None, other.classes):
            raise ValueError(
                f"calibrated on {self.classes} classes, the predictor to merge on {other.classes}"
            )

    def _merged(self, other: Any) -> None:
        self.classes, self._drawn = other.classes, {**self._drawn, **other._drawn}

    def _remembered(self) -> dict[str, Any]:
        return {"classes": self.classes, "drawn": list(self._drawn.items())}

    def _recall(self, saved: Any) -> None:
        self.classes = files.count(saved["classes"], least=2) if len(self.calibration) else None
        drawn = files.rebuilt(tuple[tuple[int, ...], ...], saved["drawn"])
        self._drawn = {files.count(seed): files.count(rows) for seed, rows in drawn}

    def _check_points(self) -> None:
        super()._check_points()
        points = self.calibration.points()
        if len(self.calibration) and points["scores"].shape[1] != 1:
            raise ValueError("it has several scores for each label")
        if bool((points.get("label", torch.zeros(0)) >= (self.classes or 0)).any()):
            raise ValueError(f"it has labels beyond its {self.classes} classes")


class CalibratingLabels(Calibrating):
    """A calibration of label sets under way: it counts classes and random numbers."""

    drawn = 0

    def see(self, batch: Batch) -> Seen:
        """Run the model on a batch of rows; refuse outputs that cannot be logits."""
        seen = super().see(batch)
        check_logits(seen.output)
        if not batch.row:
            refuse_probabilities(seen.output)
        self.count_classes(seen.output)
        self.drawn += len(seen.rows)
        return seen


class _Infinite:
    """Looks out for sets that hold all labels, or labels that are in all sets."""

    def __init__(self) -> None:
        self.notes: Columns | None = None
        self._rows = 0
        self._classes: tuple[int, int] | None = None

    def look(self, threshold: Tensor, notes: Columns, rows: int) -> None:
        lost = threshold.isinf()
        if not bool(lost.any()):
            return
        if threshold.dim() and threshold.shape[-1] > 1:
            by_class = lost.reshape(-1, lost.shape[-1]).any(dim=0)
            self._classes = max(self._classes or (0, 0), (int(by_class.sum()), threshold.shape[-1]))
        by_row = lost.reshape(-1, max(1, threshold.shape[-1] if threshold.dim() else 1)).any(dim=1)
        by_row = by_row.expand(rows)
        self._rows += int(by_row.sum())
        if self.notes is None:
            self.notes = take(notes, by_row)

    def described(self, rows: int) -> str:
        if self._classes is not None:
            return f"{self._classes[0]} of {self._classes[1]} classes are in every set"
        every = self._rows == rows
        return (
            "every set holds all labels"
            if every
            else f"{self._rows} of {rows} sets hold all labels"
        )
