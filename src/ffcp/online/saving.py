"""Saving, loading and copying of streams and monitors while they are in use."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ffcp import files
from ffcp.description import differences
from ffcp.locks import lock
from ffcp.notebooks import ShownAsText
from ffcp.predictor import Predictor

Self = TypeVar("Self", bound="Resumable")


class Resumable(ShownAsText):
    """Base class of objects that change with every row, one thread at a time.

    A subclass names the changing attributes, and converts them to plain data and back.
    """

    changing: ClassVar[tuple[str, ...]]
    predictor: Predictor
    settings: dict[str, Any]

    def __init__(self) -> None:
        self._lock = lock(reentrant=True)

    def state(self) -> dict[str, Any]:
        """Return the changing attributes as plain data."""
        raise NotImplementedError

    def from_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the changing attributes, by name, from plain data; does not modify the object."""
        raise NotImplementedError

    def save(self, path: str | Path) -> None:
        """Write the state to a file, completely or not at all.

        Parameters
        ----------
        path : str or Path
            The file to write.
        """
        with self._lock:
            saved = files.seal({**self._identity(), "state": self.state()}, {})
            files.write(path, {"stream": saved})

    def load(self: Self, path: str | Path) -> Self:
        """Restore a saved state with the same settings and weights, or raise and change nothing.

        Parameters
        ----------
        path : str or Path
            A file that :meth:`save` wrote.
        """
        tensors = files.read(path)
        with self._lock, files.refused(path):
            if "stream" not in tensors:
                raise ValueError(f"expected a saved {type(self).__name__!r}, got another file")
            saved = files.unseal(tensors["stream"], {})
            for name, value in files.unpack(files.pack(self._identity())).items():
                if saved[name] != value:
                    found = ", ".join(differences(value, saved[name], name))
                    raise ValueError(f"it was saved with other settings: {found}")
            self.__dict__.update(self.from_state(saved["state"]))
        return self

    def _identity(self) -> dict[str, Any]:
        """Return what a saved state must agree with: class, settings and weights."""
        return {
            "class": type(self).__name__,
            "settings": {**self.settings, "predictor": self.predictor.comparable()},
            "weights": str(self.predictor.calibrated().fingerprint),
        }

    def __getstate__(self) -> dict[str, Any]:
        # Changing attributes are copied under the lock: pickling is slow, and updates continue.
        with self._lock:
            state = {name: value for name, value in self.__dict__.items() if name != "_lock"}
            return {**state, **copy.deepcopy({name: state[name] for name in self.changing})}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = lock(reentrant=True)
