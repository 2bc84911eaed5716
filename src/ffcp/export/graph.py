"""Conversion of a function of tensors, with its gradients, to an ONNX graph.

``make_fx`` runs the function on tensors without values and records every operation, including
those of the backward pass, so that no autograd is left. ``torch.export`` checks that the graph is
valid for any number of rows, and torch's exporter translates it.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from ffcp.batch import traced
from ffcp.export.backward import BACKWARD

aten = torch.ops.aten
BATCH = "batch"
ROWS = 7  # rows in tracing; stands for any number but 1, which torch specialises on


def onnx_model(
    function: Callable[..., Sequence[Tensor]],
    inputs: Mapping[str, Tensor],
    fixed: Sequence[str],
    outputs: Sequence[str],
    step: Callable[[], object],
) -> Any:
    """Return an ONNX model of a function of tensors.

    Parameters
    ----------
    function : callable
        Takes the inputs in order, and returns the outputs in order.
    inputs : mapping of str to Tensor
        Examples by name, with at least two rows; the number of rows is dynamic. The first input
        has rows.
    fixed : sequence of str
        Inputs without rows.
    outputs : sequence of str
        The names of the outputs.
    step : callable
        Called after each of the three steps.

    Returns
    -------
    onnx.ModelProto
        The model, with these names of inputs and outputs.
    """
    batch = torch.export.Dim(BATCH)
    shapes = tuple(None if name in fixed else {0: batch} for name in inputs)
    # Inputs are renamed at the end: torch's names of operations could be equal to a user's names.
    final_names = {f"input.{i}": name for i, name in enumerate(inputs)}
    with _quiet():
        graph = _traced(function, inputs, fixed)
        step()
        program = torch.export.export(graph, tuple(inputs.values()), dynamic_shapes=shapes)
        step()
        exported = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            input_names=list(final_names),
            output_names=list(outputs),
        )
    step()
    assert exported is not None
    model = exported.model_proto
    _rename(model.graph, {name: f"inner.{name}" for name in inputs} | final_names)
    _name_batch_axis(model.graph)
    return model


def _name_batch_axis(graph: Any) -> None:
    """Call the axis of rows "batch", which torch calls s26, say; the first input has rows."""
    name = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:  # a product of it, perhaps
                size.dim_param = re.sub(rf"\b{re.escape(name)}\b", BATCH, size.dim_param)


def _rename(graph: Any, names: Mapping[str, str]) -> None:
    """Rename the values of an ONNX graph, and of the graphs inside it."""
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            subgraphs = [*attribute.graphs]
            if attribute.HasField("g"):
                subgraphs.append(attribute.g)
            for subgraph in subgraphs:
                _rename(subgraph, names)


def _traced(
    function: Callable[..., Sequence[Tensor]], inputs: Mapping[str, Tensor], fixed: Sequence[str]
) -> fx.GraphModule:
    """Return the traced graph of the function, for any number of rows."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = [_without_values(mode, x, name not in fixed) for name, x in inputs.items()]
    decompositions = {**BACKWARD, aten.sort.stable: _stable_sort}
    tracer = make_fx(function, decompositions, "real", _allow_non_fake_inputs=True)
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        # The fused kernels of attention, recurrent layers and convolutions have no ONNX.
        torch.backends.mha.set_fastpath_enabled(False)
        with (
            traced(),
            mode,
            enable_python_dispatcher(),
            torch.backends.mkldnn.flags(enabled=False),
            sdpa_kernel(SDPBackend.MATH),
        ):
            graph = tracer(*fakes)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    rows: Any = fakes[0].shape[0]
    if not isinstance(rows, torch.SymInt) or rows.node.maybe_as_int() is not None:
        raise ValueError(
            "the model's forward fixes the number of rows, by int(x.shape[0]) or len(x): use "
            "x.shape[0]"
        )
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _without_values(mode: FakeTensorMode, x: Tensor, has_rows: bool) -> Tensor:
    sizes = [DimDynamic.STATIC] * x.dim()
    if has_rows:
        sizes[0] = DimDynamic.DYNAMIC
    return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


@contextlib.contextmanager
def rows_uncounted(model: nn.Module) -> Iterator[None]:
    """Replace ``len`` in the modules of a model's layers, so that it keeps the rows symbolic.

    The built-in ``len`` returns a plain number. The replacement returns ``x.shape[0]`` of tensors,
    which is the same for tensors with values.
    """

    def length(x: Any) -> Any:
        return x.shape[0] if isinstance(x, Tensor) and x.dim() else builtins.len(x)

    classes = {cls for layer in model.modules() for cls in type(layer).__mro__}
    modules = {cls.__module__ for cls in classes if not cls.__module__.startswith("torch.")}
    namespaces = [vars(sys.modules[name]) for name in (modules - {"builtins"}) & set(sys.modules)]
    namespaces = [names for names in namespaces if "len" not in names]
    for names in namespaces:
        names["len"] = length
    try:
        yield
    finally:
        for names in namespaces:
            del names["len"]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's internal log messages and warnings."""
    loggers = [logging.getLogger(f"torch.{name}") for name in ("onnx", "_subclasses.fake_tensor")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)  # errors are raised anyway
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _stable_sort(
    x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Any:
    """Sort by the default operation: every sort of ONNX is stable, the lower index first."""
    return aten.sort.default(x, dim, descending)
