"""The frozen state of a calibrated predictor, and calls that work on one state throughout."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ffcp.batch import Requires
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.compressed import joined
from ffcp.network.model import Identity, stamp

P = ParamSpec("P")
Owner = TypeVar("Owner", bound=Any)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Counts:
    """What is counted in a calibration besides scores.

    Attributes
    ----------
    classes : int or None
        How many classes the model has.
    drawn : tuple of pairs
        Seeds of random numbers, and how many were drawn with each.
    unconverged : tuple of int
        Rows for which FCP found no feature that gives the target.
    """

    classes: int | None = None
    drawn: tuple[tuple[int, ...], ...] = ()
    unconverged: tuple[int, ...] = ()

    def merged(self, other: Counts) -> Counts:
        """Return the counts of both; refuse other classes, and random numbers of the same seed."""
        if self.classes not in (None, other.classes):
            raise ValueError(
                f"calibrated on {self.classes} classes, the predictor to merge on {other.classes}"
            )
        shared = {seed for seed, _ in self.drawn} & {seed for seed, _ in other.drawn}
        if shared:
            raise ValueError(
                f"both predictors drew their random numbers with seed {min(shared)}, so their rows "
                "share them: give each worker its own seed"
            )
        return Counts(other.classes, self.drawn + other.drawn)


@dataclass(frozen=True)
class Calibrated:
    """Everything that a calibration ended with, the model apart; replaced whole, never changed.

    Attributes
    ----------
    score, calibration
        Settled, unless nothing was calibrated yet.
    identity : Identity or None
        The weights that were calibrated; ``None`` where there are no scores.
    layout : mapping
        What inputs and targets were like, see :class:`ffcp.network.inputs.Reader`.
    report : mapping
        What was selected or learned, and what it was compared with.
    set_aside : int
        How many rows selected, and so do not calibrate.
    runs : tuple of str
        Names of the calibrations whose scores these are, so that none is counted twice.
    counts : Counts
    """

    score: Any
    calibration: Calibration
    identity: Identity | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    set_aside: int = 0
    runs: tuple[str, ...] = ()
    counts: Counts = field(default_factory=Counts)

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the weights that were calibrated."""
        return None if self.identity is None else self.identity.fingerprint

    @property
    def requires(self) -> Requires:
        """What the pass over the model must bring for a row to be predicted."""
        return self.score.requires().joined(self.calibration.requires())

    def merged(self, other: Calibrated) -> Calibrated:
        """Return a state with the scores of both; refuse those that cannot stand together."""
        counts = self.counts.merged(other.counts)
        for key in self.layout.keys() & other.layout.keys():
            mine, theirs = (state.layout[key].get("columns") for state in (self, other))
            if mine and theirs and mine != theirs:
                raise ValueError(
                    f"the predictor to merge was calibrated on a frame with columns {theirs}, this "
                    f"one on {mine}: give both the same columns in the same order"
                )
        if not set(self.runs).isdisjoint(other.runs):
            raise ValueError(
                "rows of the predictor to merge are here already: it is a copy of this one, was "
                "loaded from the same file, or was merged before, and rows would count twice"
            )
        if self.identity is not None and other.identity is not None:
            self.identity.must_be_run_alike(other.identity.autocast)
        return replace(
            self,
            calibration=joined(self.calibration, other.calibration),
            identity=self.identity or copy.copy(other.identity),  # with no stamp
            layout={**other.layout, **self.layout},
            runs=self.runs + other.runs,
            counts=counts,
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
