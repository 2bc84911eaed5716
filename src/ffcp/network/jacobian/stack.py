"""A plain stack of linear layers and activations, run and differentiated by hand.

With few rows torch's modules and its graph take longer than the arithmetic does. Where a model is
nothing but an ``nn.Sequential`` of layers known here, the same operations that torch would call,
forward and backward, are called without either; results are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules

from ffcp.network.features import INPUT
from ffcp.network.jacobian.norms import row_norms
from ffcp.network.model import is_frozen_copy

_MOST_OUTPUTS = 8  # more of them are better taken several at once
_KEPT = "_ffcp_stack"  # an attribute of twins, which nobody else has
_IDLE = (nn.Identity, nn.Dropout)  # in eval mode

Slope = Callable[[Tensor, Tensor, Tensor], Tensor]  # gradient, value before, value after
_aten = torch.ops.aten


class Step(NamedTuple):
    """One layer: how it maps values, and how a gradient goes back through it."""

    kind: type[nn.Module]
    forward: Callable[[Tensor], Tensor]
    backward: Slope
    weight: Tensor | None = None  # of a linear layer


class Stack:
    """The steps of a model, and after how many of them each of its features stands.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> stack = Stack.of(model)
    >>> output, norms = stack.run(torch.zeros(4, 2), ["1"], 2)
    >>> output.shape, torch.allclose(norms["1"], model[2].weight.norm())
    (torch.Size([4, 1]), True)
    >>> Stack.of(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))) is None
    True
    """

    def __init__(self, steps: list[Step], places: dict[str, int]) -> None:
        self._steps, self._places = steps, places
        self._kinds = {step.kind for step in steps}
        weights = [step.weight for step in steps if step.weight is not None]
        self._columns, self._outputs = weights[0].shape[1], weights[-1].shape[0]
        self._dtype = weights[0].dtype

    @classmethod
    def of(cls, model: nn.Module) -> Stack | None:
        """Read a model; ``None`` if it is anything but such a stack."""
        steps: list[Step] = []
        places = {INPUT: 0}
        known: set[int] = set()
        for name, layer in _flat(model, ""):
            if type(layer) is nn.Sequential or type(layer) in _IDLE:
                pass
            elif (step := _step_of(layer)) is not None:
                if steps and steps[-1].weight is not None:  # a value that nobody else has
                    step = step._replace(forward=_IN_PLACE.get(step.kind, step.forward))
                steps.append(step)
            else:
                return None
            # A layer in two places has no feature of its own, one named "input" another name.
            if id(layer) in known or name in places or _does_more(layer):
                return None
            known.add(id(layer))
            places[name] = len(steps)
        if all(step.weight is None for step in steps):
            return None
        places.pop("")
        return cls(steps, places)

    def takes(self, x: Any, names: Sequence[str]) -> bool:
        """Say whether this input can be run by hand, and the norms at these features taken."""
        return (
            isinstance(x, Tensor)
            and x.dim() == 2
            and x.shape[1] == self._columns  # else torch says what is wrong
            and x.dtype == self._dtype
            and (not names or self._outputs <= _MOST_OUTPUTS)
            and all(name in self._places for name in names)
            and all(kind.forward is _FORWARDS[kind] for kind in self._kinds)
            and not torch.is_autocast_enabled(x.device.type)
            and not (all_modules._global_forward_hooks or all_modules._global_forward_pre_hooks)
        )

    def run(self, x: Tensor, names: Sequence[str], norm: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the output of a batch (n, d), and the norms at features in its shape (n, m)."""
        with torch.inference_mode(False), torch.no_grad():
            values = [x]
            for step in self._steps:
                values.append(step.forward(values[-1]))
                if not names:
                    values = values[-1:]
            if not names:
                return values[-1], {}
            columns = [self._back(values, names, norm, j) for j in range(self._outputs)]
        return values[-1], {
            name: torch.stack([norms[name] for norms in columns], dim=1) for name in names
        }

    def _back(
        self, values: list[Tensor], names: Sequence[str], norm: float, output: int
    ) -> dict[str, Tensor]:
        """Take one output back to the earliest of some features; note the norms on the way."""
        wanted = [(self._places[name], name) for name in names]
        earliest = min(place for place, _ in wanted)
        gradient, place = self._start(values, output)
        norms: dict[str, Tensor] = {}
        while True:
            for own, name in wanted:
                if own == place:
                    norms[name] = row_norms([gradient], norm)
            if place == earliest:
                return norms
            place -= 1
            gradient = self._steps[place].backward(gradient, values[place], values[place + 1])

    def _start(self, values: list[Tensor], output: int) -> tuple[Tensor, int]:
        """Give the gradient of one output behind the last layer, or already before it."""
        last, place = self._steps[-1], len(self._steps)
        if last.weight is not None:
            row = last.weight[output]
            return row.expand(len(values[-1]), -1), place - 1
        gradient = torch.zeros_like(values[-1])
        gradient[:, output] = 1
        return gradient, place


