"""Who may change a predictor that many threads use."""

from __future__ import annotations

import threading


class Turns:
    """Two locks: for the moment in which one thing takes another's place, and for the way there.

    Whoever makes the next calibration from the one there is waits for :attr:`turn`, so that no
    other's points are lost; who only reads waits for no more than the moment.

    >>> turns, made = Turns(), []
    >>> with turns.turn:  # long work
    ...     with turns:  # its end
    ...         made.append("new")
    """

    def __init__(self) -> None:
        self.turn = threading.RLock()
        self._moment = threading.Lock()

    def __enter__(self) -> None:
        self._moment.acquire()

    def __exit__(self, *raised: object) -> None:
        self._moment.release()
