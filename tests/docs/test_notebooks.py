"""The notebooks: they run, need no network and no data folder, and hold nothing of one machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, ROOT, links

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
SECONDS = 60
# A closed port in place of every proxy, so that what is not on this machine cannot be reached.
OFFLINE = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "all_proxy")}


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [one for one in json.loads(path.read_text())["cells"] if one["cell_type"] == kind]


def shown(cell: dict[str, Any]) -> str:
    """Return the kinds of a cell's outputs."""
    return " ".join(output["output_type"] for output in cell["outputs"])


def test_there_are_three() -> None:
    names = ["a_classifier", "a_table", "start_here"]
    assert [path.stem for path in NOTEBOOKS] == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_there_small_and_of_no_machine(path: Path) -> None:
    text = path.read_text()
    assert len(text) < 100_000
    assert not re.search(r"/(home|root|tmp|work|usr|Users)/|site-packages", text)
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert sum(bool(cell["outputs"]) for cell in code) >= len(code) - 2
    assert "stderr" not in text
    assert "error" not in " ".join(map(shown, code))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_notebooks_lead_somewhere(path: Path) -> None:
    text = "\n".join("".join(cell["source"]) for cell in cells(path, "markdown"))
    assert links(text)
    for link in links(text):
        assert (path.parent / link.partition("#")[0]).resolve().exists(), link


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_again_as_it_was_kept(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("nbclient", "ipykernel", "matplotlib", "sklearn", "tabm", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.delenv("FFCP_DATA", raising=False)
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    # Tests run side by side: threads of several processes would wait for each other.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / path.name
    code = (
        "import sys, nbformat; sys.path.insert(0, sys.argv[1]); import notebooks;"
        "nbformat.write(notebooks.executed(notebooks.Path(sys.argv[2])), sys.argv[3])"
    )
    command = [sys.executable, "-c", code, str(ROOT / "tools"), str(path), str(out)]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < SECONDS
    assert [*map(shown, cells(out, "code"))] == [*map(shown, cells(path, "code"))]
