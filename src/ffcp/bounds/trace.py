"""Read a head once into a list of nodes, each with its rule."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional

from ffcp.bounds.rules import LAYERS, Activation, Rule, Sum, UnsupportedError, rule_of


class Node(NamedTuple):
    """One step of a head; `inputs` are positions in the list, 0 is the head's input."""

    rule: Rule
    inputs: tuple[int, ...]
    name: str
    inplace: bool = False


@dataclass(frozen=True)
class Head:
    """A head that `trace` has read; `ibp` and `crown` take it in place of the module.

    Parameters
    ----------
    nodes : tuple of Node
        Its operations, in the order of evaluation.
    output : int
        Position of the node that is the output.
    """

    nodes: tuple[Node, ...]
    output: int


def _dropout_as_module(p: float = 0.5, training: bool = True, inplace: bool = False) -> nn.Module:
    if training:
        raise UnsupportedError("training=True drops values at random")
    return nn.Identity()


def _flatten_as_module(start_dim: int = 0, end_dim: int = -1) -> nn.Module:
    return nn.Flatten(start_dim, end_dim)


# A function called with (value, *args, **kwargs) does what this module made of
# (*args, **kwargs) does to the value. Strings are methods of a tensor.
_FUNCTIONS: dict[Callable[..., Any] | str, Callable[..., nn.Module]] = {
    **dict.fromkeys((torch.relu, functional.relu, "relu"), nn.ReLU),
    **dict.fromkeys((torch.tanh, functional.tanh, "tanh"), nn.Tanh),
    **dict.fromkeys((torch.sigmoid, functional.sigmoid, "sigmoid"), nn.Sigmoid),
    **dict.fromkeys((torch.flatten, "flatten"), _flatten_as_module),
    functional.leaky_relu: nn.LeakyReLU,
    functional.gelu: nn.GELU,
    functional.silu: nn.SiLU,
    functional.dropout: _dropout_as_module,
    functional.avg_pool1d: nn.AvgPool1d,
    functional.avg_pool2d: nn.AvgPool2d,
    functional.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    functional.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
}

_SUMS: dict[Callable[..., Any] | str, tuple[float, ...]] = {
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add"), (1.0, 1.0)),
    **dict.fromkeys((operator.sub, operator.isub, torch.sub, "sub"), (1.0, -1.0)),
    **dict.fromkeys((operator.neg, torch.neg, "neg"), (-1.0,)),
}
_PRODUCTS = (operator.mul, operator.imul, torch.mul, "mul")


def _combine(target: Callable[..., Any] | str, args: Sequence[Any]) -> tuple[Sum, list[fx.Node]]:
    """Return the rule for a sum, difference or multiple, and its input values."""
    values = [arg for arg in args if isinstance(arg, fx.Node)]
    numbers = [arg for arg in args if isinstance(arg, int | float)]
    if target in _PRODUCTS:
        if len(values) != 1 or len(numbers) != 1:
            raise UnsupportedError("only a product with a number is bounded")
        return Sum((float(numbers[0]),)), values
    signs = _SUMS[target]
    if len(signs) != len(args) or len(values) + len(numbers) != len(args):
        raise UnsupportedError("only values computed from the input, and numbers, can be added")
    terms = list(zip(signs, args, strict=True))
    scales = tuple(sign for sign, arg in terms if isinstance(arg, fx.Node))
    shift = sum(sign * arg for sign, arg in terms if isinstance(arg, int | float))
    return Sum(scales, shift), values


