"""Collective calls in a group of processes: all get all results, and all fail if one does."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")
_PLAIN = (ValueError, TypeError, RuntimeError)  # errors that every process can raise


class Ranks:
    """A process group of torch.distributed, from the view of one process.

    Parameters
    ----------
    group : ProcessGroup, default=None
        The group; ``None`` means all processes.
    """

    def __init__(self, group: Any = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "there is no process group: call torch.distributed.init_process_group() first, in "
                "a job started by torchrun; in a single process use predictor.calibrate"
            )
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise RuntimeError(
                "this process is not a member of 'process_group': call calibrate in its members"
            )

    def each(self, work: Callable[[], Result]) -> list[Result]:
        """Run ``work`` in this process; return the results of all, in rank order.

        An error in one process is raised in all of them, with its rank: a process that fails
        still informs the others, so that none waits for it.
        """
        failure: BaseException | None = None
        try:
            result: bytes | Failure = pickle.dumps(work())
        except BaseException as error:
            failure, result = error, Failure.of(error)
        results: list[Any] = [None] * self.size
        dist.all_gather_object(results, result, group=self._group)
        if failure is not None and not isinstance(failure, Exception):
            raise failure  # this process is being stopped
        failed = [rank for rank, result in enumerate(results) if isinstance(result, Failure)]
        if failed:
            first = results[failed[0]]
            others = f" (and so did {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            raise first.kind(f"rank {failed[0]} failed{others}: {first.message}") from failure
        return [pickle.loads(result) for result in results]


class Failure(NamedTuple):
    """An error of one process, in a form that can be sent to the others."""

    kind: type[BaseException]
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure of an error; unusual types become a RuntimeError."""
        if type(error) in _PLAIN:
            return cls(type(error), str(error))
        return cls(RuntimeError, f"{type(error).__name__}: {error}")
