"""The page on all that a band can say: every block runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "what_a_band_says.md"


def test_every_block_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    matplotlib.use("Agg")
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) >= 8
    for block in blocks:
        exec(block, names)
    below = float(capsys.readouterr().out)
    assert 0.01 < below < 0.1
    assert list(names["frame"].columns)[:2] == ["prediction", "lower 0.5"]
