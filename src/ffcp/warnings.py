"""The warning class of the library: filter on it to silence or to enforce."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from types import FrameType

_HERE = str(Path(__file__).parent)


class FFCPWarning(UserWarning):
    """Something about a band that its reader should know: infinite, or no better than CP."""


def warn(message: str) -> None:
    """Warn the user, at the first line that is not the library's own."""
    warnings.warn(message, FFCPWarning, stacklevel=lines_up())


def lines_up() -> int:
    """Say which ``stacklevel`` points at the user's line: the first outside this library."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_back is not None and _is_ours(frame):
        frame, level = frame.f_back, level + 1
    return level


def _is_ours(frame: FrameType) -> bool:
    """Say whether a line is the library's own, or torch's on the way to it: ``predictor(x)``."""
    name = str(frame.f_globals.get("__name__"))
    return frame.f_code.co_filename.startswith(_HERE) or name.startswith("torch.nn.modules.")
