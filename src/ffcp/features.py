"""Cut f = g o h at named layers: run h without a graph, start the graph at the feature.

A feature is the output of a named module (``"trunk.4"``), one of several tensors that a module
returns (``"lstm[0]"``, ``"encoder[hidden]"``), the whole input (``"input"``), one tensor of it
(``"input[0]"``, ``"input[age]"``) or the model's ``"output"``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ffcp import checks, inputs

INPUT = "input"
OUTPUT = "output"


class Tapped(NamedTuple):
    """A forward pass whose graph starts at the earliest of the tapped features.

    ``edges`` gives, for every feature, the places in the graph where its gradient arrives
    (several for an input of several tensors).
    """

    prediction: Tensor
    edges: dict[str, list[GradientEdge]]


def resolve(model: nn.Module, feature: str | nn.Module) -> str:
    """Turn a feature into its name and check that the model has it.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> resolve(model, model[1])
    '1'
    >>> resolve(model, "input")
    'input'
    """
    names = _module_names(model)
    if isinstance(feature, nn.Module):
        if feature is model:
            return OUTPUT
        for name, module in names.items():
            if module is feature:
                return name
        raise ValueError(f"the feature {type(feature).__name__}(...) is not a part of the model")
    if not isinstance(feature, str):
        raise TypeError(
            f"a feature is a module or its dotted name, got {type(feature).__name__}: {feature!r}"
        )
    base = feature.partition("[")[0]
    if feature == OUTPUT or base == INPUT or base in names:
        return feature
    ranked = difflib.get_close_matches(base, names, n=len(names), cutoff=0.0)
    shown = [INPUT, OUTPUT] if not ranked else [*ranked[:20], INPUT, OUTPUT]
    more = f" and {len(ranked) - 20} more" if len(ranked) > 20 else ""
    raise ValueError(
        f"the model has no feature {feature!r}. Names there are, closest first: "
        f"{', '.join(shown)}{more}"
    )


def _module_names(model: nn.Module) -> dict[str, nn.Module]:
    """Every submodule by its dotted name; a leading dot sets modules named 'input' apart."""
    named = ((n, m) for n, m in model.named_modules() if n)
    return {f".{n}" if n in (INPUT, OUTPUT) else n: m for n, m in named}


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run the model in eval mode with frozen parameters, and leave no trace of it.

    Mode, ``requires_grad`` and random state are restored, also after an exception. Gradients
    are enabled whatever the caller's setting, so that a band can be asked for under
    ``torch.no_grad()``.
    """
    modes = [module for module in model.modules() if module.training]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with _random_state_kept(model), torch.inference_mode(False), torch.enable_grad():
        try:
            # Modules one by one: an overridden train() may do more than switch the mode.
            for module in modes:
                module.training = False
            # Without trainable parameters nothing before the feature enters a graph, and the
            # backward pass computes no gradients of weights.
            for parameter in trained:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
            for module in modes:
                module.training = True


@contextmanager
def _random_state_kept(model: nn.Module) -> Iterator[None]:
    device, _ = inputs.device_and_dtype(model)
    if device is None or device.type in ("cpu", "meta", "mps"):
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            yield


def predict(model: nn.Module, x: Any) -> Tensor:
    """Run one batch without a graph."""
    with undisturbed(model), torch.no_grad():
        return checks.output(inputs.caller(model, x)(x), inputs.row_count(x))


@contextmanager
def tapped(model: nn.Module, x: Any, names: Sequence[str]) -> Iterator[Tapped]:
    """Run one batch with a graph from the named features on.

    The graph may be used inside the ``with`` block; afterwards the model is as it was.
    """
    with undisturbed(model):
        yield _forward(model, x, names)


def _forward(model: nn.Module, x: Any, names: Sequence[str]) -> Tapped:
    taps = _Taps(inputs.row_count(x))
    call = inputs.caller(model, x)
    wanted = [name for name in names if name != OUTPUT]
    x = taps.enter(x, INPUT, [name for name in wanted if _base(name) == INPUT])
    handles = []
    try:
        modules = _module_names(model)
        for base in dict.fromkeys(_base(name) for name in wanted):
            if base != INPUT:
                group = [name for name in wanted if _base(name) == base]
                handles.append(modules[base].register_forward_hook(taps.hook(base, group)))
        prediction = checks.output(call(x), inputs.row_count(x))
    finally:
        taps.closed = True  # activation checkpointing replays forward during backward
        for handle in handles:
            handle.remove()
    missing = [name for name in wanted if name not in taps.edges]
    if missing:
        raise ValueError(
            f"the forward pass never calls {missing[0]!r}, so it has no feature there: choose a "
            "module that forward calls (a compiled or scripted model hides its modules: pass the "
            "original one)"
        )
    if wanted and not prediction.requires_grad:
        raise ValueError(
            f"the output has no gradient at feature {wanted[0]!r}: the feature does not influence "
            "the output, or forward cuts the graph after it (torch.no_grad, detach, .data, "
            "numpy). Remove the cut, choose another feature, or use CP"
        )
    return Tapped(prediction, taps.edges)


def _base(name: str) -> str:
    return name.partition("[")[0]


