"""The HTML report: its content, and how it works in a browser.

The browser tests need the package playwright and Chromium or Chrome on the path; without them
they are skipped. All numbers called "ours" here are made up.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from ffcp_paper import printed, report
from ffcp_paper.report_files import UNAVAILABLE

NAMES = ("synthetic", "com", "fb1", "fb2", "meps19", "meps20", "star", "bio", "blog", "bike")
ATTACK = "<script>document.title = 'attacked'</script><img src=x onerror=alert(1)>"

# -- a folder as a run writes it ---------------------------------------------------------------


def put(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def column(key: str, label: str, kind: str = "number", **more: object) -> dict[str, object]:
    return {"key": key, "label": label, "kind": kind, "source": None, **more}


def theirs(name: str, method: str, what: str) -> dict[str, float | None] | None:
    found = printed.value("regression_bands", row=name, method=method, column=what)
    if found is None:
        return None
    scale = 0.01 if what == "coverage" else 1
    sd = None if found.sd is None else found.sd * scale
    return {"mean": found.mean * scale, "sd": sd, "n": None}


def bands_row(i: int, name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"data": name}
    for method in ("CP", "FFCP"):
        row[f"{method}_paper"] = theirs(name, method, "length")
    row["cover_paper"] = theirs(name, "FFCP", "coverage")
    if name == "blog":
        return {**row, "CP": None, "FFCP": None, "cover": None, "claim": None,
                "note": UNAVAILABLE}  # fmt: skip
    lengths = [1.5 + 0.37 * ((7 * i) % 10), 1.4 + 0.36 * ((7 * i) % 10) + 0.02 * i]
    row["CP"] = {"mean": lengths[0], "sd": 0.04, "n": 5}
    row["FFCP"] = {"mean": lengths[1], "sd": 0.05, "n": 5}
    row["cover"] = {"mean": 0.9 + 0.001 * (i - 4), "sd": 0.004, "n": 5}
    row["claim"] = lengths[1] < lengths[0]
    return row


def bands_table() -> dict[str, Any]:
    rows = [bands_row(i, name) for i, name in enumerate(NAMES)]
    rows[3]["CP"] = float("inf")
    rows[5]["FFCP"] = {"mean": float("nan"), "sd": None, "n": 5}
    held = sum(row["claim"] is True for row in rows)
    return {
        "name": "bands",
        "title": "Table 2. Bands of CP and FFCP",
        "claim": "FFCP's bands are shorter than CP's and cover as much.",
        "alpha": 0.1,
        "verdict": {"held": held, "of": 9, "text": f"FFCP was shorter on {held} of 9 data sets."},
        "columns": [
            column("data", "data set", "text"),
            column("CP", "CP length", digits=2, source="ours"),
            column("CP_paper", "CP length", digits=2, source="paper"),
            column("FFCP", "FFCP length", digits=2, source="ours"),
            column("FFCP_paper", "FFCP length", digits=2, source="paper"),
            column("cover", "FFCP coverage", digits=1, percent=True, source="ours"),
            column("cover_paper", "FFCP coverage", digits=1, percent=True, source="paper"),
            column("claim", "FFCP shorter", "claim"),
        ],
        "rows": rows,
        "notes": ["Lengths are in units of the scaled target.", "blog needs a file to be fetched."],
    }


def simple_table(name: str, title: str, claim: str, held: int, of: int) -> dict[str, Any]:
    text = f"It held on {held} of {of}." if of else "No data was there to check it."
    return {
        "name": name,
        "title": title,
        "claim": claim,
        "alpha": None,
        "verdict": {"held": held, "of": of, "text": text},
        "columns": [
            column("data", "data set", "text"),
            column("speedup", "times faster", digits=0, source="ours"),
            column("claim", "claim", "claim"),
        ],
        "rows": [
            {"data": f"{data} {k}", "speedup": 10.0 * k, "claim": i < held if of else None}
            for i, (data, k) in enumerate((d, k) for d in NAMES[:6] for k in range(1, 6))
        ],
        "notes": [],
    }


TABLES = (
    bands_table(),
    simple_table("times", "Table 1. Running time", "FFCP is 50 times faster than FCP.", 30, 30),
    simple_table("groups", "Table 4. Worst group", "FFLCP covers the worst group best.", 0, 30),
    simple_table("labels", "Table 3. Label sets", "FFRAPS's sets are smaller.", 0, 0),
)

HELD: int = TABLES[0]["verdict"]["held"]


def write_folder(folder: Path, **changes: object) -> Path:
    settings = {
        "command": "ffcp-paper reproduce --seeds 5 --out results",
        "seeds": 5,
        "quick": True,
        "versions": {"ffcp": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6", "python": "3.11.2"},
        "machine": {"system": "Linux", "processor": "x86_64", "cores": 8, "memory_gb": 15.6},
        "started": "2024-05-01T12:30:00+00:00",
        "seconds": 4210.0,
        "earlier": [],
        "tables": [table["name"] for table in TABLES],
        "figures": ["lengths", "times", "gone"],
        **changes,
    }
    put(folder / "settings.json", settings)
    for table in TABLES:
        put(folder / "tables" / f"{table['name']}.json", table)
    for name in ("lengths", "times", "gone"):
        about = {
            "title": f"Figure of {name}",
            "caption": "Each point is a data set; the line is where both methods are equal.",
            "alt": f"A scatter plot of {name}, most points under the diagonal.",
        }
        put(folder / "figures" / f"{name}.json", about)
    draw(folder / "figures")
    return folder


def draw(folder: Path) -> None:
    from matplotlib.figure import Figure

    for name, suffixes in (("lengths", ("svg", "png")), ("times", ("png",))):
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot([0, 5], [0, 5], color="0.7")
        axes.scatter([1, 2, 3, 4], [0.8, 1.9, 3.2, 3.1])
        axes.set(xlabel="CP", ylabel="FFCP")
        for suffix in suffixes:
            figure.savefig(folder / f"{name}.{suffix}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("run"))


def change_table(folder: Path, **changes: object) -> Path:
    write_folder(folder, tables=["bands"], figures=[])
    put(folder / "tables" / "bands.json", {**bands_table(), **changes})
    return folder


def plain(text: str) -> str:
    """Return the words that a page shows."""
    body = re.sub(r"(?s)<(style|script)>.*?</\1>", " ", text)
    body = re.sub(r"</?(span|strong|em|time|code|a)\b[^>]*>", "", body)  # inside a line
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


# -- content -----------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match=re.escape(f"{path} is damaged, it is not JSON")):
        report.write(tmp_path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=re.escape(f"{path} is damaged: its content must be an")):
        report.write(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(f"there is no file {path}")):
        report.write(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"title": 3}, "title must be text, not 3"),
        ({"verdict": {"held": 3, "of": 2, "text": ""}}, "verdict.held must lie between 0 and 2"),
        ({"verdict": {"held": True, "of": 2, "text": ""}}, "verdict.held must be a whole number"),
        ({"verdict": {"held": 1, "of": 2}}, "verdict.text is missing"),
        ({"columns": []}, "columns must not be empty"),
        ({"columns": [column("a", "a", "date")]}, "kind must be text, number or claim"),
        ({"columns": [column("a", "a", source="us")]}, "source must be ours, paper or null"),
        ({"rows": [{"data": "x", "CP": "wide"}]}, "rows[0].CP must be a number, not 'wide'"),
        ({"rows": [{"data": "x", "CP": {"mean": []}}]}, "rows[0].CP.mean must be a number"),
        ({"rows": [{"data": "x", "claim": 1}]}, "rows[0].claim must be true, false or null"),
        ({"rows": [{"data": ["x"]}]}, "rows[0].data must be text"),
        ({"rows": {}}, "rows must be a list"),
        ({"notes": [None]}, "notes must hold texts only"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    change_table(tmp_path, **changes)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        report.page(tmp_path)
    assert str(tmp_path / "tables" / "bands.json") in str(caught.value)
    assert "again" in str(caught.value)


def test_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, tables=["../settings"])
    with pytest.raises(ValueError, match="tables may hold letters"):
        report.page(tmp_path)


def test_a_failure_keeps_the_old_page(tmp_path: Path) -> None:
    out = report.write(write_folder(tmp_path))
    before = out.read_bytes()
    (tmp_path / "tables" / "bands.json").write_text("{")
    with pytest.raises(ValueError, match="bands"):
        report.write(tmp_path)
    assert out.read_bytes() == before


# -- in a browser ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no browser: chromium, chromium-browser and google-chrome are not on the path")
    with sync.sync_playwright() as playwright:
        # Without the sandbox it also runs as root in a container; the page is our own.
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Opened:
    """The report in a window, with everything it complained of or asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(5000)
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("requestfailed", lambda request: self.complaints.append(request.url[:80]))
        self.page.on("request", lambda request: self.complaints.extend(outside(request.url, path)))
        self.page.goto(path.as_uri())

    def column(self, name: str, index: int) -> list[str]:
        cells = self.page.locator(f"#table-{name} tbody tr:visible > :nth-child({index + 1})")
        return [" ".join(text.split()) for text in cells.all_inner_texts()]

    def focused(self) -> str:
        script = "() => document.activeElement.textContent.trim().replace(/\\s+/g, ' ')"
        return str(self.page.evaluate(script))


