"""A slack of second order: how far the output moves, the bend of the head included."""

from __future__ import annotations

import math
from typing import Any

import torch  # noqa: F401 - for the examples
from torch import Tensor

from ffcp.pieces import Needs, Seen
from ffcp.recipes import public
from ffcp.regression.bands import as_float64
from ffcp.regression.slacks import floored


@public
class Curvature:
    """The gradient norm at a layer, and half a step of the head's curvature along it.

    A feature moved by a step t along the unit gradient moves the output by about
    ``t * (norm + t / 2 * |curvature|)``: where the gradient vanishes FFCP's slack does, and this
    one does not. It needs one more pass through the head, and a model with one output. Whether it
    helps is measured in ``docs/curvature.md``.

    Parameters
    ----------
    feature
        The layer: a dotted module name or ``"input"``.
    step
        How far the feature is moved, in its own units; a constant, not to be estimated from the
        calibration data.
    floor
        Smallest slack.

    Examples
    --------
    >>> slack = Curvature("0", step=2.0)
    >>> seen = Seen(
    ...     None, torch.zeros(1, 1), {"0": torch.tensor([[3.0]])}, {}, range(1), None,
    ...     {"0": torch.tensor([[-0.5]])},
    ... )
    >>> slack(seen)
    tensor([[3.5000]], dtype=torch.float64)
    """

    def __init__(self, feature: str, step: float = 1.0, floor: float = 1e-6) -> None:
        if not isinstance(feature, str):
            raise TypeError(f"feature must be the name of a layer, got {feature!r}")
        for name, number in (("step", step), ("floor", floor)):
            if not 0 < number < math.inf:
                raise ValueError(f"{name} must be a positive number, got {number}")
        self.feature, self.step, self.floor = feature, float(step), float(floor)

    def needs(self) -> Needs:
        """Ask for the norms and the curvature at the feature."""
        return Needs(norms=(self.feature,), curvature=(self.feature,), step=self.step)

    def __call__(self, seen: Seen) -> Tensor:
        """Give the slack of second order, no smaller than the floor."""
        norms, bend = (as_float64(m[self.feature]) for m in (seen.norms, seen.curvature))
        return floored(norms + self.step / 2 * bend.abs(), self.floor)

    def settings(self) -> dict[str, Any]:
        """Say what it is."""
        return {
            "slack": "curvature",
            "feature": self.feature,
            "step": self.step,
            "floor": self.floor,
        }
