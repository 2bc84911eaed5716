"""Multiply the matrices of a head's layers: for narrow features, linear layers and activations.

The Jacobian of such a head is a product of weight matrices and of diagonals, the slopes of the
activations. Taken from the feature's side the product has a row for every number of the feature;
where those are fewer than the outputs, it is smaller than one gradient for every output. Rows
that a dead unit has made zero are left out on the way, as products with zero add nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ffcp.network import heads
from ffcp.network.cut import Cut, Tapped
from ffcp.network.jacobian.norms import row_norms
from ffcp.network.model import is_frozen_copy

_NUMBERS = 2**22  # of a product at once: 16 MB in float32
_SORTED = 8  # times as many rows are sorted, where dead units are left out
_WORTH = 2**17  # products: where dead units spare as many in each row, they are left out
_BLOCK = 2**20  # numbers of the last matrix, picked for each row, at once
# Activations that take every number by itself.
_ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish,
    nn.Hardsigmoid, nn.Tanhshrink,
)  # fmt: skip
_IDLE = (nn.Identity, nn.Dropout)  # in eval mode
Slopes = list[Tensor | None]  # those of each activation (n, width), None where there is none


def chain(model: nn.Module, name: str, tap: Tapped) -> list[nn.Module] | None:
    """Give the layers behind a feature, if all are linear or activations; else ``None``.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 9))
    >>> from ffcp.network.model import borrowed
    >>> with borrowed(model) as frozen, Cut(frozen, ["0"]) as cut:
    ...     chain(frozen, "0", cut(torch.randn(4, 2)))
    [ReLU(), Linear(in_features=3, out_features=9, bias=True)]
    """
    shapes = tap.shapes[name]
    if len(shapes) != 1 or len(shapes[0]) != 2 or type(model) is not nn.Sequential:
        return None
    if not is_frozen_copy(model):  # it may have hooks, which may change what a layer returns
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
        yield module


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
    start, first = None, layers[0]
    if norm == 2 and isinstance(first, nn.Linear) and first.out_features < first.in_features:
        # The norms of A W are those of A R' where W' = Q R, which has fewer rows.
        start = torch.linalg.qr(first.weight.detach().T, mode="r").R
        feature, layers = first(feature), layers[1:]
    count = feature.shape[1] if start is None else len(start)
    widest = max([count, *(la.out_features for la in layers if isinstance(la, nn.Linear))])
    size = max(1, _NUMBERS // (count * widest))
    parts = feature.split(_SORTED * size)
    return torch.cat([_part(part, start, layers, norm, size) for part in parts])


def _part(
    value: Tensor, start: Tensor | None, layers: list[nn.Module], norm: float, size: int
) -> Tensor:
    """Take the norms of some rows, so many in a product; ``start`` is the identity if ``None``."""
    slopes, weights = _factors(value, layers)
    inner, last = slopes[1:-1], slopes[-1]
    if start is None and norm != math.inf and all(slope is None for slope in inner):
        norms = _scaled(slopes[0], functools.reduce(torch.matmul, weights), norm)
        norms = norms.expand(len(value), -1)
    elif _spared(start, slopes, weights) > _WORTH * len(value):
        norms = _thinned(start, len(value), slopes[:-1], weights, norm)
    else:
        products = []
        for rows in torch.arange(len(value)).split(size):
            some = [None if slope is None else slope[rows] for slope in slopes[:-1]]
            products.append(_product(start, len(rows), some, weights, norm))
        norms = torch.cat(products)
    return norms if last is None else norms * last.abs()


def _factors(value: Tensor, layers: list[nn.Module]) -> tuple[Slopes, list[Tensor]]:
    """Give the matrices of a head, and the slopes before the first, between them and at the end."""
    slopes: Slopes = [None]
    weights: list[Tensor] = []
    for layer in layers:
        if isinstance(layer, nn.Linear):
            weights.append(layer.weight.detach().T)
            slopes.append(None)
        else:
            before, own = slopes[-1], _slopes(layer, value)
            slopes[-1] = own if before is None else before * own
        value = layer(value)
    return slopes, weights


def _scaled(slope: Tensor | None, product: Tensor, norm: float) -> Tensor:
    """Take the norms of the columns of one matrix whose rows have slopes: a product of sizes."""
    if slope is None:
        return _norms(product, norm)[None]
    if norm == 1:
        return slope.abs() @ product.abs()
    return (slope.square() @ product.square()).sqrt_()


def _spared(start: Tensor | None, slopes: Slopes, weights: list[Tensor]) -> float:
    """Count the products that dead units spare, if each row has products of its own."""
    count = weights[0].shape[0] if start is None else len(start)
    dead = (
        0 if slope is None else int((slope == 0).sum()) * weight.shape[1]
        for slope, weight in zip(slopes[1:-1], weights[1:], strict=True)
    )
    return count * sum(dead)


def _thinned(
    start: Tensor | None, count: int, slopes: Slopes, weights: list[Tensor], norm: float
) -> Tensor:
    """Multiply the matrices of each row by themselves, without units whose slope is zero.

    Rows go together that have about as many units left in front of the last matrix.
    """
    ends = next(slope for slope in reversed(slopes) if slope is not None)
    order = (ends != 0).sum(dim=1).argsort()
    weights = [weight.contiguous() for weight in weights]
    norms = []
    for rows in order.split(max(1, _BLOCK // weights[-1].numel())):
        some = [None if slope is None else slope[rows] for slope in slopes]
        norms.append(row_norms([_thin(start, some, weights).flatten(0, 1)], norm))
    result = torch.empty(count, weights[-1].shape[1]).to(norms[0])
    result[order] = torch.cat(norms).view(count, -1)
    return result


def _thin(start: Tensor | None, slopes: Slopes, weights: list[Tensor]) -> Tensor:
    """Give the products (n, outputs, numbers of the feature) of some rows."""
    product = None if start is None else start.T  # what it has of each unit stands in a row
    for slope, weight in zip(slopes, weights, strict=True):
        if slope is None:
            product = weight.T if product is None else weight.T @ product
            continue
        kept = max(1, int((slope != 0).sum(dim=1).max()))
        # The rest of these places, where a row has fewer, have slopes of zero.
        places = (slope != 0).byte().argsort(dim=1, descending=True)[:, :kept]
        own = slope.gather(1, places)[:, :, None]
        some = weight.index_select(0, places.flatten()).view(*places.shape, -1)
        if product is None:
            product = some.mul_(own).transpose(1, 2)
        else:
            wide = product.expand(len(places), -1, -1)
            left = wide.gather(1, places[:, :, None].expand(-1, -1, wide.shape[2]))
            product = torch.bmm(some.transpose(1, 2), left.mul_(own))
    assert product is not None
    return product


def _product(
    start: Tensor | None,
    count: int,
    slopes: Slopes,
    weights: list[Tensor],
    norm: float,
) -> Tensor:
    """Multiply the matrices for some rows at once, and take the norms of the columns."""
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
    """Give the norms of columns; none has no rows."""
    if not len(rows):
        return rows.new_zeros(rows.shape[1])
    if norm == 2:  # vector_norm takes 30 times as long along columns
        return rows.square().sum(dim=0).sqrt_()
    return rows.abs().sum(dim=0) if norm == 1 else rows.abs().amax(dim=0)


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
