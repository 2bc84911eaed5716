"""Turn arrays, tensors, tuples, dicts and loaders into batches that the model takes.

An input is a tensor, an array, or a tuple, list or dict of them. All tensors of one input
share their first dimension, the rows. Anything else in it (``None``, a number, a string) is
passed to the model unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ffcp.network.arrays import from_list, is_arraylike, is_frame, like_model, target_tensor
from ffcp.network.model import Weights, weights_of
from ffcp.network.model_output import described, takes_arguments

# Large enough that Python's overhead is small, small enough for the caches: best of
# 2,048 to 32,768 rows on the paper's network, with and without a graph.
_MAX_ROWS = 8192
_MAX_BYTES = 16 * 2**20
_MAX_IMAGE_BYTES = 2**21
_DATASET_ROWS = 256  # of a Dataset, in one batch
LABELS = ("labels", "label")  # keys of the target in batches that are dicts, as of Hugging Face


def to_tensors(x: Any, model: nn.Module, now: Weights | None = None) -> Any:
    """Turn arrays, frames and lists into tensors on the model's device and of its float type.

    The model's type is that of its first float parameter or buffer. A float tensor of a type that
    no parameter of the model has is converted too. A model without any keeps what it is given:
    float64 stays float64.

    Arrays, frames and lists of integers or booleans become floats as well, unless the model has
    an embedding (``nn.Embedding``): then they stay integers, as indices must. Inside a tuple or
    dict an array of booleans is a mask, and stays one. Tensors of integers and booleans are never
    changed: the user has chosen their type. In a dict a list of numbers counts as an
    array if it has a number, or a list of them, for each row.

    Columns of a frame may be nullable: what is missing there is NaN. Masked arrays, complex,
    sparse and quantized tensors, and columns of strings or objects are refused. ``now`` are the
    model's weights, if they were just read.

    >>> to_tensors([[1, 2], [3, 4]], nn.Linear(2, 1)).dtype
    torch.float32
    >>> to_tensors([[1, 2], [3, 4]], nn.Embedding(5, 1)).dtype
    torch.int64
    """
    weights = (now or weights_of(model)).tensors
    if isinstance(x, list) and not any(map(is_arraylike, x)):
        x = from_list(x)
    if isinstance(x, Mapping) and any(isinstance(value, list) for value in x.values()):
        x = _with_lists_read(x)
    alone = not isinstance(x, (Mapping, tuple, list))
    if alone:
        return like_model(x, model, weights, alone)
    return _map(lambda leaf, name: like_model(leaf, model, weights, alone), x)


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

    return _like(x, {key: read(value) for key, value in x.items()})


def row_count(x: Any) -> int:
    """Return the number of rows, which all tensors of one input share.

    >>> row_count({"image": torch.zeros(5, 3, 8, 8), "age": torch.zeros(5)})
    5
    """
    if isinstance(x, Tensor) and x.dim():
        return x.shape[0]  # the common case, once a batch
    shapes = {key: tuple(t.shape) for key, t in leaves(x)}
    if not shapes:
        raise TypeError(f"expected tensors or arrays, got {described(x)}: tokenize texts first")
    if any(not shape for shape in shapes.values()):
        raise ValueError(f"every input tensor needs a first dimension of rows, got shapes {shapes}")
    rows = next(iter(shapes.values()))[0]
    if any(shape[0] != rows for shape in shapes.values()):
        raise ValueError(f"the input tensors disagree on the number of rows: shapes {shapes}")
    return rows


def batches(x: Any, batch_size: int | None = None) -> Iterable[Any]:
    """Split an input into consecutive batches; ``None`` is :func:`usual_batch`."""
    n = row_count(x)
    size = batch_size or (1 if n == 1 else usual_batch(x))
    if 0 < n <= size:
        return [x]
    return (take(x, slice(start, start + size)) for start in range(0, n, size))


def usual_batch(x: Any) -> int:
    """Return the default number of rows of a batch for rows like these.

    About 16 MB, at most 8,192 rows; about 2 MB of images, because a network makes many times more
    of them.

    >>> usual_batch(torch.zeros(2, 3)), usual_batch(torch.zeros(2, 3, 224, 224))
    (8192, 3)
    """
    tensors = [tensor for _, tensor in leaves(x)]
    per_row = sum(t.numel() * t.element_size() for t in tensors) / max(len(tensors[0]), 1)
    limit = _MAX_IMAGE_BYTES if any(t.dim() > 3 for t in tensors) else _MAX_BYTES
    return int(max(1, min(_MAX_ROWS, limit // max(per_row, 1.0))))


def take(x: Any, rows: slice | Tensor) -> Any:
    """Select rows of every tensor of one input."""
    if isinstance(x, Tensor):
        return x[rows]
    return _map(lambda leaf, name: leaf[rows] if isinstance(leaf, Tensor) else leaf, x)


def join(parts: Sequence[Any]) -> Any:
    """Concatenate the rows of several inputs of one structure."""
    tensors = [dict(leaves(part)) for part in parts]
    whole = {name: torch.cat([part[name] for part in tensors]) for name in tensors[0]}
    return replace(parts[0], whole)


def side_by_side(x: Any) -> Tensor:
    """Concatenate all numbers of each row of an input, in float32.

    >>> side_by_side({"a": torch.zeros(2, 3), "b": torch.ones(2)})
    tensor([[0., 0., 0., 1.],
            [0., 0., 0., 1.]])
    """
    return torch.cat([t.reshape(len(t), -1).float() for _, t in leaves(x)], dim=1)


class Reader:
    """Converts all inputs in the same way to tensors that the model takes.

    The layout of the first input is kept in ``layout``: later frames have their columns put in
    its order, or are refused if their columns differ. So is the shape of the first targets, which
    predictions take.

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
        now: Weights | None = None,
    ) -> None:
        self.model, self._now = model, now  # its weights, if they were just read
        self.layout: dict[str, Any] = dict(layout or {})

    def __call__(self, x: Any) -> Any:
        """Read one input."""
        columns: dict[str, list[str | int]] = {}
        if not isinstance(x, (Tensor, np.ndarray)):
            x = _map(lambda leaf, name: self._in_order(leaf, name, columns), x, "x")
        tensors = to_tensors(x, self.model, self._now)
        for key, tensor in leaves(tensors, "x"):
            if key not in self.layout:
                self.layout[key] = {"row": list(tensor.shape[1:])}
                if key in columns:
                    self.layout[key]["columns"] = columns[key]
            elif tensor.dim() == 1 and self.layout[key]["row"] == [len(tensor)] != [1]:
                raise ValueError(
                    f"{key} has shape {tuple(tensor.shape)}, as one row of the calibration had: "
                    f"for a single row write {key}[None]"
                )
        return tensors

    def _in_order(self, leaf: Any, name: str, columns: dict[str, list[str | int]]) -> Any:
        """Record the columns of a frame, and put them in the order of the layout."""
        if not is_frame(leaf):
            return leaf
        labels = {int(c) if isinstance(c, (int, np.integer)) else str(c): c for c in leaf.columns}
        columns[name] = list(labels)
        expected = self.layout.get(name, {}).get("columns", columns[name])
        missing = [column for column in expected if column not in labels]
        unknown = [column for column in labels if column not in expected]
        if missing or unknown:
            raise ValueError(
                f"{name} has other columns than the calibration: missing {missing or 'none'}, "
                f"unknown {unknown or 'none'}. Give the columns {expected}, in any order"
            )
        return leaf if expected == columns[name] else leaf[[labels[column] for column in expected]]


