"""The scripts of examples/: short, each with its page, and they run on real data."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

NEEDS = {"mlflow_model": ("mlflow",), "service": ("fastapi", "uvicorn", "httpx")}
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


def named(script: Path) -> str:
    return script.stem


@pytest.mark.parametrize("script", SCRIPTS, ids=named)
def test_a_script_is_short_and_has_its_page(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) <= 125
    pages = re.findall(r"docs/(\w+\.md)", text)
    assert len(pages) == 1
    assert script.name in (DOCS / pages[0]).read_text(), f"{pages[0]} does not name {script.name}"
    assert script.name in (DOCS / "examples.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=named)
def test_a_script_runs(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("ffcp_paper", *NEEDS.get(script.stem, ())):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, text=True, capture_output=True, timeout=600
    )
    if "MissingDataError" in done.stderr:
        assert "It comes from" in done.stderr
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert "cover" in done.stdout
