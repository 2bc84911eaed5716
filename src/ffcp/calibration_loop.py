"""The calibration loop: select on rows set aside what is not given, then score all other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ffcp.batch import BatchOutput, Requires
from ffcp.calibrated import Counts
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Columns
from ffcp.conformal.compressed import joined, settled, summary_of
from ffcp.conformal.mondrian import by_groups
from ffcp.conformal.rank import rows_needed
from ffcp.conformal.score import Score
from ffcp.conformal.selection import Aside, Division, LearningDivision, Selection
from ffcp.network import forward

NO_WEIGHTS = (
    "weights=... are for ffcp.calibrations.Weighted('given'): make the predictor with that "
    "calibration"
)
EMPTY = "the calibration data is empty: there are no rows to score"
_AT_ONCE = 2**17  # rows that are added to a summary together


class Batch(NamedTuple):
    """Rows to calibrate on: inputs, targets, the first row's number, groups and weights."""

    x: Any
    y: Tensor
    row: int
    groups: Any = None
    weights: Tensor | None = None
    columns: Sequence[str | int] | None = None


@dataclass(eq=False)
class BatchRunner:
    """Runs the model on the batches of one calibration; subclasses also check and count."""

    model: nn.Module
    sample: ClassVar[int] = 8  # rows for the check that the model does not mix rows

    def __call__(self, batch: Batch, requires: Requires) -> BatchOutput:
        """Run the model on one batch."""
        beside = (batch.groups, batch.weights, batch.columns)
        return forward.run_batch(self.model, batch.x, requires, batch.row, *beside)

    def finish(self, result: Result) -> Counts:
        """Return what was counted; warnings may be added to those of the result."""
        return Counts()


class Settings(NamedTuple):
    """How something is selected: the share of rows set aside, the level, and the seed."""

    fraction: float
    alpha: Any
    seed: int
    alpha_of_each: Callable[[Any, int], Any]
    target_inputs: Callable[[], Iterable[BatchOutput]]


class Result(NamedTuple):
    """The result of a calibration; ``scores`` are in the order of rows, if they were kept."""

    score: Score
    calibration: Calibration
    report: dict[str, Any]
    set_aside: int
    warnings: list[str]
    scores: Tensor | None


def calibrate(
    score: Any,
    calibration: Calibration,
    batches: Iterable[Batch],
    run: BatchRunner,
    settings: Settings,
    rank_error: Any = None,
) -> Result:
    """Score the rows of all batches, but for those on which something is selected first.

    Every row passes the model once. Where something is to be selected, outputs are kept until
    enough rows are set aside; then it is selected on these, and all others are scored. Rows are
    added to those that the calibration has. ``rank_error`` keeps a summary of the scores.
    """
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise ValueError(EMPTY)
    batches = chain([first], batches)
    selection = score if isinstance(score, Selection) else score.selection()
    if selection is not None:  # candidates depend on the model; of only one the score is made
        score = selection.prepared(run.model, first.x)
    selections = selections_of(score, calibration)
    requires = score.requires().joined(calibration.requires())
    forward.check_rows(run.model, first.x, requires.norms, run.sample)
    waiting: list[_Waiting] = []
    chosen = _Chosen(score, calibration, {}, [], 0)
    if selections:
        divisions = [one.division(settings.fraction, settings.seed) for one in selections]
        division = max(divisions, key=lambda one: one.most)
        for batch in batches:
            waiting.append(_Waiting.of(run(batch, requires), batch.y, requires))
            if sum(len(part.y) for part in waiting) >= division.end:
                break
        chosen, waiting = _select(selections, chosen, waiting, division, settings)
        score, calibration = chosen.score, chosen.calibration
        requires = score.requires().joined(calibration.requires())
    empty = calibration if rank_error is None else summary_of(calibration, rank_error)
    has_signs = calibration.traits.signs and hasattr(score, "signs")
    kept, filled, scores = Table(), None, None
    for out, y in chain(waiting, ((run(batch, requires), batch.y) for batch in batches)):
        columns = {"scores": score.score(out, y).cpu(), **calibration.metadata(out, y)}
        if has_signs and (signs := score.signs(out, y)) is not None:
            columns["signs"] = signs.cpu()
        kept.add(columns)
        if rank_error is not None and len(kept) >= _AT_ONCE:
            filled, kept = _with_rows(filled, empty, kept.columns), Table()
    if len(kept):
        scores = kept.columns["scores"]
        filled = _with_rows(filled, empty, kept.columns)
    if not filled:
        raise ValueError(EMPTY)
    filled = joined(calibration, filled) if len(calibration) else filled
    filled = filled if rank_error is None else settled(filled)
    report, warnings, set_aside = chosen[2:]
    return Result(score, filled, report, set_aside, warnings, scores)


