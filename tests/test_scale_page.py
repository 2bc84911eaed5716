"""The page on scale: its blocks run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"


def test_compressing_is_as_the_page_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(
        r"```python\n(import ffcp, torch\n.*?compress\(.*?)```", PAGE.read_text(), re.S
    )
    exec(block, {})
    assert capsys.readouterr().out == "100000 points, 991 kept\n"
