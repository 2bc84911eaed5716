"""The page of a fit: it says what was measured, loads nothing, and fits any window."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pandas")
from ffcp import tables
from ffcp.notebooks import number
from ffcp.tables import report
from tests.tables.material import houses, quick_fit


def test_the_page_says_what_was_measured_and_loads_nothing(fitted: tables.FittedTable) -> None:
    page, tested = fitted.report, fitted.about.tested
    assert page is not None
    assert tested is not None
    assert f"{tested.coverage:.1%}" in page
    assert "a different word in every row" in page
    assert not re.search(r"https?://|src=|<link|<script|@import|url\(", page)
    assert page.count("<circle") > 100  # the truths of the picture, and the curve


def test_methods_are_compared_in_the_units_of_the_target(fitted: tables.FittedTable) -> None:
    choice, unit = fitted.predictor.choice, fitted.about.scale
    assert unit > 2
    for trial in choice.trials.values():
        for value in (trial.score, trial.length):
            assert number(unit * value) in fitted.about.method
            assert f">{number(unit * value)}<" in fitted.report


@pytest.mark.parametrize(
    ("low", "words"), [(0.005, "by about 10.0%"), (-0.005, "no difference of coverage")]
)
def test_the_page_says_whether_coverage_depends_on_the_row(
    fitted: tables.FittedTable, monkeypatch: pytest.MonkeyPatch, low: float, words: str
) -> None:
    assert fitted.about.tested is not None
    tested = replace(fitted.about.tested, excess=(0.01, low, 0.015))
    monkeypatch.setattr(fitted, "about", replace(fitted.about, tested=tested))
    frame = houses(50, 3)
    page = report.page(fitted, fitted.predict(frame), frame["price"].to_numpy())
    assert words in page
    assert f"{low:.4f} to 0.0150" in page


def test_the_page_of_label_sets_names_the_labels(labelled: tables.FittedTable) -> None:
    assert labelled.report is not None
    assert "Number of labels" in labelled.report
    assert "<title>Prediction sets of kind" in labelled.report
    assert "By group" in labelled.report


@pytest.mark.heavy
def test_the_page_of_few_rows_says_that_none_are_tested(few: tables.FittedTable) -> None:
    assert few.report is not None
    assert "All 18 rows are used for training and calibration" in few.report
    assert few.report.count("Training:") == 1
    assert "18 networks" in few.report


@pytest.mark.heavy
def test_names_cannot_break_the_page() -> None:
    frame = houses(450)
    frame["town"] = frame["town"].replace("Chur", "<script>alert(1)</script>")
    frame = frame.rename(columns={"rooms": "<b>rooms"})
    page = quick_fit(frame, "price").report
    assert page is not None
    assert "<script>" not in page
    assert "&lt;b&gt;rooms" in page


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it_narrow_and_wide_light_and_dark(
    browser: Any, folder: Path, width: int, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: asked.append(message.text))
    path = folder / "report.html"
    page.goto(path.as_uri())
    assert asked == [path.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for kind in ("svg", ".choice p"):  # which fit, and so need not scroll
        box = page.locator(kind).first.bounding_box()
        assert box["x"] + box["width"] <= width
    wide = "[...document.querySelectorAll('div')].filter(one => one.scrollWidth > one.clientWidth)"
    page.evaluate("document.querySelector('.choice td:last-child').textContent = '1'.repeat(300)")
    assert page.evaluate(f"{wide}.length") > 0
    assert page.evaluate(f"{wide}.every(one => one.matches('.scroll'))")  # a shadow shows it
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", back)[:3])) > 380
    assert light == (scheme == "light")
    context.close()
