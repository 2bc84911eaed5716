"""What holds for all tests and doctests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Make our own warnings errors.

    Here and not in pyproject.toml, which would import ffcp before its lines are measured.
    """
    config.addinivalue_line("filterwarnings", "error::ffcp.FFCPWarning")


#: Docstrings whose examples learn: they take seconds, and cannot be marked where they stand.
_LONG_EXAMPLES = {
    "ffcp.regression.auto.Auto",
    "ffcp.regression.learned.boosting.learn",
    "ffcp.regression.learned.network.learn",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave these to `make test`."""
    for item in items:
        if item.name in _LONG_EXAMPLES:
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium without a window, for tests of pages; they are skipped where there is none."""
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no browser: chromium, chromium-browser and google-chrome are not on the path")
    with sync.sync_playwright() as playwright:
        # Without the sandbox it also runs as root in a container; the pages are our own.
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()
