from __future__ import annotations

from typing import Any


class Record(list[Any]):
    """What a module writes down in forward: its twins write into the same list."""

    def __deepcopy__(self, memo: Any) -> Record:
        return self