class _OneLevel(fx.Tracer):
    """Records the calls of submodules without entering them."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


class _Reader:
    """Appends the nodes of a module to a list, and collects what it cannot bound for the error."""

    def __init__(self) -> None:
        self.nodes = [Node(Sum(()), (), "input")]
        self.problems: list[str] = []

    def add(self, rule: Rule, inputs: Sequence[int], name: str, inplace: bool = False) -> int:
        self.nodes.append(Node(rule, tuple(inputs), name, inplace))
        return len(self.nodes) - 1

    def refuse(self, layer: str, reason: object = "") -> int:
        self.problems.append(f"{layer}: {reason}" if str(reason) else layer)
        return 0  # any position: the list is not used after an error

    def module(self, module: nn.Module, name: str, inputs: Sequence[int]) -> int:
        layer = f"layer {name!r} ({type(module).__name__})" if name else type(module).__name__
        try:
            rule = rule_of(module)
        except UnsupportedError as reason:
            return self.refuse(layer, reason)
        if rule is not None:
            if len(inputs) != 1:
                return self.refuse(layer, f"called with {len(inputs)} values")
            if rule == Sum((1.0,)):
                return inputs[0]
            return self.add(rule, inputs, name, getattr(module, "inplace", False))
        if type(module).forward is nn.Sequential.forward:
            # Not named_children, which skips a layer the second time it is used.
            for child_name, child in module._modules.items():
                assert child is not None
                inputs = [self.module(child, _join(name, child_name), inputs)]
            return inputs[0]
        # fx treats the layers of torch.nn as leaves, whose forward is not traced.
        if fx.Tracer().is_leaf_module(module, name):
            return self.refuse(layer)
        return self.graph(module, name, inputs, layer)

    def graph(self, module: nn.Module, name: str, inputs: Sequence[int], layer: str) -> int:
        try:
            graph = _OneLevel().trace(module)
        except Exception as reason:  # a forward may raise anything when called with a symbol
            return self.refuse(layer, f"torch.fx cannot trace it: {reason}")
        positions: dict[fx.Node, int] = {}
        remaining = list(inputs)
        for node in graph.nodes:
            if node.op == "placeholder":
                if not remaining:
                    return self.refuse(layer, "takes more than one input")
                positions[node] = remaining.pop(0)
            elif node.op == "output":
                if not isinstance(node.args[0], fx.Node):
                    return self.refuse(layer, "returns something other than one tensor")
                return positions[node.args[0]]
            else:
                positions[node] = self.call(module, name, node, positions)
        raise AssertionError("a torch.fx graph must end in an output node")

    def call(
        self, module: nn.Module, name: str, node: fx.Node, positions: Mapping[fx.Node, int]
    ) -> int:
        if node.op == "call_module":
            child, path = module.get_submodule(str(node.target)), _join(name, str(node.target))
            inputs = [positions[arg] for arg in node.args if isinstance(arg, fx.Node)]
            if node.kwargs or len(inputs) != len(node.args):
                layer = f"layer {path!r} ({type(child).__name__})"
                return self.refuse(layer, "called with something other than computed values")
            return self.module(child, path, inputs)
        path = _join(name, node.name)
        try:
            return self.function(node, path, positions)
        except (UnsupportedError, TypeError) as reason:
            called = getattr(node.target, "__name__", node.target)
            operation = f"{node.op} {path!r} ({called} in {type(module).__name__})"
            return self.refuse(operation, reason)

    def function(self, node: fx.Node, path: str, positions: Mapping[fx.Node, int]) -> int:
        if node.op == "get_attr":
            raise UnsupportedError("a tensor used outside a layer")
        if node.target in _SUMS or node.target in _PRODUCTS:
            if node.kwargs:
                raise UnsupportedError(f"called with {dict(node.kwargs)}")
            rule, values = _combine(node.target, node.args)
            return self.add(rule, [positions[value] for value in values], path)
        if node.target not in _FUNCTIONS:
            raise UnsupportedError()
        if len(node.all_input_nodes) != 1 or node.args[:1] != (node.all_input_nodes[0],):
            raise UnsupportedError("called with something other than one value and constants")
        equivalent = _FUNCTIONS[node.target](*node.args[1:], **node.kwargs)
        return self.module(equivalent, path, [positions[node.all_input_nodes[0]]])

    def check_inplace(self, output: int) -> None:
        """Refuse an in-place layer whose input is used elsewhere: fx has the old value there."""
        uses = [0] * len(self.nodes)
        for source in [output, *(i for node in self.nodes for i in node.inputs)]:
            uses[source] += 1
        for node in self.nodes:
            if not (node.inplace and isinstance(node.rule, Activation)):
                continue
            source = node.inputs[0]
            while uses[source] == 1 and getattr(self.nodes[source].rule, "reshapes", False):
                source = self.nodes[source].inputs[0]  # the same memory in another shape
            if uses[source] > 1:
                shared = f"overwrites {self.nodes[source].name!r}, used elsewhere"
                self.refuse(f"layer {node.name!r}", f"{shared}; set inplace=False")


def _join(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child


def trace(head: nn.Module) -> Head:
    """Read the structure of a head once, to bound it many times.

    Weights are not copied: `ibp` and `crown` use the values that the module holds when they
    are called. Layers that are added or replaced later are not noticed.

    Parameters
    ----------
    head : nn.Module
        A layer, a (nested) ``nn.Sequential``, or a module that ``torch.fx`` can trace. It is
        read as in eval mode; its mode stays as it is.

    Returns
    -------
    Head
        What `ibp` and `crown` accept in place of the module.

    Raises
    ------
    TypeError
        If the head contains something that cannot be bounded. The message lists all of it.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from ffcp.bounds import ibp, trace
    >>> head = trace(nn.Sequential(nn.ReLU(), nn.Flatten()))
    >>> ibp(head, torch.tensor([[-1.0, 2.0]]), 0.5)
    Bounds(lower=tensor([[0.0000, 1.5000]]), upper=tensor([[0.0000, 2.5000]]))
    """
    reader = _Reader()
    modes = [(module, module.training) for module in head.modules()]
    head.eval()  # a forward may depend on self.training
    try:
        output = reader.module(head, "", [0])
    finally:
        for module, mode in modes:
            module.training = mode
    if not reader.problems:
        reader.check_inplace(output)
    if reader.problems:
        known = ", ".join(kind.__name__ for kind in LAYERS)
        advice = f"Use one of {known}, or cut the network at a later layer."
        raise TypeError("\n  ".join(["cannot bound this head:", *reader.problems, advice]))
    return Head(tuple(reader.nodes), output)
