"""Rows in: arrays, tensors, tuples, dicts and loaders become batches the model can take.

An input is a tensor, an array, or a tuple, list or dict of them. All tensors of one input
share their first dimension, the rows. Anything else in it (``None``, a number, a string) is
handed to the model as it is.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

# Large enough that Python's share of a pass is small, small enough for the caches: best of
# 2,048 to 32,768 rows on the paper's network, with and without a graph.
_MAX_ROWS = 8192
_MAX_BYTES = 16 * 2**20
_MAX_IMAGE_BYTES = 2**21


def to_tensors(x: Any, model: nn.Module) -> Any:
    """Turn arrays into tensors on the model's device; arrays of floats take the model's type.

    Tensors keep their type: who builds tensors has chosen it.
    """
    device, dtype = device_and_dtype(model)

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            # A tensor born under inference_mode can never enter a graph; its copy can.
            leaf = leaf.clone() if leaf.is_inference() else leaf
            return leaf.detach().to(device)
        if isinstance(leaf, np.ndarray) or hasattr(leaf, "__array__"):
            return _from_array(np.asarray(leaf), device, dtype)
        return leaf

    if isinstance(x, list) and not any(_is_arraylike(v) for v in x):
        x = np.asarray(x)  # plain nested lists of numbers
    with torch.inference_mode(False):  # or every copy made here were such a tensor again
        return _map(convert, x)


def device_and_dtype(model: nn.Module) -> tuple[torch.device | None, torch.dtype]:
    """Where the model lives and in which float type, read off its first float parameter."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.is_floating_point():
            return tensor.device, tensor.dtype
    return None, torch.get_default_dtype()


def target_tensor(y: Any) -> Tensor:
    """Return the targets as a detached tensor, in their own type and shape."""
    if isinstance(y, Tensor):
        return y.detach()
    array = np.asarray(y)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"targets must be numbers, got an array of {array.dtype}")
    return torch.from_numpy(np.array(array))


def row_count(x: Any) -> int:
    """Count the rows that all tensors of one input share.

    >>> row_count({"image": torch.zeros(5, 3, 8, 8), "age": torch.zeros(5)})
    5
    """
    if isinstance(x, Tensor) and x.dim():
        return x.shape[0]  # the common case, once a batch
    shapes = {key: tuple(t.shape) for key, t in leaves(x)}
    if not shapes:
        raise TypeError(f"the input holds no tensor: got {type(x).__name__}")
    if any(not shape for shape in shapes.values()):
        raise ValueError(f"every input tensor needs a first dimension of rows, got shapes {shapes}")
    if len({shape[0] for shape in shapes.values()}) > 1:
        raise ValueError(f"the input tensors disagree on the number of rows: shapes {shapes}")
    return next(iter(shapes.values()))[0]


def batches(x: Any, batch_size: int | None = None) -> Iterator[Any]:
    """Cut an input into consecutive batches.

    ``None`` picks about 16 MB, at most 8,192 rows; about 2 MB of images, because a network makes
    many times more of them.
    """
    n = row_count(x)
    size = batch_size or default_batch(x, n)
    for start in range(0, n, size):
        yield take(x, slice(start, start + size))


