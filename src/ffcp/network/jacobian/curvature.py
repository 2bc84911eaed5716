"""How much the head bends along its own gradient: a second difference, from one more pass.

With n the unit gradient of the output at the feature v, this is
(g(v + t n) - 2 g(v) + g(v - t n)) / t^2 for a step t. As t shrinks it becomes n^T H n, the Hessian
along the gradient; heads of ReLUs have no Hessian, almost everywhere, and a finite step sees their
kinks. The step is a constant, and so part of a score that is fixed before any point is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ffcp.network.features import INPUT, Cut, Tapped
from ffcp.network.heads import rest_of_sequential
from ffcp.network.jacobian.norms import reached


def take_curvature(
    model: nn.Module, x: Any, tap: Tapped, names: Sequence[str], step: float
) -> dict[str, Tensor]:
    """Measure the curvature at the named features, whose values the pass has recorded."""
    if names and tap.prediction[0].numel() != 1:
        raise ValueError(
            f"the curvature is taken along the gradient of one output, and the model has "
            f"{tap.prediction[0].numel()}: predict one of them at a time, or use GradientNorm"
        )
    return {name: _curvature(model, x, tap, name, step) for name in names}


def _curvature(model: nn.Module, x: Any, tap: Tapped, name: str, step: float) -> Tensor:
    edges = tap.edges[name]
    if len(edges) != 1:
        raise ValueError(
            f"feature {name!r} has {len(edges)} tensors, and the curvature is taken along the "
            "gradient at one: choose a layer that returns one tensor"
        )
    found = torch.autograd.grad(tap.prediction.sum(), edges, retain_graph=True, allow_unused=True)
    (gradient,) = reached(name, list(found))
    size = torch.linalg.vector_norm(gradient.flatten(1), dim=1)
    # Where the gradient is zero there is no direction, and no curvature along it.
    size = size.where(size > 0, 1.0).view(-1, *[1] * (gradient.dim() - 1))
    move = gradient / size * step
    here = tap.prediction.detach()
    with torch.no_grad():
        forth, back = _moved(model, x, tap, name, move)
    return (forth - 2 * here + back) / step**2


def _moved(model: nn.Module, x: Any, tap: Tapped, name: str, move: Tensor) -> tuple[Tensor, Tensor]:
    """Run the head from features moved forth and back."""
    head = None if name == INPUT or "[" in name else rest_of_sequential(model, name)
    if head is None:  # the whole model runs again, and the feature is exchanged on the way
        return _from(model, x, name, move.add), _from(model, x, name, lambda v: v - move)
    value = tap.values[name]
    both = head(torch.cat([value + move, value - move]))
    forth, back = both.chunk(2)
    return forth, back


def _from(model: nn.Module, x: Any, name: str, change: Callable[[Tensor], Tensor]) -> Tensor:
    with Cut(model, [name], change=change, graph=False) as cut:
        return cut(x).prediction
