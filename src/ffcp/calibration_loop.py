"""One calibration under way: run the model on batches, choose what is open, score the rest."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ffcp.batch import BatchOutput
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Columns, Table, prefixed, take, with_prefix
from ffcp.conformal.compression import compressed, settled, summary_like
from ffcp.conformal.selection import Chosen, Division, Score, Selection
from ffcp.network import arrays, forward, inputs

Self = TypeVar("Self", bound="Calibrating")
NO_WEIGHTS = (
    "weights=... are for ffcp.calibrations.Weighted('given'): make the predictor with that "
    "calibration"
)


class Batch(NamedTuple):
    """Some rows to calibrate on: inputs, targets, the first row's number, groups and weights."""

    x: Any
    y: Tensor
    row: int
    groups: Any
    weights: Tensor | None = None
    whole: Batch | None = None  # what these rows are a part of, in which they have numbers

    def part(self, rows: Tensor) -> Batch:
        """Give some of the rows, by a mask; the first of them has the number of the first of all.

        >>> batch = Batch(torch.arange(3.0), torch.zeros(3), 10, ["a", "b", "c"])
        >>> batch.part(torch.tensor([False, True, True])).groups
        ['b', 'c']
        """
        groups = take({"group": self.groups}, rows)["group"] if self.groups is not None else None
        weights = None if self.weights is None else self.weights[rows]
        return Batch(inputs.take(self.x, rows), self.y[rows], self.row, groups, weights, self)


