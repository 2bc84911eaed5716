"""What a stream keeps of one group of rows: windows, controls and counts, one of each a score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from ffcp import files
from ffcp.online.controllers import Aci, Asked, Control, DtAci, Pid
from ffcp.online.windows import Window


class Progress(NamedTuple):
    """How far a stream has come: for each score, truths that came, misses, and what is promised.

    ``bounds`` say how far the share of misses can be from what was asked for by now; ``None``
    where nothing is promised.
    """

    observed: list[int]
    misses: list[int]
    bounds: list[float] | None


class Lane:
    """Follows the scores of one group: the whole stream, if there are no groups."""

    def __init__(self, windows: Sequence[Window], controls: Sequence[Control]) -> None:
        self.windows, self.controls = list(windows), list(controls)
        self.observed, self.misses = [0] * len(self.windows), [0] * len(self.windows)

    def ask(self) -> list[Asked]:
        """Give the thresholds of the next row."""
        pairs = zip(self.controls, self.windows, strict=True)
        return [control.ask(past) for control, past in pairs]

    @property
    def _placing(self) -> list[Aci | DtAci | Pid]:
        return [control for control in self.controls if isinstance(control, (Aci, DtAci, Pid))]

    def wanted(self) -> list[list[Fraction]]:
        """Say for each score at which levels a calibration that stays is to be looked up."""
        return [control.wanted() for control in self._placing]

    def placed(self, thresholds: Sequence[Sequence[float]]) -> list[Asked]:
        """Give what a row is asked with, whose thresholds at the levels wanted are these."""
        pairs = zip(self._placing, thresholds, strict=True)
        return [control.placed(own) for control, own in pairs]

    def learn(self, scores: Sequence[float], asked: list[Asked | None]) -> None:
        """Learn the scores of a row; NaN have not come yet. What was asked for the others goes."""
        for i, (score, then) in enumerate(zip(scores, asked, strict=True)):
            if math.isnan(score) or then is None:
                continue
            self.observed[i] += 1
            self.misses[i] += score > then.threshold
            self.controls[i].learn(score, then, self.windows[i])
            self.windows[i].add(score)
            asked[i] = None

    def progress(self, delay: int) -> Progress:
        """Say how far it has come, with so many predictions waiting at most."""
        promised = [c.bound(delay) for c in self.controls if isinstance(c, (Aci, Pid))]
        return Progress(list(self.observed), list(self.misses), promised or None)

    def state(self) -> dict[str, Any]:
        """Give all that changes but the windows, in plain numbers."""
        return {
            "controls": [control.state() for control in self.controls],
            "observed": self.observed,
            "misses": self.misses,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` gave; what cannot be is a ValueError."""
        columns = len(self.controls)
        observed, misses = (
            [files.count(one) for one in listed(state[name], columns)]
            for name in ("observed", "misses")
        )
        if any(missed > come for missed, come in zip(misses, observed, strict=True)):
            raise ValueError("more truths were missed than came")
        saved = listed(state["controls"], columns)
        for control, one in zip(self.controls, saved, strict=True):
            control.restore(files.rebuilt(dict, one))
        self.observed, self.misses = observed, misses


def listed(saved: Any, length: int) -> list[Any]:
    """Read a list of so many things; anything else is a ValueError.

    >>> listed([1, 2], 2)
    [1, 2]
    """
    if not isinstance(saved, list) or len(saved) != length:
        raise ValueError(f"{saved!r} stands where {length} numbers were saved"[:200])
    return saved


def is_number(value: Any) -> bool:
    """Say whether something is a number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def number(saved: Any) -> float:
    """Read a number that is one; infinity is."""
    value = float(files.rebuilt(float, saved))
    if math.isnan(value):
        raise ValueError("NaN stands where a number was saved")
    return value
