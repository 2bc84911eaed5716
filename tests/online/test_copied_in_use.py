"""Streams and monitors that other threads use while they are copied or pickled."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

import ffcp
from tests.conftest import normal

X, Y = normal(600, 2, seed=1), normal(600, seed=2)


@pytest.fixture
def _quick_turns() -> Iterator[None]:
    """Let threads take turns often, so that a race is lost soon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def stream() -> ffcp.Online:
    return ffcp.Online(ffcp.CP(nn.Linear(2, 1)).calibrate(X[:100], Y[:100]), "aci")


def test_the_state_of_a_stream_does_not_change_with_it() -> None:
    online = stream()
    online.predict_interval(X[100:110])
    copied, state = copy.copy(online), online.__getstate__()
    names = ("_controls", "_waiting", "rows", "delay")
    before = pickle.dumps([state[name] for name in names])
    online.update(X[100:105], Y[100:105])
    online.predict_interval(X[110:120])
    assert pickle.dumps([state[name] for name in names]) == before
    copied.update(X[100:105], Y[100:105])  # which it still waits for
    assert (copied.observed, copied.rows) == ([5], 10)
    assert online.rows == 20


@pytest.mark.long
@pytest.mark.usefixtures("_quick_turns")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_stream_and_a_monitor_in_use_are_copied(copied: Callable[[Any], Any]) -> None:
    online = stream()
    monitor = ffcp.Monitor(online.predictor, seed=0)
    over = threading.Event()

    def use() -> None:
        row = 100
        while not over.is_set():
            row = 100 + (row + 5) % 490
            online.predict_interval(X[row : row + 5])
            online.update(X[row : row + 3], Y[row : row + 3])
            monitor.update(X[row : row + 5], Y[row : row + 5], groups=range(row, row + 5))

    thread = threading.Thread(target=use)
    thread.start()
    try:
        for _ in range(30):
            taken = copied(online)
            assert sum(taken.observed) <= taken.rows
            assert all(number < taken.rows for number in taken._waiting)
            assert copied(monitor).rows >= 0
    finally:
        over.set()
        thread.join()
