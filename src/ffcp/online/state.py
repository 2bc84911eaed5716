"""The state of a stream in a file: written whole, read without unpickling, every part checked."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ffcp import files
from ffcp.conformal.mondrian import Label
from ffcp.locks import lock
from ffcp.online.controllers import Asked, DtAci
from ffcp.online.lanes import Lane, listed, number
from ffcp.online.windows import Window
from ffcp.regression.regression_predictor import RegressionPredictor

Self = TypeVar("Self", bound="StreamState")


@dataclass
class Waiting:
    """A point that was predicted and waits for its truth: what was asked for each score of it."""

    row: int
    asked: list[Asked | None]  # None: that truth has come
    group: Label | None = None


class StreamState:
    """What changes in a stream, and how it is saved and restored."""

    predictor: RegressionPredictor
    method: str
    settings: dict[str, Any]
    rows: int  # that were predicted
    delay: int  # the most predictions that were waiting when another one was made
    _lanes: dict[Any, Lane]
    _waiting: OrderedDict[int, tuple[str, Waiting]]
    _by_input: dict[str, deque[Waiting]]
    _lock: Any

    def _new_lanes(self) -> dict[Any, Lane]:
        raise NotImplementedError

    def _learn(self, point: Waiting, scores: list[float]) -> None:
        """Let a truth that has come count, and forget the row if it waits for no other."""
        self._lanes[point.group].learn(scores, point.asked)
        if all(one is None for one in point.asked):
            self._forget(point.row)

    def _forget(self, row: int) -> None:
        key, point = self._waiting.pop(row)
        same = self._by_input[key]
        same.remove(point)
        if not same:
            del self._by_input[key]

    def save(self, path: str | Path) -> None:
        """Write the state to a file, whole or not at all."""
        with self._lock:
            scores = {
                f"window.{number}.{i}": torch.tensor(past.scores(), dtype=torch.float64)
                for number, lane in enumerate(self._lanes.values())
                for i, past in enumerate(lane.windows)
            }
            state = {
                "settings": self.settings,
                "fingerprint": self._fingerprint(),
                "lanes": [[label, lane.state()] for label, lane in self._lanes.items()],
                "waiting": [[key, p.row, p.group, p.asked] for key, p in self._waiting.values()],
                "rows": self.rows,
                "delay": self.delay,
            }
            files.write(path, {**scores, "online": files.seal(state, scores)})

    def load(self: Self, path: str | Path) -> Self:
        """Go on where a stream was saved; of other settings or weights it is refused."""
        with self._lock, told(path):
            self._take(files.read(path))
        return self

    def _state_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        others = {name: tensor for name, tensor in tensors.items() if name != "online"}
        if "online" not in tensors:
            raise ValueError("it holds no state of a stream")
        return files.unseal(tensors["online"], others)

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        """Read a state; take over all of it or nothing."""
        state = self._state_of(tensors)
        if state["settings"] != files.unpack(files.pack(self.settings)):
            raise ValueError("it was saved with other settings")
        if state["fingerprint"] != self._fingerprint():
            raise ValueError("it was saved with other weights of the model")
        fresh = object.__new__(type(self))
        fresh.__dict__.update(self.__dict__)
        fresh._lanes = self._lanes_of(state, tensors)
        fresh.rows, fresh.delay = files.count(state["rows"]), files.count(state["delay"])
        fresh._waiting, fresh._by_input = OrderedDict(), {}
        if len(files.rebuilt(list, state["waiting"])) > self.settings["waiting"]:
            raise ValueError("more predictions wait than may")
        for key, row, group, asked in state["waiting"]:
            point = fresh._waiting_of(row, group, asked)
            fresh._waiting[point.row] = (files.rebuilt(str, key), point)
            fresh._by_input.setdefault(key, deque()).append(point)
        self.__dict__.update(fresh.__dict__)

    def _lanes_of(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[Any, Lane]:
        lanes, left = self._new_lanes(), {name for name in tensors if name != "online"}
        saved = listed(state["lanes"], len(lanes))
        for number_of, ((label, lane), (said, own)) in enumerate(
            zip(lanes.items(), saved, strict=True)
        ):
            if said != label or type(said) is not type(label):
                raise ValueError(f"group {said!r} stands where {label!r} was saved")
            lane.restore(files.rebuilt(dict, own))
            for i in range(len(lane.windows)):
                name = f"window.{number_of}.{i}"
                lane.windows[i] = self._window_of(tensors[name])
                left.remove(name)
        if left:
            raise ValueError(f"it holds {', '.join(sorted(left))}, which no stream keeps")
        return lanes

    def _window_of(self, scores: Tensor) -> Window:
        size, forget = self.settings["window"], self.settings["forget"]
        if scores.dtype != torch.float64 or scores.dim() != 1 or len(scores) > size:
            raise ValueError("a window is no list of scores")
        if bool((scores.isnan() | (scores < self.predictor.calibrated().scorer.lowest)).any()):
            raise ValueError("a window holds what is no score")
        return Window(size, forget, scores.tolist())

    def _waiting_of(self, row: Any, group: Any, asked: Any) -> Waiting:
        row, last = files.count(row), next(reversed(self._waiting), -1)
        if not last < row < self.rows:
            raise ValueError(f"row {row} waits behind row {last}, of {self.rows}")
        if isinstance(group, (list, dict)) or group not in self._lanes:
            raise ValueError(f"a row of group {group!r} waits")
        points = []
        for one in listed(asked, len(self._lanes[group].controls)):
            points.append(None if one is None else self._asked_of(one))
        if all(one is None for one in points):
            raise ValueError(f"row {row} waits for nothing")
        return Waiting(row, points, group)

    def _asked_of(self, saved: Any) -> Asked:
        # Two in files from before calibrations that stay had several step sizes.
        threshold, levels, reached = listed([*files.rebuilt(list, saved), []][:3], 3)
        one = Asked(number(threshold), tuple(map(number, levels)), tuple(map(number, reached)))
        sizes = len(DtAci.gammas) if self.method == "dtaci" else 0
        stands = self.predictor.calibration.is_local
        if (len(one.levels), len(one.reached)) != (sizes, sizes if stands else 0):
            raise ValueError("a row waits that was asked at other levels")
        return one

    def _fingerprint(self) -> str:
        return str(self.predictor.calibrated().fingerprint)

    def __getstate__(self) -> dict[str, Any]:
        # What changes is copied at one moment: pickling takes its time, and the stream goes on.
        with self._lock:
            same = {name: value for name, value in self.__dict__.items() if name != "_lock"}
            changing = {name: same[name] for name in ("_lanes", "_waiting", "_by_input")}
            return {**same, **copy.deepcopy(changing)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = lock(again=True)


@contextmanager
def told(path: str | Path) -> Iterator[None]:
    """Say of whatever is wrong with a file which it is, and what to do."""
    try:
        yield
    except files.CalibrationFileError:
        raise
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise files.CalibrationFileError(
            f"{path} cannot be used: {error}. Nothing was changed; make it as it was made "
            "then, or give another file"
        ) from error
