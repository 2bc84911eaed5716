"""A scale of second order, made of ffcp's public names.

The paper stops at the first order. A feature moved by a step t along the unit gradient n moves the
output by about t * (|gradient| + t / 2 * |curvature|), where the curvature is the second difference
(g(v + t n) - 2 g(v) + g(v - t n)) / t^2 of the head g. ``docs/curvature.md`` has the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ffcp import BatchOutput, Requires


@dataclass(frozen=True)
class Curvature:
    """The gradient norm at a layer plus half a step of the head's curvature along the gradient.

    Parameters
    ----------
    model
        A network with one output; a layer's head is what follows it in the Sequential.
    feature
        The number of a layer, or ``"input"``.
    step
        How far the feature is moved; a constant, not estimated from calibration rows.
    floor
        Smallest scale.
    """

    model: nn.Sequential
    feature: str
    step: float = 1.0
    floor: float = 1e-6

    def requires(self) -> Requires:
        """Require the values of the feature."""
        return Requires(values=(self.feature,))

    def __call__(self, out: BatchOutput) -> Tensor:
        """Return the scale of every row, (n, 1)."""
        value = out.values[self.feature].detach()
        head = self.model[0 if self.feature == "input" else int(self.feature) + 1 :]
        with torch.enable_grad():
            leaf = value.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(head(leaf).sum(), leaf)
        norm = gradient.norm(dim=1, keepdim=True)
        # Where the gradient is zero there is no direction, and no curvature along it.
        move = gradient * (self.step / norm.where(norm > 0, 1.0))
        with torch.no_grad():
            forth, here, back = (head(v) for v in (value + move, value, value - move))
        curvature = (forth - 2 * here + back).abs() / self.step**2
        scale: Tensor = norm + self.step / 2 * curvature
        return scale.double().clamp_min(self.floor)

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments."""
        return {"feature": self.feature, "step": self.step, "floor": self.floor}
