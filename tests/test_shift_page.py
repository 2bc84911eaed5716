"""The page on shifts: every block runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "shift.md"


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_every_block_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == 7
    for block in blocks:
        exec(block, names)
    assert "effective sample size" in capsys.readouterr().out
    share = names["online"].misses[0] / names["online"].truths[0]
    assert abs(share - 0.1) <= names["online"].bounds[0]