class Rows:
    """Rows to predict, in batches that the model takes at once: of one input, or of a loader.

    ``whole`` is the input, ``None`` for a loader. ``count`` is the number of rows, for a loader
    only once it is exhausted. ``at_once`` returns the batch size for an input, or ``None`` for the
    default.
    """

    def __init__(
        self, x: Any, read: Reader, at_once: Callable[[Any], int | None], name: str = "x"
    ) -> None:
        self._x, self._read, self._at_once, self._name = x, read, at_once, name
        self.whole: Any = None if is_loader(x) else read(x)
        self.count = None if is_loader(x) else row_count(self.whole)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches that the model takes."""
        if self.count is not None:
            yield from batches(self.whole, self._at_once(self.whole))
        else:
            count = 0
            for item in items(self._x):
                x = self._read(_without_target(item, self._read.model))
                yield from batches(x, self._at_once(x))
                count += row_count(x)
            self.count = count
        if not self.count:
            raise ValueError(f"{self._name} has no rows")


def is_loader(x: Any) -> bool:
    """Whether this yields batches: a DataLoader, a Dataset, a generator, any other stream."""
    if isinstance(x, (Tensor, np.ndarray)):
        return False
    if _is_dataset(x):
        return True
    is_input = isinstance(x, (Mapping, tuple, list, str, bytes)) or is_arraylike(x)
    return isinstance(x, Iterable) and not is_input


def _is_dataset(x: Any) -> bool:
    """Whether rows can be looked up by number: a Dataset of torch, or one of Hugging Face."""
    is_of_torch = isinstance(x, Dataset) and not isinstance(x, IterableDataset)
    return is_of_torch or (hasattr(x, "with_format") and hasattr(x, "__getitem__"))


def expected_rows(x: Any, y: Any) -> int | None:
    """Return how many rows there will be, as far as it can be known before they are read."""
    rows: Any = y if y is not None else x if _is_dataset(x) else getattr(x, "dataset", None)
    try:
        return len(rows)
    except TypeError:  # a stream
        return None


def _without_target(item: Any, model: nn.Module) -> Any:
    """Return x of a pair (x, y), if the model's forward shows that it is one, or of a dict."""
    if isinstance(item, Mapping) and any(key in item for key in LABELS):
        return _divided(item, model)[0]
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        return item
    if isinstance(item[0], (tuple, list, Mapping)) or not takes_arguments(model, *item):
        return item[0]
    if not takes_arguments(model, item[0]):
        return item
    raise TypeError(
        "the loader yields pairs, and the model's forward takes one argument or two, so they may "
        "be (x, y) or two inputs: say which, by a generator such as (x for x, y in loader) or "
        "({'a': a, 'b': b} for a, b in loader)"
    )


