"""Keyword arguments of all regression methods: see ``ffcp.IntervalPredictor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ffcp.arguments import Running
from ffcp.regression.joint import Joint


class Common(Running, total=False):
    """The keywords that every regression method takes."""

    joint: Joint
    output_scales: Any
    side: str
    support: Sequence[float | None] | None
    missing: bool
