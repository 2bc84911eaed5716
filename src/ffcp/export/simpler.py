"""Fewer operations for the same numbers.

What autograd writes down is longer than it need be, and with few rows it is the number of
operations that takes the time, whatever they do. Every rule here gives the same numbers up to the
order of sums; a graph that none of them fits stays as it is. Files are compared with the library
before they are kept (:mod:`~ffcp.export.checking`), these rules included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
Node = Any  # an fx.Node: what torch says of its arguments is that they may be anything

_VIEWS = (aten.detach.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim)
# The gradient behind an activation: elementwise, so that a row serves all rows.
_SLOPES = (
    aten.threshold_backward.default,  # of ReLU
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
)
_NORMS = (aten.linalg_vector_norm.default, aten.sum.dim_IntList, aten.amax.default)


def simplify(module: fx.GraphModule) -> None:
    """Leave out operations that no result needs."""
    for rule in (_whole_layer, _same_shape, _norm_as_column, _row_for_all, _mask_first):
        for node in list(_calls(module.graph)):
            rule(node)
        module.graph.eliminate_dead_code()
    module.recompile()


def _calls(graph: fx.Graph) -> Iterator[Node]:
    return (node for node in graph.nodes if node.op == "call_function")


def _whole_layer(node: Node) -> None:
    """Take a linear layer's weight as it lies; the gradient then shares it."""
    if node.target is not aten.addmm.default or node.kwargs:
        return
    bias, x, turned = node.args
    if _is_call(turned, aten.t.default) and len(_shape(bias)) == 1:
        _replace(node, aten.linear.default, x, turned.args[0], bias)


def _same_shape(node: Node) -> None:
    """Leave out a view of the same shape."""
    if node.target is aten.view.default and _shape(node) == _shape(node.args[0]):
        node.replace_all_uses_with(node.args[0])


def _norm_as_column(node: Node) -> None:
    """Let a norm keep its dimension, rather than add it again."""
    norm = node.args[0] if node.target in (aten.view.default, aten.unsqueeze.default) else None
    if not isinstance(norm, fx.Node) or norm.target not in _NORMS or norm.kwargs:
        return
    if norm.args[-1] == [1] and _shape(node) == (_shape(norm)[0], "1"):
        _replace(node, norm.target, *norm.args, True)


def _row_for_all(node: Node) -> None:
    """Start backward passes with the row of a matrix that all rows have in common."""
    if node.target not in _SLOPES:
        return
    gradient, *rest = node.args
    if _is_call(gradient, aten.mm.default):
        row = _common_row(gradient)
        if row is not None:
            node.args = (row, *rest)


def _common_row(product: Node) -> Node | None:
    """Give the row (1, k) that all rows of a product have in common, if they do."""
    seeds, matrix = product.args
    source = _source(seeds)
    if _is_call(source, aten.ones_like.default) and _shape(matrix)[0] == "1":
        return matrix
    if _is_call(source, aten.expand.default) and _shape(source.args[0]) == _shape(matrix)[:1]:
        with product.graph.inserting_before(product):
            seed = product.graph.call_function(aten.unsqueeze.default, (source.args[0], 0))
            return product.graph.call_function(aten.mm.default, (seed, matrix))
    return None


def _mask_first(node: Node) -> None:
    """Multiply a mask with a matrix that holds the row, not the masked row with the matrix.

    Only of one output: of several, each would have a matrix of its own in the file.
    """
    if node.target is not aten.mm.default:
        return
    masked, matrix = node.args
    if not _is_call(masked, aten.threshold_backward.default) or not _is_constant(matrix):
        return
    row, value, kink = masked.args
    if not (_is_constant(row) and _shape(row)[0] == "1"):
        return
    with node.graph.inserting_before(node):
        call = node.graph.call_function
        alive = call(aten.gt.Scalar, (value, kink))
        mask = call(aten._to_copy.default, (alive,), {"dtype": value.meta["val"].dtype})
        product = call(aten.mul.Tensor, (call(aten.t.default, (row,)), matrix))
    _replace(node, aten.mm.default, mask, product)


def _replace(node: Node, target: Any, *args: Any) -> None:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)


def _source(node: Node) -> Node:
    """Look through views, which leave a tensor of ones what it is."""
    while isinstance(node, fx.Node) and node.target in _VIEWS:
        node = node.args[0]
    return node


def _is_call(node: Node, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def _is_constant(node: Node) -> bool:
    """Say whether a tensor is a parameter, as it is or turned."""
    while _is_call(node, aten.t.default):
        node = node.args[0]
    return bool(node.op == "get_attr")


def _shape(node: Node) -> tuple[str, ...]:
    """Give a shape as words, so that no size that is open is asked for its value."""
    value = node.meta.get("val")
    if value is None:  # before torch 2.6 parameters have none
        value = getattr(node.graph.owning_module, node.target)
    return tuple(str(size) for size in value.shape)