def _divided(item: Mapping[str, Any], model: nn.Module) -> tuple[Any, Any]:
    """Return the input and the target of a batch that is a dict with labels.

    Columns of strings, such as the text that was tokenised, are left out unless forward takes them.
    """
    label = next(key for key in LABELS if key in item)
    rest = {key: value for key, value in item.items() if key not in LABELS}
    words = [key for key, value in rest.items() if isinstance(value, list)]
    if words and not takes_arguments(model, **rest):
        rest = {key: value for key, value in rest.items() if key not in words}
    return rest, item[label]


def items(loader: Any) -> Iterator[Any]:
    """Yield the batches of a loader; raise ValueError if every worker yields the same."""
    if _is_dataset(loader):
        rows = loader.with_format("torch") if hasattr(loader, "with_format") else loader
        loader = DataLoader(rows, batch_size=_DATASET_ROWS)
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
                f"of its rows in each of {workers} workers, and rows would count several times. "
                "Divide them in its __iter__ by torch.utils.data.get_worker_info(), or set "
                "num_workers to 0 or 1"
            )
        yield item


def _is_same(batch: Any, other: Any) -> bool:
    tensors, others = dict(leaves(batch)), dict(leaves(other))
    return (
        bool(tensors)
        and len(tensors) == len(others)
        and all(
            a.shape == b.shape and a.dtype == b.dtype and a.equal(b)
            for a, b in zip(tensors.values(), others.values(), strict=True)
        )
    )


