"""The page on pieces of one's own: every block runs, and none is longer than ten lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import ffcp

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_every_block_of_the_page_runs(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    for block in blocks():
        exec(block, names)
        predictor = names.get("predictor")
        if isinstance(predictor, ffcp.Bands):
            assert len(predictor.calibration) > 200
            predictor.save(tmp_path / "calibration.safetensors")


def test_no_piece_takes_more_than_ten_lines() -> None:
    assert len(blocks()) >= 9
    for block in blocks():
        assert len([line for line in block.splitlines() if line.strip()]) <= 10, block
