"""Features to choose from: layers spread over the depth of a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ffcp.network import inputs
from ffcp.network.cut import Cut, NoGradientError, call, undisturbed
from ffcp.network.features import INPUT, module_names
from ffcp.network.model import OWN_HOOK, borrowed, uncompiled


def candidates(model: nn.Module, x: Any, limit: int = 8, sample: int = 8) -> list[str]:
    """Name at most ``limit`` features spread over the depth, in the order of the forward pass.

    Only tensors that a gradient can reach count: modules called exactly once, with
    floating-point output that has a row for each input row and influences the prediction.
    """
    x = inputs.take(x, slice(0, sample))
    with borrowed(uncompiled(model)) as frozen:
        names = _distinct_features(frozen, x)
        if all(tensor.is_floating_point() for _, tensor in inputs.leaves(x)):
            names = [INPUT, *names]
        try:
            with Cut(frozen, names) as cut:
                tap = cut(x)
                arrivals = [tap.edges[name][0] for name in names]
                gradients = torch.autograd.grad(tap.prediction.sum(), arrivals, allow_unused=True)
        except NoGradientError:  # only plain CP is left
            return []
    names = [name for name, gradient in zip(names, gradients, strict=True) if gradient is not None]
    spread = torch.linspace(0, len(names) - 1, min(limit, len(names))).round().long()
    return [names[index] for index in spread.tolist()]


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

        setattr(record, OWN_HOOK, True)
        return record

    with undisturbed(model), ExitStack() as stack:
        for name, module in module_names(model).items():
            if not isinstance(module, torch.jit.ScriptModule):  # those refuse hooks
                stack.callback(module.register_forward_hook(watch(name)).remove)
        prediction = call(model, x, rows)
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