def outside(address: str, path: Path) -> list[str]:
    return [] if address.startswith(("data:", path.as_uri())) else [address[:80]]


@pytest.fixture(scope="module")
def written(folder: Path) -> Path:
    return report.write(folder, folder / "shown.html")


@pytest.fixture
def opened(browser: Any, written: Path) -> Iterator[Opened]:
    made = Opened(browser, written, viewport={"width": 1280, "height": 800})
    yield made
    made.context.close()
    assert made.complaints == []


def test_it_renders_with_its_figures(opened: Opened) -> None:
    assert opened.page.title() == report.TITLE
    opened.page.wait_for_load_state("load")
    widths = opened.page.evaluate("() => [...document.images].map((i) => i.naturalWidth)")
    assert len(widths) == 2
    assert min(widths) > 100


def test_hostile_text_does_nothing(browser: Any, tmp_path: Path) -> None:
    out = report.write(change_table(tmp_path, title=ATTACK, notes=[ATTACK]))
    shown = Opened(browser, out)
    assert shown.page.title() == report.TITLE
    assert shown.page.locator("#title-bands").inner_text() == ATTACK
    shown.context.close()
    assert shown.complaints == []


def test_sorting_by_number_text_and_claim(opened: Opened) -> None:
    heads = opened.page.locator("#table-bands thead th")
    original = opened.column("bands", 0)

    def press(index: int) -> str:
        heads.nth(index).locator("button").click()
        return str(heads.nth(index).get_attribute("aria-sort"))

    def numbers(index: int) -> list[float]:
        texts = [
            text.split()[0].replace("infinite", "inf") for text in opened.column("bands", index)
        ]
        return [float(text) if text != "-" else -1.0 for text in texts]

    assert press(1) == "ascending"
    up = numbers(1)
    assert up[-1] == -1.0  # no value: last
    assert up[:-1] == sorted(up[:-1])
    assert up[-2] == float("inf")
    assert press(1) == "descending"
    down = numbers(1)
    assert down[-1] == -1.0
    assert down[:-1] == sorted(up[:-1], reverse=True)
    assert press(1) == "none"
    assert opened.column("bands", 0) == original

    assert press(5) == "ascending"
    status = opened.page.locator("#table-bands .count")
    assert status.inner_text() == "10 rows shown, ascending by FFCP coverage (ours)"
    covered = [text for text in opened.column("bands", 5) if text != "-"]
    assert covered == sorted(covered)
    assert covered[0] == "89.6 ± 0.4 %"

    assert press(0) == "ascending"
    names = [text.split()[0] for text in opened.column("bands", 0)]
    assert names == sorted(NAMES)
    assert press(0) == "descending"
    assert [text.split()[0] for text in opened.column("bands", 0)] == sorted(NAMES, reverse=True)
    assert status.inner_text() == "10 rows shown, descending by data set"
    assert status.get_attribute("role") == "status"

    press(7)
    claims = [text.split(maxsplit=1)[1] for text in opened.column("bands", 7)]
    assert claims == ["does not hold"] * (9 - HELD) + ["holds"] * HELD + ["no data"]
    press(7)
    claims = [text.split(maxsplit=1)[1] for text in opened.column("bands", 7)]
    assert claims == ["holds"] * HELD + ["does not hold"] * (9 - HELD) + ["no data"]
    sorts = [heads.nth(i).get_attribute("aria-sort") for i in range(8)]
    assert sorts == ["none"] * 7 + ["descending"]


