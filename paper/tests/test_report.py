"""The content of the HTML report; test_report_browser.py opens it."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from ffcp_paper.page import report
from made_results import (
    ATTACK,
    HELD,
    bands_row,
    bands_table,
    change_table,
    column,
    plain,
    put,
    write_folder,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("run"))


def test_it_is_written_into_the_folder_or_where_asked(folder: Path, tmp_path: Path) -> None:
    assert report.write(folder) == folder / "report.html"
    out = report.write(folder, tmp_path / "new" / "page.html")
    assert out.read_bytes() == (folder / "report.html").read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]


def test_the_summary_comes_first_and_counts_the_claims(folder: Path) -> None:
    text = plain(report.page(folder))
    assert "Of 4 claims of the paper, 1 held in full, 1 held in part, " in text
    assert "1 did not hold, 1 could not be checked." in text
    places = [text.index(f" {word} ") for word in ("Which claims held here", "Claim:", "Settings")]
    assert places == sorted(places)
    assert f"FFCP was shorter on {HELD} of 9 data sets." in text


def test_numbers_marks_and_notes_are_shown(folder: Path) -> None:
    text = plain(report.page(folder))
    assert "1.50 ± 0.04" in text
    assert "89.6 ± 0.4 %" in text
    assert "infinite" in text
    assert "nan" not in text.lower().replace("finance", "")
    assert "✓ holds" in text
    assert "✗ does not hold" in text
    assert "○ no data" in text
    assert "Ours: mean ± standard deviation of 5 runs." in text
    assert "alpha = 0.1." in text


def test_a_row_without_data_is_greyed_and_says_so(folder: Path) -> None:
    rows = re.findall(r'(?s)<tr class="unavailable">.*?</tr>', report.page(folder))
    assert len(rows) == 1
    assert plain(rows[0]).startswith("blog data not available -")


def test_settings_versions_and_machine_are_shown(folder: Path) -> None:
    text = plain(report.page(folder))
    for words in (
        "ffcp-paper reproduce --seeds 5 --out results",
        "5 seeds, started 2024-05-01 12:30 UTC, took 1 h 10 min.",
        "A quick run.",
        "torch 2.13.0",
        "Processor x86_64 Cores 8 Memory in GB 15.6",
    ):
        assert words in text


def test_a_row_to_compare_with_is_neither_held_nor_without_data(tmp_path: Path) -> None:
    rows = bands_table()["rows"]
    rows[0]["claim"] = None
    first = re.findall(r"(?s)<tr.*?</tr>", report.page(change_table(tmp_path, rows=rows)))[1]
    assert plain(first).endswith("-")
    assert "no data" not in plain(first)


def test_the_number_of_runs_is_said_once(tmp_path: Path) -> None:
    noted = ["Ours: mean and standard deviation over 5 seeds."]
    text = plain(report.page(change_table(tmp_path, notes=noted)))
    assert text.count("Ours: mean") == 1


def test_a_run_in_several_calls_is_one_run(tmp_path: Path) -> None:
    call = {
        "command": "ffcp-paper reproduce",
        "started": "2024-05-01T09:00:00+00:00",
        "seconds": 3600.0,
    }
    text = plain(report.page(write_folder(tmp_path, earlier=[call, call])))
    assert "started 2024-05-01 09:00 UTC, took 3 h 10 min in 3 calls." in text


def test_the_number_of_runs_is_in_the_cells_where_it_differs(tmp_path: Path) -> None:
    table = bands_table()
    table["rows"][0]["CP"] = {"mean": 2.0, "sd": 0.1, "n": 3}
    text = plain(report.page(change_table(tmp_path, rows=table["rows"])))
    assert "2.00 ± 0.10 (n = 3)" in text
    assert "of 5 runs" not in text


def test_a_column_says_whose_number_it_is_once(tmp_path: Path) -> None:
    labels = ("hours", "paper", "time, ours", "Paper's time")
    sources = ("ours", "paper", "ours", "paper")
    head = [column("data", "data", "text")]
    head += [column("CP", label, source=s) for label, s in zip(labels, sources, strict=True)]
    text = report.page(change_table(tmp_path, columns=head))
    names = re.findall(r'data-name="([^"]*)"', text)
    assert list(map(unescape, names)) == ["data", "hours (ours)", "hours (paper)", *labels[2:]]


def test_all_text_is_escaped(tmp_path: Path) -> None:
    row = {**bands_row(0, "synthetic"), "data": ATTACK, "note": ATTACK}
    head = [column("data", ATTACK, "text"), column("CP", ATTACK, source="ours")]
    change_table(
        tmp_path,
        title=ATTACK,
        claim=ATTACK,
        rows=[row],
        columns=head,
        notes=[ATTACK],
        verdict={"held": 1, "of": 1, "text": ATTACK},
    )
    settings = json.loads((tmp_path / "settings.json").read_text())
    settings |= {"command": ATTACK, "started": ATTACK, "versions": {ATTACK: ATTACK}}
    settings |= {"machine": {"system": ATTACK, ATTACK: 1}, "figures": ["lengths"]}
    put(tmp_path / "settings.json", settings)
    about = {"title": ATTACK, "caption": ATTACK, "alt": '"' + ATTACK}
    put(tmp_path / "figures" / "lengths.json", about)
    text = report.page(tmp_path)
    assert text.count("<script>") == 1  # the page's own
    assert "<img src=x" not in text
    assert plain(text).count("document.title = 'attacked'") >= 12


def test_nothing_is_loaded_from_elsewhere(folder: Path) -> None:
    text = report.page(folder)
    addresses = re.findall(r'(?:src|href)="([^"]{,20})', text)
    assert addresses
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert "default-src 'none'" in unescape(text)
    assert "unsafe" not in text
    assert not re.search(r' (style|on\w+)="', text)  # the policy would block them


def test_svg_is_preferred_png_is_the_fallback_and_a_missing_figure_a_note(tmp_path: Path) -> None:
    write_folder(tmp_path)
    text = report.page(tmp_path)
    assert text.count("data:image/svg+xml;base64,") == 1
    assert text.count("data:image/png;base64,") == 1
    assert "Not shown: figures/gone.svg and gone.png are missing or damaged." in text
    drawing = tmp_path / "figures" / "lengths.svg"
    drawing.write_bytes(drawing.read_bytes()[:500])  # as after a full disk
    (tmp_path / "figures" / "gone.json").unlink()
    text = report.page(tmp_path)
    assert text.count("data:image/png;base64,") == 2
    assert "Not shown: figures/gone.json is missing." in text


def test_a_run_without_tables_and_figures_is_a_page_too(tmp_path: Path) -> None:
    text = plain(report.page(write_folder(tmp_path, tables=[], figures=[], versions={})))
    assert "This run checked no claims." in text
    assert "This run made no figures." in text
    assert "Not recorded." in text


# -- damage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["settings.json", "tables/bands.json"])
def test_a_missing_or_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path)
    path = tmp_path / name
    path.write_text(path.read_text()[:40])
    with pytest.raises(ValueError, match=re.escape(str(path))):
        report.write(tmp_path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=re.escape(str(path))):
        report.write(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(str(path))):
        report.write(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"title": 3}, "title"),
        ({"verdict": {"held": 3, "of": 2, "text": ""}}, "verdict.held"),
        ({"verdict": {"held": True, "of": 2, "text": ""}}, "verdict.held"),
        ({"verdict": {"held": 1, "of": 2}}, "verdict.text"),
        ({"columns": []}, "columns"),
        ({"columns": [column("a", "a", "date")]}, "kind"),
        ({"columns": [column("a", "a", source="us")]}, "source"),
        ({"rows": [{"data": "x", "CP": "wide"}]}, "rows[0].CP"),
        ({"rows": [{"data": "x", "CP": {"mean": []}}]}, "rows[0].CP.mean"),
        ({"rows": [{"data": "x", "claim": 1}]}, "rows[0].claim"),
        ({"rows": [{"data": ["x"]}]}, "rows[0].data"),
        ({"rows": {}}, "rows"),
        ({"notes": [None]}, "notes"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    change_table(tmp_path, **changes)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        report.page(tmp_path)
    assert str(tmp_path / "tables" / "bands.json") in str(caught.value)


def test_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, tables=["../settings"])
    with pytest.raises(ValueError, match="tables"):
        report.page(tmp_path)


def test_a_failure_keeps_the_old_page(tmp_path: Path) -> None:
    out = report.write(write_folder(tmp_path))
    before = out.read_bytes()
    (tmp_path / "tables" / "bands.json").write_text("{")
    with pytest.raises(ValueError, match="bands"):
        report.write(tmp_path)
    assert out.read_bytes() == before
