"""The calibration loop: select what is left open on rows set aside, then score all other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ffcp.batch import BatchOutput, Requires
from ffcp.calibrated import Counts
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Columns
from ffcp.conformal.compressed import joined, shrunk, summary_of
from ffcp.conformal.mondrian import by_groups, rows_of_groups
from ffcp.conformal.rank import rows_needed
from ffcp.conformal.score import Score
from ffcp.conformal.selection import Aside, Division, LearningDivision, Selection
from ffcp.network import forward, inputs
from ffcp.network.inputs import RowBuffer

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
        x, _, row, groups, weights, columns = batch
        return forward.run_batch(self.model, x, requires, row, groups, weights, columns)

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
    """The result of a calibration, and the numbers of rows whose score is infinite."""

    score: Score
    calibration: Any
    report: dict[str, Any]
    set_aside: int
    warnings: list[str]
    infinite: list[int]


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
    stream = iter(batches)
    first = next(stream, None)
    if first is None:
        raise ValueError(EMPTY)
    stream = chain([first], stream)
    selection = score if isinstance(score, Selection) else score.selection()
    if selection is not None:  # find its candidates for this model; a single one is the score
        score = selection.prepared(run.model, first.x)
    selections = selections_of(score, calibration)
    requires = score.requires().joined(calibration.requires())
    forward.check_rows(run.model, first.x, requires.norms, run.sample)
    result, kept = Result(score, calibration, {}, 0, [], []), []
    if selections:
        divisions = [one.division(settings.fraction, settings.seed) for one in selections]
        division = max(divisions, key=lambda division: division.most)
        kept = _first_outputs(stream, division.end, run, requires)
        result, others = _select(selections, result, kept, division, settings)
        score, calibration = result.score, result.calibration
        requires = score.requires().joined(calibration.requires())
        kept = [part.part(mask, requires.norms) for part, mask in others]
    outputs = chain(kept, ((run(batch, requires), batch.y) for batch in stream))
    filled, infinite = _filled(score, calibration, outputs, rank_error)
    return result._replace(calibration=filled, infinite=infinite)


def selections_of(score: Any, calibration: Calibration) -> list[Selection]:
    """Return the selections of the score and of the calibration, in the order to run them.

    A density ratio comes first, as it needs no scores: candidates can be weighted by it.
    """
    of_score = score if isinstance(score, Selection) else score.selection()
    of_calibration = calibration.selection()
    selections = [one for one in (of_score, of_calibration) if one is not None]
    return sorted(selections, key=lambda selection: not selection.takes_new)


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


def _filled(
    score: Any,
    calibration: Calibration,
    outputs: Iterable[tuple[BatchOutput, Tensor]],
    rank_error: Any,
) -> tuple[Any, list[int]]:
    """Return the calibration with these rows added, and those whose score is infinite."""
    empty = calibration if rank_error is None else summary_of(calibration, rank_error)
    has_signs = calibration.traits.signs and hasattr(score, "signs")
    buffer, filled, infinite = RowBuffer(), None, list[int]()
    for out, y in outputs:
        columns = {"scores": score.score(out, y).cpu(), **calibration.metadata(out, y)}
        places = columns["scores"].isinf().any(dim=1).nonzero()[:, 0]
        infinite += [out.rows[place] for place in places.tolist()]
        if has_signs and (signs := score.signs(out, y)) is not None:
            columns["signs"] = signs.cpu()
        buffer.add(columns)
        if rank_error is not None and buffer.filled >= _AT_ONCE:
            filled, buffer = _with_rows(filled, empty, buffer.columns), RowBuffer()
    if buffer.filled:
        filled = _with_rows(filled, empty, buffer.columns)
    if not filled:
        raise ValueError(EMPTY)
    filled = joined(calibration, filled) if len(calibration) else filled
    return filled if rank_error is None else shrunk(filled), infinite


def _with_rows(filled: Any, empty: Any, columns: Columns) -> Any:
    """Return a calibration with these rows added."""
    metadata = {name: column for name, column in columns.items() if name != "scores"}
    fresh = empty.fit(columns["scores"], metadata)
    return fresh if filled is None else filled.merge(fresh)


class _KeptOutput(NamedTuple):
    """The output of a batch that is kept until something is selected, and its targets."""

    out: BatchOutput
    y: Tensor

    def part(self, mask: Tensor, norms: Iterable[str] | None = None) -> _KeptOutput:
        """Return some of the rows, with all norms or some."""
        names = self.out.norms if norms is None else norms
        out = self.out._replace(norms={name: self.out.norms[name] for name in names})
        return _KeptOutput(forward.part_of(out, mask), self.y[mask])


def _first_outputs(
    stream: Iterator[Batch], end: int, run: BatchRunner, requires: Requires
) -> list[_KeptOutput]:
    """Run the batches that hold the first ``end`` rows, and keep their outputs."""
    kept: list[_KeptOutput] = []
    count = 0
    for batch in stream:
        out = run(batch, requires)
        # Copies: the batch may be a buffer that the user fills again.
        x = inputs.take(out.x, torch.arange(len(batch.y))) if requires.input else None
        values = {name: value.clone() for name, value in out.values.items()}
        out = out._replace(x=x, output=out.output.clone(), values=values)
        kept.append(_KeptOutput(out, batch.y.clone()))
        count += len(batch.y)
        if count >= end:
            break
    return kept


def _select(
    selections: list[Selection],
    result: Result,
    kept: list[_KeptOutput],
    division: Division | LearningDivision,
    settings: Settings,
) -> tuple[Result, list[tuple[_KeptOutput, Tensor]]]:
    """Select on some of the rows that were kept; return what was selected, and the other rows.

    These are batches with masks: what is required of them is known only now.
    """
    counts = [len(part.y) for part in kept]
    rows, calibration = sum(counts), result.calibration
    labels: list[Any] = []
    if calibration.traits.groups:
        labels = [label for part in kept for label in calibration.labels(part.out)]
    mask = division.mask(rows, len(set(labels)) or 1)
    if len(selections) == 1 and selections[0].is_optional:
        is_short = int((~mask).sum()) < rows_needed(settings.alpha)
        targets = torch.cat([part.y for part in kept])
        needed = rows_needed(settings.alpha_of_each(settings.alpha, targets[:1].numel()))
        mask = _spared(mask, labels, ~targets.isnan(), needed)
        if is_short or int(mask.sum()) < max(1, selections[0].fewest_rows):
            score, _, report, warning = selections[0].without_rows(rows, settings.alpha)
            warnings = [warning] if warning else []
            everything = [(part, torch.ones(len(part.y), dtype=torch.bool)) for part in kept]
            return result._replace(score=score, report=report, warnings=warnings), everything
    set_aside = int(mask.sum())
    left = rows - set_aside
    if not left or not set_aside:
        raise ValueError(
            f"{rows} rows are too few to select on some and calibrate on the others: "
            "pass more rows, or give all settings"
        )
    masks = mask.split(counts)
    picked = [part.part(own) for part, own in zip(kept, masks, strict=True) if bool(own.any())]
    aside = Aside(
        forward.joined([part.out for part in picked]),
        torch.cat([part.y for part in picked]),
        result.score,
        calibration,
        settings.alpha,
        left,
        settings.alpha_of_each,
        settings.target_inputs,
    )
    report, warnings = {}, []
    for selection in selections:
        selected = selection.select(aside)
        aside = aside._replace(score=selected.score, calibration=selected.calibration)
        report.update(selected.report)
        if selected.warning:
            warnings.append(selected.warning)
    others = [(part, ~own) for part, own in zip(kept, masks, strict=True) if not bool(own.all())]
    return Result(aside.score, aside.calibration, report, set_aside, warnings, []), others


def _spared(mask: Tensor, labels: Sequence[Any], known: Tensor, needed: int) -> Tensor:
    """Take rows back until every group that has as many targets as are needed keeps as many.

    Without labels all rows are one group. Which rows are taken back does not depend on their
    targets, so that groups stay exchangeable with new rows.

    >>> _spared(torch.tensor([True, False, True, True]), [0, 0, 1, 1], torch.ones(4, 1) > 0, 2)
    tensor([False, False, False, False])
    """
    mask, known = mask.clone(), known.flatten(1) if known.dim() > 1 else known[:, None]
    is_complete = known.all(dim=1, keepdim=True)
    # Joint coverage may need rows with all of their targets: these are counted, too.
    known = is_complete if bool(is_complete.all()) else torch.cat([known, is_complete], dim=1)
    known = known.long().cpu()
    groups = rows_of_groups(labels).values() if labels else [torch.arange(len(mask))]
    for rows in groups:
        aside = rows[mask[rows]]
        available = known[rows].sum(dim=0)
        missing = needed - (available - known[aside].sum(dim=0))
        missing[available < needed] = 0
        # How many targets come back with the first 0, 1, 2, ... of the rows set aside.
        returned = torch.cat([missing[None] * 0, known[aside].cumsum(dim=0)])
        mask[aside[: int((returned < missing).any(dim=1).sum())]] = False
    return mask
