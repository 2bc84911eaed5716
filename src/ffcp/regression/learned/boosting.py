"""Another learner: quantiles by scikit-learn's gradient boosting, kept as tensors of trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.extras import needed
from ffcp.pieces import is_traced
from ffcp.regression.learned.knots import KNOTS, at_levels

_ROUNDS, _RATE, _LEAVES, _FEWEST = 120, 0.06, 8, 40
_SMALLEST = 1e-6  # step between two quantiles, in units of a typical residual
_ROWS = 512  # that go down all trees at once

_NODES = ("feature", "threshold", "left", "right", "value")
_TENSORS = (*_NODES, "start", "unit", "columns")


class BoostedQuantiles:
    """Quantiles of the residual from columns of numbers; made by :func:`learn`.

    Trees are tensors (outputs, knots, trees, nodes): which column a node asks, below which value
    a row goes left, and where it goes. A leaf leads to itself.
    """

    kind = "boosting"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._t = dict(tensors)
        self._depth = _depth(self._t)

    def state(self) -> dict[str, Tensor]:
        """Give all tensors, from which :meth:`from_state` makes it again."""
        return dict(self._t)

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor]) -> BoostedQuantiles:
        """Make it again from saved tensors; refuse, by ValueError, what cannot have been saved."""
        if set(tensors) != set(_TENSORS):
            raise ValueError(f"what was learned has the parts {', '.join(sorted(tensors))}")
        trees = tensors["feature"]
        if trees.dim() != 4 or trees.shape[1] != len(KNOTS) or 0 in trees.shape:
            raise ValueError(f"what was learned has trees of shape {tuple(trees.shape)}")
        for name, (dtype, shape) in _expected(trees).items():
            if tensors[name].dtype != dtype or tensors[name].shape != shape:
                raise ValueError(
                    f"what was learned has a {name} of shape {tuple(tensors[name].shape)}"
                )
        columns, nodes = int(tensors["columns"]), trees.shape[-1]
        for name, most in (("feature", columns), ("left", nodes), ("right", nodes)):
            if not bool(((tensors[name] >= 0) & (tensors[name] < most)).all()):
                raise ValueError(f"what was learned has a {name} that is not there")
        for name in ("value", "start", "unit"):
            if not bool(tensors[name].isfinite().all()):
                raise ValueError(f"what was learned has a {name} that is not finite")
        if bool(tensors["threshold"].isnan().any()) or not bool((tensors["unit"] > 0).all()):
            raise ValueError("what was learned has thresholds or units that are no numbers")
        if not _leads_down(tensors):
            raise ValueError("what was learned has trees that lead in a circle")
        return cls({n: t.detach().to("cpu", copy=True) for n, t in tensors.items()})

    @property
    def columns(self) -> int:
        """How many columns it reads."""
        return int(self._t["columns"])

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
        flat = {name: t[name].reshape(-1) for name in _NODES}
        node = offset.expand(columns.shape[0], -1)
        for _ in range(self._depth):
            asked = columns.gather(1, flat["feature"][node])
            goes_left = asked.double() <= flat["threshold"][node]
            node = offset + torch.where(goes_left, flat["left"][node], flat["right"][node])
        sums = flat["value"][node].unflatten(1, shape[:-1]).sum(dim=-1) + t["start"]
        # Trees of different levels know nothing of each other: in order, they cannot cross.
        return at_levels(sums, _SMALLEST) * t["unit"].double()[:, None]


def _expected(trees: Tensor) -> dict[str, tuple[torch.dtype, torch.Size]]:
    outputs = trees.shape[0]
    whole = dict.fromkeys(("feature", "left", "right"), (torch.int64, trees.shape))
    numbers = dict.fromkeys(("threshold", "value"), (torch.float64, trees.shape))
    return {
        **whole,
        **numbers,
        "start": (torch.float64, torch.Size((outputs, len(KNOTS)))),
        "unit": (torch.float32, torch.Size((outputs,))),
        "columns": (torch.int64, torch.Size((1,))),
    }


def _leads_down(t: Mapping[str, Tensor]) -> bool:
    """Say whether every node leads to later ones, or, as a leaf, to itself."""
    own = torch.arange(t["left"].shape[-1]).expand(t["left"].shape)
    is_leaf = (t["left"] == own) & (t["right"] == own)
    return bool((is_leaf | ((t["left"] > own) & (t["right"] > own))).all())


def _depth(t: Mapping[str, Tensor]) -> int:
    """Count the steps from the root after which all rows are at a leaf."""
    left, right = t["left"].flatten(0, -2), t["right"].flatten(0, -2)
    reached, own = torch.zeros_like(left, dtype=torch.bool), torch.arange(left.shape[1])
    reached[:, 0] = True
    for depth in range(left.shape[1]):
        inner = reached & ~((left == own) & (right == own))
        if not bool(inner.any()):
            return depth
        reached = torch.zeros_like(reached)
        for way in (left, right):
            reached.view(torch.uint8).scatter_reduce_(1, way, inner.view(torch.uint8), "amax")
    return left.shape[1]


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
    ensemble = needed("sklearn.ensemble", "sklearn", 'learner="boosting"')
    unit = residuals.double().abs().nanmedian(dim=0).values
    unit = torch.where(unit > 0, unit, torch.ones_like(unit))
    unit = unit.clamp(torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max).float()
    x, y = columns.float().numpy(), (residuals.double() / unit.double()).numpy()
    models = [
        [_boosted(ensemble, x, column, float(level), seed) for level in KNOTS] for column in y.T
    ]
    starts = [[_start(model) for model in row] for row in models]
    made = BoostedQuantiles(
        {
            **_stacked([[_trees(model) for model in row] for row in models]),
            "start": torch.tensor(starts, dtype=torch.float64),
            "unit": unit,
            "columns": torch.tensor([columns.shape[1]]),
        }
    )
    _check(made, models, columns[:32])
    return made


def _boosted(ensemble: Any, x: Any, y: Any, level: float, seed: int) -> Any:
    known = ~np.isnan(y)
    model = ensemble.HistGradientBoostingRegressor(
        loss="quantile",
        quantile=level,
        max_iter=_ROUNDS,
        learning_rate=_RATE,
        max_leaf_nodes=_LEAVES,
        min_samples_leaf=_FEWEST,
        early_stopping=False,
        random_state=seed % 2**32,
    )
    return model.fit(x[known], y[known])


def _trees(model: Any) -> list[Any]:
    """Give the nodes of every tree; scikit-learn has no public name for them."""
    return [tree.nodes for (tree,) in model._predictors]


def _start(model: Any) -> float:
    return float(np.asarray(model._baseline_prediction).reshape(-1)[0])


def _stacked(trees: Sequence[Sequence[Sequence[Any]]]) -> dict[str, Tensor]:
    """Put all trees into tensors, the smaller ones filled up with leaves that nobody reaches."""
    shape = (len(trees), len(trees[0]), len(trees[0][0]))
    nodes = max(len(tree) for row in trees for level in row for tree in level)
    own = np.broadcast_to(np.arange(nodes), (*shape, nodes))
    arrays: dict[str, Any] = {
        "feature": np.zeros((*shape, nodes), np.int64),
        "threshold": np.zeros((*shape, nodes)),
        "left": own.copy(),
        "right": own.copy(),
        "value": np.zeros((*shape, nodes)),
    }
    for place in np.ndindex(*shape):
        tree = trees[place[0]][place[1]][place[2]]
        inner, size = tree["is_leaf"] == 0, len(tree)
        arrays["value"][place][:size] = tree["value"]
        for name, column in (
            ("feature", "feature_idx"),
            ("threshold", "num_threshold"),
            ("left", "left"),
            ("right", "right"),
        ):
            arrays[name][place][:size][inner] = tree[column][inner]
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _check(made: BoostedQuantiles, models: Sequence[Sequence[Any]], columns: Tensor) -> None:
    """Compare with scikit-learn's own predictions: nodes of another version may mean another."""
    own = made._quantiles(columns) / made._t["unit"].double()[:, None]
    x = columns.float().numpy()
    theirs = np.stack([[m.predict(x) for m in row] for row in models])  # outputs, knots, rows
    expected = at_levels(torch.from_numpy(theirs).permute(2, 0, 1), _SMALLEST)
    if not torch.allclose(own, expected, rtol=1e-9, atol=1e-9):
        raise RuntimeError(
            "trees of this version of scikit-learn cannot be read: use learner='network'"
        )
