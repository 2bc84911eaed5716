"""The reference is made from docstrings: each says what goes in, and shows an example."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import ffcp

NAMES = [
    name
    for name in ffcp.__all__
    if callable(found := getattr(ffcp, name))
    and not (isinstance(found, type) and issubclass(found, Exception))  # made by the library only
]


def takes_something(maker: Any) -> bool:
    return bool(inspect.signature(maker).parameters)


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_takes_and_has_an_example(name: str) -> None:
    maker = getattr(ffcp, name)
    text = inspect.cleandoc(maker.__doc__)
    if takes_something(maker):
        assert re.search(r"^(Parameters|Attributes)\n-+$", text, re.M), "what does it take or hold?"
    assert re.search(r"^Examples\n-+$", text, re.M), "an example, under Examples"
    assert ">>> " in text.split("Examples\n---", 1)[1]
