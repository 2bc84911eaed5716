"""The frozen state of a calibrated predictor, and calls that work on one state throughout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ffcp.batch import Requires
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.selection import Score
from ffcp.network.model import Identity, stamp

P = ParamSpec("P")
Owner = TypeVar("Owner", bound=Any)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Calibrated:
    """Everything that a calibration ended with, the model apart; replaced whole, never changed.

    Attributes
    ----------
    scorer, calibration
        Both settled; before the first calibration as they were given.
    identity
        Of the model that was calibrated; ``None`` where there are no scores.
    layout
        What inputs and targets were like, see :class:`ffcp.network.inputs.Reader`.
    choices
        What selections saw and took, by name.
    set_aside
        How many rows selected, and so do not calibrate.
    runs
        The names of the calibrations whose scores these are.
    counts
        What a task counted besides: classes, random numbers, images left out.
    """

    scorer: Score
    calibration: Calibration
    identity: Identity | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, Any] = field(default_factory=dict)
    set_aside: int = 0
    runs: tuple[str, ...] = ()
    counts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the weights that were calibrated."""
        return None if self.identity is None else self.identity.fingerprint

    @property
    def requires(self) -> Requires:
        """What the pass over the model must bring for a row to be predicted."""
        return self.scorer.requires().joined(self.calibration.requires())

    def check_merge(self, other: Calibrated) -> None:
        """Refuse scores of frames with other columns, and scores that are here already."""
        for key in self.layout.keys() & other.layout.keys():
            mine, theirs = (state.layout[key].get("columns") for state in (self, other))
            if mine and theirs and mine != theirs:
                raise ValueError(
                    f"the predictor to merge was calibrated on a frame with columns {theirs}, this "
                    f"one on {mine}: the model saw other numbers. Give both the same columns in "
                    "the same order"
                )
        if not set(self.runs).isdisjoint(other.runs):
            raise ValueError(
                "points of the predictor to merge are here already: it is a copy of this one, was "
                "loaded from the same file, or was merged before, and points would count twice"
            )


def steady(
    method: Callable[Concatenate[Owner, P], Result],
) -> Callable[Concatenate[Owner, P], Result]:
    """Run a method on a snapshot; raise if the weights change meanwhile.

    Another thread may calibrate, or train the model: the result is that of the calibration at the
    beginning, or an error.
    """

    @functools.wraps(method)
    def call(self: Owner, *args: P.args, **kwargs: P.kwargs) -> Result:
        if torch.compiler.is_dynamo_compiling() or _is_exported():
            # By torch.compile(predictor), or around a call of it.
            torch.compiler.disable(self.compile)()
        snapshot = self.snapshot()
        now = stamp(snapshot.model)
        snapshot.__dict__["_stamp"] = now  # serves the whole call
        snapshot.check_weights(now)
        try:
            return method(snapshot, *args, **kwargs)
        finally:  # also where weights that moved on the way made something else go wrong
            if stamp(snapshot.model) != now:
                snapshot.check_weights()

    return call  # type: ignore[return-value]


def _is_exported() -> bool:
    """Say whether torch.export traces this thread: torch itself knows only of all together."""
    return torch.compiler.is_compiling() and _get_current_dispatch_mode() is not None
