"""The frozen state of a calibrated predictor, and methods that run on one snapshot of it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ffcp.batch import Requires
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.compressed import joined
from ffcp.network.model import Identity, Weights, weights_of

P = ParamSpec("P")
Owner = TypeVar("Owner", bound=Any)
Self = TypeVar("Self", bound="Stateful")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Counts:
    """Counts of a calibration besides its scores.

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
        """Return the counts of both; raise ValueError if classes differ or seeds are shared."""
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
    """The result of a calibration, without the model; replaced as a whole, never changed.

    Attributes
    ----------
    score : Score
    calibration : Calibration
        Settled, unless nothing was calibrated yet.
    identity : Identity or None
        The weights that were calibrated; ``None`` where there are no scores.
    layout : mapping
        Columns and shapes of inputs and targets, see :class:`ffcp.network.inputs.Reader`.
    report : mapping
        What was selected or learned, and what it was compared with.
    set_aside : int
        How many rows were used to select, and so do not calibrate.
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

    @cached_property
    def requires(self) -> Requires:
        """What the pass over the model must compute for a prediction."""
        own: Requires = self.score.requires()
        return own.joined(self.calibration.requires())

    def __getstate__(self) -> dict[str, Any]:
        # Without cached values.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def merged(self, other: Calibrated) -> Calibrated:
        """Return a state with the scores of both; raise ValueError if they cannot be merged."""
        counts = self.counts.merged(other.counts)
        for key in self.layout.keys() & other.layout.keys():
            own, added = (state.layout[key].get("columns") for state in (self, other))
            if own and added and own != added:
                raise ValueError(
                    f"the predictor to merge was calibrated on a frame with columns {added}, this "
                    f"one on {own}: use the same columns in the same order"
                )
        if not set(self.runs).isdisjoint(other.runs):
            raise ValueError(
                "rows of the predictor to merge are already here: it is a copy of this one, was "
                "loaded from the same file, or was merged before, and rows would count twice"
            )
        if self.identity is not None and other.identity is not None:
            self.identity.must_be_run_alike(other.identity.autocast)
        return replace(
            self,
            calibration=joined(self.calibration, other.calibration),
            identity=self.identity or copy.copy(other.identity),  # without its stamp
            layout={**other.layout, **self.layout},
            runs=self.runs + other.runs,
            counts=counts,
        )


class Stateful(nn.Module):
    """A model and a frozen state, which is replaced by one assignment."""

    model: nn.Module
    is_predictor = True  # see ffcp.network.model
    _state: Calibrated
    _weights: Weights | None = None  # of the model at the start of a call, see steady

    @property
    def calibration(self) -> Calibration:
        """The calibration in use, with its scores."""
        return self._state.calibration

    def calibrated(self) -> Calibrated:
        """Return the calibrated state; raise RuntimeError if there is none."""
        if not len(self._state.calibration):
            raise RuntimeError(
                f"this {type(self).__name__} has no calibration: call calibrate(x, y) first, with "
                "rows that did not train the model"
            )
        return self._state

    def check_weights(self) -> Weights:
        """Return the model's weights; raise RuntimeError if they or autocast have changed."""
        now = weights_of(self.model)
        if self._state.identity is not None:
            self._state.identity.check(self.model, now)
        return now

    def check_model(self, model: nn.Module, *loaded: Any) -> None:
        """Raise ValueError if a model has other weights, or would once some are loaded."""
        if self._state.identity is not None:
            self._state.identity.must_be_that_of(model, *loaded)

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the weights that were calibrated; ``None`` without scores."""
        return self._state.fingerprint

    def snapshot(self: Self, **changes: Any) -> Self:
        """Return a copy with the current state and these changes, which no other thread changes."""
        snapshot = object.__new__(type(self))
        snapshot.__dict__.update(self.__dict__)
        snapshot.__dict__["_modules"] = modules = dict(self._modules)
        snapshot.__dict__.update(modules)  # found without torch's slow __getattr__
        snapshot.__dict__.update(changes)
        return snapshot


def steady(
    method: Callable[Concatenate[Owner, P], Result],
) -> Callable[Concatenate[Owner, P], Result]:
    """Run a method on a snapshot; raise if the weights change meanwhile.

    Another thread may calibrate, or train the model: the result is that of the calibration at the
    beginning, or an error.
    """

    @functools.wraps(method)
    def call(self: Owner, *args: P.args, **kwargs: P.kwargs) -> Result:
        # By torch.compile(predictor), or around a call of it; or by torch.export in this thread,
        # which torch itself only reports for all threads together.
        is_exported = torch.compiler.is_compiling() and _get_current_dispatch_mode() is not None
        if torch.compiler.is_dynamo_compiling() or is_exported:
            torch.compiler.disable(self.compile)()
        snapshot = self.snapshot()
        now = snapshot.check_weights()
        snapshot.__dict__["_weights"] = now  # used throughout the call
        try:
            return method(snapshot, *args, **kwargs)
        finally:  # also where another error was caused by weights that changed
            if weights_of(snapshot.model).stamp != now.stamp:
                snapshot.check_weights()

    return call  # type: ignore[return-value]
