"""The HTML report in a browser.

These tests need the package playwright and Chromium or Chrome on the path; without them they are
skipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ffcp_paper.page import report
from made_results import ATTACK, HELD, NAMES, change_table, write_folder

pytestmark = pytest.mark.slow


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
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write(write_folder(tmp_path_factory.mktemp("run")))


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
