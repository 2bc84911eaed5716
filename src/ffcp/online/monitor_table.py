"""What a monitor tells: curves of bounded length, and a table as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ffcp import files
from ffcp.online.lanes import listed, number

_MOST = 1024  # points of a curve


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


def _said(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