def selections_of(score: Any, calibration: Calibration) -> list[Selection]:
    """Return what is to be selected, in this order.

    A density ratio comes first, as it needs no scores: candidates can be weighted by it.
    """
    method = score if isinstance(score, Selection) else score.selection()
    place = calibration.selection()
    ordered = [place, method] if place is not None and place.takes_new else [method, place]
    return [selection for selection in ordered if selection is not None]


def checked_calibration(
    score: Any,
    calibration: Calibration,
    groups: Any,
    weights: Any,
    new: Any,
    update: bool,
) -> Calibration:
    """Return the calibration, by groups if given; raise ValueError for unused or missing data."""
    if groups is not None:
        if update and not calibration.traits.groups:
            raise ValueError(
                "some rows have groups and some have none: calibrate all of them with "
                "groups=, or none"
            )
        calibration = by_groups(calibration)
    if weights is not None and not calibration.traits.weights:
        raise ValueError(NO_WEIGHTS)
    takes_new = any(selection.takes_new for selection in selections_of(score, calibration))
    if new is not None and not takes_new:
        raise ValueError(
            "'new' is for predictors with calibration=ffcp.calibrations.Weighted('learn') or "
            "LabelShift(), when they are calibrated for the first time: leave it out"
        )
    if new is None and takes_new:
        raise ValueError(
            f"{type(calibration).__name__} learns the shift of the data: pass "
            "calibrate(x, y, new=...), unlabelled inputs like those to predict"
        )
    return calibration


def _with_rows(filled: Any, empty: Any, columns: Columns) -> Any:
    """Return a calibration with these rows added."""
    metadata = {name: column for name, column in columns.items() if name != "scores"}
    fresh = empty.fit(columns["scores"], metadata)
    return fresh if filled is None else filled.merge(fresh)


class _Waiting(NamedTuple):
    """The outputs of rows that wait for a selection, and their targets."""

    out: BatchOutput
    y: Tensor

    @classmethod
    def of(cls, out: BatchOutput, y: Tensor, requires: Requires) -> _Waiting:
        """Copy the output: the batch may be a buffer that the user fills again."""
        out = out if requires.input else out._replace(x=None)
        copied = forward.part_of(out, torch.ones(len(y), dtype=torch.bool))
        return cls(copied._replace(rows=out.rows), y.clone())

    def part(self, mask: Tensor) -> _Waiting:
        """Return some of the rows."""
        return _Waiting(forward.part_of(self.out, mask), self.y[mask])


class _Chosen(NamedTuple):
    """What was selected, and on how many rows."""

    score: Any
    calibration: Any
    report: dict[str, Any]
    warnings: list[str]
    set_aside: int


