"""Rows in: arrays, tensors, tuples, dicts and loaders become batches the model can take.

An input is a tensor, an array, or a tuple, list or dict of them. All tensors of one input
share their first dimension, the rows. Anything else in it (``None``, a number, a string) is
handed to the model as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from ffcp.network.arrays import (
    ModelType,
    from_list,
    is_arraylike,
    is_frame,
    target_tensor,
)
from ffcp.network.frozen import Stamp
from ffcp.network.model_output import whole

# Large enough that Python's share of a pass is small, small enough for the caches: best of
# 2,048 to 32,768 rows on the paper's network, with and without a graph.
_MAX_ROWS = 8192
_MAX_BYTES = 16 * 2**20
_MAX_IMAGE_BYTES = 2**21


def to_tensors(x: Any, model: nn.Module, now: Stamp | None = None) -> Any:
    """Turn arrays, frames and lists into tensors on the model's device and of its float type.

    The model's type is that of its first float parameter or buffer. A float tensor of a type that
    no parameter of the model has is converted too. A model without any keeps what it is given:
    float64 stays float64.

    Arrays, frames and lists of integers or booleans become floats as well, unless the model has
    an embedding (``nn.Embedding``): then they stay integers, as indices must. Inside a tuple or
    dict an array of booleans is a mask, and stays one. Tensors of integers and booleans are never
    changed: who builds tensors has chosen their type. In a dict a list of numbers counts as an
    array if it has a number, or a list of them, for each row.

    Columns of a frame may be nullable: what is missing there is NaN. Masked arrays, complex,
    sparse and quantized tensors, and columns of strings or objects are refused.

    ``now`` is the model's stamp, if it is known.

    >>> to_tensors([[1, 2], [3, 4]], nn.Linear(2, 1)).dtype
    torch.float32
    >>> to_tensors([[1, 2], [3, 4]], nn.Embedding(5, 1)).dtype
    torch.int64
    """
    target = ModelType.of(model, now)
    if isinstance(x, (Tensor, np.ndarray)) and not torch.is_inference_mode_enabled():
        return target.convert(x, alone=True)  # the common case, once a call
    if isinstance(x, list) and not any(is_arraylike(v) for v in x):
        x = from_list(x)
    if isinstance(x, Mapping):
        x = _with_lists_read(x)
    alone = not isinstance(x, (Mapping, tuple, list))
    with torch.inference_mode(False):  # or every copy made here were such a tensor again
        return _map(lambda leaf: target.convert(leaf, alone), x)


def _with_lists_read(x: Mapping[Any, Any]) -> Any:
    """Read the lists of a dict that hold numbers for every row."""
    rows = {len(value) for value in x.values() if is_arraylike(value) and np.ndim(value)}

    def read(value: Any) -> Any:
        if not isinstance(value, list) or (rows and len(value) not in rows):
            return value
        if not value or any(map(is_arraylike, value)):
            return value
        try:
            array = np.asarray(value)
        except ValueError:  # of different lengths
            return value
        return array if array.dtype.kind in "fiub" else value

    if not any(isinstance(value, list) for value in x.values()):
        return x
    return _like(x, {key: read(value) for key, value in x.items()})


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
    rows = next(iter(shapes.values()))[0]
    if any(shape[0] != rows for shape in shapes.values()):
        raise ValueError(f"the input tensors disagree on the number of rows: shapes {shapes}")
    return rows


def batches(x: Any, batch_size: int | None = None) -> Iterator[Any]:
    """Cut an input into consecutive batches; ``None`` picks the :func:`usual_batch`."""
    n = row_count(x)
    size = batch_size or (1 if n == 1 else usual_batch(x))
    if 0 < n <= size:
        yield x
        return
    for start in range(0, n, size):
        yield take(x, slice(start, start + size))


def usual_batch(x: Any) -> int:
    """Say how many rows like those of an input make a batch, if there are as many.

    About 16 MB, at most 8,192 rows; about 2 MB of images, because a network makes many times more
    of them.

    >>> usual_batch(torch.zeros(2, 3)), usual_batch(torch.zeros(2, 3, 224, 224))
    (8192, 3)
    """
    tensors = [tensor for _, tensor in leaves(x)]
    per_row = sum(t.numel() * t.element_size() for t in tensors) / max(row_count(x), 1)
    limit = _MAX_IMAGE_BYTES if any(t.dim() > 3 for t in tensors) else _MAX_BYTES
    return int(max(1, min(_MAX_ROWS, limit // max(per_row, 1.0))))


def take(x: Any, rows: slice | Tensor) -> Any:
    """Select rows of every tensor of one input."""
    return _map(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) else leaf, x)


def join(parts: Sequence[Any]) -> Any:
    """Put the rows of several inputs of one kind below each other."""
    tensors = [dict(leaves(part)) for part in parts]
    whole = {name: torch.cat([part[name] for part in tensors]) for name in tensors[0]}
    return replace(parts[0], whole)


def side_by_side(x: Any) -> Tensor:
    """Lay all numbers of an input side by side in float32, a row for each row.

    >>> side_by_side({"a": torch.zeros(2, 3), "b": torch.ones(2)})
    tensor([[0., 0., 0., 1.],
            [0., 0., 0., 1.]])
    """
    return torch.cat([t.reshape(len(t), -1).float() for _, t in leaves(x)], dim=1)


class Reader:
    """Reads inputs as a model takes them, all of them alike.

    What the first input is like is remembered in ``layout``: frames that come later have their
    columns put in the order of the first one, or are refused if their columns are others. So is
    the shape of the first targets, which predictions take.

    >>> read = Reader(nn.Linear(4, 1))
    >>> read(np.zeros((3, 4))).dtype
    torch.float32
    >>> read.layout
    {'x': {'row': [4]}}
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Mapping[str, Any] | None = None,
        now: Stamp | None = None,
    ) -> None:
        self.model, self._now = model, now
        self.layout: dict[str, Any] = dict(layout or {})

    def __call__(self, x: Any) -> Any:
        """Read one input."""
        columns: dict[str, list[str | int]] = {}
        if not isinstance(x, (Tensor, np.ndarray)):
            columns = dict(_frames(x, "x"))
            known = {key: self.layout[key].get("columns") for key in columns if key in self.layout}
            x = _in_order(x, known, "x")
        tensors = to_tensors(x, self.model, self._now)
        parts = [("x", tensors)] if isinstance(tensors, Tensor) else leaves(tensors, "x")
        for key, tensor in parts:
            if key in self.layout:
                _refuse_single_row(key, tensor, self.layout[key]["row"])
                continue
            self.layout[key] = {"row": list(tensor.shape[1:])}
            if key in columns:
                self.layout[key]["columns"] = columns[key]
        return tensors

    def note_target(self, y: Tensor) -> None:
        """Remember what the first targets are like; later ones may be (n,) for (n, 1)."""
        self.layout.setdefault("y", {"row": list(y.shape[1:])})


