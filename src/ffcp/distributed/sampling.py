"""Which rows of a process's loader are its own: a DistributedSampler pads by repeating some."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.utils.data import DistributedSampler

from ffcp.network import inputs
from ffcp.network.arrays import is_arraylike

_FEWEST = 8  # rows that are not equal by chance


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


class Told(NamedTuple):
    """What a process tells the others of its rows before any is scored."""

    share: Share | None
    has_rows: bool
    first: str | None  # a hash of its first rows


def must_be_disjoint(told: Sequence[Told]) -> None:
    """Refuse samplers that would hand out a row to several processes, and equal first rows."""
    shares = [one.share for one in told if one.share is not None]
    alike = {(share.replicas, share.order) for share in shares}
    if (
        len({share.rank for share in shares}) < len(shares)
        or len(alike) > 1
        or any(share.replicas != len(told) for share in shares)
    ):
        raise ValueError(
            "the samplers would hand out rows to several ranks, and they would count twice: give "
            "all ranks a DistributedSampler of the same rows, seed, epoch and drop_last, without "
            f"rank= and num_replicas=. There are {shares}"
        )
    seen: dict[str, int] = {}
    for rank, one in enumerate(told):
        if one.first is not None and seen.setdefault(one.first, rank) != rank:
            raise ValueError(
                f"the first rows of rank {rank} are those of rank {seen[one.first]} again, so "
                "rows would count several times: give each rank rows of its own, by "
                "torch.utils.data.DistributedSampler, say"
            )


class OwnRows:
    """The rows of one process, as ``calibrate`` takes them, without those that a sampler repeats.

    Parameters
    ----------
    model
        The model, which says how inputs are read.
    x, y, groups, weights
        As given to ``calibrate``.
    """

    def __init__(self, model: nn.Module, x: Any, y: Any, groups: Any, weights: Any) -> None:
        self.share, self._model = Share.of(x), model
        self.x, self.y, self.has_any = x, y, True
        self._first: Any = (x, y)
        own = None if self.share is None else self.share.own
        self.groups, self.weights = (_first_of(given, own) for given in (groups, weights))
        if y is not None:
            self.has_any = len(y) > 0
        elif isinstance(x, Iterable) and not (is_arraylike(x) or isinstance(x, Mapping)):
            items = self._items(x, own)
            self._first = next(items, None)
            self.has_any = self._first is not None
            self.x = itertools.chain([self._first], items)

    def _items(self, loader: Iterable[Any], rows: int | None) -> Iterator[Any]:
        """Yield so many first rows of a loader, or all; go through the rest of it, too."""
        row = 0
        for item in inputs.items(loader):
            if not isinstance(item, (tuple, list)) or len(item) != 2:
                yield item  # no pair, which calibrate refuses
                continue
            x, y = item
            left = len(y) if rows is None else min(len(y), rows - row)
            row += len(y)
            if left == len(y) > 0:
                yield item
            elif left > 0:
                yield inputs.take(inputs.to_tensors(x, self._model), slice(0, left)), y[:left]

    def told(self) -> Told:
        """Return what the other processes must know."""
        return Told(self.share, self.has_any, self._digest())

    def _digest(self) -> str | None:
        """Hash some first rows; ``None`` of so few that they may be equal by chance."""
        if not isinstance(self._first, (tuple, list)) or len(self._first) != 2:
            return None
        x, y = self._first
        if y is None or len(y) < _FEWEST:
            return None
        some = inputs.take(inputs.to_tensors(x, self._model), slice(0, _FEWEST))
        told = [leaf.detach().cpu().tolist() for _, leaf in inputs.leaves(some)]
        return hashlib.sha256(repr((told, list(y[:_FEWEST]))).encode()).hexdigest()


def _first_of(given: Any, rows: int | None) -> Any:
    """Return so many first labels or weights, if they are given for each row."""
    return given if rows is None or given is None or callable(given) else given[:rows]
