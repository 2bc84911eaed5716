"""One calibration in many processes: each scores its rows, all end with the same calibration."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ffcp import files
from ffcp.conformal.rank import exact_alpha
from ffcp.distributed.parts import Kind, State, merged, state_of
from ffcp.distributed.ranks import Ranks
from ffcp.distributed.sampling import OwnRows, Told, must_be_disjoint
from ffcp.predictor import Predictor


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
    same calibration: the scores of all ranks, merged in their order. Only scores are exchanged,
    never rows. What is left open (a layer, a bandwidth, what is learned) is selected by the first
    rank that has rows, on a share of them that does not calibrate, and sent to all others, which
    wait for it. So intervals are as valid as those of one process, but where something is selected
    they are not the same.

    Parameters
    ----------
    predictor
        Made in the same way, of the same weights, in every process.
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
        part = _RankPart(predictor, ranks.rank, new, update, rank_error)
        told = ranks.each(lambda: part.begin(x, y, groups, weights))
        must_be_disjoint(told)
        lead = next((rank for rank, one in enumerate(told) if one.has_rows), None)
        selected = None
        if not (part.update or predictor.is_settled):
            selected = ranks.each(lambda: part.scored() if ranks.rank == lead else None)[lead or 0]
        states = ranks.each(
            lambda: selected if selected and ranks.rank == lead else part.scored(selected, lead)
        )
        if len(set(ranks.each(lambda: part.merge(states)))) > 1:
            raise ValueError(
                "the ranks had different calibrations before update=True: calibrate all ranks "
                "together, or load the same file in each"
            )
    predictor.take_over(part.merged)
    return predictor


class _RankPart:
    """What one process does of a calibration that all of them make together."""

    merged: Predictor

    def __init__(
        self, predictor: Predictor, rank: int, new: Any, update: bool, rank_error: Any
    ) -> None:
        self._predictor, self._rank, self._new = predictor, rank, new
        self.update = update and len(predictor.calibration) > 0
        self._error = rank_error

    def begin(self, x: Any, y: Any, groups: Any, weights: Any) -> Told:
        """Look at what is given, and tell the others."""
        if self._error is not None:
            self._error = exact_alpha(self._error, "rank_error")
        if self.update and self._new is not None:
            raise ValueError("what was learned from new inputs stays: leave out new=, or update=")
        self._rows = OwnRows(self._predictor.model, x, y, groups, weights)
        return self._rows.told()

    def scored(self, selected: State | None = None, lead: int | None = None) -> State | None:
        """Score the rows of this process, with what another one has selected."""
        rows, predictor = self._rows, self._predictor
        if not rows.has_any:
            return None
        is_first = not self.update and lead in (None, self._rank)
        seed = predictor.seed if is_first else self._seed()
        if selected is not None:
            mine = predictor.restored(selected).settled(seed)
        else:
            mine = predictor.settled(seed) if self.update else predictor.uncalibrated(seed)
        mine.calibrate(
            rows.x,
            rows.y,
            groups=rows.groups,
            weights=rows.weights,
            new=None if selected is not None else self._new,
            rank_error=None if self._error is None else self._error / 2,
        )
        return state_of(mine)

    def _seed(self) -> int | None:
        """Return a seed of this process's own, also for its next update."""
        if self._predictor.seed is None:  # the operating system gives each another one
            return None
        told = [self._predictor.seed, self._rank, len(self._predictor.calibration)]
        return int(np.random.SeedSequence(told).generate_state(1, np.uint64)[0])

    def merge(self, states: Sequence[State | None]) -> str:
        """Merge the calibrations of all processes in the order of ranks, and return a hash."""
        base = [state_of(self._predictor)] if self.update else []
        known = [*base, *(state for state in states if state is not None)]
        self.merged = merged(self._predictor, known, self._error)
        digest = hashlib.sha256()
        files.hash_tensors(digest, state_of(self.merged))
        return digest.hexdigest()
