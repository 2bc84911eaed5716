"""Files of streams and monitors: damaged ones are refused, and kills lose one row at most."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.fuzz import damage_tensors, damaged_settings, plain_damage
from safetensors.torch import load, save

import ffcp
from ffcp import files
from ffcp.online.journal import Journal
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


def sealed_damage(data: bytes, name: str, random: np.random.Generator) -> bytes:
    """Damage tensors or the state, and make the checksum right again."""
    tensors = load(data)
    state = json.loads(bytes(tensors.pop(name).numpy())[64:])
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    if tensors and random.random() < 0.3:
        damage_tensors(tensors, random)
    else:
        state = damaged_settings(state, random)
    return save({**tensors, name: files.seal(state, tensors)}, metadata)


def check_damaged(
    whole: Any, make: Callable[[], Any], use: Callable[[Any], Any], name: str, path: Path
) -> int:
    """Load damaged files: refused with nothing changed, or as good as any. Count the refused."""
    whole.save(path)
    data, refused = path.read_bytes(), 0
    before = repr(use(copy.deepcopy(make())))
    for number in range(MUTATIONS):
        random = np.random.default_rng([0, number])
        bad = sealed_damage(data, name, random) if number % 2 else plain_damage(data, random)
        path.write_bytes(bad)
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
        return band.lower.tolist(), band.upper.tolist(), online.truths, online.misses

    refused = check_damaged(
        stream(method, grouped, seed=0), lambda: other, use, "online", tmp_path / "stream"
    )
    assert refused > 0.8 * MUTATIONS


@pytest.mark.heavy
def test_a_damaged_monitor_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    def watched(shift: float) -> ffcp.Monitor:
        monitor = ffcp.Monitor(predictor(), seed=0, window=20).start(X[:40])
        return monitor.update(X[60:90] + shift, Y[60:90], groups=["a", "b"] * 15)

    other = watched(1.0)

    def use(monitor: ffcp.Monitor) -> Any:
        return monitor.update(X[90:95], Y[90:95]).table()

    refused = check_damaged(watched(0.0), lambda: other, use, "monitor", tmp_path / "monitor")
    assert refused > 0.8 * MUTATIONS


def test_damaged_lines_behind_a_state_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "stream"
    journal = Journal(path)
    journal.begin("state")
    for row in range(5):
        journal.add([row, [0.5]])
    journal.close()
    assert len(journal.records("state")) == 5
    assert journal.records("another") == []
    data = journal.path.read_bytes()
    for cut in range(len(data)):
        journal.path.write_bytes(data[:cut])
        assert journal.records("state") == [
            [row, [0.5]] for row in range(data[:cut].count(b"\n") - 1)
        ]
    flipped = bytearray(data)
    flipped[-4] ^= 1
    journal.path.write_bytes(flipped)
    assert len(journal.records("state")) == 4


KILLED = """
import sys, torch, ffcp
from ffcp.online.kept import Kept
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
x, y = torch.randn(200, 2), torch.randn(200, 1)
ready = ffcp.CP(model).calibrate(x[:100], y[:100])
path, stop = sys.argv[1], int(sys.argv[2])
online = ffcp.Online(ready, "aci", path=path or None)
learn, done = Kept._learn, 0
def watched(self, point, scores):
    global done
    if done == stop:  # inside the batch, this row under way
        print("ready", flush=True)
        sys.stdin.read()
    done += 1
    learn(self, point, scores)
if stop >= 0:
    Kept._learn = watched
if not online.rows:
    online.predict_interval(x[100:])
left = torch.tensor(online.is_waiting(x[100:]))
came = online.truths[0]
online.update(x[100:][left], y[100:][left])
band = online.predict_interval(x[:5])
print(came, online.truths[0], online.misses[0], band.upper.tolist(), flush=True)
"""


def run(path: str, stop: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", KILLED, path, str(stop)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_killed_inside_a_batch_the_rows_before_are_kept(tmp_path: Path) -> None:
    path = str(tmp_path / "stream")
    for stop in (0, 17, 40):  # the second and third run go on where the one before was killed
        process = run(path, stop)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    said, _ = run(path, -1).communicate(timeout=120)
    came, rest = said.split(" ", 1)
    # Its row was written before it was learned, so that even the row under way is there.
    assert int(came) == (0 + 1) + (17 + 1) + (40 + 1)
    uninterrupted, _ = run("", -1).communicate(timeout=120)
    assert rest == uninterrupted.split(" ", 1)[1]
