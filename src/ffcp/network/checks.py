"""What is wrong with an input or a model, said before the work starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter


def refuse_unusable(model: nn.Module) -> None:
    """Refuse models whose weights are not all here: not made yet, or divided over processes.

    >>> refuse_unusable(nn.LazyLinear(3))
    Traceback (most recent call last):
    ValueError: the model has layers without weights yet (LazyLinear): run it once on some rows
    """
    for module in model.modules():
        # By names: the parts of torch that define them are slow to import, and may be missing.
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
            raise ValueError(
                "the weights of the model are divided over processes (FSDP): gather them into a "
                "plain model, and give that"
            )
        own = [*module._parameters.values(), *module._buffers.values()]
        if any(isinstance(tensor, UninitializedParameter | UninitializedBuffer) for tensor in own):
            raise ValueError(
                f"the model has layers without weights yet ({type(module).__name__}): run it once "
                "on some rows"
            )
        if isinstance(module, fx.GraphModule) and hasattr(module, "range_constraints"):
            given = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
            sizes = [value.shape[0] for value in given if isinstance(value, Tensor) and value.dim()]
            if any(isinstance(size, int) for size in sizes):
                raise ValueError(
                    f"the model was exported for exactly {sizes[0]} rows at a time: export it for "
                    "any number of them, with torch.export.Dim('rows') for dimension 0 in "
                    "dynamic_shapes, or give the original module"
                )


def finite(values: Tensor, what: str, first_row: int = 0) -> None:
    """Raise a ValueError naming the first row of ``values`` that holds NaN or infinity."""
    # One sum finds every NaN and infinity in a single fast read; it can also overflow on
    # large finite values, so only the slow look may complain.
    values = values.detach() if values.requires_grad else values
    if not values.is_floating_point() or math.isfinite(values.sum().item()):
        return
    bad = ~torch.isfinite(values).reshape(len(values), -1).all(dim=1)
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        shown = values[row].reshape(-1)
        value = shown[~torch.isfinite(shown)][0].item()
        raise ValueError(
            f"{what} holds {value} in row {first_row + row} (rows count from 0; {int(bad.sum())} "
            f"of {len(values)} rows are bad): remove or repair such rows"
        )


def target(y: Tensor, prediction: Tensor) -> Tensor:
    """Bring targets to the output's shape.

    (n,) and (n, 1) fit each other, every other mismatch is an error.
    """
    if y.shape == prediction.shape:
        return y
    if y.dim() == 1 and prediction.shape == (len(y), 1):
        return y[:, None]
    if prediction.dim() == 1 and y.shape == (len(prediction), 1):
        return y[:, 0]
    raise ValueError(
        f"target has shape {tuple(y.shape)}, model output {tuple(prediction.shape)}: "
        "they must be equal (shapes (n,) and (n, 1) fit each other)"
    )


def like_target(values: Tensor, layout: Mapping[str, Any]) -> Tensor:
    """Return predictions in the shape of the targets that a layout remembers.

    Only (n,) and (n, 1) can differ.

    >>> like_target(torch.zeros(3, 1), {"y": {"row": []}}).shape
    torch.Size([3])
    """
    row = layout["y"]["row"] if "y" in layout else None
    if row == [] and values.dim() == 2 and values.shape[1] == 1:
        return values.squeeze(1)
    return values[:, None] if row == [1] and values.dim() == 1 else values
