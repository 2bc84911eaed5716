"""Label sets from a label score and a calibration: calibrate, score, predict_set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ffcp.calibrating import Batch, Calibrating
from ffcp.classification.names import checked_names, label_tensor
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
from ffcp.network.picking import Output
from ffcp.pieces import Seen
from ffcp.predictor import Predictor, steady

# Streams of random numbers. Not 0: numpy takes [seed, 0] for seed, which divides the rows.
_CALIBRATION, _PREDICTION = 1, 2


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
    output
        Which part of what the model returns is the prediction, if it returns a tuple, a dict or
        the like: a key (``"logits"``), an index, or a function of what it returns.
    names
        The names of the classes, in the order of the model's outputs. Labels may then be names,
        and the labels of a set are names; integers are taken as before.

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
        output: Output = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.names = None if names is None else checked_names(names)
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
            output=output,
        )

    @property
    def choice(self) -> SetChoice | None:
        """What the automatic choice of the settings saw and took."""
        choice: SetChoice | None = self._choices.get("sets")
        return choice

    def setting(self, name: str) -> Any:
        """Give a setting of the score; ``None`` until it is chosen."""
        return self._scorer.settings().get(name)

    def _own_settings(self) -> dict[str, Any]:
        return {} if self.names is None else {"names": self.names}

    # -- calibrating ------------------------------------------------------------------------

    def _read_target(self, y: Any) -> Tensor:
        return label_tensor(y, self.names)

    def _calibrating(self, scorer: Scorer, calibration: Calibration, update: bool) -> Calibrating:
        assert isinstance(scorer, LabelScore)
        start = self._drawn.get(self.seed, 0) if update else 0
        scorer = scorer.drawing(Shares(self.seed, _CALIBRATION, start))
        run = CalibratingLabels(self.model, scorer, calibration, self._choosing, update)
        run.classes, run.drawn = (self.classes if update else None), start
        run.names = self.names
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
            Inputs, as the model takes them; or a loader of such batches, whose sets come back in
            one piece. A loader may yield pairs ``(x, y)``, of which x is taken, if the model has
            one argument; a model of two arguments takes both as inputs, and where either could be
            meant that is an error. A list is an input, never a loader.
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
        given, score = self._rows(x), self._drawing(first_row)
        buffer, infinite = inputs.RowBuffer(given.count), _Infinite()
        ordered: list[Tensor] = []
        for seen, notes, thresholds in self._looked_up(given, exact, groups):
            self._check_classes(seen.output)
            threshold = self._wide(thresholds)
            infinite.look(threshold, notes, len(seen.rows))
            mask = score.mask(seen, threshold, allow_empty=self.allow_zero_sets)
            buffer.add({"mask": mask})
            if given.whole is None:  # a loader need not yield the same rows again
                ordered += LabelSet(mask, partial(score.order, seen)).ordered
        if infinite.notes is not None:
            assert given.count is not None
            what = infinite.described(given.count)
            self._warn(f"{what}{self._why_infinite(exact, infinite.notes)}")
        if given.whole is None:
            return LabelSet(buffer["mask"], ordered=ordered, names=self.names)
        weights = partial(self._order, score, given.whole)
        return LabelSet(buffer["mask"], weights, names=self.names)

    def forward(
        self, x: Any, alpha: Any = 0.1, *, first_row: int = 0, groups: Any = None
    ) -> LabelSet:
        """Give sets of labels, as :meth:`predict_set` does: ``predictor(x)``."""
        return self.predict_set(x, alpha, first_row=first_row, groups=groups)

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
    def score(self, x: Any, y: Any = None, *, first_row: int = 0) -> Tensor:
        """Return the scores of one label per row, shape (n,), in float64.

        ``x`` may be a loader of pairs ``(x, y)``, passed alone. Random numbers are
        those of :meth:`predict_set`, not of the calibration.
        """
        self._must_be_settled()
        buffer, score = inputs.RowBuffer(None), self._drawing(first_row)
        for seen, y_seen in self._targeted(x, y):
            labels = checked_labels(y_seen, seen)
            buffer.add({"scores": score.of_labels(seen, labels)})
        return buffer["scores"]

    @steady
    def score_all(self, x: Any, *, first_row: int = 0) -> Tensor:
        """Return the scores of every label, shape (n, K), in float64.

        Random numbers are those of :meth:`predict_set`, not of the calibration.
        """
        self._must_be_settled()
        given, score = self._rows(x), self._drawing(first_row)
        buffer = inputs.RowBuffer(given.count)
        for seen in self._seen(given):
            self._check_classes(seen.output)
            buffer.add({"scores": score.of_all(seen)})
        return buffer["scores"]

    def _drawing(self, first_row: int) -> LabelScore:
        if first_row < 0:
            raise ValueError(f"first_row counts from 0, got {first_row}")
        return self._scorer.drawing(Shares(self.seed, _PREDICTION, first_row))

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
        own = {"classes": self.classes, "drawn": list(self._drawn.items())}
        return {**super()._remembered(), **own}

    def _recall(self, saved: Any) -> None:
        super()._recall(saved)
        self.classes, self._drawn = saved["classes"], dict(saved["drawn"])


class CalibratingLabels(Calibrating):
    """A calibration of label sets under way: it counts classes and random numbers."""

    drawn = 0
    names: list[str] | None = None

    def see(self, batch: Batch) -> Seen:
        """Run the model on a batch of rows; refuse outputs that cannot be logits."""
        seen = super().see(batch)
        check_logits(seen.output)
        if not batch.row:
            refuse_probabilities(seen.output)
        self.count_classes(seen.output)
        if self.names is not None and len(self.names) != seen.output.shape[1]:
            raise ValueError(
                f"there are {len(self.names)} names, and the model has {seen.output.shape[1]} "
                "classes: give one name for each, in the order of the outputs"
            )
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
