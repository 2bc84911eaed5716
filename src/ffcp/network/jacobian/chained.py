"""Multiply the matrices of a head's layers: for narrow features, linear layers and activations.

The Jacobian of such a head is a product of weight matrices and of diagonals, the slopes of the
activations. Taken from the feature's side the product has a row for every number of the feature;
where those are fewer than the outputs, it is smaller than one gradient for every output. Rows
that a dead unit has made zero are left out on the way, as products with zero add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ffcp.network import heads
from ffcp.network.features import Cut, Tapped, has_hooks

_NUMBERS = 2**22  # of a product at once: 16 MB in float32
# Activations that take every number by itself.
_ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish,
    nn.Hardsigmoid, nn.Tanhshrink,
)  # fmt: skip
_IDLE = (nn.Identity, nn.Dropout)  # in eval mode


def chain(model: nn.Module, name: str, tap: Tapped) -> list[nn.Module] | None:
    """Give the layers behind a feature, if all are linear or activations; else ``None``.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 9))
    >>> with Cut(model, ["0"]) as cut:
    ...     chain(model, "0", cut(torch.randn(4, 2)))
    [ReLU(), Linear(in_features=3, out_features=9, bias=True)]
    """
    shapes = tap.shapes[name]
    if len(shapes) != 1 or len(shapes[0]) != 2 or type(model) is not nn.Sequential:
        return None
    try:
        layers = list(_flat(heads.head(model, name)))
    except ValueError:
        return None
    known = all(type(layer) in (nn.Linear, *_ACTIVATIONS) for layer in layers)
    return layers if known and any(type(layer) is nn.Linear for layer in layers) else None


def _flat(module: nn.Module) -> Iterator[nn.Module]:
    """Give the layers of nested Sequentials in their order; those with hooks as they are."""
    if type(module) is nn.Sequential:
        for child in module:
            yield from _flat(child)
    elif type(module) not in _IDLE:
        # A hook may change what a layer gives: then this is no layer that we know.
        yield nn.Sequential() if has_hooks(module) else module


def passes(layers: list[nn.Module], width: int, norm: float) -> int:
    """Count the rows that the product has to have."""
    if norm == 2 and type(layers[0]) is nn.Linear:
        return min(width, layers[0].out_features)
    return width


@torch.no_grad()
def chained(feature: Tensor, layers: list[nn.Module], norm: float) -> Tensor:
    """Take the norms (n, m) of all rows of the Jacobian at a feature (n, d).

    >>> layers = [nn.Tanh(), nn.Linear(3, 9)]
    >>> norms = chained(torch.zeros(1, 3), layers, 2)
    >>> torch.allclose(norms[0], layers[1].weight.norm(dim=1))
    True
    """
    start = torch.eye(feature.shape[1], dtype=feature.dtype, device=feature.device)
    first = layers[0]
    if norm == 2 and isinstance(first, nn.Linear) and first.out_features < len(start):
        # The norms of A W are those of A R' where W' = Q R, which has fewer rows.
        start = torch.linalg.qr(first.weight.detach().T, mode="r").R
        feature, layers = first(feature), layers[1:]
    widest = max([start.shape[1], *(la.out_features for la in layers if isinstance(la, nn.Linear))])
    size = max(1, _NUMBERS // (len(start) * widest))
    return torch.cat([_product(part, start, layers, norm) for part in feature.split(size)])


def _product(value: Tensor, start: Tensor, layers: list[nn.Module], norm: float) -> Tensor:
    """Multiply the layers' matrices for some rows, and take the norms of the columns."""
    rows, owner = start, None  # one product for all rows until a slope depends on the row
    for layer in layers:
        if isinstance(layer, nn.Linear):
            rows = rows @ layer.weight.T
        else:
            slopes = _slopes(layer, value)
            if owner is None:
                count = len(rows)
                rows = (rows * slopes[:, None]).flatten(0, 1)
                owner = torch.arange(len(value), device=value.device).repeat_interleave(count)
            else:
                rows = rows.mul_(slopes[owner])
            alive = rows.any(dim=1)
            if not bool(alive.all()):
                rows, owner = rows[alive], owner[alive]
        value = layer(value)
    if owner is None:
        return _norms(rows, norm).expand(len(value), -1)
    sizes = rows.square_() if norm == 2 else rows.abs_()
    if norm == math.inf:
        parts = sizes.split(owner.bincount(minlength=len(value)).tolist())
        return torch.stack([_norms(part, norm) for part in parts])
    result = sizes.new_zeros(len(value), sizes.shape[1]).index_add_(0, owner, sizes)
    return result.sqrt_() if norm == 2 else result


def _norms(rows: Tensor, norm: float) -> Tensor:
    """Give the norms of columns; none has no rows."""
    if not len(rows):
        return rows.new_zeros(rows.shape[1])
    norms: Tensor = torch.linalg.vector_norm(rows, norm, dim=0)
    return norms


def _slopes(activation: nn.Module, value: Tensor) -> Tensor:
    """Give the slope of an activation at every number."""
    with torch.enable_grad():
        at = value.detach().requires_grad_()
        # A copy, because the activation may work in place.
        (slopes,) = torch.autograd.grad(activation(at.clone()).sum(), at)
    return slopes


def feature_of(model: nn.Module, x: Any, name: str) -> Tensor:
    """Give the value of a feature that is one tensor."""
    with Cut(model, values=(name,)) as cut:
        return cut(x).values[name]
