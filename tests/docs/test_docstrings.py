"""The reference is made from docstrings: each says what goes in, and shows an example."""

from __future__ import annotations

import inspect
import operator
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


PARTS = ("scores", "scales", "calibrations", "kernels", "metrics", "sklearn", "tables", "plots")


def makers() -> dict[str, Any]:
    """Return the public classes and functions with parameters, by their full names."""
    found: dict[str, Any] = {}
    for part in ("", *PARTS):
        module = operator.attrgetter(part)(ffcp) if part else ffcp
        for name in getattr(module, "__all__", None) or vars(module):
            made = getattr(module, name)
            own = inspect.isfunction(made) or inspect.isclass(made)
            if not own or name[0] == "_" or is_exception(made):
                continue
            at_home = hasattr(module, "__all__") or made.__module__ == module.__name__
            if at_home and takes_something(made):
                found[f"{made.__module__}.{name}"] = made
    return found


def is_exception(made: Any) -> bool:
    return inspect.isclass(made) and issubclass(made, Exception)


@pytest.mark.parametrize("name", makers())
def test_parameters_have_a_type_and_a_default(name: str) -> None:
    maker = makers()[name]
    entries: dict[str, str] = {}
    for line in inspect.cleandoc(maker.__doc__).splitlines():
        if entry := re.fullmatch(r"([\w*][\w*, ]*) : (\S.*)", line):
            entries = dict.fromkeys(entry[1].replace("*", "").split(", "), entry[2]) | entries
    for parameter in inspect.signature(maker).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue  # described one by one, or there to catch misspelt names
        described = entries.get(parameter.name, "")
        assert described, f"{parameter.name} has no type"
        if parameter.default is not parameter.empty:
            assert re.search(r"default=|optional", described), f"{parameter.name}: {described}"
