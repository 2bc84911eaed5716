"""What a monitor tells, as text and as one HTML page without anything from outside."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ffcp import files
from ffcp.online.lanes import listed, number

_MOST = 1024  # points of a curve
_WIDTH, _HEIGHT, _EDGE = 720, 180, 46
_STYLE = """body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;
padding:0 1rem;color:#1b1f24;background:#fff}h1{font-size:1.5rem}
h2{font-size:1.1rem;margin-top:2rem}
.quiet{color:#1a6b3c}.moved{color:#b3261e}table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.35rem .6rem;border-bottom:1px solid #d8dde3}
td.n{text-align:right;font-variant-numeric:tabular-nums}svg{width:100%;height:auto}
svg text{font:11px system-ui,sans-serif;fill:#57606a}p.small{color:#57606a}
@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}
th,td{border-color:#30363d}.quiet{color:#56d364}.moved{color:#ff7b72}
svg text{fill:#9da7b3}p.small{color:#9da7b3}polyline{stroke:#58a6ff}}
@media(max-width:40rem){thead{display:none}td,td.n{display:inline-block;border:0;
padding:.1rem .4rem;
text-align:left}td:first-child,td:last-child{display:block}td:first-child{font-weight:600}
td[data-n]::before{content:attr(data-n) " ";color:#7d8590}tr{display:block;padding:.4rem 0;
border-bottom:1px solid #8c959f}}"""


class Trace:
    """A curve that keeps at most 1,024 points: every second one goes when there are more.

    >>> trace = Trace()
    >>> for step in range(5000):
    ...     trace.add(float(step))
    >>> len(trace.values) <= 1024, trace.step
    (True, 8)
    """

    def __init__(self) -> None:
        self.values: list[float] = []
        self.step, self._seen = 1, 0

    def add(self, value: float) -> None:
        """Take the next point."""
        if self._seen % self.step == 0:
            self.values.append(value)
            if len(self.values) > _MOST:
                self.values = self.values[::2]
                self.step *= 2
        self._seen += 1

    def state(self) -> Any:
        """Give all that changes, in plain numbers."""
        return [self.values, self.step, self._seen]

    def restore(self, state: Any) -> None:
        """Take over what :meth:`state` gave; what cannot have been given is a ValueError."""
        values, step, seen = listed(state, 3)
        step, seen = files.count(step, least=1), files.count(seen)
        if step & (step - 1) or -(-seen // step) > _MOST:
            raise ValueError(f"a curve keeps every {step}th of {seen} points")
        self.values = [number(one) for one in listed(values, -(-seen // step))]
        self.step, self._seen = step, seen


def text(table: Sequence[Mapping[str, Any]]) -> str:
    """Lay a table out in columns.

    >>> print(text([{"what": "coverage", "rows": 10, "value": 0.9}]))
    what      rows  value
    coverage  10    0.9
    """
    names = list(table[0]) if table else []
    lines = [names, *([_said(row[name]) for name in names] for row in table)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    padded = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def page(
    alarm: bool,
    rows: int,
    table: Sequence[Mapping[str, Any]],
    traces: Mapping[str, tuple[Trace, float]],
) -> str:
    """Give the whole page."""
    verdict = (
        '<p class="moved"><strong>The data has moved.</strong> At least one test raised an alarm; '
        "without change each test ever does so with at most the probability 1 / its limit.</p>"
        if alarm
        else '<p class="quiet"><strong>No change was found.</strong> This does not prove that '
        "there is none.</p>"
    )
    curves = "".join(
        f"<h2>Wealth of the test of {html.escape(name)}</h2>{_curve(trace, limit)}"
        for name, (trace, limit) in traces.items()
        if trace.values
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Has the data moved?</title><style>{_STYLE}</style></head><body>"
        f"<h1>Has the data moved?</h1>{verdict}<p>{rows} rows have come in.</p>"
        f"{_table(table)}{curves}"
        '<p class="small">Wealth is that of fair bets against online conformal p-values, on a '
        "logarithmic scale; the dashed line is the limit of the alarm. Coverage is over the last "
        "rows, with its exact 95 % interval.</p></body></html>"
    )


def _table(table: Sequence[Mapping[str, Any]]) -> str:
    names = list(table[0]) if table else []
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(_cell(name, row[name]) for name in names) + "</tr>" for row in table
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(name: str, value: Any) -> str:
    # Narrow pages have no head of the table: numbers say there what they are.
    kind = "" if isinstance(value, str) else f' class="n" data-n="{html.escape(name)}"'
    return f"<td{kind}>{html.escape(_said(value))}</td>"


def _said(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _curve(trace: Trace, limit: float) -> str:
    """Draw the logarithm of wealth to base 10 over the rows."""
    tens = [value / math.log(10) for value in trace.values]
    top = max(max(tens), math.log10(limit)) + 0.5
    bottom = min(*tens, 0.0) - 0.5 if len(tens) > 1 else min(tens[0], 0.0) - 0.5
    last = max(1, len(tens) - 1)

    def place(i: float, value: float) -> str:
        x = _EDGE + i / last * (_WIDTH - _EDGE - 8)
        y = 8 + (top - value) / (top - bottom) * (_HEIGHT - 30)
        return f"{x:.1f},{y:.1f}"

    line = " ".join(place(i, value) for i, value in enumerate(tens))
    zero, cap = place(0, 0.0).split(",")[1], place(0, math.log10(limit)).split(",")[1]
    far = abs(float(zero) - float(cap)) > 12  # or one would hide the other
    one = f'<text x="2" y="{zero}">1</text>' if far else ""
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="wealth over rows">'
        f'<line x1="{_EDGE}" x2="{_WIDTH}" y1="{zero}" y2="{zero}" stroke="#8c959f"/>'
        f'<line x1="{_EDGE}" x2="{_WIDTH}" y1="{cap}" y2="{cap}" stroke="#b3261e" '
        'stroke-dasharray="6 4"/>'
        f'{one}<text x="2" y="{cap}">{limit:g}</text>'
        f'<text x="{_EDGE}" y="{_HEIGHT - 4}">row 0</text>'
        f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 4}" text-anchor="end">row '
        f"{(len(tens) - 1) * trace.step}</text>"
        f'<polyline fill="none" stroke="#0969da" stroke-width="1.6" points="{line}"/></svg>'
    )
