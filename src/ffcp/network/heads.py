"""The head g of f = g o h as a module of its own, for methods that move the feature.

FFCP needs only the gradient of g at one point and takes it from the running model. FCP evaluates
g at other features, so here g is extracted from the model. Where that is not possible,
:func:`behind` runs the whole model and replaces the feature on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from ffcp.network import inputs
from ffcp.network.cut import Cut
from ffcp.network.features import INPUT, OUTPUT, resolve
from ffcp.network.model import is_frozen_copy


def head(model: nn.Module, feature: str | nn.Module) -> nn.Module:
    """Cut the part behind ``feature`` out of the model; parameters are shared, not copied.

    Parameters
    ----------
    model : nn.Module
        A model that ``torch.fx`` can trace, with one tensor as input.
    feature : str or nn.Module
        A module or its dotted name, ``"input"`` or ``"output"``.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> head(model, "0")
    Sequential(
      (0): ReLU()
      (1): Linear(in_features=3, out_features=1, bias=True)
    )
    """
    name = resolve(model, feature)
    if name == OUTPUT:
        return nn.Identity().train(model.training)
    if name == INPUT:
        return model
    if "[" in name:
        raise ValueError(f"feature {name!r} is one of several outputs: its head cannot be cut out")
    rest = rest_of_sequential(model, name)
    return rest if rest is not None else _traced_head(model, name.removeprefix("."))


def rest_of_sequential(model: nn.Module, name: str) -> nn.Module | None:
    """Return the modules behind a layer of nested Sequentials; None of any other model.

    >>> rest_of_sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), "0")
    Sequential(
      (0): ReLU()
    )
    """
    behind: list[nn.Module] = []
    for part in name.removeprefix(".").split("."):
        if type(model) is not nn.Sequential or part not in model._modules:
            return None
        index = list(model._modules).index(part)
        behind = [*list(model)[index + 1 :], *behind]
        rest = nn.Sequential(*behind)
        # In the mode of its layers, so that nothing has to be restored.
        rest.training, model = model.training, model[index]
    return rest


class _Tracer(fx.Tracer):
    def __init__(self, feature: str) -> None:
        super().__init__()
        self._feature = feature

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name == self._feature or super().is_leaf_module(
            m, module_qualified_name
        )


def _traced_head(model: nn.Module, name: str) -> nn.Module:
    try:
        graph = _Tracer(name).trace(model)
    except Exception as error:  # whatever a user's forward does under tracing
        raise ValueError(
            f"torch.fx cannot trace this model, so its head behind {name!r} cannot be cut out "
            f"({error}). Pass it yourself: head=..., the module that maps the feature to the output"
        ) from error
    calls = [n for n in graph.nodes if n.op == "call_module" and n.target == name]
    if len(calls) != 1:
        raise ValueError(
            f"the forward pass calls {name!r} {len(calls)} times; a head can be cut behind a "
            "module that is called once"
        )
    needed = _needed(graph, calls[0])
    _refuse_bypass(needed, calls[0])
    return _subgraph(model, graph, calls[0], needed)


def _needed(graph: fx.Graph, cut: fx.Node) -> set[fx.Node]:
    """Return all nodes that the output needs, up to the cut."""
    needed: set[fx.Node] = set()
    waiting = [node for node in graph.nodes if node.op == "output"]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [] if node is cut else node.all_input_nodes
    return needed


def _refuse_bypass(needed: set[fx.Node], cut: fx.Node) -> None:
    """Raise ValueError for a skip connection around the cut: the head would need two tensors."""
    if cut not in needed:
        raise ValueError(f"feature {cut.target!r} does not influence the output")
    if any(node.op == "placeholder" for node in needed):
        raise ValueError(
            f"the part behind {cut.target!r} also needs what comes around the cut (a skip "
            "connection): cut where all information passes through one tensor, such as the sum "
            "behind the connection"
        )


def _subgraph(
    model: nn.Module, graph: fx.Graph, cut: fx.Node, needed: set[fx.Node]
) -> fx.GraphModule:
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {cut: new.placeholder("feature")}
    for node in graph.nodes:
        if node in needed and node is not cut:
            copies[node] = new.node_copy(node, lambda old: copies[old])
    return fx.GraphModule(model, new)


@contextmanager
def behind(
    model: nn.Module, x: Any, name: str
) -> Iterator[tuple[tuple[Tensor, ...], Callable[..., Tensor]]]:
    """Yield the feature's tensors, and the model as a function of them, without a graph.

    The function takes tensors of any number of rows. It runs the head alone behind a layer of
    nested Sequentials, else the whole model on the rows of ``x``, over and over.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> with behind(model, torch.randn(4, 2), "0") as ((v,), output):
    ...     output(2 * v[:1]).shape
    torch.Size([1, 1])
    """
    features: list[Tensor] = []  # as the model computes them
    replacements: Iterator[Tensor] | None = None

    def swap(value: Tensor) -> Tensor:
        if replacements is None:
            features.append(value.clone())
            return value
        return next(replacements).clone()  # the next layer may work in place

    # A model that is no copy may have hooks between its layers.
    rest = rest_of_sequential(model, name) if is_frozen_copy(model) else None

    def output(*values: Tensor) -> Tensor:
        nonlocal replacements
        if rest is not None:
            returned: Tensor = rest(values[0].clone())
            return returned
        replacements, rows = iter(values), torch.arange(len(values[0]))
        return cut(inputs.take(x, rows % inputs.row_count(x))).prediction

    with Cut(model, [name], change=swap, graph=False) as cut, torch.no_grad():
        cut(x)
        yield tuple(features), output