def test_filtering(opened: Opened) -> None:
    field = opened.page.locator("#table-bands").get_by_label("Filter the rows")
    status = opened.page.locator("#table-bands .count")
    field.fill("MEPS")
    assert opened.column("bands", 0) == ["meps19", "meps20"]
    assert status.inner_text() == "2 of 10 rows shown"
    opened.page.locator("#table-bands thead button").first.click()
    opened.page.locator("#table-bands thead button").first.click()
    assert opened.column("bands", 0) == ["meps20", "meps19"]
    field.fill("not hold fb")
    assert len(opened.column("bands", 0)) <= 2
    field.fill("nothing like it")
    assert opened.column("bands", 0) == []
    assert status.inner_text().startswith("0 of 10 rows shown")
    field.fill("")
    assert len(opened.column("bands", 0)) == 10


def test_the_figure_opens_and_closes_from_the_keyboard(opened: Opened) -> None:
    page = opened.page
    button = page.get_by_role("button", name="Enlarge Figure of lengths")
    small = page.locator("#figure-lengths img").bounding_box()["width"]
    dialog = page.locator("dialog")
    for close in ("Escape", "Enter"):
        button.focus()
        page.keyboard.press("Enter")
        assert dialog.is_visible()
        assert opened.focused() == "Close"
        assert dialog.locator("h2").inner_text() == "Figure of lengths"
        assert dialog.locator("img").bounding_box()["width"] > small
        for _ in range(4):  # Tab stays inside, or goes to the browser's own controls
            page.keyboard.press("Tab")
            inside = "() => document.activeElement.closest('dialog, body').tagName"
            assert page.evaluate(inside) in ("DIALOG", "BODY")
            assert opened.page.evaluate("() => !document.activeElement.closest('main')")
        if close == "Enter":
            page.locator("#close").focus()
        page.keyboard.press(close)
        assert not dialog.is_visible()
        assert opened.focused() == "Enlarge Figure of lengths"


