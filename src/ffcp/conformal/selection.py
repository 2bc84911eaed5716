"""Set rows aside, choose on them, score the rest: the one loop behind every automatic choice.

The layer of FFCP, the steps of FCP, the bandwidth of localized methods, temperature and penalties
of label sets: whatever is chosen by data is chosen on rows that do not calibrate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ffcp.batch import BatchOutput, Requires
from ffcp.conformal.columns import Columns, Table, take
from ffcp.conformal.rank import rows_needed

Batch = TypeVar("Batch")
Incoming = TypeVar("Incoming", contravariant=True)
Self = TypeVar("Self", bound="Score")


class Score:
    """Gives points their scores; the base of families of bands and of label scores.

    One that is open has something to choose first: it notes what the choice needs of every row,
    and :meth:`choose` gives a settled one.
    """

    #: Whether something is still to be chosen before points can be scored.
    is_open = False
    #: What that is, in words.
    what_is_open = "what is left open"
    #: No score is below this.
    lowest = -math.inf
    #: Whether a score may be infinite, of a point that no threshold covers.
    takes_infinity = True
    #: Whether scores are tensors that nobody else has, so that they need not be copied.
    gives_new = False

    def requires(self) -> Requires:
        """Say what the pass over the model must bring."""
        return Requires()

    def settings(self) -> dict[str, Any]:
        """Say what scores depend on besides the model; saved, and compared when merging."""
        return {}

    def note(self, out: BatchOutput, y: Any) -> dict[str, Any]:
        """Note of rows what their scores need: the scores themselves if nothing is open."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Give tensors that scores depend on besides the model: what was learned; saved too."""
        return {}

    def again(self, noted: Columns) -> tuple[BatchOutput, Tensor] | None:
        """Give what was seen of rows that waited for a choice, and their targets, if it was noted.

        Their scores and notes are then made as if the model had just seen them.
        """
        return None

    def scores(self, noted: Columns) -> Tensor:
        """Give the scores (n, m) of rows that were noted, here or by the one that was open."""
        return torch.as_tensor(noted["score"])

    def signs(self, noted: Columns) -> Tensor | None:
        """Say which of these rows' scores are the size of a negative number, if any can be."""
        sign: Tensor | None = noted.get("sign")
        return sign

    # -- only where something is open -------------------------------------------------------

    #: Whether what the choice needs of a row takes long: then it is worked out only of rows that
    #: choose, and these come first, where inputs stay in memory.
    is_costly = False
    #: How many rows are enough to choose; more would only cost time and memory.
    most_rows = 10_000
    #: How many rows must be set aside for a choice: with fewer it is done without, if that can be.
    fewest_rows = 0
    #: Of how many rows that come first twice the share is set aside: few rows choose badly.
    early_rows = 0
    #: Of how many rows it is checked that the model treats them separately.
    sample = 8

    def prepared(self: Self, model: Any, x: Any) -> Self:
        """Look at the model and at a first batch, to know what to choose from."""
        return self

    def choose(
        self, aside: Columns, alpha: Any, left: int = 0, weights: Tensor | None = None
    ) -> Chosen:
        """Choose what is open on rows set aside; at least ``left`` others will calibrate.

        ``weights`` say how much likelier each of these rows is among new ones, if not all are
        alike: candidates may be compared by them.
        """
        raise NotImplementedError

    def without_choice(self, rows: int, alpha: Any) -> Chosen | None:
        """Settle what is open without any rows, too few to be divided, if that can be."""
        return None

    def restored(self: Self, settings: Mapping[str, Any]) -> Self:
        """Give a scorer whose open settings are those that were saved."""
        return self

    def recalled(self: Self, settings: Mapping[str, Any], state: Mapping[str, Tensor]) -> Self:
        """Give a scorer whose open settings, and what was learned, are those that were saved."""
        if state:
            raise ValueError(f"it holds {', '.join(sorted(state))}, where nothing is learned")
        return self.restored(settings)

    def choices_from(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Build the choices again that were saved."""
        return {}


class Chosen(NamedTuple):
    """A settled scorer, what was chosen by name, and what the user should know of it.

    A choice of more than the scorer also gives the ``calibration`` to use in place of another.
    """

    scorer: Any
    choices: dict[str, Any]
    warning: str | None = None
    calibration: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Division:
    """Sends about a ``fraction`` of the first rows of a stream aside.

    Every 1 / fraction consecutive rows give one row, picked at random, up to ``most`` of them; of
    the ``early`` rows that come first twice as many, at most half of them.
    Whether a row is set aside depends on its position alone, so that workers can tell for any
    piece of a stream, and neither part looks at the data: both stay exchangeable with new points.

    >>> division = Division(fraction=0.25, seed=0, most=100)
    >>> int(division.mask(range(8)).sum())
    2
    >>> torch.equal(division.mask(range(8))[5:], division.mask(range(5, 8)))
    True
    """

    fraction: float
    seed: int
    most: int
    early: int = 0

    def mask(self, rows: range) -> Tensor:
        """Mark which of these rows are set aside."""
        first = max(0, math.floor(self._count(rows.start)) - 1)
        last = min(self.most, math.ceil(self._count(rows.stop)) + 1)
        bits = np.random.PCG64(np.random.SeedSequence(self.seed))
        bits.advance(first)  # a number takes one step
        draws = np.random.Generator(bits).random(max(0, last - first))
        picked = self._place(first + np.arange(len(draws)) + draws).astype(np.int64)
        mask = np.zeros(len(rows), dtype=bool)
        mask[picked[(picked >= rows.start) & (picked < rows.stop)] - rows.start] = True
        return torch.from_numpy(mask)

    @property
    def end(self) -> int:
        """The row from which on no row is set aside."""
        return math.ceil(float(self._place(np.array(self.most)))) + 1

    @property
    def _at_first(self) -> float:
        return max(self.fraction, min(2 * self.fraction, 0.5))

    def _count(self, row: int) -> float:
        """Say how many rows before this one are set aside."""
        early = min(row, self.early)
        return early * self._at_first + (row - early) * self.fraction

    def _place(self, count: Any) -> Any:
        """Say before which row so many are set aside."""
        early = np.minimum(count, self.early * self._at_first)
        return early / self._at_first + (count - early) / self.fraction


class Work(Protocol[Incoming]):
    """What is done with the batches of a calibration."""

    def note(self, batch: Incoming) -> Columns:
        """Run the model on a batch, and note of its rows what scores and choices need."""

    def choose(self, aside: Columns, left: int) -> None:
        """Choose what is open, on rows set aside; ``left`` rows at least will calibrate."""

    def do_without(self, rows: int) -> bool:
        """Settle what is open without any rows, of which there are few; say if that was done."""

    def finish(self, noted: Columns) -> Columns:
        """Turn what was noted, also before the choice, into columns to keep."""


@dataclass
class Selection(Generic[Batch]):
    """The loop: note rows until enough of them are set aside, choose, then score all others.

    Parameters
    ----------
    work
        What is noted of rows, chosen and kept.
    division
        Which rows are set aside; ``None`` if nothing is open.
    alpha
        The level at which candidates are compared: the rows that are left must allow for it.
    fewest
        How many rows must be set aside, unless nothing can be done without a choice.

    Examples
    --------
    >>> class Doubling:  # scores are the batch itself; nothing is open
    ...     def note(self, batch):
    ...         return {"score": batch}
    ...
    ...     def finish(self, noted):
    ...         return {"score": 2 * noted["score"]}
    >>> Selection(Doubling(), None, 0.1).run(torch.arange(6.0).split(4))["score"]
    tensor([ 0.,  2.,  4.,  6.,  8., 10.])
    """

    work: Work[Batch]
    division: Division | None
    alpha: Any
    fewest: int = 0
    set_aside: int = 0
    _waiting: Table = field(default_factory=Table)

    def run(self, batches: Iterable[Batch], kept: Any = None) -> Columns:
        """Go through all batches; return the columns of the rows that calibrate.

        ``kept`` takes them as they come, batch by batch, in place of a table.
        """
        kept = Table(borrows=True) if kept is None else kept
        is_open = self.division is not None
        for batch in batches:
            noted = self.work.note(batch)
            if is_open and self.division is not None:  # the first batch may show nothing is open
                self._waiting.add(noted)
                if len(self._waiting) < self._end:
                    continue
                is_open, noted = False, self._settle()
            kept.add(self.work.finish(noted))
        if is_open and len(self._waiting):
            kept.add(self.work.finish(self._settle()))
        if not len(kept):
            raise ValueError("the calibration data is empty: there are no rows to score")
        columns: Columns = kept.columns
        return columns

    @property
    def _end(self) -> int:
        assert self.division is not None
        return self.division.end

    def _settle(self) -> Columns:
        """Choose; return what was noted of the rows that are to calibrate."""
        assert self.division is not None
        waiting = self._waiting.columns
        mask = self.division.mask(range(len(self._waiting)))
        self._waiting = Table()
        left = int((~mask).sum())
        has_chosen = self.chosen_on(lambda: take(waiting, mask), int(mask.sum()), left)
        return take(waiting, ~mask) if has_chosen else waiting

    def chosen_on(self, aside: Callable[[], Columns], rows: int, left: int) -> bool:
        """Choose on so many rows set aside; say whether they did, and so do not calibrate.

        What was noted of them is asked for only if there are enough rows to choose on.
        """
        few = left < rows_needed(self.alpha) or rows < self.fewest
        if few and self.work.do_without(rows + left):
            return False
        if not left or not rows:
            raise ValueError(
                f"{rows + left} rows cannot be divided into some that choose and some that "
                "calibrate: give more rows, or values for all that is left open"
            )
        self.set_aside = rows
        self.work.choose(aside(), left)
        return True