def pairs(
    x: Any, y: Any, read: Reader, target: Callable[[Any], Tensor] = target_tensor, call: str = ""
) -> Iterator[tuple[Any, Tensor]]:
    """Yield (input, target): arrays whole, or batch after batch from a loader, ``y=None``.

    ``target`` reads targets; ``call`` is the name of the method that errors speak of.
    """
    call = call or "calibrate"
    if y is not None and is_loader(x):
        raise TypeError(
            f"{call}(x, y) takes arrays or tensors, got {type(x).__name__} for x; "
            f"a loader that yields (x, y) pairs is passed alone: {call}(loader)"
        )
    if y is None and not is_loader(x) and not isinstance(x, (tuple, list)):
        raise TypeError(
            f"got {type(x).__name__} and no targets: "
            f"call {call}(x, y), or {call}(loader) with a loader of (x, y) pairs"
        )
    for number, item in enumerate(items(x) if y is None else [(x, y)]):
        if isinstance(item, Mapping) and any(key in item for key in LABELS):
            item = _divided(item, read.model)
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise TypeError(
                "a loader must yield pairs (x, y) or dicts with 'labels'; batch "
                f"{number} is {described(item)}. {_remedy(item, call)}"
            )
        check_order(*item)
        batch, labels = read(item[0]), target(item[1])
        rows = row_count(batch)
        if labels.dim() == 0 or labels.shape[0] != rows:
            raise ValueError(
                f"x has {rows} rows but the target has shape {tuple(labels.shape)}: give one "
                "target for each row. For a single row write x[None], for a list of rows "
                "torch.stack(x), for a stream of rows DataLoader(data, batch_size=256)"
            )
        # The shape of the first targets; later ones may be (n,) in place of (n, 1).
        read.layout.setdefault("y", {"row": list(labels.shape[1:])})
        yield batch, labels


def _remedy(item: Any, call: str) -> str:
    if not isinstance(item, Mapping):
        return f"Wrap it: {call}((x, y) for ... in loader)"
    if len(item) != 2:
        return "Rename the key of the targets to 'labels'"
    return "Wrap it: {}((batch[{!r}], batch[{!r}]) for batch in loader)".format(call, *item)


def check_order(x: Any, y: Any) -> None:
    """Raise ValueError if the index of y is that of x in another order; others say nothing."""
    rows: Any = getattr(x, "index", None)
    targets: Any = getattr(y, "index", None)
    if not hasattr(rows, "is_unique") or not hasattr(targets, "is_unique") or rows.equals(targets):
        return
    if rows.is_unique and len(rows) == len(targets) and set(rows) == set(targets):
        raise ValueError("y has the rows of x in another order: give y.loc[x.index]")


def leaves(x: Any, name: str = "input") -> list[tuple[str, Tensor]]:
    """Return every tensor of an input or output with its path: ``input[0]``, ``input[mask]``."""
    if isinstance(x, Tensor):
        return [(name, x)]
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(x, Mapping):
        children = x.items()
    elif isinstance(x, (tuple, list)):
        children = enumerate(x)
    return [leaf for key, child in children for leaf in leaves(child, f"{name}[{key}]")]


def replace(x: Any, new: Mapping[str, Tensor], name: str = "input") -> Any:
    """Copy the structure of ``x``, with the tensors named in ``new`` replaced."""
    if isinstance(x, Tensor):
        return new.get(name, x)
    return _map(lambda leaf, key: new.get(key, leaf), x, name)


def _map(fn: Callable[[Any, str], Any], x: Any, name: str = "") -> Any:
    """Apply a function of a leaf and its path to every leaf of an input."""
    if isinstance(x, Mapping):
        return _like(x, {key: _map(fn, value, f"{name}[{key}]") for key, value in x.items()})
    if isinstance(x, (tuple, list)):
        return _like(x, [_map(fn, value, f"{name}[{i}]") for i, value in enumerate(x)])
    return fn(x, name)