def stack_of(frozen: nn.Module) -> Stack | None:
    """Give the stack that a twin is, if it is one; read once, as nobody changes a twin."""
    if not is_frozen_copy(frozen):
        return None
    kept = frozen.__dict__.get(_KEPT, False)
    if kept is False:
        kept = frozen.__dict__[_KEPT] = Stack.of(frozen)
    stack: Stack | None = kept
    return stack


def _flat(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of nested Sequentials in their order; a container behind its layers."""
    if type(module) is nn.Sequential:
        for key, child in module._modules.items():
            if child is not None:
                yield from _flat(child, f"{name}.{key}" if name else key)
    yield name, module


def _does_more(layer: nn.Module) -> bool:
    """Whether a layer is not just what its type says: it has hooks, or a forward of its own."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__)


def _step_of(layer: nn.Module) -> Step | None:
    if type(layer) is nn.Linear:
        weight, bias = layer.weight, layer.bias
        return Step(
            nn.Linear,
            lambda value: nn.functional.linear(value, weight, bias),
            lambda gradient, before, after: gradient @ weight,
            weight,
        )
    slope = _SLOPES.get(type(layer))
    # What works in place leaves no value before it; the slope of ReLU needs none.
    if slope is None or (getattr(layer, "inplace", False) and type(layer) is not nn.ReLU):
        return None
    return Step(type(layer), layer.forward, slope(layer))


# The very operations that torch's backward pass calls.
_SLOPES: dict[type[nn.Module], Callable[[Any], Slope]] = {
    nn.ReLU: lambda layer: lambda g, before, after: _aten.threshold_backward.default(g, after, 0),
    nn.LeakyReLU: lambda layer: (
        lambda g, before, after: _aten.leaky_relu_backward.default(
            g, before, layer.negative_slope, False
        )
    ),
    nn.ELU: lambda layer: (
        lambda g, before, after: _aten.elu_backward.default(g, layer.alpha, 1, 1, False, before)
    ),
    nn.GELU: lambda layer: (
        lambda g, before, after: _aten.gelu_backward.default(
            g, before, approximate=layer.approximate
        )
    ),
    nn.SiLU: lambda layer: lambda g, before, after: _aten.silu_backward.default(g, before),
    nn.Tanh: lambda layer: lambda g, before, after: _aten.tanh_backward.default(g, after),
    nn.Sigmoid: lambda layer: lambda g, before, after: _aten.sigmoid_backward.default(g, after),
    nn.Softplus: lambda layer: (
        lambda g, before, after: _aten.softplus_backward.default(
            g, before, layer.beta, layer.threshold
        )
    ),
}

# Spares memory; their slopes need no value before them.
_IN_PLACE: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.ReLU: torch.relu_, nn.Tanh: torch.tanh_, nn.Sigmoid: torch.sigmoid_,
}  # fmt: skip

# As torch has them: who exchanges one of them for all layers means it.
_FORWARDS: dict[type[nn.Module], Any] = {kind: kind.forward for kind in _SLOPES}
_FORWARDS[nn.Linear] = nn.Linear.forward
