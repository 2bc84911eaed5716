"""Locations and checksums of the data files that users provide.

Data sets are never part of the package. They are looked for in the data directory, which the
environment variable ``FFCP_DATA`` names; without it, in a folder of the user's cache. What is
computed from them is kept in the cache, which ``FFCP_CACHE`` can move.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path


class MissingDataError(FileNotFoundError):
    """A data file is missing; the message says where to get it and where to put it."""


@dataclass(frozen=True)
class DataFile:
    """A file that the user has to provide.

    Parameters
    ----------
    path
        Where it is looked for, relative to the data directory; ``path + ".gz"`` is accepted too.
    source
        Where it officially comes from, for the message when it is missing.
    sha256
        Checksum of the file, uncompressed; ``None`` if it is unknown.
    """

    path: str
    source: str
    sha256: str | None = None

    @property
    def place(self) -> Path:
        """Expected path of the file."""
        return data_dir() / self.path

    @property
    def found(self) -> Path | None:
        """Path of the file, compressed or not; ``None`` if it is missing."""
        for place in (self.place, self.place.with_name(self.place.name + ".gz")):
            if place.is_file():
                return place
        return None

    def require(self) -> Path:
        """Return the path of the file; raise with instructions if it is missing."""
        result = self.found
        if result is None:
            raise MissingDataError(
                f"{self.path} is missing. It comes from {self.source}. Put it (or {self.path}.gz) "
                f"into {data_dir()}, or set FFCP_DATA to the folder that holds it"
            )
        return result

    def checksum(self) -> str:
        """Return the expected checksum, or that of the present file if none is known."""
        if self.sha256 is not None:
            return self.sha256
        digest = hashlib.sha256()
        with self.require().open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()

    def verify(self, content: bytes) -> bytes:
        """Return the uncompressed content if its checksum is right."""
        if self.sha256 is not None and hashlib.sha256(content).hexdigest() != self.sha256:
            raise ValueError(
                f"{self.path} is damaged or another version: its sha256 is not "
                f"{self.sha256[:16]}... Get it again from {self.source}"
            )
        return content


def data_dir() -> Path:
    """Return the folder of the data files: ``FFCP_DATA``, or ``data`` in the cache."""
    named = os.environ.get("FFCP_DATA")
    return Path(named).expanduser() if named else cache_dir() / "data"


def cache_dir() -> Path:
    """Return the folder for computed results: ``FFCP_CACHE``, or ``ffcp`` in the user's cache."""
    named = os.environ.get("FFCP_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ffcp"
