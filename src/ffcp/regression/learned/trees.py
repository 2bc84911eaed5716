"""Boosted trees as tensors: read from the public dump of LightGBM, evaluated by torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ffcp.batch import is_traced
from ffcp.regression.learned.network import checked_tensors

_ROWS = 128  # evaluated at once: more do not fit a processor's cache
_ZERO = 1e-35  # LightGBM takes smaller numbers for zero
# What a split does with missing values: NaN is 0; or NaN, or zero and NaN, go to one side.
_AS_ZERO, _NAN_LEFT, _NAN_RIGHT, _ZERO_LEFT, _ZERO_RIGHT = range(5)
_MISSING = {
    ("None", True): _AS_ZERO,
    ("None", False): _AS_ZERO,
    ("NaN", True): _NAN_LEFT,
    ("NaN", False): _NAN_RIGHT,
    ("Zero", True): _ZERO_LEFT,
    ("Zero", False): _ZERO_RIGHT,
}
_WHOLE = ("feature", "missing", "category", "booster")


class Split(NamedTuple):
    """The column of a node, and which rows go left: those up to a threshold, or in a set."""

    feature: int
    threshold: float
    missing: int
    category: int  # number of the set of categories, 0 for a threshold


class Trees:
    """Several boosters: each the sum of its trees.

    A tree is its splits and, for every leaf, on which side of which splits it lies: +1 left, -1
    right, 0 if the split is not on the way. A row is in the leaf that agrees with all of its
    splits, which matrix products find, in about the time of LightGBM itself.

    Parameters
    ----------
    tensors
        ``feature``, ``threshold``, ``missing``, ``category`` (trees, splits), ``path`` (trees,
        leaves, splits), ``value`` (trees, leaves), ``booster`` (trees,) to which a tree belongs,
        ``categories`` (sets, largest + 1), the first without any, and ``columns`` (1,), how many
        columns there are.

    Examples
    --------
    >>> leaf = {"leaf_value": 0.5}
    >>> Trees.from_dumps([{"tree_info": [{"tree_structure": leaf}]}], columns=2)(torch.zeros(3, 2))
    tensor([[0.5000],
            [0.5000],
            [0.5000]], dtype=torch.float64)
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._t = t = dict(tensors)
        self._path = t["path"].float()
        # The number of splits on the path to a leaf that send its rows left. Padding leaves of
        # smaller trees have the value 0.
        self._left = (t["path"] > 0).sum(dim=-1, keepdim=True).float()
        owners = torch.arange(int(t["booster"].max()) + 1)
        self._sums = (t["booster"] == owners[:, None]).double()
        self._is_plain = not bool(t["missing"].any()) and not bool(t["category"].any())

    @classmethod
    def from_dumps(cls, dumps: Sequence[Mapping[str, Any]], columns: int) -> Trees:
        """Read boosters of LightGBM, each as ``booster.dump_model()`` returns it."""
        sets: list[list[int]] = [[]]
        trees: list[tuple[list[Split], list[tuple[LeafPath, float]]]] = []
        owners: list[int] = []
        for number, dump in enumerate(dumps):
            for tree in dump["tree_info"]:
                splits: list[Split] = []
                leaves = [*_leaves(tree["tree_structure"], [], splits, sets)]
                trees.append((splits, leaves))
                owners.append(number)
        most = max(1, *(len(splits) for splits, _ in trees))
        table = np.zeros((len(trees), most, len(Split._fields)))
        path = np.zeros((len(trees), most + 1, most), dtype=np.int8)
        value = np.zeros((len(trees), most + 1))
        for i, (splits, leaves) in enumerate(trees):
            table[i, : len(splits)] = np.array(splits, dtype=float).reshape(-1, len(Split._fields))
            for j, (way, leaf_value) in enumerate(leaves):
                value[i, j] = leaf_value
                for split, side in way:
                    path[i, j, split] = side
        categories = np.zeros((len(sets), 1 + max((max(s, default=0) for s in sets), default=0)))
        for i, members in enumerate(sets):
            categories[i, members] = 1
        arrays: dict[str, Any] = {
            name: table[..., i].astype(np.int64 if name in _WHOLE else np.float64)
            for i, name in enumerate(Split._fields)
        }
        arrays["path"], arrays["value"] = path, value
        arrays["booster"] = np.array(owners)
        arrays["categories"], arrays["columns"] = categories.astype(bool), np.array([columns])
        return cls({name: torch.from_numpy(array) for name, array in arrays.items()})

    def state(self) -> dict[str, Tensor]:
        """Return all tensors, for :meth:`from_state`."""
        return dict(self._t)

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor]) -> Trees:
        """Return the trees of saved tensors; raise ValueError for impossible ones."""
        if tensors["path"].dim() != 3 or 0 in tensors["path"].shape:
            raise ValueError(
                f"'path' must have three dimensions, got shape {tuple(tensors['path'].shape)}"
            )
        trees, leaves, splits = tensors["path"].shape
        whole, real = (torch.int64, (trees, splits)), (torch.float64, (trees, splits))
        expected: dict[str, Any] = {
            **dict.fromkeys(("feature", "missing", "category"), whole),
            "threshold": real,
            "path": (torch.int8, (trees, leaves, splits)),
            "value": (torch.float64, (trees, leaves)),
            "booster": (torch.int64, (trees,)),
            "categories": (torch.bool, tensors["categories"].shape),
            "columns": (torch.int64, (1,)),
        }
        checked = checked_tensors(tensors, expected)
        most = {
            "feature": int(checked["columns"]),
            "missing": len(set(_MISSING.values())),
            "category": len(checked["categories"]),
            "booster": trees,
        }
        for name, end in most.items():
            if not bool(((checked[name] >= 0) & (checked[name] < end)).all()):
                raise ValueError(f"{name!r} of the trees points outside its table")
        return cls(checked)

    @property
    def rounds(self) -> list[int]:
        """How many trees each booster has."""
        return self._sums.sum(dim=1).long().tolist()

    def __call__(self, columns: Tensor) -> Tensor:
        """Return the sums of all boosters (n, boosters) for columns (n, k), in float64."""
        if is_traced() or len(columns) <= _ROWS:
            return self._evaluated(columns)
        return torch.cat([self._evaluated(part) for part in columns.split(_ROWS)])

    def _evaluated(self, columns: Tensor) -> Tensor:
        t = self._t
        if self._is_plain:
            columns = torch.where(columns.isnan(), torch.zeros_like(columns), columns)
        asked = columns.T.contiguous()[t["feature"].reshape(-1)].unflatten(0, t["feature"].shape)
        is_in_leaf = self._path @ self._is_left(asked).float() == self._left  # trees, leaves, rows
        values = t["value"][:, None] @ is_in_leaf.double()
        return (self._sums @ values[:, 0]).T

    def _is_left(self, asked: Tensor) -> Tensor:
        """Whether rows go left at each split (trees, splits, rows)."""
        t = self._t
        threshold = t["threshold"][..., None]
        if self._is_plain:
            return asked <= threshold
        missing, category = t["missing"][..., None], t["category"][..., None]
        is_nan = asked.isnan()
        number = torch.where(is_nan, torch.zeros_like(asked), asked)
        has_side = (is_nan & (missing != _AS_ZERO)) | (
            (number.abs() <= _ZERO) & (missing >= _ZERO_LEFT)
        )
        side = (missing == _NAN_LEFT) | (missing == _ZERO_LEFT)
        is_left = torch.where(has_side, side, number <= threshold)
        if not bool(t["category"].any()):
            return is_left
        sets = t["categories"]
        whole = number.clamp(-1, sets.shape[1]).long()  # cut towards zero, as LightGBM does
        known = ~is_nan & (number > -1) & (whole < sets.shape[1])
        place = category * sets.shape[1] + whole.clamp(0, sets.shape[1] - 1)
        in_set = known & sets.reshape(-1)[place]
        return torch.where(category > 0, in_set, is_left)


LeafPath = list[tuple[int, int]]  # the splits above a leaf, and the side of each, +1 or -1


def _leaves(
    node: Mapping[str, Any], path: LeafPath, splits: list[Split], sets: list[list[int]]
) -> Iterator[tuple[LeafPath, float]]:
    """Yield the path to each leaf below a node, and its value; append the node's splits."""
    if "split_feature" not in node:
        yield path, node["leaf_value"]
        return
    threshold, category = node["threshold"], 0
    if node["decision_type"] == "==":
        sets.append([int(member) for member in str(threshold).split("||")])
        threshold, category = 0.0, len(sets) - 1
    missing = _MISSING[node["missing_type"], bool(node["default_left"])]
    splits.append(Split(node["split_feature"], threshold, missing, category))
    number = len(splits) - 1
    yield from _leaves(node["left_child"], [*path, (number, 1)], splits, sets)
    yield from _leaves(node["right_child"], [*path, (number, -1)], splits, sets)
