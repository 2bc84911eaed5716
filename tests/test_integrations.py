"""Optional subpackages are imported when they are named, as README names them."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ffcp

INTEGRATIONS = {
    "export": "export",
    "ray": "calibrate",
    "sklearn": "ConformalRegressor",
    "tables": "fit",
}
NEEDS = {"ray": "ray", "sklearn": "sklearn", "tables": "pandas"}


def printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.heavy
@pytest.mark.parametrize(("integration", "name"), INTEGRATIONS.items())
def test_an_integration_is_imported_when_it_is_named(integration: str, name: str) -> None:
    pytest.importorskip(NEEDS.get(integration, "ffcp"))
    assert printed(f"import ffcp; print(ffcp.{integration}.{name}.__name__)") == name


@pytest.mark.long
@pytest.mark.parametrize("way", ["import ffcp; ffcp.{}", "import ffcp.{}"])
@pytest.mark.parametrize(("name", "package"), NEEDS.items())
def test_an_integration_says_which_extra_is_missing(name: str, package: str, way: str) -> None:
    said = printed(
        f"import sys; sys.modules[{package!r}] = None\n"
        f"try: {way.format(name)}\nexcept ImportError as error: print(error)"
    )
    assert all(word in said for word in (package, f"ffcp[{name}]"))


def test_other_names_are_still_refused() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        ffcp.nothing  # type: ignore[attr-defined]  # noqa: B018
