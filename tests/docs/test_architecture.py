"""The architecture page: its numbers bound the walk of one call, and its modules are on it."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ffcp
from tests.docs.pages import DOCS, blocks

PAGE = (DOCS / "architecture.md").read_text()
ROOT = Path(ffcp.__file__).parent
STEPS = ("calibrate", "predict_interval")


def walk(run: Callable[[], Any]) -> set[tuple[str, int]]:
    """Return the functions of ffcp that a call runs, by module and line; no comprehensions."""
    found: set[tuple[str, int]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and ROOT in file.parents and not frame.f_code.co_name.startswith("<"):
            found.add((file.relative_to(ROOT).as_posix(), frame.f_code.co_firstlineno))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


@pytest.fixture(scope="module")
def walks() -> dict[str, set[tuple[str, int]]]:
    (block,) = blocks(PAGE, "python")
    names: dict[str, Any] = {}
    exec(block.text, names)  # as the page has it; what a process does once is done then
    predictor = ffcp.FFCP(names["model"], feature="2")
    x, y = names["x"], names["y"]
    return {
        "calibrate": walk(lambda: predictor.calibrate(x, y)),
        "predict_interval": walk(lambda: predictor.predict_interval(x[:64])),
    }


@pytest.mark.parametrize("step", STEPS)
def test_the_walk_is_no_longer_than_the_page_says(
    step: str, walks: dict[str, set[tuple[str, int]]]
) -> None:
    row = re.search(rf"^\| `{step}` \| at most (\d+) \| at most (\d+) \|$", PAGE, re.M)
    assert row
    functions, modules = int(row[1]), int(row[2])
    assert 0 < len(walks[step]) <= functions
    assert 0 < len({module for module, _ in walks[step]}) <= modules


@pytest.mark.parametrize("step", STEPS)
def test_every_module_of_the_page_is_on_the_walk(
    step: str, walks: dict[str, set[tuple[str, int]]]
) -> None:
    part = PAGE.split(f"\n## {step}\n")[1].split("\n## ")[0]
    named = re.findall(r"^\| \d+ \| `([\w/]+\.py)` \|", part, re.M)
    assert len(named) >= 7
    assert set(named) <= {module for module, _ in walks[step]}
