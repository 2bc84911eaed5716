"""The head g of f = g o h as a module of its own, for methods that move the feature.

FFCP needs only the gradient of g at one point and takes it from the running model. FCP asks for
g at other features, so here g is read out of the model. Where that is not possible, :func:`behind`
runs the whole model and exchanges the feature on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from ffcp.network import checks, inputs
from ffcp.network.cut import Cut, checked_output, undisturbed
from ffcp.network.features import INPUT, OUTPUT, resolve


def head(model: nn.Module, feature: str | nn.Module) -> nn.Module:
    """Cut the part behind ``feature`` out of the model; parameters are shared, not copied.

    Parameters
    ----------
    model
        A model that ``torch.fx`` can trace, with one tensor as input.
    feature
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
        return _as(model, nn.Identity())
    if name == INPUT:
        return model
    if "[" in name:
        raise ValueError(f"feature {name!r} is one of several outputs: its head cannot be cut out")
    rest = _rest_of_sequential(model, name.removeprefix(".").split("."))
    return rest if rest is not None else _traced_head(model, name.removeprefix("."))


def rest_of_sequential(model: nn.Module, name: str) -> nn.Module | None:
    """Give the modules behind a layer of nested Sequentials; None of any other model.

    >>> rest_of_sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), "0")
    Sequential(
      (0): ReLU()
    )
    """
    return _rest_of_sequential(model, name.removeprefix(".").split("."))


def _rest_of_sequential(model: nn.Module, path: list[str]) -> nn.Module | None:
    """Follow nested Sequentials; None where another kind of module is on the way."""
    if not path:
        return _as(model, nn.Sequential())
    if type(model) is not nn.Sequential:
        return None
    names = list(model._modules)
    index = names.index(path[0])
    inner = _rest_of_sequential(model[index], path[1:])
    if inner is None:
        return None
    own = [inner] if len(inner._modules) else []
    return _as(model, nn.Sequential(*own, *list(model)[index + 1 :]))


def _as(model: nn.Module, made: nn.Module) -> nn.Module:
    """Put a module that was made in the mode of the model: new ones are in training mode."""
    # Of a twin's head nothing must be put back then, the random state of all threads least of all.
    made.training = model.training
    return made


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
    """Collect all nodes that the output needs, not looking behind the cut."""
    needed: set[fx.Node] = set()
    waiting = [node for node in graph.nodes if node.op == "output"]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [] if node is cut else node.all_input_nodes
    return needed


def _refuse_bypass(needed: set[fx.Node], cut: fx.Node) -> None:
    """Refuse a skip connection around the cut: the head would need a second tensor."""
    if cut not in needed:
        raise ValueError(f"feature {cut.target!r} does not influence the output")
    if not any(node.op == "placeholder" for node in needed):
        return
    behind = _behind(needed, cut)
    bypass = sorted(
        {
            str(source.target) if source.op in ("call_module", "placeholder") else source.name
            for node in behind - {cut}
            for source in node.all_input_nodes
            if source not in behind and source.op != "get_attr"
        }
    )
    raise ValueError(
        f"the part behind {cut.target!r} also needs {', '.join(map(repr, bypass))}, which comes "
        "around the cut (a skip connection): cut where all information passes through one tensor, "
        "such as the sum behind the connection"
    )


def _behind(needed: set[fx.Node], cut: fx.Node) -> set[fx.Node]:
    behind, waiting = {cut}, [cut]
    while waiting:
        for user in waiting.pop().users:
            if user in needed and user not in behind:
                behind.add(user)
                waiting.append(user)
    return behind


def _subgraph(
    model: nn.Module, graph: fx.Graph, cut: fx.Node, needed: set[fx.Node]
) -> fx.GraphModule:
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {cut: new.placeholder("feature")}
    for node in graph.nodes:
        if node in needed and node is not cut:
            copies[node] = new.node_copy(node, lambda old: copies[old])
    return fx.GraphModule(model, new)


_COMPARED = 8  # rows


class _Alone(NamedTuple):
    """A head that was cut out of a model, and whether it changes its input."""

    head: nn.Module
    in_place: bool


# By the name of the feature; None where the head cannot be cut out.
_CUT_OUT: WeakKeyDictionary[nn.Module, dict[str, _Alone | None]] = WeakKeyDictionary()


@contextmanager
def behind(
    model: nn.Module, x: Any, name: str
) -> Iterator[tuple[tuple[Tensor, ...], Callable[..., Tensor]]]:
    """Give the feature's tensors, and the model as a function of them, without a graph.

    The function takes tensors of any number of rows. It runs the head alone where that can be
    cut out, else the whole model on the rows of ``x``, over and over.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> with behind(model, torch.randn(4, 2), "0") as ((v,), output):
    ...     output(2 * v[:1]).shape
    torch.Size([1, 1])
    """
    swap = _Swap()
    with Cut(model, [name], change=swap, graph=False) as cut, torch.no_grad():
        prediction = cut(x).prediction
        kept = tuple(swap.kept)
        alone = _cut_out(model, name, kept, prediction)

        def output(*values: Tensor) -> Tensor:
            rows = len(values[0])
            if alone is not None:
                value = values[0].clone() if alone.in_place else values[0]
                return checked_output(alone.head(value), rows)
            swap.given = iter(values)
            numbers = torch.arange(rows) % inputs.row_count(x)
            return cut(x if rows == inputs.row_count(x) else inputs.take(x, numbers)).prediction

        with ExitStack() as stack:
            if alone is not None:
                stack.enter_context(undisturbed(alone.head))
                stack.enter_context(torch.no_grad())
            yield kept, output


class _Swap:
    """Keeps the feature of the first pass, and puts given tensors in its place afterwards."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.given: Iterator[Tensor] | None = None

    def __call__(self, value: Tensor) -> Tensor:
        if self.given is None:
            self.kept.append(value.clone())
            return value
        return next(self.given).clone()  # the next layer may work in place


def _cut_out(
    model: nn.Module, name: str, kept: tuple[Tensor, ...], prediction: Tensor
) -> _Alone | None:
    """Give the head as a module of its own, if there is one that gives the same output.

    It is remembered, and compared with the model each time: layers may have been exchanged.
    """
    if name == INPUT or len(kept) != 1:
        return None  # nothing comes before the input, so there is nothing to save
    known = _CUT_OUT.setdefault(model, {})
    feature, expected = kept[0][:_COMPARED], prediction[:_COMPARED]
    alone = known.get(name)
    stale = alone is not None and _changes_input(alone.head, feature, expected) is None
    if name not in known or stale:
        known[name] = _fresh(model, name, feature, expected)
    return known[name]


def _fresh(model: nn.Module, name: str, feature: Tensor, expected: Tensor) -> _Alone | None:
    try:
        cut = head(model, name)
    except ValueError:
        return None
    in_place = _changes_input(cut, feature, expected)
    return None if in_place is None else _Alone(cut, in_place)


def _changes_input(head: nn.Module, feature: Tensor, expected: Tensor) -> bool | None:
    """Say whether the head works in place; ``None`` if it does not give the expected output."""
    given = feature.clone()
    try:
        with undisturbed(head), torch.no_grad():
            output = head(given)
        same = output.shape == expected.shape and checks.close(output, expected)
    except Exception:  # whatever a user's layers do when they are called apart
        return None
    return not given.equal(feature) if same else None