class Noted(NamedTuple):
    """What another process has noted of a batch: see :meth:`Calibrating.elsewhere`."""

    columns: Columns
    row: int
    rows: int
    met: int  # how many of them :meth:`Predictor.fit` has seen
    classes: int | None


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
        scorer: Score,
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
        #: Whether inputs stay in memory until the end, so that some rows can wait for a choice.
        self.inputs_stay = False
        # Held weakly: in a circle all scores would stay until Python looks for circles.
        work: Any = weakref.proxy(self)
        self.selection: Selection[Batch | Noted] = Selection(
            work, self._division(), choosing.alpha, scorer.fewest_rows
        )

    def must_take(self, weights: Any, new: Any) -> None:
        """Refuse weights and new inputs that nothing here looks at, and missing ones."""
        if weights is not None and not self.calibration.takes_weights:
            raise ValueError(NO_WEIGHTS)
        if new is not None and self.is_update:
            raise ValueError("what was learned from new inputs stays: leave out new=, or update=")
        if new is not None and not self.calibration.takes_new:
            raise ValueError(
                "new=... are inputs to learn from, for ffcp.calibrations.Weighted('learn') or "
                "ffcp.calibrations.LabelShift(): make the predictor with that calibration"
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
        early = self.scorer.early_rows if self.scorer.is_open else 0
        return Division(self._choosing.fraction, self._choosing.seed, most, early)

    def choosing_first(self, batches: Iterable[Batch | Noted]) -> Iterator[Batch | Noted]:
        """Give the batches; where a choice looks at much of a row, choose, then give other rows.

        Where inputs stay in memory, the rows set aside pass the model before all others, of which
        only what was chosen is then worked out. Every row passes once.
        """
        waiting: list[Batch] = []
        for batch in batches:
            division = None if isinstance(batch, Noted) else self._division_before(batch)
            if isinstance(batch, Noted) or division is None:
                yield batch
                continue
            waiting.append(batch)
            if sum(len(one.y) for one in waiting) >= division.end:
                yield from self._others(waiting, division)
                waiting = []
        if waiting and self.selection.division is not None:
            yield from self._others(waiting, self.selection.division)

    def _division_before(self, batch: Batch) -> Division | None:
        """Say how rows are divided, if this batch is to wait, unseen, for a choice."""
        if not self.inputs_stay:
            return None
        self.prepare(batch.x)  # which may show that nothing is open
        is_costly = self.scorer.is_open and self.scorer.is_costly
        return self.selection.division if is_costly else None

    def _others(self, batches: Sequence[Batch], division: Division) -> Iterator[Batch]:
        """Choose on some rows of these batches, and give the others."""
        ends = np.cumsum([len(batch.y) for batch in batches]).tolist()
        masks = [division.mask(range(e - len(b.y), e)) for b, e in zip(batches, ends, strict=True)]
        rows = sum(int(mask.sum()) for mask in masks)

        def aside() -> Columns:
            table = Table()
            for batch, mask in zip(batches, masks, strict=True):
                if bool(mask.any()):
                    table.add(self.note(batch.part(mask)))
            return table.columns

        has_chosen = self.selection.chosen_on(aside, rows, ends[-1] - rows)
        self.selection.division = None
        for batch, mask in zip(batches, masks, strict=True):
            if not has_chosen or not bool(mask.any()):
                yield batch
            elif not bool(mask.all()):
                yield batch.part(~mask)

    def note(self, batch: Batch | Noted) -> Columns:
        """Run the model on a batch, and note of its rows what scores and choices need."""
        if isinstance(batch, Noted):  # another process has
            self.count(batch.rows, batch.classes)
            return batch.columns
        out, y = self._see_by_number(batch), batch.y
        return {
            **prefixed("score.", self.scorer.note(out, y)),
            **prefixed("note.", self.calibration.note(out, y)),
        }

    def _see_by_number(self, batch: Batch) -> BatchOutput:
        """Run the model on a batch; errors name rows by their number in all."""
        try:
            return self.see(batch)
        except ValueError:
            if batch.whole is not None:
                self.see(batch.whole)
            raise

    @property
    def is_open(self) -> bool:
        """Whether something is still to be chosen, which is noted of every row until then."""
        return self.scorer.is_open or self.calibration.is_open

    def portable(self: Self) -> Self:
        """Give what another process needs to note batches :meth:`elsewhere`.

        That has the model already (:meth:`using`), and needs no points.
        """
        sent = copy.copy(self)
        empty = self.calibration.empty()
        sent.calibration = empty.facing(dict) if empty.takes_new else empty
        for name in ("selection", "columns", "_choosing", "_model"):
            del sent.__dict__[name]
        return sent

    def using(self: Self, model: nn.Module) -> Self:
        """Use this model: in another process, where the calibration came without one."""
        self._model = model
        return self

    def elsewhere(self, batch: Batch, met: int = 0) -> Noted:
        """Note a batch for a calibration that is under way in another process.

        Who divides the work prepares here, sends what is :meth:`portable` there, and gives what
        comes back to the selection, in the order of the rows.
        """
        columns = {
            # Cloned: a part of a larger tensor would take all of it along.
            name: column.detach().cpu().clone() if isinstance(column, Tensor) else column
            for name, column in self.note(batch).items()
        }
        return Noted(columns, batch.row, len(batch.y), met, self.classes)

    def prepare(self, x: Any) -> None:
        """Look at some first rows, once: what is to choose from, and what a model must not do."""
        if not self._is_first:
            return
        if self.is_open:
            self.scorer = self.scorer.prepared(self._model, x)
            self.selection.division = self._division()  # how many rows choose, too, is known now
        forward.check_rows(self._model, x, self.scorer.requires().norms, self.scorer.sample)
        self._is_first = False

    def see(self, batch: Batch) -> BatchOutput:
        """Run the model on a batch; look at the first one for what the model must not do."""
        self.prepare(batch.x)
        requires = self.scorer.requires().joined(self.calibration.requires())
        out = forward.see(self._model, batch.x, requires, batch.row, batch.groups)
        return out._replace(weights=batch.weights)

    def draw_from(self, row: int) -> None:
        """Let random numbers, where rows draw any, be those from this row on."""

    def count(self, rows: int, classes: int | None) -> None:
        """Count rows; refuse other classes, where outputs are classes, than those before."""
        if None not in (classes, self.classes) and classes != self.classes:
            raise ValueError(
                f"calibrated on {self.classes} classes, but the model now gives {classes}"
            )
        self.classes = classes

    def choose(self, aside: Columns, left: int) -> None:
        """Choose what is open, of the scorer and of the calibration.

        A ratio of densities comes first, as it looks at no scores: rows can count by it then.
        """
        if self.calibration.is_open and not self.calibration.looks_at_scores:
            metadata, alpha = with_prefix("note.", aside), self._choosing.alpha
            self._choose_next(torch.empty(0, 0), metadata, left, alpha)
        if self.scorer.is_open:
            noted = with_prefix("score.", aside)
            weights = self.calibration.weight_of(with_prefix("note.", aside))
            self._settle(self.scorer.choose(noted, self._choosing.alpha, left, weights))
        if self.calibration.is_open:
            self.choose_calibration(aside, left)

    def choose_calibration(self, aside: Columns, left: int) -> None:
        """Choose what the calibration leaves open; ``left`` other rows will calibrate."""
        scores = self.scorer.scores(self._scored(with_prefix("score.", aside)))
        metadata = with_prefix("note.", aside)
        alpha = self._choosing.alpha_of_each(self._choosing.alpha, scores.shape[1])
        self._choose_next(scores, metadata, left, alpha)  # again, where it was chosen before
        while self.calibration.is_open:  # a ratio and a bandwidth, say: one after the other
            self._choose_next(scores, metadata, left, alpha)

    def _choose_next(self, scores: Tensor, metadata: Columns, left: int, alpha: Any) -> None:
        name = self.calibration.choice_name
        self.calibration, choice = self.calibration.choose(scores, metadata, left, alpha)
        self.choices[name] = choice

    def _settle(self, chosen: Chosen) -> None:
        self.scorer = chosen.scorer
        if chosen.calibration is not None:
            self._has_new_calibration = True
            self.calibration = chosen.calibration(self.calibration)
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
        own, metadata = with_prefix("score.", noted), with_prefix("note.", noted)
        waited = self.scorer.again(own)
        if waited is not None:
            if self._has_new_calibration:
                metadata = self.calibration.noted_again(*waited, metadata)
            own = self.scorer.note(*waited)
        scores = self.scorer.scores(own).cpu()
        if not self.scorer.gives_new:
            scores = scores.clone()
        # What is noted may be a part of the user's data.
        kept = {n: c.clone() if isinstance(c, Tensor) else c for n, c in metadata.items()}
        signs = self.scorer.signs(own) if self.calibration.keeps_signs else None
        if signs is not None:
            kept["signs"] = signs.cpu()
        return {"score": scores, **prefixed("note.", kept)}


class Summing:
    """Takes the scores of a calibration under way into a summary, in place of a table of all.

    Parameters
    ----------
    run
        The calibration under way: its points, if it has any, and all that come are compressed.
    rank_error
        The rank error of the summary.
    entries
        What gives the scores and notes to keep of rows.
    """

    rows_at_once = 2**17

    def __init__(
        self,
        run: Calibrating,
        rank_error: Any,
        entries: Callable[[Columns], tuple[Tensor, Columns]],
    ) -> None:
        summary_like(run.calibration, rank_error)  # refused before the work begins
        self._run, self._error, self._entries = run, rank_error, entries
        self._waiting, self._rows = Table(), 0

    def __len__(self) -> int:
        return self._rows

    def add(self, columns: Columns) -> None:
        """Take rows in."""
        if not self._rows:  # what was open is chosen now
            self._run.calibration = compressed(self._run.calibration, self._error)
        self._waiting.add(columns)
        self._rows += len(columns["score"])
        if len(self._waiting) >= self.rows_at_once:
            self._flush()

    def _flush(self) -> None:
        if len(self._waiting):
            self._run.calibration.add(*self._entries(self._waiting.columns))
        self._waiting = Table()

    @property
    def columns(self) -> Columns:
        """Nothing: all of it is in the summary, which is now as small as it may be."""
        self._flush()
        self._run.calibration = settled(self._run.calibration)
        return {}


def as_labels(groups: Any) -> Any:
    """Read the labels of all rows; ``None`` and functions stay as they are."""
    if groups is None or callable(groups):
        return groups
    if isinstance(groups, Tensor):
        groups = groups.detach().cpu()
    if not hasattr(groups, "__array__"):
        return list(groups)
    array = np.asarray(groups)
    if array.ndim != 1:
        raise ValueError(f"groups must be one label per row, got shape {array.shape}")
    return array.tolist()


def groups_of(labels: Any, batch: Any, row: int, count: int) -> Any:
    """Give the groups of some rows: a part of the labels, or what the function says."""
    if labels is None or callable(labels):
        return None if labels is None else labels(batch)
    if len(labels) < row + count:
        raise ValueError(f"groups has {len(labels)} labels, fewer than x has rows")
    return labels[row : row + count]


def as_weights(weights: Any) -> Tensor | None:
    """Read the weights of all rows."""
    if weights is None:
        return None
    values = arrays.target_tensor(weights)
    if not values.dim():
        raise ValueError(f"weights must be one number for each row, got {weights!r}")
    return values[:, None].flatten(1)


def weights_of(weights: Tensor | None, row: int, count: int) -> Tensor | None:
    """Give the weights of some rows."""
    return None if weights is None else weights[row : row + count]


def must_have_weights(weights: Tensor | None, rows: int | None) -> None:
    """Refuse weights that are more or fewer than rows."""
    if weights is not None and rows is not None and len(weights) != rows:
        raise ValueError(f"weights has {len(weights)} numbers, but x has {rows} rows")