class _Taps:
    """Collects, during one forward pass, where the gradients of the features will arrive."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.edges: dict[str, list[GradientEdge]] = {}
        self.closed = False
        # A scalar that requires a gradient: what every graph of a pass grows from.
        self._seed = torch.ones((), requires_grad=True)

    def hook(self, base: str, names: list[str]) -> Callable[..., Any]:
        def record(module: nn.Module, args: Any, value: Any) -> Any:
            if self.closed:
                return value
            if names[0] in self.edges:
                raise ValueError(
                    f"module {base!r} is called more than once in a forward pass, so 'its output' "
                    "is not one feature: give each call its own module, or choose another layer"
                )
            if not torch.is_grad_enabled():
                raise ValueError(
                    f"feature {base!r} runs under torch.no_grad or inference_mode inside the "
                    "model's forward, so the output has no gradient there: remove the decorator "
                    "or context, choose a later layer, or use CP"
                )
            return self.enter(value, base, names)

        return record

    def enter(self, value: Any, base: str, names: list[str]) -> Any:
        """Start or tap the graph at the named tensors of ``value``; return it with them in."""
        tensors = dict(inputs.leaves(value, base))
        changed: dict[str, Tensor] = {}
        for name in names:
            keys = _select(name, tensors, whole=base == INPUT)
            for key in keys:
                self._check(name, tensors[key])
                if not tensors[key].requires_grad:
                    tensors[key] = changed[key] = _root(tensors[key], self._seed)
            # Edges stay put when a later in-place operation moves the tensor on.
            self.edges[name] = [get_gradient_edge(tensors[key]) for key in keys]
        return inputs.replace(value, changed, base) if changed else value

    def _check(self, name: str, value: Tensor) -> None:
        if not value.is_floating_point():
            raise TypeError(
                f"feature {name!r} has type {value.dtype}, which has no gradient: "
                "choose a floating-point one, such as the embedding behind it"
            )
        if value.dim() == 0 or len(value) != self.rows:
            raise ValueError(
                f"feature {name!r} has shape {tuple(value.shape)} for {self.rows} input rows: "
                "its first dimension must be the rows"
            )


def _select(name: str, tensors: dict[str, Tensor], *, whole: bool) -> list[str]:
    """Find which tensors of a module's output, or of the input, a feature name means."""
    if name in tensors:
        return [name]
    floats = [key for key, tensor in tensors.items() if tensor.is_floating_point()]
    if whole and name == INPUT:
        if floats:
            return floats
        kinds = sorted({str(tensor.dtype) for tensor in tensors.values()})
        raise TypeError(f"the input has type {', '.join(kinds)}, which has no gradient")
    raise ValueError(
        f"feature {name!r} does not name one tensor; there are: {', '.join(tensors) or 'none'}"
    )


class _Root(torch.autograd.Function):
    """The identity on ``value``, made the start of a graph.

    Not a leaf that requires a gradient, because the next layer may work in place (ReLU) and
    autograd forbids that on leaves; not a copy, because features can be large.
    """

    @staticmethod
    def forward(ctx: Any, seed: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None  # gradients are read where they arrive; nothing lies beyond


def _root(value: Tensor, seed: Tensor) -> Tensor:
    rooted: Tensor = _Root.apply(seed, value)  # type: ignore[no-untyped-call]
    return rooted


def candidates(model: nn.Module, x: Any, limit: int = 8, sample: int = 8) -> list[str]:
    """Name at most ``limit`` features spread over the depth, in the order of the forward pass.

    Only tensors that a gradient can reach count: modules called exactly once, with
    floating-point output that has a row for each input row and influences the prediction.
    """
    x = inputs.take(x, slice(0, sample))
    found = _distinct_features(model, x)
    if all(tensor.is_floating_point() for _, tensor in inputs.leaves(x)):
        found = [INPUT, *found]
    with undisturbed(model):
        try:
            tap = _forward(model, x, found)
        except ValueError:  # no gradient anywhere: only plain CP is left
            return []
        edges = [tap.edges[name][0] for name in found]
        reached = torch.autograd.grad(tap.prediction.sum(), edges, allow_unused=True)
    found = [name for name, gradient in zip(found, reached, strict=True) if gradient is not None]
    if len(found) <= limit:
        return found
    spread = torch.linspace(0, len(found) - 1, limit).round().long().tolist()
    return [found[index] for index in spread]


def _distinct_features(model: nn.Module, x: Any) -> list[str]:
    """List modules whose output is one usable tensor, in call order, without repeats."""
    seen: list[tuple[str, Tensor, int]] = []  # holding the tensors keeps their ids unique
    calls: dict[str, int] = {}
    rows = inputs.row_count(x)

    def watch(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, value: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            usable = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
            if usable and len(value) == rows and torch.is_grad_enabled():
                seen.append((name, value, value._version))

        return record

    handles = []
    with undisturbed(model):
        try:
            for name, module in _module_names(model).items():
                handles.append(module.register_forward_hook(watch(name)))
            prediction = checks.output(inputs.caller(model, x)(x), rows)
        finally:
            for handle in handles:
                handle.remove()
    # A container returns its last child's tensor and dropout its input: one feature, one name.
    known = {(id(prediction), prediction._version)} | {
        (id(tensor), tensor._version) for _, tensor in inputs.leaves(x)
    }
    names = []
    for name, tensor, version in seen:
        if calls[name] == 1 and (id(tensor), version) not in known:
            known.add((id(tensor), version))
            names.append(name)
    return names
