"""The ``ffcp`` command as a newcomer meets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ffcp
from ffcp.cli.app import app

runner = CliRunner()


@pytest.mark.heavy
def test_demo_prints_both_tables_and_writes_the_picture(tmp_path: Path) -> None:
    out = tmp_path / "bands.png"
    result = runner.invoke(app, ["demo", "--epochs", "3", "--out", str(out)])
    assert result.exit_code == 0, result.output
    for word in ("growth", "waves", "method", "coverage", "mean length", "worst group", "seconds"):
        assert word in result.output
    assert result.output.count("FFCP auto") == 2
    assert result.output.count("4 output = CP") >= 2
    lines = [line for line in result.output.splitlines() if "Plot" not in line]  # has a path
    assert max(map(len, lines)) <= 80
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_demo_is_reproducible(tmp_path: Path) -> None:
    def table() -> list[list[str]]:
        arguments = ["demo", "--epochs", "2", "--out", str(tmp_path / "a.png")]
        lines = runner.invoke(app, arguments).output.splitlines()
        return [line.split()[:-1] for line in lines if line.startswith(("CP", "FFCP"))]

    assert table() == table()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--alpha", "1.5"], "1.5 does not lie between 0 and 1"),
        (["--alpha", "nan"], "nan does not lie between 0 and 1"),
        (["--out", "bands.txt"], "must end in .png, .pdf or .svg"),
        (["--out", "no_such_folder/a.png"], "there is no folder no_such_folder"),
        (["--epochs", "0"], "--epochs"),
    ],
)
def test_demo_refuses_bad_options_before_training(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_version_and_help() -> None:
    assert runner.invoke(app, ["--version"]).output.strip() == f"ffcp {ffcp.__version__}"
    assert "demo" in runner.invoke(app, ["--help"]).output


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.long
def test_import_brings_in_nothing_heavy() -> None:
    loaded = run_python(
        "import torch, sys; before = set(sys.modules); import ffcp;"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    heavies = ("pandas", "ray", "sklearn", "scipy", "matplotlib", "typer", "rich", "safetensors")
    for heavy in heavies:
        assert repr(heavy) not in loaded


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("package", "arguments"), [("typer", []), ("rich", ["--help"]), ("matplotlib", ["demo"])]
)
def test_the_command_without_its_extra_says_what_to_install(
    package: str, arguments: list[str]
) -> None:
    said = run_python(
        f"import sys; sys.modules[{package!r}] = None; sys.argv = ['ffcp', *{arguments}]\n"
        "from ffcp.cli import main\n"
        "try:\n main()\nexcept SystemExit as stop: print(stop)"
    )
    assert said.startswith(f"The ffcp command needs the package {package!r}.")
    assert said.endswith("pip install 'ffcp[cli]'")


@pytest.mark.heavy
def test_a_command_on_tables_without_pandas_says_what_to_install() -> None:
    said = run_python(
        "import sys; sys.modules['pandas'] = None; sys.argv = ['ffcp', 'show', 'houses.ffcp']\n"
        "from ffcp.cli import main\n"
        "try:\n main()\nexcept SystemExit as stop: print(stop)"
    )
    assert said.endswith("needs pandas, which is not installed: pip install 'ffcp[tables]'")


@pytest.mark.heavy
def test_the_command_is_a_module_too() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "ffcp.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == f"ffcp {ffcp.__version__}"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["demo", "--help"]])
def test_help_explains_every_command_and_option(arguments: list[str]) -> None:
    said = runner.invoke(app, arguments, env={"COLUMNS": "100"}).output
    words = ("half a minute", "--alpha", "--out") if "demo" in arguments else ("demo", "guarantee")
    for word in (*words, "Usage"):
        assert word in said
