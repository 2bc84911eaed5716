"""Multiply the matrices of a head's layers: for narrow features, linear layers and activations.

The Jacobian of such a head is a product of weight matrices and of diagonals, the slopes of the
activations. Taken from the feature's side the product has a row for every number of the feature;
where those are fewer than the outputs, it is smaller than one gradient for every output. Rows
that a dead unit has made zero are left out on the way, as products with zero add nothing.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from ffcp.network.cut import Tapped
from ffcp.network.features import INPUT
from ffcp.network.heads import rest_of_sequential
from ffcp.network.jacobian.stack import BACKWARD, IDLE, layers_of
from ffcp.network.model import is_frozen_copy

_NUMBERS = 2**22  # of a product at once: 16 MB in float32
Slopes = list[Tensor | None]  # those of each activation (n, width), None where there is none


def chain(model: nn.Module, name: str, tap: Tapped) -> list[nn.Module] | None:
    """Return the layers behind a feature, if all are linear or activations; else ``None``.

    >>> from ffcp.network.cut import Cut
    >>> from ffcp.network.model import borrowed
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 9))
    >>> with borrowed(model) as frozen, Cut(frozen, ["0"]) as cut:
    ...     chain(frozen, "0", cut(torch.randn(4, 2)))
    [ReLU(), Linear(in_features=3, out_features=9, bias=True)]
    """
    shapes = tap.shapes[name]
    # Where the model itself is run, hooks may change what a layer returns.
    if len(shapes) != 1 or len(shapes[0]) != 2 or not is_frozen_copy(model):
        return None
    rest = model if name == INPUT else rest_of_sequential(model, name)
    if type(rest) is not nn.Sequential:
        return None
    layers = [layer for _, layer in layers_of(rest) if type(layer) not in IDLE]
    known = all(type(layer) in BACKWARD for layer in layers)
    if any("forward" in layer.__dict__ for layer in layers):
        return None
    return layers if known and any(type(layer) is nn.Linear for layer in layers) else None


def passes(layers: list[nn.Module], width: int, norm: float) -> int:
    """Return the number of rows that the product needs."""
    if norm == 2 and type(layers[0]) is nn.Linear:
        return min(width, layers[0].out_features)
    return width


@torch.no_grad()
def chained(feature: Tensor, layers: list[nn.Module], norm: float) -> Tensor:
    """Return the norms (n, m) of all rows of the Jacobian at a feature (n, d).

    >>> layers = [nn.Tanh(), nn.Linear(3, 9)]
    >>> norms = chained(torch.zeros(1, 3), layers, 2)
    >>> torch.allclose(norms[0], layers[1].weight.norm(dim=1))
    True
    """
    start, first = None, layers[0]
    if norm == 2 and isinstance(first, nn.Linear) and first.out_features < first.in_features:
        # The norms of A W are those of A R' where W' = Q R, which has fewer rows.
        start = torch.linalg.qr(first.weight.detach().T, mode="r").R
        feature, layers = first(feature), layers[1:]
    slopes, weights = _factors(feature, layers)
    if start is None and norm != math.inf and all(slope is None for slope in slopes[1:-1]):
        norms = _scaled(slopes[0], functools.reduce(torch.matmul, weights), norm)
        norms = norms.expand(len(feature), -1)
    else:
        count = feature.shape[1] if start is None else len(start)
        size = max(1, _NUMBERS // (count * max(map(max, (weight.shape for weight in weights)))))
        products = []
        for rows in torch.arange(len(feature)).split(size):
            block = [None if slope is None else slope[rows] for slope in slopes[:-1]]
            products.append(_product(start, len(rows), block, weights, norm))
        norms = torch.cat(products)
    return norms if slopes[-1] is None else norms * slopes[-1].abs()


def _factors(value: Tensor, layers: list[nn.Module]) -> tuple[Slopes, list[Tensor]]:
    """Return the matrices of a head, and the slopes before the first, between and after them."""
    slopes: Slopes = [None]
    weights: list[Tensor] = []
    for layer in layers:
        after = layer(value.clone())  # it may work in place
        if isinstance(layer, nn.Linear):
            weights.append(layer.weight.detach().T)
            slopes.append(None)
        else:
            slope = BACKWARD[type(layer)](layer, torch.ones_like(value), value, after)
            slopes[-1] = slope if slopes[-1] is None else slopes[-1] * slope
        value = after
    return slopes, weights


def _scaled(slope: Tensor | None, product: Tensor, norm: float) -> Tensor:
    """Return the norms of the columns of one matrix whose rows have slopes."""
    if slope is None:
        return _norms(product, norm)[None]
    if norm == 1:
        return slope.abs() @ product.abs()
    return (slope.square() @ product.square()).sqrt_()


def _product(
    start: Tensor | None,
    count: int,
    slopes: Slopes,
    weights: list[Tensor],
    norm: float,
) -> Tensor:
    """Multiply the matrices for some rows at once, and return the norms of the columns."""
    rows = torch.eye(len(weights[0])).to(weights[0]) if start is None else start
    owner = None  # one product for all rows until a slope depends on the row
    for slope, weight in zip(slopes, weights, strict=True):
        if slope is not None:
            if owner is None:
                owner = torch.arange(count, device=rows.device).repeat_interleave(len(rows))
                rows = (rows * slope[:, None]).flatten(0, 1)
            else:
                rows = rows.mul_(slope[owner])
            alive = rows.any(dim=1)
            if not bool(alive.all()):
                rows, owner = rows[alive], owner[alive]
        rows = rows @ weight
    if owner is None:
        return _norms(rows, norm).expand(count, -1)
    sizes = rows.square_() if norm == 2 else rows.abs_()
    if norm == math.inf:
        parts = sizes.split(owner.bincount(minlength=count).tolist())
        return torch.stack([_norms(part, norm) for part in parts])
    result = sizes.new_zeros(count, sizes.shape[1]).index_add_(0, owner, sizes)
    return result.sqrt_() if norm == 2 else result


def _norms(rows: Tensor, norm: float) -> Tensor:
    """Return the norms of columns; 0 where there are no rows."""
    if not len(rows):
        return rows.new_zeros(rows.shape[1])
    if norm == 2:  # vector_norm takes 30 times as long along columns
        return rows.square().sum(dim=0).sqrt_()
    return rows.abs().sum(dim=0) if norm == 1 else rows.abs().amax(dim=0)
