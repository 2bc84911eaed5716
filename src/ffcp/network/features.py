"""Cut f = g o h at named layers: run h without a graph, start the graph at the feature.

A feature is the output of a named module (``"trunk.4"``), one of several tensors that a module
returns (``"lstm[0]"``, ``"encoder[hidden]"``), the whole input (``"input"``), one tensor of it
(``"input[0]"``, ``"input[age]"``) or the model's ``"output"``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ffcp.network import arrays, calling, checks, inputs
from ffcp.network.frozen import is_frozen_copy, uncompiled
from ffcp.network.model_output import whole
from ffcp.network.modes import gradients

INPUT = "input"
OUTPUT = "output"


class NoGradientError(ValueError):
    """The model's output has no gradient at any of the features asked for."""


class Tapped(NamedTuple):
    """A forward pass whose graph starts at the earliest of the tapped features.

    ``edges`` gives, for every feature, the places in the graph where its gradient arrives
    (several for an input of several tensors), ``shapes`` the shapes it has there. ``values``
    holds what was recorded. ``moved`` says that a feature was changed on the way, so that the model
    alone, run again, would not give it. ``flat`` holds features of one row of numbers each, and how
    often they had been written to when they passed.
    """

    prediction: Tensor
    edges: dict[str, list[GradientEdge]]
    shapes: dict[str, list[torch.Size]]
    values: dict[str, Tensor]
    moved: bool = False
    flat: Mapping[str, tuple[Tensor, int]] = MappingProxyType({})

    def flat_value(self, name: str) -> Tensor | None:
        """Give the value of a flat feature, if nothing has worked in place on it since."""
        value, version = self.flat.get(name, (None, 0))
        return value if value is not None and value._version == version else None

    def only(self, *names: str) -> Tapped:
        """Give the same pass with some of the features."""
        return self._replace(
            edges={name: self.edges[name] for name in names},
            shapes={name: self.shapes[name] for name in names},
        )


def resolve(model: nn.Module, feature: str | nn.Module) -> str:
    """Turn a feature into its name and check that the model has it.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> resolve(model, model[1])
    '1'
    >>> resolve(model, "input")
    'input'

    Layers of a compiled model are those of the module that was compiled. Inside a scripted, traced
    or exported model, or one with a compiled part, no layer can be cut at: that is an error.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    compiled = uncompiled(model)
    names = module_names(compiled)
    if isinstance(feature, str) and compiled is not model:
        feature = feature.removeprefix("_orig_mod.")
    if isinstance(feature, nn.Module):
        if feature is model or feature is compiled:
            return OUTPUT
        for name, module in names.items():
            if module is feature:
                _refuse_opaque(compiled, name)
                return name
        raise ValueError(f"the feature {type(feature).__name__}(...) is not a part of the model")
    if not isinstance(feature, str):
        raise TypeError(
            f"a feature is a module or its dotted name, got {type(feature).__name__}: {feature!r}"
        )
    base = feature.partition("[")[0]
    if feature == OUTPUT or base == INPUT:
        return feature
    if base in names:
        _refuse_opaque(compiled, base)
        return feature
    ranked = difflib.get_close_matches(base, names, n=max(1, len(names)), cutoff=0.0)
    shown = [INPUT, OUTPUT] if not ranked else [*ranked[:20], INPUT, OUTPUT]
    more = f" and {len(ranked) - 20} more" if len(ranked) > 20 else ""
    raise ValueError(
        f"the model has no feature {feature!r}. Names there are, closest first: "
        f"{', '.join(shown)}{more}"
    )


def is_inside(name: str) -> bool:
    """Say whether a feature lies inside the model, being neither its input nor its output."""
    return name != OUTPUT and name.partition("[")[0] != INPUT


def _refuse_opaque(model: nn.Module, name: str) -> None:
    """Refuse a layer of a model that runs as one piece, so that no hook sees its layers."""
    path, module = name.removeprefix(".").split("."), whole(model)
    for depth, part in enumerate(["", *path]):
        module = module._modules[part] if part else module  # type: ignore[assignment]
        kind = _opaque_kind(module, path[depth:])
        if kind:
            raise ValueError(
                f"feature {name!r} lies inside {kind} model, which runs as one piece, so that no "
                "layer of it can be cut at: pass the original module, or choose 'input', 'output' "
                "or CP, which need no layer"
            )


def _opaque_kind(module: nn.Module, rest: list[str]) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return "a traced" if "Traced" in type(module).__name__ else "a scripted"
    if "_orig_mod" in module._modules:
        return "a compiled"
    if isinstance(module, fx.GraphModule) and rest:
        name = ".".join(rest)
        called = (str(node.target) for node in module.graph.nodes if node.op == "call_module")
        if not any(f"{name}.".startswith(f"{target}.") for target in called):
            return "an exported"
    return ""


def module_names(model: nn.Module) -> dict[str, nn.Module]:
    """Every submodule by its dotted name; a leading dot sets modules named 'input' apart."""
    named = ((n, m) for n, m in model.named_modules() if n)
    return {f".{n}" if n in (INPUT, OUTPUT) else n: m for n, m in named}


def _module_at(model: nn.Module, name: str) -> nn.Module:
    """Find a submodule by its name, as :func:`resolve` gives it."""
    try:
        return model.get_submodule(name.removeprefix("."))
    except AttributeError:
        return module_names(model)[resolve(model, name)]  # says which names there are


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run the model in eval mode with frozen parameters, and leave no trace of it.

    Mode, ``requires_grad`` and random state are restored, also after an exception. Gradients
    are enabled whatever the caller's setting, so that a band can be asked for under
    ``torch.no_grad()``.
    """
    if is_frozen_copy(model):  # frozen already, and nobody else's
        with gradients(True):
            yield
        return
    # Once over the modules: model.parameters() would go over them again, and takes its time.
    modules = list(model.modules())
    modes = [module for module in modules if module.training]
    parameters = (p for module in modules for p in module._parameters.values())
    trained = [p for p in parameters if p is not None and p.requires_grad]
    # A head cut out of a twin has nothing to restore.
    kept = _random_state_kept(model) if modes or trained else nullcontext()
    with kept, gradients(True):
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
    device, _ = arrays.device_and_dtype(model)
    if device is None or device.type in ("cpu", "meta", "mps"):
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            yield


