"""The site: the reference is complete; it builds, fits any window, loads nothing and searches."""

from __future__ import annotations

import ast
import importlib
import operator
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ffcp
from tests.docs.pages import DOCS, PAGES, ROOT

ROOMS = Path(ffcp.__file__).parent
TASKS = (
    *("regression", "quantiles", "classification", "segmentation"),
    *("tables", "groups", "conditional", "shift", "online", "forecasts", "deploy", "scale"),
    *("risk", "probabilities", "selection"),
)
INTEGRATIONS = ("sklearn", "huggingface", "lightning", "service", "mlflow", "drift")
GUARANTEE = ["Guarantee", "When not to use it"]
PICTURES = sorted((DOCS / "pictures").glob("*.png"))


def listed(file: Path) -> list[str]:
    """Read the names in ``__all__`` of a file, without importing it."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def public_names() -> list[str]:
    """Name all that is public: of ffcp, and of every package in it that says what it offers."""
    modules = {"ffcp": listed(ROOMS / "__init__.py")}
    for room in sorted(ROOMS.glob("*/__init__.py")):
        modules[f"ffcp.{room.parent.name}"] = listed(room)
    tree = ast.parse((ROOMS / "plots.py").read_text())
    drawn = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    modules["ffcp.plots"] = [name for name in drawn if not name.startswith("_")]
    for parts in ("calibrations", "kernels", "scales", "scores"):
        modules[f"ffcp.{parts}"] = listed(ROOMS / f"{parts}.py")
    return [f"{module}.{name}" for module, names in modules.items() for name in names]


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
    described = set(re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.M))
    whole = {name for name in described if f".. automodule:: {name}\n   :members:" in text}
    missing = [
        name
        for name in public_names()
        if name not in described and name.rpartition(".")[0] not in whole
    ]
    assert not missing, f"describe them in docs/api: {', '.join(missing)}"


def test_the_reference_describes_what_there_is_and_once() -> None:
    text = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
    names = re.findall(r"^\.\. auto(?:class|function|exception):: ffcp\.(\S+)$", text, re.M)
    assert len(names) == len(set(names)), sorted(n for n in set(names) if names.count(n) > 1)
    for name in names:
        assert operator.attrgetter(name)(ffcp), name


def test_pictures_are_small_and_each_is_shown() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    assert PICTURES
    for picture in PICTURES:
        assert picture.stat().st_size < 100_000, picture.name
        assert f"pictures/{picture.name}" in text, picture.name


def test_task_pages_have_their_form() -> None:
    for name in TASKS:
        heads = re.findall(r"^## (.+)$", (DOCS / f"{name}.md").read_text(), re.M)
        assert heads[:4] == ["Quick start", "Example", *GUARANTEE], name


def test_pages_of_integrations_have_theirs() -> None:
    for name in INTEGRATIONS:
        heads = re.findall(r"^## (.+)$", (DOCS / f"{name}.md").read_text(), re.M)
        assert heads[:3] == ["Quick start", *GUARANTEE], name


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as ``make docs`` does: a warning is an error."""
    pytest.importorskip("furo")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    command += ["-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.mark.slow
def test_every_public_name_is_on_a_page(site: Path) -> None:
    inventory = importlib.import_module("sphinx.util.inventory").InventoryFile
    found = inventory.loads((site / "objects.inv").read_bytes(), uri="")
    names = {name for kind in found.data.values() for name in kind}
    missing = [name for name in public_names() if name not in names]
    assert not missing, missing


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for file in [*site.rglob("*.html"), *site.rglob("*.css")]:
        loads = re.findall(
            r'(?:<script[^>]*src|<img[^>]*src|<link[^>]*rel="stylesheet"[^>]*href)="(https?:[^"]+)'
            r"|@import\s+url\((https?:[^)]+)",
            file.read_text(),
        )
        assert not loads, f"{file.name}: {loads}"


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
def test_pages_fit_the_window(site: Path, browser: Any, width: int) -> None:
    """Wide tables and code scroll inside their boxes; the page itself never does."""
    page = browser.new_page(viewport={"width": width, "height": 800})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    for file in sorted(site.rglob("*.html")):
        page.goto(file.as_uri())
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{file.name} is {wide} wide"
    assert not errors
    page.close()


@pytest.mark.slow
def test_search_works_without_a_network(site: Path, browser: Any) -> None:
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto((site / "index.html").as_uri())
    page.fill("input[name=q]", "exchangeable")
    page.press("input[name=q]", "Enter")
    # Results appear one after the other: the fifth is there when four were found before it.
    page.wait_for_selector("#search-results ul.search li:nth-child(5) a", timeout=60_000)
    assert "search.html" in page.url
    page.locator("#search-results ul.search li a").first.click()
    page.wait_for_selector("article")
    assert "exchangeable" in page.inner_text("article").lower()
    context.close()
