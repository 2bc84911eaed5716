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
from ffcp.network.jacobian.methods import AUTO, COLOURED, EXACT
from ffcp.network.jacobian.norms import reached, row_norms
from ffcp.pieces import Needs


def take_curvature(
    model: nn.Module, x: Any, tap: Tapped, names: Sequence[str], step: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Measure the curvature at the named features, whose values the pass has recorded.

    Gives the gradients there as well, so that their norms need no other backward pass.
    """
    if not names:
        return {}, {}
    if tap.prediction[0].numel() != 1:
        raise ValueError(
            f"the curvature is taken along the gradient of one output, and the model has "
            f"{tap.prediction[0].numel()}: predict one of them at a time, or use GradientNorm"
        )
    for name in names:
        if len(tap.edges[name]) != 1:
            raise ValueError(
                f"feature {name!r} has {len(tap.edges[name])} tensors, and the curvature is taken "
                "along the gradient at one: choose a layer that returns one tensor"
            )
    edges = [tap.edges[name][0] for name in names]
    result = torch.autograd.grad(tap.prediction.sum(), edges, retain_graph=True, allow_unused=True)
    gradients = {
        name: reached(name, [gradient])[0] for name, gradient in zip(names, result, strict=True)
    }
    curvature = {
        name: _along(model, x, tap, name, gradient, step) for name, gradient in gradients.items()
    }
    return curvature, gradients


def norms_of(
    gradients: dict[str, Tensor], names: Sequence[str], needs: Needs, output: Tensor
) -> dict[str, Tensor] | None:
    """Give the norms that are asked for where these gradients are enough; None where not."""
    is_plain = needs.of is None and needs.method in (AUTO, EXACT, COLOURED)
    if not gradients or not is_plain or any(name not in gradients for name in names):
        return None
    return {name: row_norms([gradients[name]], needs.norm).view_as(output) for name in names}


def _along(
    model: nn.Module, x: Any, tap: Tapped, name: str, gradient: Tensor, step: float
) -> Tensor:
    size = row_norms([gradient], 2)
    # Where the gradient is zero there is no direction, and no curvature along it.
    factor = (step / size.where(size > 0, 1.0)).view(-1, *[1] * (gradient.dim() - 1))
    with torch.no_grad():
        forth, back = _moved(model, x, tap, name, gradient * factor.to(gradient.dtype))
    return (forth - 2 * tap.prediction.detach() + back) / step**2


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
