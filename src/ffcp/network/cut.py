"""Cut f = g o h at named layers: run h without a graph, start the graph at the feature."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ffcp.network import inputs
from ffcp.network.features import INPUT, OUTPUT, resolve
from ffcp.network.model import OWN_HOOK, is_frozen_copy, weights_of
from ffcp.network.model_output import described, takes_arguments, whole


class NoGradientError(ValueError):
    """The model's output has no gradient at any of the requested features."""


_NOTHING = torch.empty(0)


@dataclass
class Tapped:
    """A forward pass whose graph starts at the earliest of the tapped features.

    ``edges`` holds, for every feature, the places in the graph where its gradient arrives
    (several for an input of several tensors), ``shapes`` its shapes there. ``values`` holds what
    was recorded. ``moved`` is whether a feature was changed on the way, so that running the model
    again would not give it.
    """

    rows: int
    moved: bool
    prediction: Tensor = _NOTHING  # until the pass has ended
    edges: dict[str, list[GradientEdge]] = field(default_factory=dict)
    shapes: dict[str, list[torch.Size]] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)

    def only(self, *names: str) -> Tapped:
        """Return the same pass with some of the features."""
        return replace(self, edges={name: self.edges[name] for name in names})


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run the model in eval mode with frozen parameters, and restore its state.

    Mode, ``requires_grad`` and random state are restored, also after an exception. Gradients
    are enabled whatever the caller's setting, so that intervals can be predicted under
    ``torch.no_grad()``.
    """
    modules = [] if is_frozen_copy(model) else [*model.modules()]
    modes = [module for module in modules if module.training]
    parameters = (p for module in modules for p in module._parameters.values())
    trained = [p for p in parameters if p is not None and p.requires_grad]
    # The head of a frozen copy has nothing to restore.
    kept = _random_state_kept(model) if modes or trained else nullcontext()
    with kept, torch.inference_mode(False), torch.enable_grad():
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


def _random_state_kept(model: nn.Module) -> Any:
    devices = {tensor.device for tensor in weights_of(model).tensors}
    device = next((d for d in devices if d.type not in ("cpu", "meta", "mps")), None)
    if device is None:
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


class Cut:
    """A model cut at named features, ready to run batches inside one ``with`` block.

    Inside the block the model is :func:`undisturbed`. The block can be entered again.

    Parameters
    ----------
    model : nn.Module
        The model.
    names : sequence of str, default=()
        Features at which gradients are wanted: every pass builds a graph from the earliest of
        them on, and without names it builds none.
    change : callable, default=None
        Replaces every tensor of these features, so that the model continues from another
        feature.
    graph : bool, default=True
        ``False`` changes the features only, and builds no graph.
    values : sequence of str, default=()
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
        self._model, self._change, self._graph = model, change, graph
        self._names = [name for name in dict.fromkeys(names) if name != OUTPUT]
        self._values = [*dict.fromkeys(values)]
        bases = dict.fromkeys(name.partition("[")[0] for name in (*self._names, *self._values))
        self._modules = [base for base in bases if base not in (INPUT, OUTPUT)]
        self._stack = ExitStack()
        self._tap: Tapped | None = None  # the pass under way

    def __enter__(self) -> Cut:
        with ExitStack() as stack:
            stack.enter_context(undisturbed(self._model))
            for base in self._modules:
                try:
                    module = self._model.get_submodule(base.removeprefix("."))
                except AttributeError:
                    resolve(self._model, base)  # says which names there are
                    raise
                stack.callback(module.register_forward_hook(self._hook(base)).remove)
            stack.enter_context(torch.set_grad_enabled(bool(self._names)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def __call__(self, x: Any) -> Tapped:
        """Run one batch."""
        self._tap = tap = Tapped(inputs.row_count(x), self._change is not None)
        try:
            tap.prediction = call(self._model, self._passed(x, INPUT, tap), tap.rows)
            if self._values:
                self._record(tap.prediction, OUTPUT, tap)
        finally:
            self._tap = None  # activation checkpointing replays forward during backward
        missing = [base for base in self._modules if base not in tap.called]
        if missing:
            raise ValueError(
                f"the forward pass never calls {min(missing)!r}, so it has no feature there: "
                "choose a module that forward calls (a compiled or scripted model hides its "
                "modules: pass the original one)"
            )
        if self._names and self._graph and not tap.prediction.requires_grad:
            raise NoGradientError(
                f"the output has no gradient at feature {self._names[0]!r}: the feature does not "
                "influence the output, or forward cuts the graph after it (torch.no_grad, detach, "
                ".data, numpy). Remove the cut, choose another feature, or use CP"
            )
        return tap

    def _hook(self, base: str) -> Callable[..., Any]:
        def take_notice(module: nn.Module, args: Any, value: Any) -> Any:
            tap = self._tap
            if tap is None:
                return value
            if base in tap.called:
                raise ValueError(
                    f"module {base!r} is called more than once in a forward pass, so 'its output' "
                    "is not one feature: give each call its own module, or choose another layer"
                )
            tap.called.add(base)
            return self._passed(value, base, tap)

        setattr(take_notice, OWN_HOOK, True)
        return take_notice

    def _passed(self, value: Any, base: str, tap: Tapped) -> Any:
        """Record a value; start or tap the graph at its tensors that are features."""
        if self._values:
            self._record(value, base, tap)
        names = [name for name in self._names if name.partition("[")[0] == base]
        if not names:
            return value
        if self._graph and not torch.is_grad_enabled():
            raise ValueError(
                f"feature {base!r} runs under torch.no_grad or inference_mode inside the model's "
                "forward, so the output has no gradient there: remove the decorator or context, "
                "choose a later layer, or use CP"
            )
        tensors = dict(inputs.leaves(value, base))
        changed: dict[str, Tensor] = {}
        for name in names:
            keys = _selected(name, tensors, tap.rows)
            for key in keys:
                tensor = tensors[key]
                if not tensor.is_floating_point():
                    raise TypeError(
                        f"feature {name!r} has type {tensor.dtype}, which has no gradient: "
                        "choose a floating-point one, such as the embedding behind it"
                    )
                if self._change is not None:
                    tensors[key] = changed[key] = tensor = self._change(tensor)
                if self._graph and not tensor.requires_grad:
                    tensors[key] = changed[key] = _Root.apply(_SEED, tensor)  # type: ignore[no-untyped-call]
            tap.shapes[name] = [tensors[key].shape for key in keys]
            if self._graph:
                # Edges stay put when a later in-place operation moves the tensor on.
                tap.edges[name] = [get_gradient_edge(tensors[key]) for key in keys]
        return inputs.replace(value, changed, base)

    def _record(self, value: Any, base: str, tap: Tapped) -> None:
        """Keep a copy of the requested tensors of a value."""
        for name in self._values:
            if name.partition("[")[0] != base:
                continue
            tensors = dict(inputs.leaves(value, base))
            if name == INPUT and len(tensors) > 1:
                tap.values[name] = inputs.side_by_side(value)
                continue
            key = next(iter(tensors)) if name == INPUT else _selected(name, tensors, tap.rows)[0]
            tensor = tensors[key].detach()
            # A copy of a hidden value: the next layer may work in place.
            tap.values[name] = tensor if base in (INPUT, OUTPUT) else tensor.clone()


def _selected(name: str, tensors: dict[str, Tensor], rows: int) -> list[str]:
    """Find which tensors of a module's output, or of the input, a feature name means."""
    if name not in tensors and name != INPUT:
        raise ValueError(
            f"feature {name!r} does not name one tensor; there are: {', '.join(tensors) or 'none'}"
        )
    keys = [name]
    if name not in tensors:
        keys = [key for key, tensor in tensors.items() if tensor.is_floating_point()]
    if not keys:
        kinds = sorted({str(tensor.dtype) for tensor in tensors.values()})
        raise TypeError(f"the input has type {', '.join(kinds)}, which has no gradient")
    for shape in (tuple(tensors[key].shape) for key in keys):
        if shape[:1] != (rows,):
            raise ValueError(
                f"feature {name!r} has shape {shape} for {rows} input rows: its first dimension "
                "must be the rows (a single row is written x[None])"
            )
    return keys


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
        return None, None  # gradients are read before they arrive here


# A scalar that requires a gradient, from which every graph of a pass grows.
_SEED = torch.ones((), requires_grad=True)


# -- calling a model ---------------------------------------------------------------------------


def call(model: nn.Module, x: Any, rows: int) -> Tensor:
    """Call a model on an input and check its output.

    A tuple is spread over positional and a dict over keyword arguments if ``forward`` takes them;
    otherwise the whole object is its one argument.
    """
    try:
        if isinstance(x, Mapping):
            returned = model(**x) if takes_arguments(model, **x) else _with_dict(model, x)
        elif isinstance(x, (tuple, list)) and takes_arguments(model, *x):
            returned = model(*x)
        else:
            returned = model(x)
    except (RuntimeError, IndexError) as error:
        if isinstance(x, Tensor) and x.dim() == 1 and not isinstance(error, MemoryError):
            raise ValueError(
                f"the model cannot take x of shape {tuple(x.shape)} ({error}). A single row is "
                "written x[None], rows of one number each x[:, None]; y comes after x"
            ) from error
        if columns := _advice_on_columns(x, str(error)):
            raise ValueError(columns) from error
        if advice := _advice_on_types(model, x, str(error)):
            raise ValueError(f"the model cannot take this x ({error}): {advice}") from error
        raise
    except AssertionError as error:
        if "Guard failed" not in str(error):
            raise
        raise ValueError(
            f"the exported model does not take {rows} rows of this shape ({error}): export it for "
            "any number of rows (dynamic_shapes, with torch.export.Dim('rows') for dimension 0), "
            "or set batch_size= to what it takes"
        ) from error
    if isinstance(returned, Mapping):
        returned = prediction_in(returned)
    if not isinstance(returned, Tensor):
        raise TypeError(
            f"the model returned {described(returned)}, not a tensor: pass output=, the "
            "key or index of the prediction, or a function that returns it"
        )
    if not returned.is_floating_point():
        raise TypeError(
            f"the model's output has type {returned.dtype}; expected a floating-point "
            "prediction (does forward end in argmax or round?)"
        )
    if returned.dim() == 0 or returned.shape[0] != rows:
        is_flat = isinstance(x, Tensor) and x.dim() == 1
        hint = " (x is 1-D: a single row is written x[None])" if is_flat else ""
        raise ValueError(
            f"the model's output has shape {tuple(returned.shape)} for {rows} input rows: "
            f"its first dimension must be the rows{hint}"
        )
    return returned


def prediction_in(returned: Mapping[str, Any]) -> Any:
    """Return the ``logits`` of a dict, or its only tensor; else the dict.

    >>> prediction_in({"loss": torch.tensor(1.0), "logits": torch.tensor([2.0])})
    tensor([2.])
    """
    tensors = {key: value for key, value in returned.items() if isinstance(value, Tensor)}
    if "logits" in tensors:
        return tensors["logits"]
    return next(iter(tensors.values())) if len(tensors) == 1 else returned


def _advice_on_columns(x: Any, message: str) -> str:
    """Return how many columns are expected, if a matrix product fails on those of the input.

    >>> _advice_on_columns(torch.ones(5, 3), "shapes cannot be multiplied (5x3 and 4x16)")
    'x has 3 columns, the model takes 4: give those it was trained with, in their order'
    """
    sizes = re.search(r"\(\d+x(\d+) and (\d+)x\d+\)", message)
    if sizes is None or not isinstance(x, Tensor) or x.shape[-1] != int(sizes[1]):
        return ""
    advice = "give those it was trained with, in their order"
    return f"x has {sizes[1]} columns, the model takes {sizes[2]}: {advice}"


def _advice_on_types(model: nn.Module, x: Any, message: str) -> str:
    """Return which tensors of an input to convert, if torch complains of their types."""
    is_index = "'indices'" in message  # of an embedding
    if not is_index and not any(words in message for words in _OF_TYPES):
        return ""
    dtypes = [tensor.dtype for tensor in weights_of(model).tensors if tensor.is_floating_point()]
    give = "long()" if is_index else f"to({dtypes[0] if dtypes else torch.get_default_dtype()})"
    wrong = [k for k, tensor in inputs.leaves(x, "x") if tensor.is_floating_point() == is_index]
    return f"give {' or '.join(f'{key}.{give}' for key in wrong)}" if wrong else ""


_OF_TYPES = ("dtype", "datatype", "scalar type", "Input type", "not implemented for")


def _with_dict(model: nn.Module, x: Mapping[str, Any]) -> Any:
    """Pass a dict as one argument, if that can be meant."""
    try:
        parameters = inspect.signature(whole(model).forward).parameters
    except (TypeError, ValueError):
        return model(x)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {n: p for n, p in parameters.items() if p.kind not in variadic}
    missing = [n for n, p in named.items() if p.default is inspect.Parameter.empty and n not in x]
    message = (
        f"the model's forward takes the arguments {', '.join(named)}, and x has the keys "
        f"{', '.join(map(str, x))}: unknown are {[key for key in x if key not in named]}, "
        f"missing {missing}"
    )
    has_known = any(key in named for key in x)
    if len(named) > 1 and (has_known or not takes_arguments(model, x)):
        raise TypeError(message)
    try:
        return model(x)
    except (TypeError, AttributeError) as error:
        if has_known:  # one argument, with the name of a key
            raise TypeError(message) from error
        if len(x) == 1 and isinstance(error, TypeError):
            (key,) = x
            raise TypeError(
                f"the model takes no dict with the key {key!r} ({error}): give its tensor, of a "
                f"loader calibrate((batch[{key!r}], batch['labels']) for batch in loader)"
            ) from error
        raise