def test_tab_reaches_every_control_in_order_and_shows_where_it_is(opened: Opened) -> None:
    page = opened.page
    wanted = page.evaluate(
        """() => [...document.querySelectorAll('a, button, input, .scroll[tabindex]')]
        .filter((e) => !e.closest('dialog')).map((e, i) => (e.dataset.order = i))"""
    )
    seen = []
    for _ in wanted:
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate(
                """() => { const e = document.activeElement; const s = getComputedStyle(e);
                return [Number(e.dataset.order), s.outlineStyle, parseFloat(s.outlineWidth)]; }"""
            )
        )
    assert [order for order, _, _ in seen] == wanted
    assert {style for _, style, _ in seen} == {"solid"}
    assert min(width for _, _, width in seen) >= 2


def test_the_skip_link_leads_to_the_summary(opened: Opened) -> None:
    opened.page.keyboard.press("Tab")
    assert opened.focused() == "Skip to the summary"
    opened.page.keyboard.press("Enter")
    assert opened.page.evaluate("() => document.activeElement.id") == "main"


def test_headings_go_down_one_level_at_a_time(opened: Opened) -> None:
    levels = opened.page.evaluate(
        "() => [...document.querySelectorAll('h1, h2, h3, h4')].map((h) => Number(h.tagName[1]))"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_phone_width(browser: Any, written: Path) -> None:
    shown = Opened(browser, written, viewport={"width": 360, "height": 740}, has_touch=True)
    page = shown.page
    assert page.evaluate("() => document.documentElement.scrollWidth") == 360
    box = page.locator("#table-bands .scroll")
    assert box.evaluate("(e) => e.scrollWidth > e.clientWidth + 100")
    assert box.get_attribute("tabindex") == "0"
    box.evaluate("(e) => { e.scrollLeft = 200; }")
    first = page.locator("#table-bands tbody tr").nth(1).locator("th")
    assert abs(first.bounding_box()["x"] - box.bounding_box()["x"]) < 3
    assert 90 < first.bounding_box()["width"] < 180
    page.locator("#figure-times img").tap()
    assert page.locator("dialog").is_visible()
    assert page.locator("dialog").bounding_box()["width"] <= 360
    assert page.locator("dialog img").bounding_box()["width"] > 600  # scrolled over
    shown.context.close()
    assert shown.complaints == []


CONTRAST = """() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const worst = {};
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || e.closest('dialog')) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const name = e.tagName + '.' + e.className;
    worst[name] = Math.min(worst[name] ?? 99, ratio);
  }
  return worst;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_the_switch_of_colours(browser: Any, written: Path, scheme: str) -> None:
    shown = Opened(browser, written, color_scheme=scheme)
    page = shown.page
    other = "dark" if scheme == "light" else "light"
    ground = "() => getComputedStyle(document.body).backgroundColor"
    grounds = {"light": "rgb(251, 250, 248)", "dark": "rgb(20, 23, 26)"}
    for now, next_ in ((scheme, other), (other, scheme)):
        assert page.evaluate(ground) == grounds[now]
        ratios = page.evaluate(CONTRAST)
        assert len(ratios) > 15
        assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}
        assert ratios["H1."] > 10
        page.get_by_role("button", name=f"{next_.capitalize()} colours").click()
    assert page.evaluate(ground) == grounds[scheme]
    shown.context.close()
    assert shown.complaints == []


def test_without_scripts_it_can_be_read(browser: Any, written: Path) -> None:
    shown = Opened(browser, written, java_script_enabled=False)
    assert shown.page.locator("#table-bands tbody tr").count() == 10
    assert not shown.page.locator("#theme").is_visible()
    assert not shown.page.locator("#table-bands input").is_visible()
    assert shown.page.locator("#table-bands .count").inner_text() == "10 rows"
    shown.context.close()


def test_printing_is_dark_on_light_and_leaves_controls_out(browser: Any, written: Path) -> None:
    shown = Opened(browser, written, color_scheme="dark")
    shown.page.emulate_media(media="print", color_scheme="dark")
    assert shown.page.evaluate("() => getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    assert not shown.page.locator("nav").is_visible()
    assert not shown.page.locator("#table-bands input").is_visible()
    assert shown.page.locator("#table-times .scroll").evaluate("(e) => e.scrollTop === 0")
    shown.context.close()
    assert shown.complaints == []
