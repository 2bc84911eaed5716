"""Names of features, and whether a model has them.

A feature is the output of a named module (``"trunk.4"``), one of several tensors that a module
returns (``"lstm[0]"``, ``"encoder[hidden]"``), the whole input (``"input"``), one tensor of it
(``"input[0]"``, ``"input[age]"``) or the model's ``"output"``.
"""

from __future__ import annotations

import difflib

import torch
from torch import fx, nn

from ffcp.network.model import uncompiled
from ffcp.network.model_output import whole

INPUT = "input"
OUTPUT = "output"


def resolve(model: nn.Module, feature: str | nn.Module) -> str:
    """Return the name of a feature, once it is checked that the model has it.

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
    ranked = difflib.get_close_matches(base, names, n=20, cutoff=0.0)
    raise ValueError(
        f"the model has no feature {feature!r}. Names there are, closest first: "
        f"{', '.join([*ranked, INPUT, OUTPUT])}"
    )


def _refuse_opaque(model: nn.Module, name: str) -> None:
    """Raise ValueError for a layer inside a module that runs as one piece, without hooks."""
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
    """Return every submodule by its dotted name; '.input' is a module of that name."""
    named = ((n, m) for n, m in model.named_modules() if n)
    return {f".{n}" if n in (INPUT, OUTPUT) else n: m for n, m in named}
