"""The comparison of tables: resumable, peers measured once, and honest about who wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pandas")
pytest.importorskip("tabm")

from benchmarks import tables, tables_peers
from benchmarks.tables import FFCP, OURS, Task


def result(score: float = 1.0, **changed: float) -> dict[str, Any]:
    whole = {"score": score, "length": 1.0, "coverage": 0.9, "worst third": 0.8, "seconds": 1.0}
    return {**whole, "calibrated": 1000, "tested": 1000, **changed}


def task(data: str = "star", library: str = FFCP, label: str = "") -> Task:
    return Task(data, 100, library, label, 3.0, 100, 1, "python")


def test_results_of_a_changed_ffcp_stand_beside_the_same_peers(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    tables.store(out, task(), {OURS: result(1.0)})
    tables.store(out, task(label="new"), {OURS: result(0.5)})
    tables.store(out, task(library="crepes"), {"crepes": result(0.7)})
    with out.open("a") as file:
        file.write('{"data": "com", "se')  # killed here
    known = tables.stored(out)
    assert task(label="new").key in known
    assert task("com").key not in known
    old, new = (tables.together(known, ["star", "com"], [100], label) for label in ("", "new"))
    assert "best mean interval score on 0 of 1" in tables.verdict(old)
    assert "best mean interval score on 1 of 1" in tables.verdict(new)
    assert "**0.5**" in tables.show(new)
    assert list(old) == ["star"]  # nothing of ours is known of com


def test_a_task_after_a_line_cut_short_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    out.write_text('{"data": "com", "se')
    tables.store(out, task(), {OURS: result()})
    assert task().key in tables.stored(out)


def test_only_what_every_seed_has_is_averaged() -> None:
    seeds = [{OURS: result(1.0), "crepes": result()}, {OURS: result(3.0)}]
    assert tables.means(seeds) == {OURS: pytest.approx({**_numbers(result(2.0))})}


def _numbers(one: dict[str, Any]) -> dict[str, float]:
    return {key: one[key] for key in ("score", "length", "coverage", "worst third", "seconds")}


def test_limits_are_held_against_the_best_peer_of_a_data_set() -> None:
    def runs(blog: float, outside: float = 0.0) -> tables.Runs:
        others = {"crepes": result(2.0), "MAPIE": result(1.0)}
        mine = {"star": (0.5, 0.52), "blog": (blog, blog + 0.01)}
        return {
            name: [{OURS: result(score, outside=outside), **others} for score in scores]
            for name, scores in mine.items()
        }

    assert tables.ratios(runs(1.2))["blog"] == pytest.approx([1.2, 1.21])
    assert all(one.holds for one in tables.limits(runs(0.8)))
    mean, worse, outside = tables.limits(runs(1.2, outside=0.01))
    assert mean.holds
    assert not worse.holds
    assert worse.measured.startswith("blog 1.205")
    assert not outside.holds
    assert not next(iter(tables.limits(runs(3.0)))).holds
    assert "DOES NOT HOLD" in tables.verdict(runs(1.2))


def test_coverage_is_judged_by_its_spread() -> None:
    # Both the calibration and the test spread with 0.09 / 1000.
    assert tables.deviations([result(coverage=0.9)]) == pytest.approx(0)
    assert tables.deviations([result(coverage=0.9 - np.sqrt(0.09 * 2 / 1000))]) == pytest.approx(-1)


def test_the_table_takes_the_place_of_the_last_one(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{tables._MARKS[0]}\nold\n{tables._MARKS[1]}\nafter\n")
    tables.write(page, "new")
    tables.write(page, "newer")
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "newer" in text
    assert "old" not in text


def test_the_page_has_marks() -> None:
    text = tables._PAGE.read_text()
    assert all(text.count(mark) == 1 for mark in tables._MARKS)


def test_what_bands_share_is_in_the_time_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 10.0, 11.0, 11.0, 13.0])
    monkeypatch.setattr(tables_peers.time, "process_time", lambda: next(clock))
    bands = iter([("one", lambda: [[0, 1]]), ("two", lambda: [[0, 2]])])
    made = tables_peers.measured(bands)
    assert made["seconds one"] == 11
    assert made["seconds two"] == 12


def test_every_line_is_one_result(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    tables.store(out, task(), {OURS: result()})
    line = json.loads(out.read_text())
    assert (line["minutes"], line["label"], "trees" in line) == (3.0, "", False)
