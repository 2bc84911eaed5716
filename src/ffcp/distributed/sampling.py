"""The rows of one process, without those that a DistributedSampler repeats as padding."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.utils.data import DistributedSampler

from ffcp.network import inputs
from ffcp.network.arrays import is_arraylike

_FEWEST = 8  # this many equal rows are no coincidence


class Share(NamedTuple):
    """The share of the rows that a DistributedSampler assigns to one process."""

    rank: int
    replicas: int
    order: tuple[Any, ...]  # must be equal in all processes, or rows would be repeated
    rows: int  # how many rows, counted from the first, are not padding

    @classmethod
    def of(cls, loader: Any) -> Share | None:
        """Return the share of a loader's sampler; ``None`` without a DistributedSampler."""
        batches = getattr(loader, "batch_sampler", None)
        samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
        sampler = next((s for s in samplers if isinstance(s, DistributedSampler)), None)
        if sampler is None:
            return None
        if type(sampler).__iter__ is not DistributedSampler.__iter__:
            raise ValueError(
                f"sampler {type(sampler).__name__!r} overrides __iter__, so repeated rows cannot "
                "be recognised: use torch.utils.data.DistributedSampler, or pass every rank "
                "different rows"
            )
        rows = len(sampler.dataset)  # type: ignore[arg-type]
        # Position p of the order, padded at its end by its beginning, goes to rank p % replicas.
        assigned = len(range(sampler.rank, sampler.total_size, sampler.num_replicas))
        kept = len(range(sampler.rank, min(rows, sampler.total_size), sampler.num_replicas))
        if kept < assigned and not getattr(loader, "in_order", True):
            raise ValueError(
                "the sampler repeats rows at the end, and 'in_order' is False, so they cannot be "
                "recognised: leave out in_order=False"
            )
        seed = (sampler.seed, sampler.epoch) if sampler.shuffle else None
        return cls(sampler.rank, sampler.num_replicas, (rows, seed, sampler.drop_last), kept)


class RowsSummary(NamedTuple):
    """The summary of its rows that a process sends to the others before scoring."""

    share: Share | None
    has_rows: bool
    first: str | None  # a hash of its first rows


def must_be_disjoint(summaries: Sequence[RowsSummary]) -> None:
    """Raise ValueError if processes would score the same rows."""
    shares = [summary.share for summary in summaries if summary.share is not None]
    layouts = {(share.replicas, share.order) for share in shares}
    if (
        len({share.rank for share in shares}) < len(shares)
        or len(layouts) > 1
        or any(share.replicas != len(summaries) for share in shares)
    ):
        raise ValueError(
            "the samplers would assign rows to several ranks, so they would count twice: use a "
            "DistributedSampler with the same rows, seed, epoch and drop_last in all ranks, "
            f"without rank= and num_replicas=. Got {shares}"
        )
    ranks: dict[str, int] = {}
    for rank, first in enumerate(summary.first for summary in summaries):
        if first is not None and ranks.setdefault(first, rank) != rank:
            raise ValueError(
                f"rank {rank} and rank {ranks[first]} have the same first rows, so rows would "
                "count several times: pass each rank different rows, for example with "
                "torch.utils.data.DistributedSampler"
            )


class OwnRows:
    """The rows of one process for ``calibrate``, without those that a sampler repeats.

    Parameters
    ----------
    model : nn.Module
        The model, which determines the type of the inputs.
    x : array-like, frame, tuple, dict or loader
    y, groups, weights : array-like
        As given to ``calibrate``.
    """

    def __init__(self, model: nn.Module, x: Any, y: Any, groups: Any, weights: Any) -> None:
        self.share, self._model = Share.of(x), model
        self.x, self.y, self.has_any = x, y, True
        self._first: Any = (x, y)
        rows = None if self.share is None else self.share.rows
        self.groups, self.weights = _first_of(groups, rows), _first_of(weights, rows)
        if y is not None:
            self.has_any = len(y) > 0
        elif isinstance(x, Iterable) and not (is_arraylike(x) or isinstance(x, Mapping)):
            items = self._items(x, rows)
            self._first = next(items, None)
            self.has_any = self._first is not None
            self.x = itertools.chain([self._first], items)

    def _items(self, loader: Iterable[Any], rows: int | None) -> Iterator[Any]:
        """Yield the first ``rows`` rows of a loader, or all; exhaust the loader in either case."""
        row = 0
        for item in inputs.items(loader):
            if not isinstance(item, (tuple, list)) or len(item) != 2:
                yield item  # not a pair: calibrate raises an error
                continue
            x, y = item
            count = len(y) if rows is None else min(len(y), rows - row)
            row += len(y)
            if count == len(y) > 0:
                yield item
            elif count > 0:
                yield inputs.take(inputs.to_tensors(x, self._model), slice(0, count)), y[:count]

    def summary(self) -> RowsSummary:
        """Return the summary for the other processes."""
        return RowsSummary(self.share, self.has_any, self._hash())

    def _hash(self) -> str | None:
        """Return a hash of the first rows; ``None`` if there are too few for a comparison."""
        if not isinstance(self._first, (tuple, list)) or len(self._first) != 2:
            return None
        x, y = self._first
        if y is None or len(y) < _FEWEST:
            return None
        first = inputs.take(inputs.to_tensors(x, self._model), slice(0, _FEWEST))
        values = [leaf.detach().cpu().tolist() for _, leaf in inputs.leaves(first)]
        return hashlib.sha256(repr((values, list(y[:_FEWEST]))).encode()).hexdigest()


def _first_of(values: Any, rows: int | None) -> Any:
    """Return the first ``rows`` groups or weights, if they are given for each row."""
    return values if rows is None or values is None or callable(values) else values[:rows]
