"""The warning class of the library: filter on it to silence or to enforce."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)


class FFCPWarning(UserWarning):
    """Something about a band that its reader should know: infinite, or no better than CP."""


def lines_up() -> int:
    """Say which ``stacklevel`` points at the user's line: the first outside this library."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame, level = frame.f_back, level + 1
    return level
