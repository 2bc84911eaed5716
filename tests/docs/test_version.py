"""The version: the package, the paper's package, CITATION.cff and HISTORY.md agree."""

from __future__ import annotations

import re

import pytest

import ffcp
from tests.docs.pages import ROOT


def first(pattern: str, name: str) -> str:
    found = re.search(pattern, (ROOT / name).read_text(), re.M)
    assert found is not None, f"{name} names no version"
    return found[1]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("CITATION.cff", r"^version: (\S+)$"),
        ("HISTORY.md", r"^## (\S+)"),
        ("src/ffcp/__init__.py", r'^__version__ = "(.+)"$'),
        ("paper/src/ffcp_paper/__init__.py", r'^__version__ = "(.+)"$'),
    ],
)
def test_all_files_name_one_version(name: str, pattern: str) -> None:
    assert first(pattern, name) == ffcp.__version__


def test_the_release_has_one_date() -> None:
    dated = first(r"^## \S+ \((\S+)\)$", "HISTORY.md")
    assert dated == first(r"^date-released: (\S+)$", "CITATION.cff")
