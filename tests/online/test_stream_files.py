"""Files of streams and monitors: damaged ones are refused, and saved ones lose nothing."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.fuzz import plain_damage

import ffcp
from tests.conftest import normal, small_mlp

X, Y = normal(120, 4, seed=1), normal(120, 1, seed=2)
MUTATIONS = 150


def predictor(grouped: bool = False) -> Any:
    found = ffcp.FFCP(small_mlp(), "0")
    return found.calibrate(X[:60], Y[:60], **({"groups": ["a", "b"] * 30} if grouped else {}))


def stream(method: str, grouped: bool, seed: int) -> ffcp.Online:
    online = ffcp.Online(predictor(grouped), method, window=40)
    given = {"groups": ["a", "b"] * 10} if grouped else {}
    online.predict_interval(X[60:80] + seed, **given)
    online.update(X[60:70] + seed, Y[60:70])
    return online


def check_damaged(
    whole: Any, make: Callable[[], Any], use: Callable[[Any], Any], path: Path
) -> int:
    """Load damaged files: refused with nothing changed. Count the refused."""
    whole.save(path)
    data, refused = path.read_bytes(), 0
    before = repr(use(copy.deepcopy(make())))
    for number in range(MUTATIONS):
        random = np.random.default_rng([0, number])
        path.write_bytes(plain_damage(data, random))
        victim, message = copy.deepcopy(make()), None
        try:
            victim.load(path)
        except ffcp.CalibrationFileError as error:
            message = str(error)
        after = repr(use(victim))  # whatever passed can be used, and saved again
        if message is None:
            victim.save(path)
            continue
        refused += 1
        assert str(path) in message
        assert after == before
    return refused


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("method", "grouped"), [("aci", False), ("dtaci", True), ("pid", False), ("plain", False)]
)
def test_a_damaged_stream_is_refused_and_nothing_is_lost(
    method: str, grouped: bool, tmp_path: Path
) -> None:
    other = stream(method, grouped, seed=1)

    def use(online: ffcp.Online) -> Any:
        given = {"groups": ["a", "b", "a"]} if grouped else {}
        band = online.predict_interval(X[90:93], **given)
        online.update(X[90:93], Y[90:93])
        return band.lower.tolist(), band.upper.tolist(), online.observed, online.misses

    whole = stream(method, grouped, seed=0)
    refused = check_damaged(whole, lambda: other, use, tmp_path / "stream")
    assert refused > 0.8 * MUTATIONS


@pytest.mark.heavy
def test_a_damaged_monitor_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    def watched(shift: float) -> ffcp.Monitor:
        monitor = ffcp.Monitor(predictor(), seed=0, window=20).start(X[:40])
        return monitor.update(X[60:90] + shift, Y[60:90], groups=["a", "b"] * 15)

    other = watched(1.0)

    def use(monitor: ffcp.Monitor) -> Any:
        return monitor.update(X[90:95], Y[90:95]).table()

    refused = check_damaged(watched(0.0), lambda: other, use, tmp_path / "monitor")
    assert refused > 0.8 * MUTATIONS


def test_saving_onto_the_file_it_came_from_loses_nothing(tmp_path: Path) -> None:
    path, online = tmp_path / "stream", stream("aci", False, seed=0)
    online.save(path)
    again = ffcp.Online(predictor(), "aci", window=40).load(path)
    again.update(X[70:80], Y[70:80])
    again.save(path)
    last = ffcp.Online(predictor(), "aci", window=40).load(path)
    assert (last.rows, last.observed) == (20, [20])
    assert last.state() == again.state()
    assert [one.name for one in tmp_path.iterdir()] == ["stream"]


def test_on_a_full_disk_every_row_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = stream("aci", False, seed=0)
    online.save(tmp_path / "stream")
    before = (tmp_path / "stream").read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    online.predict_interval(X[80:90])  # asks no disk
    online.update(X[80:90], Y[80:90])
    with pytest.raises(OSError, match="space"):
        online.save(tmp_path / "stream")
    assert (tmp_path / "stream").read_bytes() == before
    monkeypatch.undo()
    online.save(tmp_path / "stream")
    last = ffcp.Online(predictor(), "aci", window=40).load(tmp_path / "stream")
    assert (last.rows, last.observed) == (online.rows, online.observed) == (30, [20])


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    path, online = tmp_path / "file", stream("aci", False, seed=0)
    predictor().save(path)
    with pytest.raises(ffcp.CalibrationFileError, match="Online"):
        online.load(path)
    online.save(path)
    with pytest.raises(ffcp.CalibrationFileError, match="class"):
        ffcp.Monitor(predictor()).load(path)
    model = small_mlp()
    model[0].weight.data += 1
    others = ffcp.FFCP(model, "0").calibrate(X[:60], Y[:60])
    with pytest.raises(ffcp.CalibrationFileError, match="weights"):
        ffcp.Online(others, "aci", window=40).load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ffcp.CalibrationFileError, match="file"):
        online.load(path)


def test_the_state_of_another_group_is_refused(tmp_path: Path) -> None:
    path, online = tmp_path / "stream", stream("aci", True, seed=0)
    online.save(path)
    others = ffcp.FFCP(small_mlp(), "0").calibrate(X[:60], Y[:60], groups=["a", "c"] * 30)
    with pytest.raises(ffcp.CalibrationFileError):
        ffcp.Online(others, "aci", window=40).load(path)
