"""Doors that bring in much are opened where they are named, as README names them."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ffcp

DOORS = {"export": "export", "ray": "calibrate", "sklearn": "ConformalRegressor", "tables": "fit"}
NEEDS = {"ray": "ray", "sklearn": "sklearn", "tables": "pandas"}


def printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.heavy
@pytest.mark.parametrize(("door", "name"), DOORS.items())
def test_a_door_opens_when_it_is_named(door: str, name: str) -> None:
    pytest.importorskip(NEEDS.get(door, "ffcp"))
    assert printed(f"import ffcp; print(ffcp.{door}.{name}.__name__)") == name


@pytest.mark.long
@pytest.mark.parametrize("way", ["import ffcp; ffcp.{}", "import ffcp.{}"])
@pytest.mark.parametrize(("door", "package"), NEEDS.items())
def test_a_door_says_which_extra_is_missing(door: str, package: str, way: str) -> None:
    said = printed(
        f"import sys; sys.modules[{package!r}] = None\n"
        f"try: {way.format(door)}\nexcept ImportError as error: print(error)"
    )
    assert said == (
        f"ffcp.{door} needs {package}, which is not installed: pip install 'ffcp[{door}]'"
    )


def test_other_names_are_still_refused() -> None:
    with pytest.raises(AttributeError, match="module 'ffcp' has no attribute 'nothing'"):
        ffcp.nothing  # type: ignore[attr-defined]  # noqa: B018
