"""The page of promises: each names tests that exist, and every page leads to it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ffcp
from tests.docs.pages import DOCS, PAGES, ROOT, links, named

PAGE = DOCS / "promises.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| what |")
]


def names_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_every_promise_names_tests_that_exist(row: list[str]) -> None:
    assert len(row) == 4
    found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[3])
    assert found
    assert re.sub(r"`[^`]*`", "", row[3]).strip(", ") == ""
    for file, name in found:
        assert name.startswith("test_")
        assert name in names_of(ROOT / file), f"{file} has no test {name}"


def test_everything_that_predicts_has_a_row() -> None:
    text = PAGE.read_text()
    parts = {"calibrations": ffcp.calibrations.__all__, "": ffcp.__all__}
    left_out = {  # what returns nothing, or is returned by others
        *("BatchOutput", "Requires", "CalibrationFileError", "FFCPWarning", "Interval", "LabelSet"),
        *("calibrations", "kernels", "scales", "scores", "plots", "metrics", "segmentation"),
        *("load", "pinball_loss", "conformal_quantile", "conformal_rank", "Calibration", "Local"),
    }
    for names in parts.values():
        for name in set(names) - left_out:
            assert re.search(rf"\b{name}\b", text), f"{name} is not on the page of promises"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "results" not in page.parts and page != PAGE], ids=named
)
def test_every_page_leads_to_the_promises(page: Path) -> None:
    assert any(link.endswith("promises.md") for link in links(page.read_text()))
