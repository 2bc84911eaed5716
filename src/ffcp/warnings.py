"""The warning class of the library: filter on it to silence or to enforce."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from types import FrameType

_HERE = str(Path(__file__).parent)


class FFCPWarning(UserWarning):
    """A warning of this library: an interval is infinite, or no better than that of CP."""


def warn(message: str) -> None:
    """Issue a warning at the user's line: the first outside this library."""
    warnings.warn(message, FFCPWarning, stacklevel=lines_up())


def lines_up() -> int:
    """Return the ``stacklevel`` of the user's line: the first outside this library."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_back is not None and _is_ours(frame):
        frame, level = frame.f_back, level + 1
    return level


def _is_ours(frame: FrameType) -> bool:
    """Whether a frame is this library's, or torch's between two of ours: ``predictor(x)``."""
    name = str(frame.f_globals.get("__name__"))
    return frame.f_code.co_filename.startswith(_HERE) or name.startswith("torch.nn.modules.")
