"""The pages of the site as the tests see them: blocks of code, links and headings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    page for page in DOCS.rglob("*.md") if "tables" not in page.relative_to(DOCS).parts[:-1]
)
_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.M | re.S)
_NEEDS = re.compile(r"^# needs (.+)\n")


class Block(NamedTuple):
    """A fenced block: its language, its text, the line it starts at, the packages it needs."""

    language: str
    text: str
    line: int
    requires: tuple[str, ...] = ()


def named(page: Path) -> str:
    """Name a page as it stands in its folder."""
    return page.relative_to(ROOT).as_posix()


def blocks(text: str, language: str | None = None) -> list[Block]:
    """Find the fenced blocks of a page, of one language or all."""
    found = []
    for match in _FENCE.finditer(text):
        requires = _NEEDS.match(match[2])
        packages = tuple(requires[1].split(", ")) if requires else ()
        found.append(Block(match[1], match[2], text[: match.start()].count("\n") + 2, packages))
    return [block for block in found if language in (None, block.language)]


def prose(text: str) -> str:
    """Leave the fenced blocks out of a page."""
    return _FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """Give the names by which links reach the headings of a page, as code hosts make them.

    >>> sorted(anchors("# Which layer?\\n\\n## FCP, `FFCP`"))
    ['fcp-ffcp', 'which-layer']
    """
    heads = re.findall(r"^#+ +(.+?) *$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def links(text: str) -> list[str]:
    """Find where the links and pictures of a page point to."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(text))