def _frames(x: Any, name: str) -> Iterator[tuple[str, list[str | int]]]:
    """Yield the columns of every frame of an input."""
    if is_frame(x):
        yield name, [_label(column) for column in x.columns]
    elif isinstance(x, Mapping):
        for key, value in x.items():
            yield from _frames(value, f"{name}[{key}]")
    elif isinstance(x, (tuple, list)):
        for index, value in enumerate(x):
            yield from _frames(value, f"{name}[{index}]")


def _label(column: Any) -> str | int:
    """Give the name of a column as a file can hold it."""
    return int(column) if isinstance(column, (int, np.integer)) else str(column)


def _in_order(x: Any, known: Mapping[str, Any], name: str) -> Any:
    """Put the columns of every frame in the order there was before."""
    if is_frame(x):
        return _ordered(x, known[name], name) if known.get(name) else x
    if isinstance(x, Mapping):
        return _like(x, {k: _in_order(v, known, f"{name}[{k}]") for k, v in x.items()})
    if isinstance(x, (tuple, list)) and known:
        return _like(x, [_in_order(v, known, f"{name}[{i}]") for i, v in enumerate(x)])
    return x


def _ordered(frame: Any, columns: list[str | int], name: str) -> Any:
    own = {_label(column): column for column in frame.columns}
    if list(own) == columns:
        return frame
    missing = [column for column in columns if column not in own]
    unknown = [column for column in own if column not in columns]
    if missing or unknown:
        wrong = [f"lacks {', '.join(map(repr, missing))}"] if missing else []
        wrong += [f"has also {', '.join(map(repr, unknown))}"] if unknown else []
        raise ValueError(
            f"{name} has other columns than the calibration: it {' and '.join(wrong)}. Give the "
            f"columns {columns}, in any order"
        )
    return frame[[own[column] for column in columns]]


def _refuse_single_row(name: str, tensor: Tensor, row: list[int]) -> None:
    if tensor.dim() == 1 and len(row) == 1 and len(tensor) == row[0] > 1:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, and every row of the calibration had: for a "
            f"single row write {name}[None]"
        )


class Rows:
    """Rows to predict: one input, or a loader of inputs that is read batch after batch.

    ``count`` is the number of rows, of a loader only when it has come to its end.
    """

    def __init__(self, x: Any, read: Reader) -> None:
        self._x, self._read = x, read
        self.whole: Any = None
        self.count: int | None = None
        if not is_loader(x):
            self.whole = read(x)
            self.count = row_count(self.whole)

    def __iter__(self) -> Iterator[Any]:
        """Yield inputs as the model takes them."""
        if self.count is not None:
            yield self.whole
            return
        count = 0
        for item in items(self._x):
            batch = self._read(_without_target(item, self._read.model))
            count += row_count(batch)
            yield batch
        self.count = count


