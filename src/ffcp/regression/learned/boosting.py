"""Another learner: quantiles by LightGBM, kept as tensors of trees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ffcp.batch import is_traced
from ffcp.extras import needed
from ffcp.regression.learned.nested import KNOTS, at_levels
from ffcp.regression.learned.network import checked_tensors, typical_size

_ROUNDS, _RATE, _LEAVES, _FEWEST = 120, 0.06, 8, 40
_SMALLEST = 1e-6  # step between two quantiles, in units of a typical residual
_ROWS = 512  # that go down all trees at once
_WHOLE = ("feature", "left", "right")  # whole numbers


class TreeNode(NamedTuple):
    """Which column is asked, below which value a row goes left, and what a leaf is worth."""

    feature: int
    threshold: float
    left: int
    right: int
    value: float


class BoostedQuantiles:
    """Quantiles of the residual from columns of numbers; made by :func:`learn`.

    Trees are tensors (outputs, knots, trees, nodes): which column a node asks, below which value
    a row goes left, and where it goes. A leaf leads to itself.
    """

    kind = "boosting"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._t = dict(tensors)

    def state(self) -> dict[str, Tensor]:
        """Give all tensors, from which :meth:`from_state` makes it again."""
        return dict(self._t)

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor]) -> BoostedQuantiles:
        """Make it again from saved tensors; refuse, by ValueError, what cannot have been saved."""
        trees = tensors["feature"]
        if trees.dim() != 4 or trees.shape[1] != len(KNOTS) or 0 in trees.shape:
            raise ValueError(f"what was learned has trees of shape {tuple(trees.shape)}")
        expected = {
            **dict.fromkeys(_WHOLE, (torch.int64, trees.shape)),
            **dict.fromkeys(("threshold", "value"), (torch.float64, trees.shape)),
            "unit": (torch.float32, trees.shape[:1]),
            "columns": (torch.int64, (1,)),
        }
        checked = checked_tensors(tensors, expected)
        columns, nodes = int(checked["columns"]), trees.shape[-1]
        for name, most in zip(_WHOLE, (columns, nodes, nodes), strict=True):
            if not bool(((checked[name] >= 0) & (checked[name] < most)).all()):
                raise ValueError(f"what was learned has a {name} that is not there")
        if not bool((checked["unit"] > 0).all()):
            raise ValueError("what was learned has a unit that is not positive")
        if not _leads_down(checked):
            raise ValueError("what was learned has trees that lead in a circle")
        return cls(checked)

    @property
    def outputs(self) -> int:
        """Of how many outputs it knows the residual."""
        return len(self._t["unit"])

    def __call__(self, columns: Tensor) -> Tensor:
        """Give quantiles (n, outputs, levels), in float64."""
        columns = columns.to("cpu", torch.float32)
        if is_traced() or len(columns) <= _ROWS:
            return self._quantiles(columns)
        return torch.cat([self._quantiles(part) for part in columns.split(_ROWS)])

    def _quantiles(self, columns: Tensor) -> Tensor:
        t = self._t
        shape = t["feature"].shape
        trees = shape[:-1].numel()
        offset = torch.arange(trees) * shape[-1]
        flat = {name: t[name].reshape(-1) for name in TreeNode._fields}
        node = offset.expand(columns.shape[0], -1)
        for _ in range(shape[-1] // 2):  # which leads to the deepest leaf of so many nodes
            asked = columns.gather(1, flat["feature"][node])
            goes_left = asked.double() <= flat["threshold"][node]
            node = offset + torch.where(goes_left, flat["left"][node], flat["right"][node])
        sums = flat["value"][node].unflatten(1, shape[:-1]).sum(dim=-1)
        # Trees of different levels know nothing of each other: in order, they cannot cross.
        return at_levels(sums, _SMALLEST) * t["unit"].double()[:, None]


def _leads_down(t: Mapping[str, Tensor]) -> bool:
    """Say whether every node leads to later ones, or, as a leaf, to itself."""
    own = torch.arange(t["left"].shape[-1]).expand(t["left"].shape)
    is_leaf = (t["left"] == own) & (t["right"] == own)
    return bool((is_leaf | ((t["left"] > own) & (t["right"] > own))).all())


def learn(columns: Tensor, residuals: Tensor, seed: int = 0) -> BoostedQuantiles:
    """Learn quantiles of residuals (n, outputs) from columns (n, k), the same for the same seed.

    NaN residuals are not known and teach nothing.

    >>> _ = torch.manual_seed(0)
    >>> x = torch.rand(1000, 1)
    >>> trees = learn(x, (1 + 9 * x) * torch.randn(1000, 1))
    >>> narrow, wide = trees(torch.tensor([[0.0], [1.0]]))[:, 0].diff(dim=1).sum(dim=1)
    >>> bool(wide > 3 * narrow)
    True
    """
    lightgbm = needed("lightgbm", "trees", 'learner="boosting"')
    unit = typical_size(residuals)
    x, y = columns.float().numpy(), (residuals.double() / unit.double()).numpy()
    trees = [
        [_boosted(lightgbm, x, column, float(level), seed) for level in KNOTS] for column in y.T
    ]
    columns_read = torch.tensor([columns.shape[1]])
    return BoostedQuantiles({**_stacked(trees), "unit": unit, "columns": columns_read})


def _boosted(lightgbm: Any, x: Any, y: Any, level: float, seed: int) -> list[list[TreeNode]]:
    """Return the trees of one quantile."""
    known = ~np.isnan(y)
    settings = {
        "objective": "quantile",
        "alpha": level,
        "learning_rate": _RATE,
        "num_leaves": _LEAVES,
        "min_data_in_leaf": _FEWEST,
        "seed": seed % 2**31,
        "deterministic": True,
        "force_row_wise": True,  # which "deterministic" asks for
        "verbosity": -1,
    }
    booster = lightgbm.train(settings, lightgbm.Dataset(x[known], y[known]), _ROUNDS)
    return [list(_nodes(tree["tree_structure"])) for tree in booster.dump_model()["tree_info"]]


def _nodes(root: Mapping[str, Any]) -> Iterator[TreeNode]:
    """Yield the nodes of a dumped tree, every one before its children."""
    waiting, count = [root], 1
    for number, node in enumerate(waiting):  # which grows on the way
        if "leaf_value" in node:
            yield TreeNode(0, 0.0, number, number, node["leaf_value"])
            continue
        waiting += [node["left_child"], node["right_child"]]
        yield TreeNode(node["split_feature"], node["threshold"], count, count + 1, 0.0)
        count += 2


def _stacked(trees: Sequence[Sequence[Sequence[Sequence[TreeNode]]]]) -> dict[str, Tensor]:
    """Put all trees into tensors, the smaller ones filled up with leaves that nobody reaches."""
    most = max(len(level) for row in trees for level in row)
    nodes = max(len(tree) for row in trees for level in row for tree in level)
    padded = [
        [
            [
                [*tree, *(TreeNode(0, 0.0, i, i, 0.0) for i in range(len(tree), nodes))]
                for tree in [*level, *[[]] * (most - len(level))]
            ]
            for level in row
        ]
        for row in trees
    ]
    array = np.array(padded, dtype=np.float64)  # outputs, knots, trees, nodes, fields
    return {
        name: torch.from_numpy(array[..., i].astype(np.int64 if name in _WHOLE else np.float64))
        for i, name in enumerate(TreeNode._fields)
    }
