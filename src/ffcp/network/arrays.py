"""Arrays, frames and lists as tensors, and targets in the shape of predictions; or an error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def like_model(leaf: Any, model: nn.Module, weights: Sequence[Tensor], alone: bool) -> Any:
    """Convert an array or tensor to the type and device of the model's first float weight.

    ``alone`` if it is all of the input.
    """
    first = next((tensor for tensor in weights if tensor.is_floating_point()), None)
    if isinstance(leaf, Tensor):
        leaf = target_tensor(leaf, "the input")
        dtype = leaf.dtype
    elif is_arraylike(leaf):
        array = leaf
        leaf = torch.from_numpy(numbers(array, "the input"))
        dtype = leaf.dtype
        is_mask = dtype == torch.bool and not alone and not is_frame(array)
        modules = model.modules()
        has_embedding = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in modules)
        if not (leaf.is_floating_point() or is_mask or has_embedding):
            # Python and numpy count in float64, as does a model without a type of its own.
            dtype = torch.float64 if first is None else first.dtype
        elif dtype in (torch.int8, torch.uint8, torch.int16):  # no indices of an embedding
            dtype = torch.int64
    else:
        return leaf
    if first is not None and leaf.is_floating_point() and all(dtype != t.dtype for t in weights):
        dtype = first.dtype
    device = leaf.device if first is None else first.device
    is_inference = leaf.is_inference()  # and cannot enter a graph
    if not is_inference and leaf.dtype == dtype and leaf.device == device:
        return leaf
    with torch.inference_mode(False):
        return leaf.to(device, dtype, copy=is_inference)


def _why_refused(tensor: Tensor) -> str:
    """Return why a tensor cannot be split into rows of real numbers, and what to give."""
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
            "for example by .astype(float). Words in rows are for ffcp.tables.fit and "
            "ffcp.sklearn, words as labels for ffcp.LAC and RAPS with names=[...], and texts go "
            "through the model's tokenizer first"
        )
    # Types that torch lacks: long double, other byte orders, wide unsigned integers.
    if kind == "f":
        array = array.astype(f"f{min(array.dtype.itemsize, 8)}", copy=False)
    elif kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64 if array.size == 0 or array.max() < 2**63 else np.float64)
    else:
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
    # In row order, so that sums do not depend on the layout; torch takes no negative strides. A
    # read-only array is copied.
    return np.require(array, requirements=("C", "W"))


def is_frame(x: Any) -> bool:
    """Whether this is a table with named columns, as those of pandas and polars."""
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
    """Read one column; missing values of a nullable one are NaN."""
    kind, size = (getattr(series.dtype, name, None) for name in ("kind", "itemsize"))
    if isinstance(series.dtype, np.dtype) or kind is None or kind not in "fiub" or size is None:
        array = np.asarray(series.to_numpy())  # sparse types of pandas have no itemsize
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
    return y.detach() if y.requires_grad else y


def is_arraylike(x: Any) -> bool:
    """Whether something is a tensor, an array, a sparse matrix or a frame, not a numpy scalar."""
    if isinstance(x, np.generic):
        return False
    has_numbers = hasattr(x, "__array__") or hasattr(x, "tocsr")
    return isinstance(x, Tensor) or has_numbers or is_frame(x)


def check_finite(values: Tensor, what: str, first_row: int = 0) -> None:
    """Raise a ValueError naming the first row of ``values`` that holds NaN or infinity."""
    # One sum finds every NaN and infinity in a single fast read; it can also overflow on
    # large finite values, so only the slow check raises.
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
            f"of {len(values)} rows are bad): remove or repair these rows"
        )


def target_like(y: Tensor, prediction: Tensor) -> Tensor:
    """Bring targets to the output's shape.

    (n,) and (n, 1) fit each other, every other mismatch is an error.
    """
    if y.shape == prediction.shape:
        return y
    if y.dim() == 1 and prediction.shape == (len(y), 1):
        return y[:, None]
    if prediction.dim() == 1 and y.shape == (len(prediction), 1):
        return y[:, 0]
    hint = (
        ". For classes use ffcp.LAC, for quantiles CQR, for one column output=lambda out: out[:, 0]"
    )
    raise ValueError(
        f"target has shape {tuple(y.shape)}, model output {tuple(prediction.shape)}: they must be "
        f"equal ((n,) and (n, 1) fit each other){hint if y.shape == prediction.shape[:1] else ''}"
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