def _select(
    selections: list[Selection],
    chosen: _Chosen,
    waiting: list[_Waiting],
    division: Division | LearningDivision,
    settings: Settings,
) -> tuple[_Chosen, list[_Waiting]]:
    """Select on some of the rows that wait; return the others."""
    rows = [len(part.y) for part in waiting]
    has_groups = chosen.calibration.traits.groups
    labels = [chosen.calibration.labels(part.out) for part in waiting if has_groups]
    mask = division.mask(sum(rows), len(set(chain(*labels))) if labels else 1)
    if len(selections) == 1 and selections[0].is_optional:
        is_short = int((~mask).sum()) < rows_needed(settings.alpha)
        targets = torch.cat([part.y for part in waiting])
        needed = rows_needed(settings.alpha_of_each(settings.alpha, targets[:1].numel()))
        mask = _spared(mask, list(chain(*labels)), ~targets.isnan(), needed)
        if is_short or int(mask.sum()) < max(1, selections[0].fewest_rows):
            score, _, report, warning = selections[0].without_rows(sum(rows), settings.alpha)
            warnings = [warning] if warning else []
            return _Chosen(score, chosen.calibration, report, warnings, 0), waiting
    count, left = int(mask.sum()), int((~mask).sum())
    if not left or not count:
        raise ValueError(
            f"{count + left} rows are too few to select on some and calibrate on the others: "
            "pass more rows, or give all settings"
        )
    masks = list(zip(waiting, mask.split(rows), strict=True))
    parts = [part.part(own) for part, own in masks if bool(own.any())]
    out, y = forward.joined([part.out for part in parts]), torch.cat([part.y for part in parts])
    ways = (settings.alpha, left, settings.alpha_of_each, settings.target_inputs)
    for selection in selections:
        selected = selection.select(Aside(out, y, chosen.score, chosen.calibration, *ways))
        warnings = [*chosen.warnings, *([selected.warning] if selected.warning else [])]
        report = {**chosen.report, **selected.report}
        chosen = _Chosen(selected.score, selected.calibration, report, warnings, count)
    return chosen, [part.part(~own) for part, own in masks if not bool(own.all())]


def _spared(mask: Tensor, labels: Sequence[Any], known: Tensor, needed: int) -> Tensor:
    """Take rows back until every group that has as many targets as are needed keeps as many.

    Without labels all rows are one group. Which rows are taken back does not depend on their
    targets, so that groups stay exchangeable with new rows.

    >>> _spared(torch.tensor([True, False, True, True]), [0, 0, 1, 1], torch.ones(4, 1) > 0, 2)
    tensor([False, False, False, False])
    """
    mask, known = mask.clone(), known.flatten(1) if known.dim() > 1 else known[:, None]
    every = known.all(dim=1, keepdim=True)
    known = (every if bool(every.all()) else torch.cat([known, every], dim=1)).long().cpu()
    places: dict[Any, list[int]] = {}
    for place, label in enumerate(labels):
        places.setdefault(label, []).append(place)
    for group in map(torch.tensor, places.values()) if labels else [torch.arange(len(mask))]:
        all_known, aside = known[group].sum(dim=0), group[mask[group]]
        missed = needed - (all_known - known[aside].sum(dim=0))
        missed[all_known < needed] = 0
        back = torch.cat([missed[None] * 0, known[aside].cumsum(dim=0)])
        mask[aside[: int((back < missed).any(dim=1).sum())]] = False
    return mask


@dataclass(eq=False)
class Table:
    """Columns that grow batch by batch.

    Tensors double when they are full: a list of small ones would lie between the large
    intermediates of the batches, and fragment the heap.

    >>> table = Table()
    >>> table.add({"score": torch.zeros(2, 1), "group": ["a", "b"]})
    >>> table.add({"score": torch.ones(1, 1), "group": ["a"]})
    >>> len(table), table.columns["score"][:, 0], table.columns["group"]
    (3, tensor([0., 0., 1.]), ['a', 'b', 'a'])
    """

    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _lists: dict[str, list[Any]] = field(default_factory=dict)
    _rows: int = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, columns: Columns) -> None:
        """Append rows to every column."""
        end = self._rows + max(map(len, columns.values()))
        for name, column in columns.items():
            if not isinstance(column, Tensor):
                self._lists.setdefault(name, []).extend(column)
                continue
            old = self._tensors.get(name, column[:0])
            if end > len(old):
                size = max(end, 2 * len(old))
                self._tensors[name] = column.new_empty((size, *column.shape[1:]))
                self._tensors[name][: self._rows] = old[: self._rows]
            self._tensors[name][self._rows : end] = column.detach()
        self._rows = end

    @property
    def columns(self) -> dict[str, Any]:
        """All columns so far, without unused capacity."""
        filled = {
            name: tensor if len(tensor) == self._rows else tensor[: self._rows].clone()
            for name, tensor in self._tensors.items()
        }
        return {**filled, **self._lists}
