"""States of streams and monitors that cannot be: each is refused, by what is wrong with it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn

import ffcp
from ffcp import files
from ffcp.online import lanes
from tests.conftest import normal, small_mlp

X, Y = normal(120, 4, seed=1), normal(120, 1, seed=2)
State = dict[str, Any]
Change = Callable[[State, dict[str, Tensor]], object]


def ready() -> Any:
    return ffcp.FFCP(small_mlp(), "0").calibrate(X[:60], Y[:60])


def stream() -> ffcp.Online:
    online = ffcp.Online(ready(), "aci", window=40, waiting=20)
    online.predict_interval(X[60:80])
    online.update(X[60:70], Y[60:70])
    return online


def changed(path: Path, name: str, change: Change) -> None:
    """Change a state and its tensors, and seal them again."""
    tensors = load(path.read_bytes())
    state = json.loads(bytes(tensors.pop(name).numpy())[64:])
    change(state, tensors)
    files.write(path, {**tensors, name: files.seal(state, tensors)})


def waits(number: int, place: int, value: Any) -> Change:
    return lambda state, _: state["waiting"][number].__setitem__(place, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state, _: state.update(fingerprint="0"), "saved with other weights"),
        (lambda state, _: state.update(waiting=3 * state["waiting"]), "more predictions wait"),
        (lambda state, _: state["lanes"][0].__setitem__(0, "b"), "group 'b' stands where"),
        (lambda _, tensors: tensors.update(more=torch.ones(1)), "more, which no stream keeps"),
        (lambda _, t: t.update({"window.0.0": torch.ones(2)}), "a window is no list of scores"),
        (lambda _, t: t["window.0.0"].fill_(-1), "a window holds what is no score"),
        (waits(1, 1, 0), "row 0 waits behind row"),
        (waits(0, 2, "b"), "a row of group 'b' waits"),
        (waits(0, 3, [[0.5, [0.1]]]), "asked at other levels"),
        (waits(0, 3, [None]), "waits for nothing"),
        (lambda state, _: state["lanes"][0][1].update(misses=[99]), "more truths were missed"),
        (
            lambda state, _: state["lanes"][0][1].update(observed=[1, 2]),
            "where 1 numbers were saved",
        ),
    ],
)
def test_a_stream_that_cannot_be_is_refused(change: Change, message: str, tmp_path: Path) -> None:
    path, online = tmp_path / "stream", stream()
    online.save(path)
    online.load(path)  # as it is, it may be taken
    changed(path, "online", change)
    before = online.predict_interval(X[80:90])
    with pytest.raises(ffcp.CalibrationFileError, match=message):
        online.load(path)
    assert online.predict_interval(X[80:90]).upper.equal(before.upper)


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    ready().save(path)
    with pytest.raises(ffcp.CalibrationFileError, match="it holds no state of a stream"):
        stream().load(path)
    with pytest.raises(ffcp.CalibrationFileError, match="it holds no state of a monitor"):
        monitor().load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ffcp.CalibrationFileError, match="damaged or not a safetensors file"):
        stream().load(path)


def test_no_number_stands_for_a_number() -> None:
    with pytest.raises(ValueError, match="NaN stands where a number was saved"):
        lanes.number(float("nan"))


# -- monitors --------------------------------------------------------------------------------------


def monitor() -> ffcp.Monitor:
    watched = ffcp.Monitor(ready(), seed=0, window=20, feature="0").start(X[:40])
    return watched.update(X[60:90], Y[60:90], groups=["a", "b"] * 15)


def of_test(**values: Any) -> Change:
    return lambda state, _: next(iter(state["tests"].values())).update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state, _: state.update(fingerprint="0"), "saved with other weights"),
        (lambda state, _: state["tests"].update(wind={}), "it holds tests of"),
        (of_test(rows=10_000), "rows came and"),
        (of_test(alarm_row=500), "by a row that has not come"),
        (of_test(last_p=2.0), "is no p-value"),
        (lambda _, tensors: tensors.update(more=torch.ones(1)), "it holds .*more"),
        (lambda _, tensors: tensors["spread"].fill_(0), "no row of finite numbers"),
        (lambda _, t: t.update(centre=t["centre"].float()), "its centre is no row of numbers"),
    ],
)
def test_a_monitor_that_cannot_be_is_refused(change: Change, message: str, tmp_path: Path) -> None:
    path, watched = tmp_path / "monitor", monitor()
    watched.save(path)
    watched.load(path)
    changed(path, "monitor", change)
    before = repr(copy.deepcopy(watched).update(X[90:95], Y[90:95]).table())
    with pytest.raises(ffcp.CalibrationFileError, match=message):
        watched.load(path)
    assert repr(watched.update(X[90:95], Y[90:95]).table()) == before


def test_a_monitor_says_what_it_cannot_watch() -> None:
    predictor = ready()
    with pytest.raises(ValueError, match="threshold must be above 1"):
        ffcp.Monitor(predictor, threshold=1)
    with pytest.raises(ValueError, match="window must be a whole number of at least 1"):
        ffcp.Monitor(predictor, window=0)
    with pytest.raises(ValueError, match="at least two rows to start with"):
        ffcp.Monitor(predictor).start(X[:1])
    with pytest.raises(ValueError, match="x has no rows"):
        ffcp.Monitor(predictor).start(X[:0])
    with pytest.raises(TypeError, match="watches predictors of bands or label sets"):
        ffcp.Monitor(ffcp.RiskControl(nn.Linear(4, 3)))
