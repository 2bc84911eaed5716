"""The ``ffcp-paper`` command as a newcomer meets it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import ffcp
import ffcp_paper
from ffcp_paper.cli import app

COMMANDS = ("reproduce", "report", "groups", "labels", "segment", "stream", "data")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(arguments: list[str]) -> None:
    said = CliRunner().invoke(app, arguments, env={"COLUMNS": "100"}).output
    for word in (*COMMANDS, "FFCP_DATA"):
        assert word in said


@pytest.mark.parametrize("command", [*COMMANDS, "data fetch"])
def test_every_command_explains_itself(command: str) -> None:
    said = CliRunner().invoke(app, [*command.split(), "--help"], prog_name="ffcp-paper").output
    assert f"Usage: ffcp-paper {command}" in said
    assert said.count("\n") > 5


def test_both_versions_are_told() -> None:
    said = CliRunner().invoke(app, ["--version"]).output.strip()
    assert said == f"ffcp-paper {ffcp_paper.__version__}, ffcp {ffcp.__version__}"
