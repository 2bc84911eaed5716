"""Weights that torch does not list: those that hooks and plain attributes hold."""

from __future__ import annotations

import dis
import functools
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from operator import itemgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import CallableProxyType, ProxyType

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TORCHS = nn.Module().__dict__.keys()  # what every module has
_PLAIN = {type(None), bool, int, float, complex, str, bytes, type}
_PLAIN |= {torch.dtype, torch.device, torch.Size}
_PLAIN |= {ProxyType, CallableProxyType}  # their object may no longer exist
_LISTS = (dict, list, tuple, deque)
_FUNCTIONS = (FunctionType, MethodType, functools.partial)
_MOST_OBJECTS = 1000  # in nested lists and dicts: more is data, and not searched


def own_names(module: nn.Module) -> list[str]:
    """Return the names of a module's plain attributes, besides those that every module has."""
    return sorted(module.__dict__.keys() - _TORCHS)


def holders(module: nn.Module) -> list[str]:
    """Return the names of attributes that may hold what torch does not list."""
    return [name for name in own_names(module) if type(module.__dict__[name]) not in _PLAIN]


def unlisted(module: nn.Module) -> list[tuple[str, Tensor | nn.Module]]:
    """Return weights and modules that a module reaches beside those that torch lists, by name.

    They are found in plain attributes (a module in a list or a dict, or set without torch) and in
    forward hooks: what their functions enclose, name, are bound to, or are called with. Parameters
    count, other tensors that are trained, and all tensors that a function holds itself; tensors in
    lists and attributes, or assigned by the function, may be recordings of some pass.

    >>> adapter, model = nn.Linear(1, 1), nn.Linear(1, 1)
    >>> _ = model.register_forward_hook(lambda module, x, out: out + adapter(x[0]))
    >>> unlisted(model)
    [('_forward_hooks.0.adapter', Linear(in_features=1, out_features=1, bias=True))]
    """
    weights: list[tuple[str, Tensor | nn.Module]] = []
    for name in holders(module):
        _search(module.__dict__[name], name, weights, set())
    for hooks in _HOOKS:
        for number, hook in enumerate(getattr(module, hooks).values()):
            _search(hook, f"{hooks}.{number}", weights, set(), held=True)
    return weights


def _search(
    value: Any,
    name: str,
    weights: list[tuple[str, Tensor | nn.Module]],
    visited: set[int],
    *,
    held: bool = False,
    into_functions: bool = True,
) -> None:
    """Add the weights and modules that an object reaches; ``held``: by a function.

    By ``type`` and not by ``isinstance``, which would load lazy objects and call proxies.
    """
    kind = type(value)
    if issubclass(kind, nn.Module):
        weights.append((name, value))
    elif issubclass(kind, Tensor):
        if held or _is_trained(value):
            weights.append((name, value))
    elif kind not in _PLAIN and id(value) not in visited:
        visited.add(id(value))
        if issubclass(kind, _FUNCTIONS):
            if not into_functions:
                return
            for key, child in _of_function(value):
                _search(child, f"{name}.{key}", weights, visited, held=True)
            for key, child in _globals(value):  # but not the functions among them
                _search(child, f"{name}.{key}", weights, visited, held=True, into_functions=False)
        elif issubclass(kind, _LISTS):
            for path, child in _inside(value):
                _search(child, f"{name}{path}", weights, visited, into_functions=into_functions)
        elif held and not issubclass(kind, type | ModuleType):
            # The attributes of an object, but not those of objects in them.
            for key, child in _attributes(value):
                _search(child, f"{name}.{key}", weights, visited, into_functions=False)


def _is_trained(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield by place what nested lists and dicts hold, unless that is too much.

    >>> [*_inside([torch.relu, [1, torch.tanh]])]
    [('.0', <built-in method relu of type object at ...>), ('.1.1', <built-in method tanh ...>)]
    """
    queue, visited, budget = deque([("", value)]), {id(value)}, _MOST_OBJECTS
    while queue:
        path, container = queue.popleft()
        if len(container) > budget:
            continue
        # Copied at once: another thread may add to it.
        members = [*(dict.values(container) if isinstance(container, dict) else container)]
        budget -= len(members)
        for number, member in enumerate(members):
            kind = type(member)
            if kind in _PLAIN:
                continue
            if not issubclass(kind, _LISTS):
                yield f"{path}.{number}", member
            elif id(member) not in visited:
                visited.add(id(member))
                queue.append((f"{path}.{number}", member))


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object, without running its own code."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    return sorted(((str(name), child) for name, child in attributes.items()), key=itemgetter(0))


def _of_function(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function, a method or a partial holds, by name."""
    if isinstance(function, MethodType):
        yield from (("self", function.__self__), ("function", function.__func__))
    elif isinstance(function, functools.partial):
        yield "function", function.func
        yield from ((str(number), value) for number, value in enumerate(function.args))
        yield from sorted(function.keywords.items())
    else:
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            with suppress(ValueError):  # not set yet
                if not _is_recorded(name, cell.cell_contents, function.__code__):
                    yield name, cell.cell_contents
        yield from (
            (str(number), value) for number, value in enumerate(function.__defaults__ or ())
        )
        yield from sorted((function.__kwdefaults__ or {}).items())


def _globals(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the global variables that a function names, as hooks in scripts and notebooks do."""
    if isinstance(function, FunctionType):
        variables = function.__globals__
        for name in function.__code__.co_names:
            if name in variables and not _is_recorded(name, variables[name], function.__code__):
                yield name, variables[name]


def _is_recorded(name: str, value: Any, code: CodeType) -> bool:
    """Whether a tensor was assigned by the function itself, as a recording."""
    return issubclass(type(value), Tensor) and not _is_trained(value) and name in _assigned(code)


@functools.lru_cache(maxsize=256)
def _assigned(code: CodeType) -> frozenset[str]:
    """Return the outer variables that a function assigns, by ``global`` or ``nonlocal``."""
    stores = ("STORE_GLOBAL", "STORE_DEREF")
    return frozenset(str(i.argval) for i in dis.get_instructions(code) if i.opname in stores)


def refuse_unusable(model: nn.Module) -> None:
    """Raise ValueError for models whose weights are not all here: not made yet, or sharded.

    >>> refuse_unusable(nn.LazyLinear(3))
    Traceback (most recent call last):
    ValueError: the model has layers without weights yet (LazyLinear): run it once on some rows
    """
    for module in model.modules():
        # By name: the modules that define them are slow to import, and may be missing.
        classes = {base.__name__ for base in type(module).__mro__}
        if classes & {"FullyShardedDataParallel", "FSDPModule"}:
            raise ValueError(
                "the weights of the model are sharded over processes (FSDP): gather them into a "
                "plain model, and pass that"
            )
        tensors = [*module._parameters.values(), *module._buffers.values()]
        if any(isinstance(t, UninitializedParameter | UninitializedBuffer) for t in tensors):
            raise ValueError(
                f"the model has layers without weights yet ({type(module).__name__}): run it once "
                "on some rows"
            )
        if isinstance(module, fx.GraphModule) and hasattr(module, "range_constraints"):
            examples = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
            sizes = [x.shape[0] for x in examples if isinstance(x, Tensor) and x.dim()]
            if any(isinstance(size, int) for size in sizes):
                raise ValueError(
                    f"the model was exported for exactly {sizes[0]} rows at a time: export it for "
                    "any number of them, with torch.export.Dim('rows') for dimension 0 in "
                    "dynamic_shapes, or give the original module"
                )