def default_batch(x: Any, n: int) -> int:
    """Say how many rows of an input with n rows make a batch."""
    tensors = [tensor for _, tensor in leaves(x)]
    per_row = sum(t.numel() * t.element_size() for t in tensors) / max(n, 1)
    limit = _MAX_IMAGE_BYTES if any(t.dim() > 3 for t in tensors) else _MAX_BYTES
    return int(max(1, min(_MAX_ROWS, limit // max(per_row, 1.0))))


class RowBuffer:
    """Puts the results of consecutive batches into whole tensors, made once.

    Keeping the small results in a list until the end would leave a hole in the heap beside each
    of them, of the size of a batch's intermediates.

    >>> buffer = RowBuffer(5)
    >>> for part in torch.arange(5).split(2):
    ...     buffer.add({"square": part**2})
    >>> buffer["square"]
    tensor([ 0,  1,  4,  9, 16])
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._filled = 0
        self._whole: dict[str, Tensor] = {}

    def add(self, parts: Mapping[str, Tensor]) -> None:
        """Take the next rows of every tensor."""
        rows = 0
        for name, part in parts.items():
            rows = part.shape[0]
            if name not in self._whole:
                if rows == self._rows:  # all at once
                    self._whole[name] = part
                    continue
                self._whole[name] = part.new_empty((self._rows, *part.shape[1:]))
            self._whole[name][self._filled : self._filled + rows] = part
        self._filled += rows

    def __getitem__(self, name: str) -> Tensor:
        return self._whole[name]


def take(x: Any, rows: slice | Tensor) -> Any:
    """Select rows of every tensor of one input."""
    return _map(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) else leaf, x)


def side_by_side(x: Any) -> Tensor:
    """Lay all numbers of an input side by side in float32, a row for each row.

    >>> side_by_side({"a": torch.zeros(2, 3), "b": torch.ones(2)})
    tensor([[0., 0., 0., 1.],
            [0., 0., 0., 1.]])
    """
    return torch.cat([t.reshape(len(t), -1).float() for _, t in leaves(x)], dim=1)


def pairs(x: Any, y: Any, model: nn.Module) -> Iterator[tuple[Any, Tensor]]:
    """Yield (input, target): arrays whole, or batch after batch from a loader, ``y=None``."""
    if y is not None:
        if not _is_input(x):
            raise TypeError(
                f"calibrate(x, y) takes arrays or tensors, got {type(x).__name__} for x; "
                "a loader that yields (x, y) pairs is passed alone: calibrate(loader)"
            )
        x, y = to_tensors(x, model), target_tensor(y)
        _same_rows(row_count(x), y)
        yield x, y
        return
    if _is_arraylike(x) or isinstance(x, Mapping) or not isinstance(x, Iterable):
        raise TypeError(
            f"got {type(x).__name__} and no targets: "
            "call calibrate(x, y), or calibrate(loader) with a loader of (x, y) pairs"
        )
    for number, item in enumerate(x):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise TypeError(
                f"a loader must yield pairs (x, y); batch {number} is {_describe(item)}. "
                "Wrap it: calibrate((x, y) for ... in loader)"
            )
        batch, target = to_tensors(item[0], model), target_tensor(item[1])
        _same_rows(row_count(batch), target)
        yield batch, target


def _same_rows(rows: int, y: Tensor) -> None:
    if y.dim() == 0 or len(y) != rows:
        raise ValueError(f"x has {rows} rows but the target has shape {tuple(y.shape)}")


def caller(model: nn.Module, x: Any) -> Callable[[Any], Any]:
    """Find how the model takes this kind of input: spread over its arguments, or as one.

    A tuple is spread over positional and a dict over keyword arguments if ``forward`` can
    take them so; otherwise the whole object is its one argument.
    """
    if isinstance(x, Tensor):
        return model
    if isinstance(x, Mapping) and _binds(model, **x):
        return lambda batch: model(**batch)
    if isinstance(x, (tuple, list)) and _binds(model, *x):
        return lambda batch: model(*batch)
    return model


def _binds(model: nn.Module, *args: Any, **kwargs: Any) -> bool:
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def leaves(x: Any, name: str = "input") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of an input or output with its path: ``input[0]``, ``input[mask]``."""
    if isinstance(x, Tensor):
        yield name, x
    elif isinstance(x, Mapping):
        for key, value in x.items():
            yield from leaves(value, f"{name}[{key}]")
    elif isinstance(x, (tuple, list)):
        for index, value in enumerate(x):
            yield from leaves(value, f"{name}[{index}]")


def replace(x: Any, new: Mapping[str, Tensor], name: str = "input") -> Any:
    """Copy the structure of ``x`` with the tensors named in ``new`` exchanged."""
    if isinstance(x, Tensor):
        return new.get(name, x)
    if isinstance(x, Mapping):
        changed = {key: replace(value, new, f"{name}[{key}]") for key, value in x.items()}
        return _like(x, changed)
    if isinstance(x, (tuple, list)):
        return _like(x, [replace(v, new, f"{name}[{i}]") for i, v in enumerate(x)])
    return x


def _map(fn: Callable[[Any], Any], x: Any) -> Any:
    if isinstance(x, Mapping):
        return _like(x, {key: _map(fn, value) for key, value in x.items()})
    if isinstance(x, (tuple, list)):
        return _like(x, [_map(fn, value) for value in x])
    return fn(x)


def _like(x: Any, values: Any) -> Any:
    """Build a container of the type of ``x``: dicts, lists, tuples and named tuples."""
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*values)
    return cast(Any, type(x))(values)


def _from_array(array: np.ndarray, device: torch.device | None, dtype: torch.dtype) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise TypeError(f"the input must be numbers, got an array of {array.dtype}")
    # Copying protects a caller's read-only array; a change of type copies anyway.
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)


def _is_arraylike(x: Any) -> bool:
    return isinstance(x, Tensor) or hasattr(x, "__array__")


def _is_input(x: Any) -> bool:
    return _is_arraylike(x) or isinstance(x, (tuple, list, Mapping))


def _describe(item: Any) -> str:
    if isinstance(item, Mapping):
        return f"a {type(item).__name__} with keys {list(item)}"
    if isinstance(item, (tuple, list)):
        return f"a {type(item).__name__} of length {len(item)}"
    return f"a {type(item).__name__}"
