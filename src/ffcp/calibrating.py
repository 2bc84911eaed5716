"""One calibration under way: run the model on batches, choose what is open, score the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Columns, prefixed, with_prefix
from ffcp.conformal.mondrian import by_groups
from ffcp.conformal.selection import Chosen, Division, Scorer, Selection
from ffcp.network import passes
from ffcp.pieces import Seen

NO_WEIGHTS = "weights=... are for ffcp.Weighted('given'): make the predictor with that calibration"


class Batch(NamedTuple):
    """Some rows to calibrate on: inputs, targets, the first row's number, groups and weights."""

    x: Any
    y: Tensor
    row: int
    groups: Any
    weights: Tensor | None = None


class Choosing(NamedTuple):
    """How what is open is chosen: the share of rows set aside, the level, and the seed."""

    fraction: float
    alpha: Any
    seed: int
    alpha_of_each: Callable[[Any, int], Any]  # of several thresholds, given the level of all


class Calibrating:
    """One calibration under way; nothing of it is seen outside until it has ended well."""

    def __init__(
        self,
        model: nn.Module,
        scorer: Scorer,
        calibration: Calibration,
        choosing: Choosing,
        is_update: bool,
    ) -> None:
        self._model, self._choosing = model, choosing
        self.scorer = scorer
        self.calibration = calibration.empty()
        if is_update:
            self.calibration.keep(calibration.points())
        self.is_update = is_update
        self.choices: dict[str, Any] = {}
        self.columns: Columns = {}  # scores and notes of the rows that calibrate
        self.layout: dict[str, Any] = {}  # what inputs are like, see inputs.Reader
        self.warnings: list[str] = []
        self.classes: int | None = None  # of the outputs so far, where they are classes
        self._is_first = True
        self._has_new_calibration = False  # one that was chosen: it has notes of its own
        self.selection: Selection[Batch] = Selection(self, self._division(), choosing.alpha)

    def must_take(self, weights: Any, new: Any) -> None:
        """Refuse weights and new inputs that nothing here looks at, and missing ones."""
        if weights is not None and not self.calibration.takes_weights:
            raise ValueError(NO_WEIGHTS)
        if new is not None and self.is_update:
            raise ValueError("what was learned from new inputs stays: leave out new=, or update=")
        if new is not None and not self.calibration.takes_new:
            raise ValueError(
                "new=... are inputs to learn from, for ffcp.Weighted('learn') or "
                "ffcp.LabelShift(): make the predictor with that calibration"
            )
        if new is None and self.calibration.takes_new and self.calibration.is_open:
            raise ValueError(
                f"{type(self.calibration).__name__} is to learn how the data has moved: pass "
                "calibrate(x, y, new=...), inputs like those to come, without targets"
            )

    def facing(self, new: Callable[[], Columns]) -> None:
        """Let the calibration, if it learns from new inputs, do so when it comes to choose."""
        if self.calibration.takes_new and not self.is_update:
            self.calibration = self.calibration.facing(new)

    def _division(self) -> Division | None:
        open_pieces = [p for p in (self.scorer, self.calibration) if p.is_open]
        if not open_pieces:
            return None
        most = max(piece.most_rows for piece in open_pieces)
        return Division(self._choosing.fraction, self._choosing.seed, most)

    def note(self, batch: Batch) -> Columns:
        """Run the model on a batch, and note of its rows what scores and choices need."""
        seen = self.see(batch)
        return {
            **prefixed("score.", self.scorer.note(seen, batch.y)),
            **prefixed("note.", self.calibration.note(seen, batch.y)),
        }

    def see(self, batch: Batch) -> Seen:
        """Run the model on a batch; look at the first one for what the model must not do."""
        model = self._model
        if self._is_first:
            self.scorer = self.scorer.prepared(model, batch.x)
            self.selection.division = self._division()  # how many rows choose, too, is known now
            passes.check_rows(model, batch.x, self.scorer.needs().norms, self.scorer.sample)
            self._is_first = False
        needs = self.scorer.needs().joined(self.calibration.needs())
        seen = passes.see(model, batch.x, needs, batch.row, batch.groups)
        return seen._replace(weights=batch.weights)

    def count_classes(self, output: Tensor) -> None:
        """Refuse a batch whose output has other classes than those before."""
        if output.dim() < 2:
            return  # what is wrong with it is said where it is scored
        if self.classes not in (None, output.shape[1]):
            raise ValueError(
                f"calibrated on {self.classes} classes, but the model now gives {output.shape[1]}"
            )
        self.classes = output.shape[1]

    def choose(self, aside: Columns, left: int) -> None:
        """Choose what is open, first of the scorer and then of the calibration."""
        if self.scorer.is_open:
            noted = with_prefix("score.", aside)
            self._settle(self.scorer.choose(noted, self._choosing.alpha, left))
        if self.calibration.is_open:
            self.choose_calibration(aside, left)

    def choose_calibration(self, aside: Columns, left: int) -> None:
        """Choose what the calibration leaves open; ``left`` other rows will calibrate."""
        scores = self.scorer.scores(self._scored(with_prefix("score.", aside)))
        notes = with_prefix("note.", aside)
        alpha = self._choosing.alpha_of_each(self._choosing.alpha, scores.shape[1])
        is_left = True
        while is_left:  # a ratio and a bandwidth, say: one after the other
            name = self.calibration.choice_name
            self.calibration, choice = self.calibration.choose(scores, notes, left, alpha)
            self.choices[name], is_left = choice, self.calibration.is_open

    def _settle(self, chosen: Chosen) -> None:
        self.scorer = chosen.scorer
        if chosen.calibration is not None:
            self._has_new_calibration = True
            has_groups = self.calibration.takes_groups
            self.calibration = (
                by_groups(chosen.calibration) if has_groups else chosen.calibration
            ).empty()
        self.choices.update(chosen.choices)
        self.warnings += [chosen.warning] if chosen.warning else []

    def do_without(self, rows: int) -> bool:
        """Settle the scorer without rows, where it can be and nothing else is open."""
        if self.calibration.is_open:
            return False
        settled = self.scorer.without_choice(rows, self._choosing.alpha)
        if settled is None:
            return False
        self._settle(settled)
        return True

    def _scored(self, own: Columns) -> Columns:
        """Score rows that waited for a choice as if the model had just seen them."""
        waited = self.scorer.again(own)
        return own if waited is None else self.scorer.note(*waited)

    def finish(self, noted: Columns) -> Columns:
        """Turn what was noted into scores and notes to keep."""
        own, notes = with_prefix("score.", noted), with_prefix("note.", noted)
        waited = self.scorer.again(own)
        if waited is not None and self._has_new_calibration:
            seen, y = waited
            notes = self.calibration.note(seen._replace(groups=notes.get("group")), y)
        own = dict(self._scored(own))
        scores = self.scorer.scores(own)
        signs = self.scorer.signs(own) if self.calibration.keeps_signs else None
        if signs is not None:
            notes["signs"] = signs.cpu()
        return {"score": scores.cpu(), **prefixed("note.", notes)}