def is_loader(x: Any) -> bool:
    """Say whether this yields batches: a DataLoader, a generator, any other stream."""
    known = (Tensor, np.ndarray, Mapping, tuple, list, str, bytes)
    if isinstance(x, known) or is_arraylike(x):
        return False
    return isinstance(x, Iterable)


def _without_target(item: Any, model: nn.Module) -> Any:
    """Take x of a pair (x, y), where the model says that it must be one."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        return item
    fewest, most = _positional(model)
    if isinstance(item[0], (tuple, list, Mapping)) or most == 1:
        return item[0]
    if fewest >= 2:
        return item
    raise TypeError(
        "the loader yields pairs, and the model's forward takes one argument or two, so they may "
        "be (x, y) or two inputs: say which, by a generator such as (x for x, y in loader) or "
        "({'a': a, 'b': b} for a, b in loader)"
    )


def _positional(model: nn.Module) -> tuple[int, float]:
    """Give the smallest and largest number of positional arguments of forward."""
    kinds = inspect.Parameter
    try:
        parameters = inspect.signature(whole(model).forward).parameters.values()
    except (TypeError, ValueError):
        return 1, 1
    plain = [
        p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    endless = any(p.kind == kinds.VAR_POSITIONAL for p in parameters)
    return sum(p.default is kinds.empty for p in plain), float("inf") if endless else len(plain)


def items(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a loader; refuse one that yields the same in every worker."""
    workers = 0
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        workers = loader.num_workers
    first: Any = None
    for number, item in enumerate(loader):
        if number == 0 and workers > 1:
            first = item
        elif number < workers and _is_same(first, item):
            raise ValueError(
                f"batch {number} of the loader is batch 0 again: the IterableDataset yields all "
                f"of its rows in each of {workers} workers, and points would count several times. "
                "Divide them in its __iter__ by torch.utils.data.get_worker_info(), or set "
                "num_workers to 0 or 1"
            )
        yield item


def _is_same(one: Any, other: Any) -> bool:
    mine, theirs = list(leaves(one)), list(leaves(other))
    return len(mine) == len(theirs) > 0 and all(
        a.shape == b.shape and a.dtype == b.dtype and a.equal(b)
        for (_, a), (_, b) in zip(mine, theirs, strict=True)
    )


def pairs(
    x: Any, y: Any, read: Reader, target: Callable[[Any], Tensor] = target_tensor, call: str = ""
) -> Iterator[tuple[Any, Tensor]]:
    """Yield (input, target): arrays whole, or batch after batch from a loader, ``y=None``.

    ``target`` reads targets; ``call`` is the name of the method that errors speak of.
    """
    call = call or "calibrate"
    if y is not None:
        if not _is_input(x):
            raise TypeError(
                f"{call}(x, y) takes arrays or tensors, got {type(x).__name__} for x; "
                f"a loader that yields (x, y) pairs is passed alone: {call}(loader)"
            )
        x, y = read(x), target(y)
        _same_rows(x, y)
        read.note_target(y)
        yield x, y
        return
    if is_arraylike(x) or isinstance(x, Mapping) or not isinstance(x, Iterable):
        raise TypeError(
            f"got {type(x).__name__} and no targets: "
            f"call {call}(x, y), or {call}(loader) with a loader of (x, y) pairs"
        )
    for number, item in enumerate(items(x)):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise TypeError(
                f"a loader must yield pairs (x, y); batch {number} is {_describe(item)}. "
                f"Wrap it: {call}((x, y) for ... in loader)"
            )
        batch, labels = read(item[0]), target(item[1])
        _same_rows(batch, labels)
        read.note_target(labels)
        yield batch, labels


def _same_rows(x: Any, y: Tensor) -> None:
    rows = row_count(x)
    if y.dim() == 0 or y.shape[0] != rows:
        is_flat = isinstance(x, Tensor) and x.dim() == 1 and y.numel() == 1
        hint = ": for a single row write x[None]" if is_flat else ""
        if isinstance(x, list) and y.dim() and len(x) == len(y):
            hint = ": a list of tensors is an input of several parts; of rows, give torch.stack(x)"
        raise ValueError(f"x has {rows} rows but the target has shape {tuple(y.shape)}{hint}")


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


def _is_input(x: Any) -> bool:
    return is_arraylike(x) or isinstance(x, (tuple, list, Mapping))


def _describe(item: Any) -> str:
    if isinstance(item, Mapping):
        return f"a {type(item).__name__} with keys {list(item)}"
    if isinstance(item, (tuple, list)):
        return f"a {type(item).__name__} of length {len(item)}"
    return f"a {type(item).__name__}"
