"""Save a stream or a monitor, go on from the file, and copy it while it is in use."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ffcp import files
from ffcp.locks import lock
from ffcp.notebooks import ShownAsText
from ffcp.predictor import Predictor

Self = TypeVar("Self", bound="Resumable")


class Resumable(ShownAsText):
    """Something that changes with every row, one thread at a time.

    A subclass names the attributes that change, and turns them into plain data and back.
    """

    changing: ClassVar[tuple[str, ...]]
    predictor: Predictor
    settings: dict[str, Any]

    def __init__(self) -> None:
        self._lock = lock(reentrant=True)

    def state(self) -> dict[str, Any]:
        """Return what changes as plain data."""
        raise NotImplementedError

    def from_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the changing attributes, by name, from plain data; nothing is changed here."""
        raise NotImplementedError

    def save(self, path: str | Path) -> None:
        """Write the state to a file, whole or not at all."""
        with self._lock:
            saved = files.seal({**self._identity(), "state": self.state()}, {})
            files.write(path, {"stream": saved})

    def load(self: Self, path: str | Path) -> Self:
        """Go on where one of the same settings and weights was saved, or change nothing."""
        tensors = files.read(path)
        with self._lock, files.refused(path):
            if "stream" not in tensors:
                raise ValueError(f"it holds no {type(self).__name__}")
            saved = files.unseal(tensors["stream"], {})
            for name, value in files.unpack(files.pack(self._identity())).items():
                if saved[name] != value:
                    raise ValueError(f"it was saved with other {name}")
            self.__dict__.update(self.from_state(saved["state"]))
        return self

    def _identity(self) -> dict[str, Any]:
        return {
            "class": type(self).__name__,
            "settings": {**self.settings, "predictor": self.predictor.comparable()},
            "weights": str(self.predictor.calibrated().fingerprint),
        }

    def __getstate__(self) -> dict[str, Any]:
        # What changes is copied at one moment: pickling takes its time, and updates go on.
        with self._lock:
            same = {name: value for name, value in self.__dict__.items() if name != "_lock"}
            return {**same, **copy.deepcopy({name: same[name] for name in self.changing})}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = lock(reentrant=True)
