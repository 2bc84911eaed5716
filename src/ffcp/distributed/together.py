"""One calibration in many processes: each scores its rows, all end with the same points."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ffcp import files
from ffcp.calibrating import Batch, Calibrating, Summing
from ffcp.conformal.columns import Columns, Table, take
from ffcp.conformal.compressing import joined, settled, summary_like
from ffcp.conformal.rank import exact_alpha
from ffcp.distributed.ranks import Ranks
from ffcp.distributed.sampling import Share, first_rows, must_be_disjoint
from ffcp.network import inputs
from ffcp.network.identity import Identity
from ffcp.predictor import Predictor

Kind = TypeVar("Kind", bound=Predictor)
_EXAMPLE = 8  # rows that show a process without any what inputs are like
_FEWEST = 8  # rows that are not equal by chance


def calibrate(
    predictor: Kind,
    x: Any,
    y: Any = None,
    *,
    groups: Any = None,
    weights: Any = None,
    new: Any = None,
    update: bool = False,
    rank_error: Any = None,
    process_group: Any = None,
) -> Kind:
    """Calibrate a predictor in all processes of a group: each scores its part of the rows.

    All processes call this with the same predictor and each with its own rows. All end with the
    same calibration, to the last bit, as if one process had seen the rows of rank 0, then those of
    rank 1, and so on. Only scores are exchanged, never rows: but for those set aside to choose
    something automatically, of which what the choice looks at is, and for a few that a process
    without any is shown.

    Parameters
    ----------
    predictor
        Made in the same way, of the same weights, in every process. Every method can be
        calibrated so, also those that choose or learn something: all ranks set rows aside, and
        every rank makes the same choice on all of them.
    x, y, groups, weights, new, update
        As in :meth:`ffcp.predictor.Predictor.calibrate`. Parts may be of any size, also empty. Of
        a loader with a ``DistributedSampler`` the rows that it repeats, to give every rank the
        same number, are left out. ``groups`` and ``weights`` that are no functions are those of
        this rank's rows, as its loader yields them; ``new`` is the same in every process.
    rank_error
        Keep and send summaries of the scores, as :meth:`compress` makes them, and with this rank
        error in the end: 1e-4, say. By default every process keeps all scores of all.
    process_group
        Which processes take part; by default all.

    Returns
    -------
    predictor
        Calibrated; unchanged, in every process, if anything goes wrong in any of them. Then all
        processes raise an error with the message and the rank of the one that failed.

    Examples
    --------
    In a script that ``torchrun --nproc_per_node=4 script.py`` starts::

        torch.distributed.init_process_group("gloo")
        sampler = torch.utils.data.DistributedSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=512, sampler=sampler)
        ffcp.distributed.calibrate(predictor, loader)
    """
    if not isinstance(predictor, Predictor):
        raise TypeError(f"cannot calibrate a {type(predictor).__name__} in several processes")
    ranks = Ranks(process_group)
    with torch.inference_mode(False):  # the scores outlive the caller's inference_mode
        part = _Part(predictor, ranks)
        part.begin(x, y, groups, weights, new, update, rank_error)
        part.choose()
        part.score()
        part.end()
    if ranks.rank == 0:
        for message in part.run.warnings:
            predictor._warn(message)
    return predictor


class _Told(NamedTuple):
    """What a process says of itself before any work is done."""

    settings: dict[str, Any]
    fingerprint: str
    points: str
    share: Share | None
    entropy: int | None
    drawn: int
    name: str


class _Waiting(NamedTuple):
    """What a process has noted of its first rows, for a choice."""

    aside: Columns
    set_aside: int
    left: int
    is_open: bool
    has_rows: bool
    first: str | None


class _Result(NamedTuple):
    """What came of the rows of a process: scores and notes, or the points of a summary."""

    columns: Columns
    rows: int
    seen: int
    met: int
    classes: int | None
    layout: dict[str, Any]


class _Part:
    """The part of one process in a calibration that all of them make together."""

    def __init__(self, predictor: Predictor, ranks: Ranks) -> None:
        self._predictor, self._ranks = predictor, ranks
        self._noted: Columns | None = None  # of rows that were looked at first, to be scored
        self._all: Columns = {}  # of those that wait for a choice
        self._left: Columns = {}  # and of those that are not set aside
        self._rows = self._met = 0
        self._example: Any = None  # some of its rows
        self._first: str | None = None  # the hash of its first batch

    # -- before any row -----------------------------------------------------------------------

    def begin(
        self, x: Any, y: Any, groups: Any, weights: Any, new: Any, update: bool, rank_error: Any
    ) -> None:
        """Make ready; refuse processes that do not fit together."""

        def told() -> _Told:
            predictor = self._predictor
            self.run, self._read = predictor._begun(groups, weights, new, update)
            self._identity = Identity.of(predictor.model)
            self._error = None if rank_error is None else exact_alpha(rank_error, "rank_error")
            if self._error is not None:
                summary_like(self.run.calibration, self._error)
            share = Share.of(x)
            batches = predictor._batches(x, y, groups, self._read, weights=weights)
            self._batches = self._counted(first_rows(batches, None if share is None else share.own))
            settings = {
                **predictor._settings_of(self.run.scorer, self.run.calibration),
                "seed": predictor.seed,
                "choose_fraction": predictor.choose_fraction,
                "choose_alpha": str(predictor.choose_alpha),
                "update": self.run.is_update,
                "compressed": str(self._error),
                "autocast": self._identity.autocast,
            }
            points = _digest({}, self.run.calibration.points())
            numbers = self.run.entropy, self.run.drawn
            name = uuid.uuid4().hex
            return _Told(settings, self._identity.fingerprint, points, share, *numbers, name)

        all_told = self._ranks.each(told)
        first = all_told[0]
        for rank, one in enumerate(all_told):
            self._must_match(rank, first, one)
        must_be_disjoint([one.share for one in all_told])
        self._name = first.name
        if first.entropy is not None:
            self.run.take_part(first.entropy, first.drawn, self._ranks.rank, self._ranks.size)

    def _must_match(self, rank: int, first: _Told, other: _Told) -> None:
        if other.fingerprint != first.fingerprint:
            raise ValueError(
                f"the model of rank {rank} has other weights than that of rank 0: give all of them "
                "the same, by load_state_dict or DistributedDataParallel"
            )
        if other.points != first.points:
            raise ValueError(
                f"the calibration of rank {rank}, to be updated, is not that of rank 0: calibrate "
                "all ranks together, or load the same file in each"
            )
        whose = f"the predictor of rank {rank}"
        self._predictor._must_match(first.settings, other.settings, whose)

    def _counted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Count rows on the way, and those from which something was learned."""
        for batch in batches:
            if not self._rows:
                some = inputs.take(batch.x, slice(0, _EXAMPLE))
                self._example = inputs.replace(some, _on_cpu(dict(inputs.leaves(some))))
                many = len(batch.y) >= _FEWEST
                self._first = _batch_digest(batch) if many else None
            self._rows += len(batch.y)
            self._met += self._predictor._met(batch)
            yield batch

    # -- what is open -------------------------------------------------------------------------

    def choose(self) -> None:
        """Choose what is open, in every process alike, on rows that all of them set aside."""
        told = self._ranks.each(self._wait)
        self._must_differ([one.first for one in told])
        example = self._shown([one.has_rows for one in told])

        def choose() -> str:
            run = self.run
            if not self._rows and example is not None:
                run.prepare(self._read(example))
            if any(one.is_open for one in told):
                table = Table()
                for one in told:
                    if one.set_aside:
                        table.add(one.aside)
                rows = sum(one.set_aside for one in told), sum(one.left for one in told)
                is_chosen = run.selection.chosen_on(lambda: table.columns, *rows)
                self._noted = self._left if is_chosen else self._all
            settings = self._predictor._settings_of(run.scorer, run.calibration)
            return _digest(settings, run.scorer.state())

        digests = self._ranks.each(choose)
        differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if differing:
            raise RuntimeError(
                f"rank {differing[0]} chose otherwise than rank 0 from the same rows, as machines "
                "of different kinds may: let one process choose or fit, and give all of them what "
                "it found"
            )

    def _wait(self) -> _Waiting:
        """Note first rows, as many as this process is to set aside from."""
        selection, waiting = self.run.selection, Table()
        for batch in self._batches:
            noted = self.run.note(batch)
            if selection.division is None:  # nothing is open, as the first batch may have shown
                self._noted = noted
                return _Waiting({}, 0, 0, False, True, self._first)
            waiting.add(noted)
            own = replace(selection.division, most=-(-selection.division.most // self._ranks.size))
            if len(waiting) >= own.end:
                break
        if not len(waiting):
            return _Waiting({}, 0, 0, False, False, None)
        mask = own.mask(range(len(waiting)))
        self._all = waiting.columns
        self._left = take(self._all, ~mask)
        aside = take(self._all, mask)
        counts = int(mask.sum()), int((~mask).sum())
        return _Waiting(_on_cpu(aside), *counts, True, True, self._first)

    def _shown(self, has_rows: list[bool]) -> Any:
        """Show processes without rows some of the first that has any, to prepare as it did."""
        if all(has_rows) or not any(has_rows):
            return None
        is_first = self._ranks.rank == has_rows.index(True)
        shown = self._ranks.each(lambda: self._example if is_first else None)
        return next(one for one in shown if one is not None)

    def _must_differ(self, digests: list[str | None]) -> None:
        seen: dict[str, int] = {}
        for rank, digest in enumerate(digests):
            if digest is not None and digest in seen:
                raise ValueError(
                    f"the first batch of rank {rank} is that of rank {seen[digest]} again, so "
                    "points would count several times: give each rank rows of its own, by "
                    "torch.utils.data.DistributedSampler, say"
                )
            if digest is not None:
                seen[digest] = rank

    # -- scores -------------------------------------------------------------------------------

    def score(self) -> None:
        """Score all rows of this process, and put those of all processes together."""
        before = self.run.calibration
        results = self._ranks.each(self._scored)
        if not sum(one.rows for one in results):
            raise ValueError("the calibration data is empty: no rank has rows to score")

        def put_together() -> str:
            run = self.run
            self._predictor._must_be_new(
                sum(one.met for one in results), sum(one.seen for one in results)
            )
            some = [one for one in results if one.rows]
            run.together({one.classes for one in some})
            run.layout = _common_layout([one.layout for one in some])
            if self._error is None:
                table = Table()
                for one in some:
                    table.add(one.columns)
                run.columns = table.columns
                run.calibration.add(*self._predictor._entries(run.columns))
            else:
                self._merge(before, [one.columns for one in some])
            if not self._identity.is_that_of(self._predictor.model):
                raise RuntimeError("the model's weights changed while it was calibrated")
            return _digest(run.layout, run.calibration.points())

        digests = self._ranks.each(put_together)
        assert len(set(digests)) == 1, "ranks have put the same parts together in different ways"

    def _scored(self) -> _Result:
        run = self.run
        kept: Any = Table()
        if self._error is not None:
            run.calibration = run.calibration.empty()  # only what is new is sent
            kept = Summing(run, self._error / 2, self._predictor._entries)
        if self._noted is not None and _length(self._noted):
            kept.add(run.finish(self._noted))
        for batch in self._batches:
            kept.add(run.finish(run.note(batch)))
        columns: Columns = {}
        if len(kept):
            columns = kept.columns if self._error is None else _points_of(kept, run)
        rows = len(kept)
        counts = rows, self._rows, self._met
        return _Result(_on_cpu(columns), *counts, run.classes, self._read.layout)

    def _merge(self, before: Any, parts: list[Columns]) -> None:
        """Put summaries together in the order of ranks, and make one of them."""
        assert self._error is not None
        run = self.run
        whole = summary_like(before, self._error)
        whole = joined(before, whole) if len(before) else whole
        for points in parts:
            part = summary_like(before, self._error / 2).empty()
            part.keep(points)
            whole = joined(whole, part)
        run.calibration = settled(whole)

    def end(self) -> None:
        """Take over what all processes have made."""
        self._predictor._ended(self.run, self._identity, self._name)


def _points_of(kept: Summing, run: Calibrating) -> Columns:
    kept.columns  # noqa: B018 - takes the last rows in
    return run.calibration.points()


def _length(columns: Columns) -> int:
    return len(next(iter(columns.values()), ()))


def _on_cpu(columns: Columns) -> dict[str, Any]:
    return {n: _alone(c.detach().cpu()) if isinstance(c, Tensor) else c for n, c in columns.items()}


def _alone(tensor: Tensor) -> Tensor:
    """Part a tensor from a larger one, all of which would go along to other processes."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _digest(settings: Any, tensors: Any) -> str:
    """Hash settings and tensors, all bits of them."""
    return hashlib.sha256(files.seal(settings, tensors).numpy().tobytes()).hexdigest()


def _batch_digest(batch: Batch) -> str:
    return _digest({}, {"y": batch.y, **dict(inputs.leaves(batch.x))})


def _common_layout(layouts: list[dict[str, Any]]) -> dict[str, Any]:
    """Refuse frames whose columns differ from process to process."""
    for layout in layouts:
        for key, part in layout.items():
            mine = layouts[0].get(key, part)
            if mine.get("columns") != part.get("columns"):
                raise ValueError(
                    f"ranks have frames with different columns, {mine.get('columns')} and "
                    f"{part.get('columns')}: give all the same columns in the same order"
                )
    return layouts[0]
