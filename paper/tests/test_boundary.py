"""Where the library ends and the paper begins."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ffcp
import ffcp_paper

PAPER = Path(ffcp_paper.__file__).parent
LIBRARY = Path(ffcp.__file__).parent
PARTS = {f"ffcp.{part}" for part in ("calibrations", "kernels", "scales", "scores")}
PUBLIC = {"ffcp", "ffcp.bounds", "ffcp.metrics", "ffcp.segmentation", *PARTS}


def imported(path: Path) -> Iterator[str]:
    """Name the modules that a module imports, or takes names from."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


def modules(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@pytest.mark.parametrize("path", modules(PAPER), ids=lambda path: path.stem)
def test_only_one_module_knows_what_is_inside_of_the_library(path: Path) -> None:
    inside = {name for name in imported(path) if name.split(".")[0] == "ffcp"} - PUBLIC
    assert not inside or path.name == "ffcp_internals.py"


def test_names_taken_from_the_library_are_public() -> None:
    for path in modules(PAPER):
        if path.name == "ffcp_internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "ffcp":
                assert {name.name for name in node.names} <= set(ffcp.__all__), path


def test_the_library_knows_nothing_of_the_paper() -> None:
    for path in modules(LIBRARY):
        assert not {name for name in imported(path) if name.startswith("ffcp_paper")}, path


def test_no_module_is_long() -> None:
    for path in modules(PAPER):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 500, path


def test_templates_and_printed_numbers_come_with_the_package() -> None:
    assert {path.suffix for path in (PAPER / "page" / "templates").iterdir()} == {
        ".html",
        ".css",
        ".js",
    }
    assert len(list((PAPER / "tables" / "printed_tables").glob("*.csv"))) == 10
