"""A plain stack of linear layers and activations, run and differentiated by hand.

With few rows torch's modules and its graph take longer than the arithmetic does. Where a model is
nothing but an ``nn.Sequential`` of layers known here, the same operations that torch would call,
forward and backward, are called without either; results are the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules

from ffcp.batch import Requires
from ffcp.network.features import INPUT
from ffcp.network.jacobian.norms import AUTO, EXACT, row_norms
from ffcp.network.model import is_frozen_copy

_MOST_OUTPUTS = 8  # with more, batched passes are faster
IDLE = (nn.Sequential, nn.Identity, nn.Dropout)  # the identity, in eval mode
_KEPT = "_ffcp_stack"  # an attribute of frozen copies
_aten = torch.ops.aten

# The operations that torch's backward pass calls, given the layer, the gradient of its output, and
# its input and output.
BACKWARD: dict[type[nn.Module], Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    nn.Linear: lambda layer, g, before, after: g @ layer.weight,
    nn.ReLU: lambda layer, g, before, after: _aten.threshold_backward.default(g, after, 0),
    nn.LeakyReLU: lambda layer, g, before, after: _aten.leaky_relu_backward.default(
        g, before, layer.negative_slope, False
    ),
    nn.ELU: lambda layer, g, before, after: _aten.elu_backward.default(
        g, layer.alpha, 1, 1, False, before
    ),
    nn.GELU: lambda layer, g, before, after: _aten.gelu_backward.default(
        g, before, approximate=layer.approximate
    ),
    nn.SiLU: lambda layer, g, before, after: _aten.silu_backward.default(g, before),
    nn.Tanh: lambda layer, g, before, after: _aten.tanh_backward.default(g, after),
    nn.Sigmoid: lambda layer, g, before, after: _aten.sigmoid_backward.default(g, after),
    nn.Softplus: lambda layer, g, before, after: _aten.softplus_backward.default(
        g, before, layer.beta, layer.threshold
    ),
}
# To notice a forward that was replaced for all layers of a kind.
_FORWARDS: dict[type[nn.Module], Any] = {kind: kind.forward for kind in BACKWARD}


class Stack:
    """The layers of a model, and behind how many of them each of its features stands.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> stack = Stack.of(model)
    >>> output, norms = stack.run(torch.zeros(4, 2), ["1"], 2)
    >>> output.shape, torch.allclose(norms["1"], model[2].weight.norm())
    (torch.Size([4, 1]), True)
    >>> Stack.of(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))) is None
    True
    """

    def __init__(self, layers: list[Any], places: dict[str, int]) -> None:
        self.layers, self._places = layers, places
        self._kinds = {type(layer) for layer in layers}
        linear = [layer for layer in layers if type(layer) is nn.Linear]
        self._columns, self._outputs = linear[0].in_features, linear[-1].out_features
        self._dtype = linear[0].weight.dtype
        # Parameters are looked up here, once.
        self._weights = [layer.weight if type(layer) is nn.Linear else None for layer in layers]
        #: The gradients of outputs before the last layer, if that is linear: rows of its weights.
        self._rows = [] if self._weights[-1] is None else [*self._weights[-1][:_MOST_OUTPUTS]]
        #: What each layer computes; a linear one calls addmm.
        self._steps = [
            layer.forward
            if weight is None or layer.bias is None
            else partial(torch.addmm, layer.bias, mat2=weight.t())
            for layer, weight in zip(layers, self._weights, strict=True)
        ]

    @classmethod
    def of(cls, model: nn.Module) -> Stack | None:
        """Return the stack of a model; ``None`` if it is none."""
        layers: list[nn.Module] = []
        places = {INPUT: 0}
        visited: set[int] = set()
        for name, layer in layers_of(model):
            # Not for a layer that is used twice, is named "input", has hooks, or whose forward was
            # replaced.
            hooks = layer._forward_hooks or layer._forward_pre_hooks
            if id(layer) in visited or name in places or hooks or "forward" in layer.__dict__:
                return None
            visited.add(id(layer))
            if type(layer) not in IDLE:
                # A layer that works in place overwrites its input; ReLU does not need it.
                in_place = getattr(layer, "inplace", False) and type(layer) is not nn.ReLU
                if type(layer) not in BACKWARD or in_place:
                    return None
                layers.append(layer)
            places[name] = len(layers)
        if not any(type(layer) is nn.Linear for layer in layers):
            return None
        # A feature behind the last layer is the output itself, and left to torch.
        inside = {name: place for name, place in places.items() if name and place < len(layers)}
        return cls(layers, inside)

    def takes(self, x: Any, names: Sequence[str]) -> bool:
        """Whether this input can be run by hand, and the norms at these features taken."""
        return (
            isinstance(x, Tensor)
            and x.dim() == 2
            and not x.requires_grad
            and x.shape[1] == self._columns  # else torch raises
            and x.dtype == self._dtype
            and (not names or self._outputs <= _MOST_OUTPUTS)
            and all(name in self._places for name in names)
            and all(kind.forward is _FORWARDS[kind] for kind in self._kinds)
            and not torch.is_autocast_enabled(x.device.type)
            and not (all_modules._global_forward_hooks or all_modules._global_forward_pre_hooks)
        )

    def run(self, x: Tensor, names: Sequence[str], norm: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the output of a batch (n, d), and the norms at features in its shape (n, m)."""
        with torch.inference_mode(False):  # no graph, as neither weights nor x need a gradient
            values = [x]
            for step in self._steps:
                values.append(step(values[-1]))
                if not names:  # others are not needed again
                    del values[0]
            if not names:
                return values[-1], {}
            columns = [self._back(values, names, norm, j) for j in range(self._outputs)]
            if self._outputs == 1:
                return values[-1], columns[0]
            norms = {n: torch.cat([column[n] for column in columns], dim=1) for n in names}
            return values[-1], norms

    def _back(
        self, values: list[Tensor], names: Sequence[str], norm: float, output: int
    ) -> dict[str, Tensor]:
        """Differentiate one output back to the earliest of some features; return the norms."""
        place = len(self.layers)
        if self._rows:
            place -= 1
            gradient = self._rows[output].expand(values[-1].shape[0], -1)
        else:
            gradient = torch.zeros_like(values[-1])
            gradient[:, output] = 1
        norms: dict[str, Tensor] = {}
        while True:
            here = [name for name in names if self._places[name] == place]
            norms.update({name: row_norms([gradient], norm).unsqueeze(1) for name in here})
            if len(norms) == len(names):
                return norms
            place -= 1
            layer, weight = self.layers[place], self._weights[place]
            if weight is None:
                back = BACKWARD[type(layer)]
                gradient = back(layer, gradient, values[place], values[place + 1])
            else:
                gradient = gradient.mm(weight)


def by_hand(
    frozen: nn.Module, x: Any, names: Sequence[str], requires: Requires
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Return output and gradient norms of a batch; ``None`` where the model is not a plain stack.

    A frozen copy is read once, as nobody changes it.
    """
    is_exact = requires.of is None and requires.method in (AUTO, EXACT)
    is_exact = is_exact and requires.norm in (1, 2, math.inf) and not requires.logits
    if requires.values or (names and not is_exact) or not is_frozen_copy(frozen):
        return None
    if _KEPT not in frozen.__dict__:
        frozen.__dict__[_KEPT] = Stack.of(frozen)
    stack: Stack | None = frozen.__dict__[_KEPT]
    if stack is None or not stack.takes(x, names):
        return None
    return stack.run(x, names, requires.norm)


def layers_of(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of nested Sequentials in their order; a container behind its layers."""
    if type(module) is nn.Sequential:
        for key, child in module._modules.items():
            if child is not None:
                yield from layers_of(child, f"{name}.{key}" if name else key)
    yield name, module
