"""The pages of the site: every block of code runs, and every link leads somewhere."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

import ffcp
from ffcp.cli.app import app as ffcp_app
from ffcp.regression.learned import network
from tests.docs.pages import DOCS, PAGES, ROOT, anchors, blocks, links, named, prose

DIRECTIVES = {"{toctree}", "{eval-rst}", "{literalinclude}", "{include}"}
# They import, fit or start more than others.
LONG = {
    *("coming_from_mapie.md", "deploy.md", "scale.md", "tables.md", "sklearn.md"),
    *("forecasts.md", "huggingface.md", "lightning.md", "mlflow.md", "service.md"),
}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
MARKS = {name: [pytest.mark.heavy] for name in LONG}
MARKS["scale_ray.md"] = [pytest.mark.slow]  # it starts clusters, for a minute
WITH_CODE = [
    pytest.param(page, marks=MARKS.get(page.name, []), id=named(page))
    for page in PAGES
    if blocks(page.read_text(), "python")
]
SHORT = [page for page in PAGES if page.name != "bands.md"]  # the tables of a benchmark
# Pages that speak of the paper's tables and pictures, and one that is written by a benchmark.
OF_THE_PAPER = {"paper.md", "bands.md", "segmentation_results.md", "glossary.md"}
PLAIN = [
    page
    for page in (ROOT / "README.md", *PAGES)
    if page.name not in OF_THE_PAPER and "results" not in page.parts
]
WITH_SHELL = [page for page in (ROOT / "README.md", *PAGES) if blocks(page.read_text(), "sh")]


def online_kept_its_bound(names: dict[str, Any], printed: str) -> None:
    share = names["online"].misses[0] / names["online"].observed[0]
    assert abs(share - 0.1) <= names["online"].bounds[0]


def the_tail_is_thin(names: dict[str, Any], printed: str) -> None:
    assert 0.01 < float(printed) < 0.1
    assert list(names["frame"].columns)[:2] == ["prediction", "lower 0.5"]


def summaries_are_small(names: dict[str, Any], printed: str) -> None:
    assert printed.startswith("100000 rows, ")
    streamed, merged = names["predictor"].calibration, names["parts"][0].calibration
    assert len(streamed) == len(merged) == 100_000
    assert streamed.rank_error <= 1e-4
    assert merged.rank_error <= 1e-3
    assert len(merged.scores) <= 1000


def intervals_were_written(names: dict[str, Any], printed: str) -> None:
    table = importlib.import_module("pyarrow.parquet").read_table("intervals")
    assert table.num_rows == 400
    assert {"age", "prediction", "lower_0.1", "upper_0.05"} <= set(table.column_names)


def intervals_of_a_pipeline_cover(names: dict[str, Any], printed: str) -> None:
    """Fewer would be covered once in 10,000 times: 375 rows calibrate or choose, 500 are new."""
    assert float(printed.split("covered: ")[1].split()[0]) > 0.8


def a_loaded_model_takes_alpha(names: dict[str, Any], printed: str) -> None:
    assert (names["wider"]["upper"] > names["intervals"]["upper"]).all()


AFTER: dict[str, Callable[[dict[str, Any], str], None]] = {
    "forecasts.md": online_kept_its_bound,
    "mlflow.md": a_loaded_model_takes_alpha,
    "sklearn.md": intervals_of_a_pipeline_cover,
    "scale.md": summaries_are_small,
    "scale_ray.md": intervals_were_written,
    "online.md": online_kept_its_bound,
    "interval_options.md": the_tail_is_thin,
}


@pytest.mark.long
@pytest.mark.parametrize("page", WITH_CODE)
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_blocks_run_one_after_the_other(
    page: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if page.name == "deploy.md":
        request.getfixturevalue("torch_that_exports")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setattr(network, "_EPOCHS", 3)
    if page.name == "mlflow.md":
        monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        monkeypatch.syspath_prepend(tmp_path)
        shutil.copy(ROOT / "examples" / "mlflow_model.py", tmp_path)
    if page.name == "scale.md":
        for name, value in TORCHRUN.items():
            monkeypatch.setenv(name, value)
    if page.name == "scale_ray.md":
        request.addfinalizer(importlib.import_module("ray").shutdown)
    if importlib.util.find_spec("torchsort") is None:
        # TorchCP imports it for a training loss; it has to be compiled, and no page uses it.
        stub = types.ModuleType("torchsort")
        stub.__dict__.update(soft_rank=None, soft_sort=None)
        monkeypatch.setitem(sys.modules, "torchsort", stub)
    names: dict[str, Any] = {"__name__": "__main__"}
    left_out = []
    for block in blocks(page.read_text(), "python"):
        absent = [name for name in block.requires if importlib.util.find_spec(name) is None]
        if absent:
            left_out.append(f"line {block.line} needs {', '.join(absent)}")
            continue
        lines = "\n" * (block.line - 1) + block.text  # so that errors name the line of the page
        exec(compile(lines, str(page), "exec", dont_inherit=True), names)  # no future of this file
    if page.name in AFTER:
        AFTER[page.name](names, capsys.readouterr().out)
    if left_out:
        pytest.skip("; ".join(left_out))


def test_pieces_of_ones_own_are_short_and_can_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks((DOCS / "extending.md").read_text(), "python")
    assert len(found) >= 9
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in found:
        lines = [line for line in block.text.splitlines() if line.strip()]
        assert len(lines) <= 10 or "ffcp.load" in block.text, block.text
        exec(block.text, names)
        predictor = names.get("predictor")
        if isinstance(predictor, ffcp.IntervalPredictor):
            assert len(predictor.calibration) > 200
            predictor.save("other.safetensors")


def test_a_scale_a_score_and_a_calibration_take_forty_lines_and_public_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, *others = blocks((DOCS / "extending.md").read_text(), "python")
    (block,) = (block for block in others if "ffcp.load" in block.text)
    assert len(block.text.splitlines()) <= 40
    assert not re.search(r"\._|from ffcp|import ffcp\.", block.text)
    public = ("scores", "scales", "calibrations", "kernels")
    for module, name in re.findall(r"ffcp\.(\w+)(?:\.(\w+))?", block.text):
        assert module in ffcp.__all__
        assert module not in public or name in getattr(ffcp, module).__all__
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(first.text, names)
    exec(block.text, names)
    model, loaded = names["model"], names["loaded"]
    assert loaded.calibration.count == 200
    assert len(loaded.calibration) == 300
    with pytest.raises(ffcp.CalibrationFileError, match="count=200"):
        ffcp.load("calibration.safetensors", model, calibration=names["LastRows"](100))
    with pytest.raises(ffcp.CalibrationFileError, match="LastRows"):
        ffcp.load("calibration.safetensors", model)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_says_what_it_is(page: Path) -> None:
    """A block without a language, or set off by spaces alone, would be run by nobody."""
    text = page.read_text()
    for block in blocks(text):
        assert block.language in {"python", "sh", "text"} | DIRECTIVES, f"line {block.line}"
    assert "```" not in prose(text)
    assert not re.search(r"\n\n {4}[^\s*\-\d]", prose(text)), "a block without a fence"


@pytest.mark.long
@pytest.mark.parametrize("page", WITH_SHELL, ids=named)
def test_commands_exist(page: Path) -> None:
    for block in blocks(page.read_text(), "sh"):
        parsed = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
        assert parsed.returncode == 0, parsed.stderr
        for line in block.text.replace("\\\n", " ").splitlines():
            for part in line.split("&&"):
                known(shlex.split(part, comments=True))


def known(words: list[str]) -> None:
    """See that a command, its parts and its options are there."""
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        words = words[1:]
    if not words:
        return
    name, rest = Path(words[0]).name, words[1:]
    if name in ("ffcp", "ffcp-paper"):
        app = ffcp_app if name == "ffcp" else pytest.importorskip("ffcp_paper.cli").app
        command: Any = typer.main.get_command(app)
        while rest and hasattr(command, "commands"):
            assert rest[0] in command.commands, f"{name} has no command {rest[0]}"
            command, rest = command.commands[rest[0]], rest[1:]
        options = {option for given in command.params for option in given.opts}
        for word in rest:
            assert not word.startswith("-") or word in options, f"no option {word}"
    elif name == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(rest) <= set(targets), f"no target among {rest}"
    elif name == "python" and rest[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in rest if word.endswith(".py")), rest
    elif name == "python" and rest[:1] == ["-m"]:
        assert rest[1] == "venv" or importlib.util.find_spec(rest[1]), f"no module {rest[1]}"
    elif name == "python":
        assert (ROOT / rest[0]).exists(), f"no file {rest[0]}"
    else:
        assert name == "pip", f"unknown command {name}"


@pytest.mark.parametrize("page", SHORT, ids=named)
def test_a_page_has_at_most_200_lines(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 200


@pytest.mark.parametrize("page", PLAIN, ids=named)
def test_intervals_are_called_intervals(page: Path) -> None:
    """The word "band" is the paper's; code and names of tests and files do not count here."""
    words = re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose(page.read_text()))
    assert not re.search(r"\b(bands?|label sets?)\b", words, re.I)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=named)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in links(page.read_text()):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{named(page)} points to {link}"
        if anchor:
            assert anchor in anchors(file.read_text()), f"{named(page)}: no heading for {link}"
