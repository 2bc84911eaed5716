"""The committed run: complete, as the code writes it, and what its page says of it is true."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ffcp_paper.figures import paper_figures
from ffcp_paper.page import report
from ffcp_paper.tables import paper_tables, render

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SETTINGS = json.loads((RESULTS / "settings.json").read_text())


def _table(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / "tables" / f"{name}.json").read_text())


def test_it_is_the_full_run_in_one_piece() -> None:
    assert (SETTINGS["seeds"], SETTINGS["quick"]) == (5, False)
    assert tuple(SETTINGS["tables"]) == paper_tables.NAMES
    assert tuple(SETTINGS["figures"]) == tuple(paper_figures.FIGURES)
    assert SETTINGS["command"] == "ffcp-paper reproduce"
    assert not SETTINGS.get("earlier")


@pytest.mark.parametrize("name", paper_tables.NAMES)
def test_tables_are_as_the_code_writes_them(name: str, tmp_path: Path) -> None:
    for made in render.write(_table(name), tmp_path):
        assert (RESULTS / "tables" / made.name).read_bytes() == made.read_bytes()


@pytest.mark.parametrize("name", paper_figures.FIGURES)
def test_figures_are_there(name: str) -> None:
    for suffix in (".svg", ".png", ".json"):
        assert (RESULTS / "figures" / f"{name}{suffix}").stat().st_size > 0


def test_files_are_small_and_name_no_folder_of_a_machine() -> None:
    for path in RESULTS.rglob("*"):
        if path.is_file():
            assert path.stat().st_size < 1_500_000, path
            if path.suffix != ".png":
                text = path.read_text(encoding="utf-8")
                assert not re.search(r"/(tmp|home|root|work|Users)/", text), path


@pytest.mark.parametrize("name", paper_tables.NAMES)
def test_the_page_counts_the_rows_in_which_a_claim_holds(name: str) -> None:
    page = (RESULTS / "README.md").read_text()
    verdict = _table(name)["verdict"]
    line = next(line for line in page.splitlines() if line.startswith("|") and f"[{name}]" in line)
    assert f"| {verdict['held']} of {verdict['of']} |" in line


def test_means_are_those_of_the_seeds() -> None:
    lines = (RESULTS / "results.jsonl").read_text().splitlines()
    lengths: dict[str, list[float]] = {}
    for one in map(json.loads, lines):
        of = one["of"]
        if (of["what"], of.get("method"), of.get("training"), of.get("alpha")) == (
            "bands", "CP", "mean", 0.1
        ):  # fmt: skip
            lengths.setdefault(of["data"], []).append(one["result"]["length"])
    every = [row for row in _table("regression_bands")["rows"] if row["method"] == "split CP"]
    rows = [row for row in every if row["length"] is not None]  # the rest is not available
    assert len(rows) == len(lengths) == 7
    for row in rows:
        own = lengths[row["data"]]
        assert len(own) == SETTINGS["seeds"]
        assert row["length"]["mean"] == pytest.approx(sum(own) / len(own))


def test_it_makes_a_page() -> None:
    text = report.page(RESULTS)
    assert text.count("<figure") == len(paper_figures.FIGURES)
