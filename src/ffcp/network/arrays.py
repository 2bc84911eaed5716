"""Arrays, frames and lists become tensors of the model's type, or are refused in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def like_model(leaf: Any, model: nn.Module, weights: Sequence[Tensor], alone: bool) -> Any:
    """Convert an array or tensor to the type and device of the model's first float weight.

    ``alone`` if it is all of the input.
    """
    floats = [tensor for tensor in weights if tensor.is_floating_point()]
    device, dtype = (floats[0].device, floats[0].dtype) if floats else (None, None)
    if not isinstance(leaf, Tensor):
        if not is_arraylike(leaf):
            return leaf
        tensor = torch.from_numpy(numbers(leaf, "the input"))
        is_mask = tensor.dtype == torch.bool and not alone and not is_frame(leaf)
        modules = model.modules()
        has_embedding = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in modules)
        if not (tensor.is_floating_point() or is_mask or has_embedding):
            # Python and numpy count in float64, as does a model without a type of its own.
            return tensor.to(device, dtype or torch.float64)
        # Indices of an embedding are of these types alone.
        is_small = tensor.dtype in (torch.int8, torch.uint8, torch.int16)
        leaf = tensor.long() if is_small else tensor
    leaf = target_tensor(leaf, "the input")
    if leaf.is_inference():  # born under inference_mode it can never enter a graph
        leaf = leaf.clone()
    if leaf.is_floating_point() and floats and all(leaf.dtype != t.dtype for t in floats):
        return leaf.to(device, dtype)
    return leaf if leaf.device == device else leaf.to(device)


def _why_refused(tensor: Tensor) -> str:
    """Return why a tensor cannot be cut into rows of real numbers, and what to give."""
    if tensor.is_complex():
        return (
            f"complex ({tensor.dtype}): give its real and imaginary part side by side, as "
            "torch.view_as_real does"
        )
    if tensor.is_meta:
        return "on the device 'meta' and holds no numbers: give one that does"
    if tensor.is_quantized:
        return f"quantized ({tensor.dtype}): give x.dequantize()"
    if tensor.is_nested:
        return "a tensor of layout nested: give a padded tensor"
    return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}: give x.to_dense()"


def numbers(values: Any, what: str) -> np.ndarray:
    """Read an array, a series or a frame as an array of numbers that torch can take.

    >>> numbers(np.arange(3, dtype=">i2")[::-1], "x")
    array([2, 1, 0], dtype=int16)
    """
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(
            f"{what} is a masked array, and a model cannot see the mask: fill it, for example "
            "with x.filled(0), or leave out rows with masked values"
        )
    if hasattr(values, "tocsr"):
        raise TypeError(f"{what} is a sparse matrix: give x.toarray()")
    if is_frame(values):
        array = _frame_numbers(values, what)
    elif hasattr(values, "to_numpy"):
        array = _column(values, what, "")
    else:
        array = np.asarray(values)
    kind = array.dtype.kind
    if kind not in "fiub":
        raise TypeError(
            f"{what} must be numbers, got an array of {array.dtype}: encode it as real numbers, "
            "for example by x.astype(float). Words in rows are for ffcp.tables.fit and "
            "ffcp.sklearn, words as labels for ffcp.LAC and RAPS with names=[...]"
        )
    # No type of torch: long double, numbers of another byte order, unsigned ones that are wide.
    if kind == "f":
        array = array.astype(f"f{min(array.dtype.itemsize, 8)}", copy=False)
    elif kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64 if array.size == 0 or array.max() < 2**63 else np.float64)
    else:
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
    # Row by row, for the same numbers to the last bit; torch cannot step backwards, either.
    # Copying protects a caller's read-only array.
    return np.require(array, requirements=("C", "W"))


def is_frame(x: Any) -> bool:
    """Say whether this is a table with named columns, as those of pandas and polars."""
    return hasattr(x, "columns") and hasattr(x, "to_numpy")


def _frame_numbers(frame: Any, what: str) -> np.ndarray:
    names = list(frame.columns)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{what} has several columns named {twice!r}: give each its own name")
    if not names:
        return np.empty((len(frame), 0))
    return np.stack([_column(frame[name], what, f" in column {name!r}") for name in names], axis=1)


def _column(series: Any, what: str, where: str) -> np.ndarray:
    """Read one column; what is missing in a nullable one is NaN."""
    kind, size = (getattr(series.dtype, name, None) for name in ("kind", "itemsize"))
    if isinstance(series.dtype, np.dtype) or kind is None or kind not in "fiub" or size is None:
        array = np.asarray(series.to_numpy())  # those of pandas that are sparse have no size
    elif bool(series.isna().any()):
        array = np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan))
    else:
        array = np.asarray(series.to_numpy(dtype=np.dtype(f"{kind}{size}")))
    if array.dtype.kind not in "fiub":
        raise TypeError(
            f"{what} must be numbers, got {series.dtype}{where}: encode it as numbers, or leave "
            "it out; ffcp.tables.fit and ffcp.sklearn take frames with words as they are"
        )
    return array


def from_list(x: list[Any]) -> np.ndarray:
    """Read rows of numbers given as lists."""
    try:
        return np.asarray(x)
    except ValueError as error:
        raise ValueError(
            "the input is a list whose rows have different lengths: every row needs the same "
            "numbers of values"
        ) from error


def target_tensor(y: Any, what: str = "y") -> Tensor:
    """Return the targets as a detached tensor, in their own type and shape.

    >>> target_tensor([1.5, 2.0])
    tensor([1.5000, 2.0000], dtype=torch.float64)
    """
    if not isinstance(y, Tensor):
        return torch.from_numpy(numbers(y if is_arraylike(y) else np.asarray(y), what))
    is_odd = y.is_complex() or y.is_meta or y.is_quantized
    if is_odd or y.is_nested or y.layout != torch.strided:
        raise TypeError(f"{what} is {_why_refused(y)}")
    return y.detach()


def is_arraylike(x: Any) -> bool:
    """Say whether something is a tensor, an array or a frame; a number of numpy's is none."""
    if isinstance(x, np.generic):
        return False
    return isinstance(x, Tensor) or hasattr(x, "__array__") or is_frame(x)
