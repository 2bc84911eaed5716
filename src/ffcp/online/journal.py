"""Rows that were learned since the whole state was written last: one line each, as they come.

A stream that is killed inside a batch goes on behind the last whole line. Lines belong to the state
that they follow, which the first one names; behind another state they say nothing.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import IO, Any


class Journal:
    """The lines beside a state, in a file of its name and ``.rows``.

    Parameters
    ----------
    path
        The file of the state.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(path.name + ".rows")
        self._file: IO[bytes] | None = None

    def begin(self, follows: str) -> None:
        """Begin anew behind a state."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("wb")
        self.add(follows)

    def add(self, record: Any) -> None:
        """Write a line, and hand it to the operating system: a killed process does not lose it."""
        assert self._file is not None
        text = json.dumps(record).encode()
        self._file.write(b"%08x " % zlib.crc32(text) + text + b"\n")
        self._file.flush()

    def end(self) -> None:
        """Do away with the lines: the state holds them."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave the lines as they are."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def records(self, follows: str) -> list[Any]:
        """Give the lines behind a state, up to the first that is not whole."""
        if not self.path.is_file():
            return []
        result = []
        for line in self.path.read_bytes().splitlines(keepends=True):
            record = _record(line)
            if record is None:
                break
            result.append(record)
        return result[1:] if result and result[0] == follows else []


def _record(line: bytes) -> Any:
    """Read a line; None if it is not whole."""
    mark, text = line[:8], line[9:].removesuffix(b"\n")
    if not line.endswith(b"\n") or mark != b"%08x" % zlib.crc32(text):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