def _like(x: Any, values: Any) -> Any:
    """Build a container of the type of ``x``: dicts, lists, tuples and named tuples."""
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*values)
    return cast(Any, type(x))(values)


@dataclass(eq=False)
class RowBuffer:
    """Columns that grow batch by batch: tensors, and lists of anything else.

    A tensor is allocated once for ``rows`` rows; where their number is not known, it doubles when
    it is full. The small results themselves would lie between the large intermediates of the
    batches, and fragment the heap.

    >>> buffer = RowBuffer()
    >>> buffer.add({"score": torch.zeros(2, 1), "group": ["a", "b"]})
    >>> buffer.add({"score": torch.ones(1, 1), "group": ["a"]})
    >>> buffer.filled, buffer["score"][:, 0], buffer.columns["group"]
    (3, tensor([0., 0., 1.]), ['a', 'b', 'a'])
    """

    rows: int | None = None
    filled: int = 0
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _lists: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, columns: Mapping[str, Any]) -> None:
        """Append the next rows of every column."""
        start, end = self.filled, self.filled + max(map(len, columns.values()))
        for name, column in columns.items():
            if not isinstance(column, Tensor):
                self._lists.setdefault(name, []).extend(column)
                continue
            if end == self.rows and not start:  # all at once
                self._tensors[name] = column.detach()
                continue
            old = self._tensors.get(name, column[:0])
            if old.shape[1:] != column.shape[1:]:
                before, now = tuple(old.shape[1:]), tuple(column.shape[1:])
                raise ValueError(f"{name} is {now} per row, and {before} in earlier batches")
            if end > len(old):
                size = self.rows or max(end, 2 * len(old))
                self._tensors[name] = column.new_empty((size, *column.shape[1:]))
                self._tensors[name][:start] = old[:start]
            self._tensors[name][start:end] = column.detach()
        self.filled = end

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return tensor if len(tensor) == self.filled else tensor[: self.filled].clone()

    @property
    def columns(self) -> dict[str, Any]:
        """All columns so far, without unused room."""
        return {**{name: self[name] for name in self._tensors}, **self._lists}


class GroupsAndWeights:
    """Groups and weights that were given with the rows, one for each."""

    def __init__(self, groups: Any, weights: Any) -> None:
        self._groups, self._weights = groups, None
        if groups is not None and not callable(groups):
            self._groups = _labels(groups)
        if weights is not None:
            values = target_tensor(weights)
            if not values.dim():
                raise ValueError(f"'weights' must be one number for each row, got {weights!r}")
            self._weights = values[:, 0] if values.shape[1:] == (1,) else values

    def of(self, x: Any, row: int, count: int) -> tuple[Any, Tensor | None]:
        """Return the groups and weights of some rows."""
        groups = self._groups
        if callable(groups):
            groups = groups(x)
        elif groups is not None:
            if len(groups) < row + count:
                raise ValueError(f"'groups' has {len(groups)} labels, fewer than x has rows")
            groups = groups[row : row + count]
        return groups, None if self._weights is None else self._weights[row : row + count]

    def check(self, rows: int | None) -> None:
        """Raise ValueError if there are more or fewer groups or weights than rows."""
        groups = None if callable(self._groups) else self._groups
        for name, given in (("groups", groups), ("weights", self._weights)):
            if given is not None and rows is not None and len(given) != rows:
                raise ValueError(f"{name} has {len(given)} entries, but x has {rows} rows")


def _labels(groups: Any) -> list[Any]:
    """Read the labels of all rows."""
    if isinstance(groups, str):
        raise TypeError(f"'groups' must be one label per row: give frame[{groups!r}]")
    if isinstance(groups, Tensor):
        groups = groups.detach().cpu()
    if not hasattr(groups, "__array__"):
        return list(groups)
    array = np.asarray(groups)
    if array.ndim != 1:
        raise ValueError(f"'groups' must be one label per row, got shape {array.shape}")
    labels: list[Any] = array.tolist()
    return labels
