"""What all regression methods take besides their own arguments; explained in ``ffcp.Bands``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ffcp.predictor import Running
from ffcp.regression.joint import Joint


class Common(Running, total=False):
    """The keywords that every regression method takes."""

    joint: Joint
    scales: Any
    side: str
    support: Sequence[float | None] | None
    missing: bool
