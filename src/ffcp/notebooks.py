"""How objects are shown: lines for ``print``, and HTML for notebooks."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

_WIDTH = 80  # of what is printed
_LEAST = 24  # of the column of names


class ShownAsText:
    """Shows in notebooks what ``print`` writes, with its columns in place."""

    def _repr_html_(self) -> str:
        return f"<pre style='overflow-x: auto'>{html.escape(str(self))}</pre>"


class Ranking(NamedTuple):
    """Candidates and their numbers, the best first; lines above and below, and the chosen row."""

    above: Sequence[str]
    names: Sequence[str]
    rows: Sequence[Sequence[str]]
    chosen: int
    below: Sequence[str] = ()


class ShownAsTable:
    """Shows a ranking as a table: 80 columns wide in print, as HTML in notebooks."""

    def ranking(self) -> Ranking:
        """Return the ranking to show."""
        raise NotImplementedError

    def __str__(self) -> str:
        above, names, rows, chosen, below = self.ranking()
        lines = _wrapped(above)
        if rows:
            widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
            left = _WIDTH - 2 - sum(2 + width for width in widths[1:])
            widths[0] = min(widths[0], max(_LEAST, left))
            for row, (name, *cells) in enumerate((names, *rows), start=-1):  # -1: the head
                first, *continued = textwrap.wrap(name, widths[0], subsequent_indent="  ")
                pairs = zip(cells, widths[1:], strict=True)
                numbers = "".join(f"  {cell:>{width}}" for cell, width in pairs)
                mark = ">" if row == chosen else " "
                lines.append(f"{mark} {first:<{widths[0]}}{numbers}")
                lines += [f"  {line}" for line in continued]
        return "\n".join([*lines, *_wrapped(below)])

    def _repr_html_(self) -> str:
        above, names, rows, chosen, below = self.ranking()
        table = []
        for row, (name, *cells) in enumerate((names, *rows) if rows else (), start=-1):
            style = "<b>{}</b>" if row in (-1, chosen) else "{}"
            name = f"> {name}" if row == chosen else name
            first, *numbers = (style.format(html.escape(cell)) for cell in (name, *cells))
            right = "".join(f'<td style="text-align:right">{cell}</td>' for cell in numbers)
            table.append(f'<tr><td style="text-align:left">{first}</td>{right}</tr>')
        body = f"<table>{''.join(table)}</table>" if table else ""
        return f"{_paragraphs(above)}{body}{_paragraphs(below)}"


def _wrapped(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, _WIDTH)]


def wrapped(text: str) -> str:
    """Break a line after 80 columns; the rest is indented by four.

    >>> print(wrapped("  model: " + 75 * "x"))
      model:
        xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
    """
    return "\n".join(textwrap.wrap(text, _WIDTH, break_on_hyphens=False, subsequent_indent="    "))


def _paragraphs(texts: Sequence[str]) -> str:
    return "".join(f"<p>{html.escape(text)}</p>" for text in texts)


def number(value: float) -> str:
    """Write a number with four digits, thousands apart.

    >>> number(123456.789), number(0.000123456), number(math.inf)
    ('123,457', '0.0001235', '∞')
    """
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
