"""A lock for writers of a predictor that threads share, and locks that are free after a fork."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakSet


class WriterLock:
    """Held while the next state of a predictor is made, so that no scores are lost.

    Readers never wait: a state is replaced by one assignment. A forked process gets a new lock,
    as the work under way goes on in its parent only.

    >>> writing = WriterLock()
    >>> with writing.turn:
    ...     pass
    """

    def __init__(self) -> None:
        self.turn = threading.RLock()
        with _ADDING:
            _TURNS.add(self)


def lock(*, reentrant: bool = False) -> Any:
    """Return a lock for short work; ``reentrant``: the same thread may acquire it twice.

    A forked process has none of its parent's other threads: it would wait forever for a lock that
    one of them held, and find their work half done. So all of these locks are taken for a fork.
    """
    new = threading.RLock() if reentrant else threading.Lock()
    with _ADDING:
        _LOCKS.add(new)
    return new


_ADDING = threading.Lock()
_LOCKS: WeakSet[Any] = WeakSet()
_TURNS: WeakSet[WriterLock] = WeakSet()
_TAKEN: list[Any] = []  # while a process is forked


def _take_all() -> None:
    """Take all locks: wait for one only while holding no other, as others may wait for those."""
    _ADDING.acquire()
    locks = [*_LOCKS]
    held: list[Any] = []
    while len(held) < len(locks):
        is_free = locks[len(held)].acquire(blocking=not held)
        if is_free:
            held.append(locks[len(held)])
            continue
        locks = [*locks[len(held) :], *held]  # next time wait for this one first
        while held:
            held.pop().release()
    _TAKEN.extend(held)


def _release_all() -> None:
    while _TAKEN:
        _TAKEN.pop().release()
    _ADDING.release()


def _release_in_child() -> None:  # pragma: no cover - of which no lines are counted
    for turns in _TURNS:  # long work is not waited for, and goes on in the parent only
        turns.turn = threading.RLock()
    _release_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_take_all, after_in_parent=_release_all, after_in_child=_release_in_child
    )
