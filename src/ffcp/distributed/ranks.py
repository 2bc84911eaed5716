"""The processes of a group: each does its part, all hear of it, and all fail if one does."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Part = TypeVar("Part")
_PLAIN = (ValueError, TypeError, RuntimeError)  # that every process can raise again


class Ranks:
    """All processes of a group of torch.distributed, seen from one of them.

    Parameters
    ----------
    group
        The group; ``None`` is all processes.
    """

    def __init__(self, group: Any = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "there is no process group: call torch.distributed.init_process_group() first, in "
                "a job started by torchrun; in a single process, predictor.calibrate does the same"
            )
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise RuntimeError("this process is not in the process group that it was given")

    def each(self, work: Callable[[], Part]) -> list[Part]:
        """Do this process's part; return the results of all, in the order of their ranks.

        Whatever goes wrong in one process is raised in all of them, with the rank it came from:
        who fails still tells the others, so that nobody waits for it.
        """
        failure: BaseException | None = None
        try:
            mine: bytes | Failure = pickle.dumps(work())
        except BaseException as error:
            failure, mine = error, Failure.of(error)
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, mine, group=self._group)
        failed = [(rank, one) for rank, one in enumerate(told) if isinstance(one, Failure)]
        if failure is not None and not isinstance(failure, Exception):
            raise failure  # this process is being stopped
        if failed:
            rank, first = failed[0]
            others = f" (and so did {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            raise first.kind(f"rank {rank} failed{others}: {first.message}") from failure
        return [pickle.loads(one) for one in told]


class Failure:
    """What went wrong in a process, as others can be told."""

    def __init__(self, kind: type[Exception], message: str) -> None:
        self.kind, self.message = kind, message

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return what went wrong; errors that others may not know become a RuntimeError."""
        plain = type(error) in _PLAIN
        message = str(error) if plain else f"{type(error).__name__}: {error}"
        return cls(type(error) if plain else RuntimeError, message)  # type: ignore[arg-type]