_OWN = "_ffcp_hook"  # an attribute of our hooks


def has_hooks(module: nn.Module) -> bool:
    """Say whether hooks that are not ours may change what a module takes or gives."""
    own = (getattr(hook, _OWN, False) for hook in module._forward_hooks.values())
    return bool(module._forward_pre_hooks) or not all(own)


class Cut:
    """A model cut at named features, ready to run batches inside one ``with`` block.

    Inside the block the model is :func:`undisturbed`. The block can be entered again.

    Parameters
    ----------
    model
        The model.
    names
        Features at which gradients are wanted: every pass builds a graph from the earliest of
        them on, and without names it builds none.
    change
        Replaces every tensor of these features, so that the model goes on from another feature
        than its own.
    graph
        ``False`` changes the features only, and builds no graph.
    values
        Layers whose values every pass records.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> with Cut(model, ["0"], values=["1"]) as cut:
    ...     tap = cut(torch.randn(4, 2))
    ...     torch.autograd.grad(tap.prediction.sum(), tap.edges["0"])[0].shape
    torch.Size([4, 3])
    >>> tap.values["1"].shape
    torch.Size([4, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str] = (),
        change: Callable[[Tensor], Tensor] | None = None,
        graph: bool = True,
        values: Sequence[str] = (),
    ) -> None:
        self._model = model
        self._change, self._graph = change, graph
        self._names = [name for name in names if name != OUTPUT]
        self._features = _by_module(self._names)
        self._recorded = _by_module(values)
        self._modules = {base for base in (*self._features, *self._recorded) if base != INPUT}
        self._modules.discard(OUTPUT)
        self._mode = gradients(bool(self._names))
        self._stack: ExitStack | None = None  # of what is to be restored, if anything is
        self._open = False  # whether hooks are to take notice
        self._rows, self._hint = 0, ""
        self._called: set[str] = set()
        self._edges: dict[str, list[GradientEdge]] = {}
        self._shapes: dict[str, list[torch.Size]] = {}
        self._values: dict[str, Tensor] = {}
        self._flat: dict[str, tuple[Tensor, int]] = {}

    def __enter__(self) -> Cut:
        if (
            is_frozen_copy(self._model) and not self._modules
        ):  # nothing to put on it, nothing to restore
            self._mode.__enter__()
            return self
        with ExitStack() as stack:
            if not is_frozen_copy(self._model):
                stack.enter_context(undisturbed(self._model))
            for base in self._modules:
                module = _module_at(self._model, base)
                handle = module.register_forward_hook(self._hook(base))
                stack.callback(handle.remove)
            stack.enter_context(self._mode)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._stack is None:
            self._mode.__exit__()
        else:
            self._stack.close()
            self._stack = None
        # The result of the pass alone keeps them.
        self._edges, self._values, self._flat = {}, {}, {}

    def __call__(self, x: Any) -> Tapped:
        """Run one batch."""
        self._rows, self._hint = inputs.row_count(x), checks.flat_hint(x)
        self._called, self._edges, self._shapes, self._values = set(), {}, {}, {}
        self._flat = {}
        try:
            self._open = True
            self._record(x, INPUT)
            prediction = checks.output(
                calling.call(self._model, self._enter(x, INPUT)), self._rows, x
            )
            self._record(prediction, OUTPUT)
        finally:
            self._open = False  # activation checkpointing replays forward during backward
        self._check_reached(prediction)
        moved = self._change is not None
        return Tapped(prediction, self._edges, self._shapes, self._values, moved, self._flat)

    def _check_reached(self, prediction: Tensor) -> None:
        missing = self._modules - self._called
        if missing:
            raise ValueError(
                f"the forward pass never calls {min(missing)!r}, so it has no feature there: "
                "choose a module that forward calls (a compiled or scripted model hides its "
                "modules: pass the original one)"
            )
        if self._names and self._graph and not prediction.requires_grad:
            raise NoGradientError(
                f"the output has no gradient at feature {self._names[0]!r}: the feature does not "
                "influence the output, or forward cuts the graph after it (torch.no_grad, detach, "
                ".data, numpy). Remove the cut, choose another feature, or use CP"
            )

    def _hook(self, base: str) -> Callable[..., Any]:
        def take_notice(module: nn.Module, args: Any, value: Any) -> Any:
            if not self._open:
                return value
            if base in self._called:
                raise ValueError(
                    f"module {base!r} is called more than once in a forward pass, so 'its output' "
                    "is not one feature: give each call its own module, or choose another layer"
                )
            self._called.add(base)
            if base in self._features and self._graph and not torch.is_grad_enabled():
                raise ValueError(
                    f"feature {base!r} runs under torch.no_grad or inference_mode inside the "
                    "model's forward, so the output has no gradient there: remove the decorator "
                    "or context, choose a later layer, or use CP"
                )
            self._record(value, base)
            return self._enter(value, base)

        setattr(take_notice, _OWN, True)
        return take_notice

    def _record(self, value: Any, base: str) -> None:
        """Keep a copy of the tensors of ``value`` that were asked for."""
        for name in self._recorded.get(base, []):
            tensors = dict(inputs.leaves(value, base))
            if name == INPUT and len(tensors) > 1:
                self._values[name] = inputs.side_by_side(value)
                continue
            key = next(iter(tensors)) if name == INPUT else _select(name, tensors, whole=False)[0]
            self._check_rows(name, tensors[key])
            kept = tensors[key].detach()
            # A copy of what lies inside: the next layer may work in place.
            self._values[name] = kept if base in (INPUT, OUTPUT) else kept.clone()

    def _enter(self, value: Any, base: str) -> Any:
        """Start or tap the graph at the tensors of ``value`` that are features."""
        names = self._features.get(base, [])
        if not names:
            return value
        tensors = dict(inputs.leaves(value, base))
        changed: dict[str, Tensor] = {}
        for name in names:
            keys = _select(name, tensors, whole=base == INPUT)
            for key in keys:
                self._check_feature(name, tensors[key])
                if self._change is not None:
                    tensors[key] = changed[key] = self._change(tensors[key])
                if self._graph and not tensors[key].requires_grad:
                    tensors[key] = changed[key] = _root(tensors[key])
            self._shapes[name] = [tensors[key].shape for key in keys]
            self._keep_flat(name, [tensors[key] for key in keys])
            if self._graph:
                # Edges stay put when a later in-place operation moves the tensor on.
                self._edges[name] = [get_gradient_edge(tensors[key]) for key in keys]
        return inputs.replace(value, changed, base) if changed else value

    def _keep_flat(self, name: str, tensors: list[Tensor]) -> None:
        """Keep a feature that is one row of numbers: maps are too large to be held for longer."""
        value = tensors[0].detach()
        is_counted = not value.is_inference()  # how often those are written to nobody knows
        if len(tensors) == 1 and value.dim() == 2 and is_counted:
            self._flat[name] = value, value._version

    def _check_feature(self, name: str, value: Tensor) -> None:
        if not value.is_floating_point():
            raise TypeError(
                f"feature {name!r} has type {value.dtype}, which has no gradient: "
                "choose a floating-point one, such as the embedding behind it"
            )
        self._check_rows(name, value)

    def _check_rows(self, name: str, value: Tensor) -> None:
        if value.dim() == 0 or value.shape[0] != self._rows:
            raise ValueError(
                f"feature {name!r} has shape {tuple(value.shape)} for {self._rows} input rows: "
                f"its first dimension must be the rows{self._hint}"
            )


def _by_module(names: Sequence[str]) -> dict[str, list[str]]:
    """Sort feature names by the module they belong to: ``lstm[0]`` and ``lstm[1]`` by ``lstm``."""
    sorted_names: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        sorted_names.setdefault(name.partition("[")[0], []).append(name)
    return sorted_names


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


# A scalar that requires a gradient, which nobody asks for: what every graph of a pass grows from.
_SEED = torch.ones((), requires_grad=True)


def _root(value: Tensor) -> Tensor:
    rooted: Tensor = _Root.apply(_SEED, value)  # type: ignore[no-untyped-call]
    return rooted
