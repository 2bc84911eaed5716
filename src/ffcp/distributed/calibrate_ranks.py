"""One calibration in many processes: each scores its rows, and all get the same calibration."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ffcp import files
from ffcp.conformal.rank import exact_alpha
from ffcp.distributed.parts import P, State, merged, state_of
from ffcp.distributed.ranks import Ranks
from ffcp.distributed.sampling import OwnRows, RowsSummary, must_be_disjoint
from ffcp.predictor import Predictor


def calibrate(
    predictor: P,
    x: Any,
    y: Any = None,
    *,
    groups: Any = None,
    weights: Any = None,
    new: Any = None,
    update: bool = False,
    rank_error: Any = None,
    process_group: Any = None,
) -> P:
    """Calibrate a predictor in all processes of a group: each scores its part of the rows.

    All processes call this with the same predictor and each with its own rows. All get the same
    calibration: the scores of all ranks, merged in rank order. Only scores are exchanged, never
    rows. A selection (of a layer, a bandwidth, a learned model) is made by the first rank that has
    rows, on a share of them that is not used for calibration, and sent to the others, which wait
    for it. Intervals are as valid as those of one process, but after a selection not identical.

    Parameters
    ----------
    predictor : Predictor
        Constructed with the same arguments and weights in every process.
    x : array-like, frame, tuple, dict or loader
        As in :meth:`ffcp.predictor.Predictor.calibrate`. Parts may be of any size, even empty.
        Rows that a ``DistributedSampler`` repeats, to give every rank the same number, are left
        out.
    y, groups, weights, new : array-like, default=None
        As in :meth:`ffcp.predictor.Predictor.calibrate`. ``groups`` and ``weights``, unless they
        are functions, are those of this rank's rows, as its loader yields them; ``new`` is the
        same in every process.
    update : bool, default=False
        As in :meth:`ffcp.predictor.Predictor.calibrate`.
    rank_error : float, default=None
        Keep and send summaries of the scores, as of :meth:`compress`, with this rank error of the
        final calibration, for example 1e-4. By default every process keeps all scores.
    process_group : ProcessGroup, default=None
        The processes that take part; by default all.

    Returns
    -------
    predictor
        The calibrated predictor. If any process fails, it is unchanged in every process, and all
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
        raise TypeError(
            f"'predictor' must be a predictor of ffcp, got {type(predictor).__name__!r}"
        )
    ranks = Ranks(process_group)
    with torch.inference_mode(False):  # the scores outlive the caller's inference_mode
        part = _RankPart(predictor, ranks.rank, new, update, rank_error)
        summaries = ranks.each(lambda: part.begin(x, y, groups, weights))
        must_be_disjoint(summaries)
        # The first rank that has rows makes the selection, if there is one to make.
        lead = next((rank for rank, summary in enumerate(summaries) if summary.has_rows), 0)
        selected = None
        if not (part.update or predictor.is_settled):
            selected = ranks.each(lambda: part.scored() if ranks.rank == lead else None)[lead]
        states = ranks.each(
            lambda: selected if selected and ranks.rank == lead else part.scored(selected, lead)
        )
        if len(set(ranks.each(lambda: part.merge(states)))) > 1:
            raise ValueError(
                "update=True needs the same calibration in all ranks, but they differ: calibrate "
                "all ranks together, or load the same file in each"
            )
    predictor.take_over(part.merged)
    return predictor


class _RankPart:
    """The part of one process in a common calibration."""

    merged: Predictor

    def __init__(
        self, predictor: Predictor, rank: int, new: Any, update: bool, rank_error: Any
    ) -> None:
        self._predictor, self._rank, self._new = predictor, rank, new
        self.update = update and len(predictor.calibration) > 0
        self._rank_error = rank_error

    def begin(self, x: Any, y: Any, groups: Any, weights: Any) -> RowsSummary:
        """Check the arguments and return a summary of the rows for the other processes."""
        if self._rank_error is not None:
            self._rank_error = exact_alpha(self._rank_error, "rank_error")
        if self.update and self._new is not None:
            raise ValueError(
                "'new' cannot be combined with update=True, which keeps the density ratio: leave "
                "out one of the two"
            )
        self._rows = OwnRows(self._predictor.model, x, y, groups, weights)
        return self._rows.summary()

    def scored(self, selected: State | None = None, lead: int | None = None) -> State | None:
        """Return the calibration of this process's rows, given another rank's selection."""
        rows, predictor = self._rows, self._predictor
        if not rows.has_any:
            return None
        is_first = not self.update and lead in (None, self._rank)
        seed = predictor.seed if is_first else self._seed()
        if selected is not None:
            part = predictor.restored(selected).settled(seed)
        else:
            part = predictor.settled(seed) if self.update else predictor.uncalibrated(seed)
        part.calibrate(
            rows.x,
            rows.y,
            groups=rows.groups,
            weights=rows.weights,
            new=None if selected is not None else self._new,
            rank_error=None if self._rank_error is None else self._rank_error / 2,
        )
        return state_of(part)

    def _seed(self) -> int | None:
        """Return a seed that differs between processes and updates."""
        if self._predictor.seed is None:  # the operating system seeds each process
            return None
        entropy = [self._predictor.seed, self._rank, len(self._predictor.calibration)]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])

    def merge(self, states: Sequence[State | None]) -> str:
        """Merge the calibrations of all processes in rank order, and return a hash."""
        present = [state for state in states if state is not None]
        if self.update:
            present.insert(0, state_of(self._predictor))
        self.merged = merged(self._predictor, present, self._rank_error)
        digest = hashlib.sha256()
        files.hash_tensors(digest, state_of(self.merged))
        return digest.hexdigest()
