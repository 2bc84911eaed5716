"""The page of trials: no row has failures now, and each command selects tests that exist."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.docs.pages import DOCS, ROOT

HEAD = "| what was tried | failures before (0.2.0) | failures now | command |"
PAGE = (DOCS / "trials.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for table in PAGE.split(HEAD)[1:]
    for line in table.partition("\n\n")[0].splitlines()[2:]
]
COMMANDS = sorted({command for row in ROWS for command in re.findall(r"`([^`]+)`", row[-1])})


def functions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield what -k and -m look at: names from folder to function, and the marks."""
    files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
    for file in files:
        tree = ast.parse(file.read_text())
        of_all = [ast.unparse(one) for one in tree.body if isinstance(one, ast.Assign)]
        shared = " ".join(one for one in of_all if one.startswith("pytestmark"))
        for one in tree.body:
            if isinstance(one, ast.FunctionDef) and one.name.startswith("test_"):
                own = " ".join(map(ast.unparse, one.decorator_list))
                yield f"{file.relative_to(ROOT)}::{one.name}", f"{shared} {own}"


def test_every_line_of_a_table_is_a_row() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    assert len(ROWS) == len(lines) - 2 * lines.count(HEAD)
    (stated,) = re.findall(r"lists (\d+)\nkinds", (DOCS / "reliability.md").read_text())
    assert len(ROWS) == int(stated)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_no_row_has_failures_now(row: list[str]) -> None:
    assert len(row) == 4
    assert re.fullmatch(r"0(, 0)*", row[2]), row[2]
    assert row[3] == "the same" or re.search(r"`[^`]+`", row[3])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_selects_something_that_exists(command: str) -> None:
    first, *words = shlex.split(command)
    if first == "python":
        assert words[0] == "-m"
        assert find_spec(words[1]) is not None
        return
    assert first == "pytest"
    chosen = dict(pairwise(words))
    name = Expression.compile(chosen.get("-k", "test"))
    mark = Expression.compile(chosen.get("-m", "not slow"))
    paths = [ROOT / word for word in words if word.startswith(("tests", "paper"))]
    for path in paths:
        found = [
            place
            for place, marks in functions(path)
            if name.evaluate(lambda word, place=place, **_: word.lower() in place.lower())
            and mark.evaluate(lambda word, marks=marks, **_: f"mark.{word}" in marks)
        ]
        assert found, f"{path} has no such test"
