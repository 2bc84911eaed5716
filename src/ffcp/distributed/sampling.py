"""Which rows of a process's loader are its own: a DistributedSampler pads by repeating some."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DistributedSampler

from ffcp.calibrating import Batch
from ffcp.network import inputs


class Share(NamedTuple):
    """What a DistributedSampler hands out to one process."""

    rank: int
    replicas: int
    order: tuple[Any, ...]  # what all processes must agree on, for no row to come twice
    own: int  # how many rows, counted from the first, are no repeats

    @classmethod
    def of(cls, loader: Any) -> Share | None:
        """Look for the sampler of a loader; ``None`` where rows are divided in another way."""
        by_batch = getattr(loader, "batch_sampler", None)
        among = (getattr(loader, "sampler", None), by_batch, getattr(by_batch, "sampler", None))
        sampler = next((one for one in among if isinstance(one, DistributedSampler)), None)
        if sampler is None:
            return None
        if type(sampler).__iter__ is not DistributedSampler.__iter__:
            raise ValueError(
                f"{type(sampler).__name__} deals out rows in a way of its own, so that nobody can "
                "tell which it repeats: use torch.utils.data.DistributedSampler, or give every "
                "rank rows of its own"
            )
        rows = len(sampler.dataset)  # type: ignore[arg-type]
        # Position p of the order, padded at its end by its beginning, goes to rank p % replicas.
        places = range(sampler.rank, sampler.total_size, sampler.num_replicas)
        own = len(range(sampler.rank, min(rows, sampler.total_size), sampler.num_replicas))
        if own < len(places) and not getattr(loader, "in_order", True):
            raise ValueError(
                "the sampler repeats rows at the end, and the loader yields batches in any order: "
                "leave out in_order=False"
            )
        seed = (sampler.seed, sampler.epoch) if sampler.shuffle else None
        return cls(sampler.rank, sampler.num_replicas, (rows, seed, sampler.drop_last), own)


def must_be_disjoint(shares: Sequence[Share | None]) -> None:
    """Refuse samplers that would hand out a row to several processes.

    >>> must_be_disjoint([Share(0, 2, (), 5), Share(0, 2, (), 5)])
    Traceback (most recent call last):
    ValueError: the samplers of ranks 0 and 1 are both that of rank 0 of 2, and points would count
    twice: leave out rank= and num_replicas= of DistributedSampler
    """
    known = {number: share for number, share in enumerate(shares) if share is not None}
    first = next(iter(known.values()), None)
    seen: dict[int, int] = {}
    for number, share in known.items():
        assert first is not None
        if share.replicas != len(shares):
            raise ValueError(
                f"the sampler of rank {number} divides rows among {share.replicas}, but there are "
                f"{len(shares)} ranks: leave out num_replicas= of DistributedSampler"
            )
        if share.rank in seen:
            raise ValueError(
                f"the samplers of ranks {seen[share.rank]} and {number} are both that of rank "
                f"{share.rank} of {share.replicas}, and points would count twice: leave out rank= "
                "and num_replicas= of DistributedSampler"
            )
        if share.order != first.order:
            raise ValueError(
                f"the sampler of rank {number} puts rows in another order than that of others (its "
                "number of rows, seed, epoch or drop_last differs), and points would count twice: "
                "make all of them alike"
            )
        seen[share.rank] = number


def first_rows(batches: Iterable[Batch], rows: int | None) -> Iterator[Batch]:
    """Yield so many first rows of some batches, or all; go through the rest of them, too."""
    for batch in batches:
        left = len(batch.y) if rows is None else rows - batch.row
        if left >= len(batch.y):
            yield batch
        elif left > 0:
            part = slice(0, left)
            groups = None if batch.groups is None else batch.groups[part]
            weights = None if batch.weights is None else batch.weights[part]
            x = inputs.take(batch.x, part)
            yield batch._replace(x=x, y=batch.y[part], groups=groups, weights=weights)
