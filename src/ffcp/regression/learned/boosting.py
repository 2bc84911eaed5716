"""A learner: quantiles of the residual by boosted trees of LightGBM, kept as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ffcp.conformal.columns import prefixed, with_prefix
from ffcp.extras import needed
from ffcp.regression.learned.nested import at_levels, to_levels
from ffcp.regression.learned.network import checked_tensors, typical_size
from ffcp.regression.learned.trees import Trees

_RATE, _LEAVES = 0.1, 15
_MOST_ROUNDS = 400  # trees of a quantile
# Training stops after this many trees without gain, and keeps at least this many: with few rows
# held out, the gain of the first trees of an outer quantile hardly shows.
_PATIENCE = 60
_SHARE = 0.8  # of rows and of columns that a tree sees
_HELD_OUT = 4  # a quarter of the rows says how many trees are enough
_MANY_ROWS = 10_000  # above which trees are grown by several threads
_MOST_OUTPUTS = 8  # every output has boosters of its own, which is slow
_SMALLEST = 1e-6  # step between two quantiles, in units of a typical residual
#: The least and the largest level of the outer knots.
_OUTER = (0.005, 0.2)


class BoostedQuantiles:
    """Quantiles of the residual from columns of numbers; made by :func:`learn`.

    Every output has a booster at each of a few levels, the knots; levels between them are
    interpolated.
    """

    kind = "boosting"

    def __init__(self, trees: Trees, knots: Tensor, unit: Tensor) -> None:
        self._trees, self._knots, self._unit = trees, knots, unit
        self._to_levels = to_levels(knots)

    def state(self) -> dict[str, Tensor]:
        """Return all tensors, for :meth:`from_state`."""
        return {**prefixed("trees.", self._trees.state()), "knots": self._knots, "unit": self._unit}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor]) -> BoostedQuantiles:
        """Return the learner from saved tensors; raise ValueError for impossible ones."""
        trees = Trees.from_state(with_prefix("trees.", tensors))
        own = {name: one for name, one in tensors.items() if not name.startswith("trees.")}
        outputs, knots = len(own["unit"]), len(own["knots"])
        shapes = {"unit": (torch.float32, (outputs,)), "knots": (torch.float64, (knots,))}
        checked = checked_tensors(own, shapes)
        levels = [0.0, *checked["knots"].tolist(), 1.0]
        if knots < 2 or any(low >= high for low, high in pairwise(levels)):
            raise ValueError(
                "'knots' of what was learned must be levels between 0 and 1, in ascending order"
            )
        if len(trees.rounds) != outputs * knots:
            raise ValueError(f"expected {outputs * knots} boosters, got {len(trees.rounds)}")
        if not bool((checked["unit"] > 0).all()):
            raise ValueError("'unit' of what was learned must be positive")
        return cls(trees, checked["knots"], checked["unit"])

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return len(self._unit)

    @property
    def rounds(self) -> list[int]:
        """How many trees each quantile has."""
        return self._trees.rounds

    def __call__(self, columns: Tensor) -> Tensor:
        """Return quantiles (n, outputs, levels), in float64."""
        sums = self._trees(columns.to("cpu", torch.float32)).unflatten(1, (self.outputs, -1))
        # Trees of different levels know nothing of each other: in order, they cannot cross.
        return at_levels(sums, _SMALLEST, self._to_levels) * self._unit.double()[:, None]


def why_not(outputs: int) -> str | None:
    """Return why trees cannot learn the residuals of so many outputs; ``None`` if they can."""
    if outputs > _MOST_OUTPUTS:
        return f"trees: they learn at most {_MOST_OUTPUTS} outputs"
    try:
        needed("lightgbm", "trees", "trees")
    except ImportError as error:
        return str(error)
    return None


def learn(
    columns: Tensor,
    residuals: Tensor,
    seed: int = 0,
    weights: Tensor | None = None,
    *,
    tail: float = 0.05,
    first: int | None = None,
    held: tuple[Tensor, Tensor] | None = None,
    rounds: Sequence[int] | None = None,
) -> BoostedQuantiles:
    """Learn quantiles of residuals (n, outputs) from columns (n, k), the same for the same seed.

    NaN residuals are not known and left out; ``weights`` (n,) say how much each row counts.
    The outer quantiles that are learned are those at ``tail`` and 1 - ``tail``; ``first`` is how
    many of the columns are learned from, by default all. Each quantile has
    so many trees as ``rounds`` says, or until columns and residuals ``held`` out get no better; by
    default a quarter of the rows is held out for that, and then learned from too.

    >>> _ = torch.manual_seed(0)
    >>> x = torch.rand(1000, 1)
    >>> trees = learn(x, (1 + 9 * x) * torch.randn(1000, 1))
    >>> narrow, wide = trees(torch.tensor([[0.0], [1.0]]))[:, 0].diff(dim=1).sum(dim=1)
    >>> bool(wide > 2 * narrow)
    True
    """
    lightgbm = needed("lightgbm", "trees", 'learner="boosting"')
    weights = torch.ones(len(columns)) if weights is None else weights
    if rounds is None and held is None:
        out = torch.arange(len(columns)) % _HELD_OUT == 0
        inside = (columns[~out], residuals[~out], seed, weights[~out])
        held_out = (columns[out], residuals[out])
        rounds = learn(*inside, tail=tail, first=first, held=held_out).rounds
    unit = typical_size(residuals)
    outer = min(max(tail, _OUTER[0]), _OUTER[1])
    knots = torch.tensor([outer, 0.25, 0.5, 0.75, 1 - outer], dtype=torch.float64)
    dumps: list[Mapping[str, Any]] = []
    for output, size in enumerate(unit):
        targets = residuals[:, output] / size
        training = _dataset(lightgbm, columns[:, :first], targets, weight=weights)
        validation = None
        if held is not None:
            targets = held[1][:, output] / size
            validation = _dataset(lightgbm, held[0][:, :first], targets, reference=training)
        for level in knots.tolist():
            count = _MOST_ROUNDS if rounds is None else rounds[len(dumps)]
            booster = _boosted(lightgbm, training, validation, count, level, seed)
            count = max(booster.best_iteration, _PATIENCE) if validation else count
            dumps.append(booster.dump_model(num_iteration=count))
    return BoostedQuantiles(Trees.from_dumps(dumps, columns.shape[1]), knots, unit)


def _dataset(
    lightgbm: Any, x: Tensor, y: Tensor, weight: Tensor | None = None, reference: Any = None
) -> Any:
    """Return the rows whose residual is known; if that is no row, all with the residual 0."""
    known = ~y.isnan() if bool((~y.isnan()).any()) else torch.ones(len(y), dtype=torch.bool)
    weights = None if weight is None else weight[known].double().numpy()
    values = y[known].nan_to_num().double().numpy()
    return lightgbm.Dataset(x[known].float().numpy(), values, reference=reference, weight=weights)


def threads_for(rows: int) -> int:
    """Return how many threads grow trees.

    They wait for each other at every split, with few rows longer than they work: beside another
    busy process a fit took nine times as long with two threads as with one.
    """
    return torch.get_num_threads() if rows > _MANY_ROWS else 1


def _boosted(lightgbm: Any, data: Any, valid: Any, rounds: int, level: float, seed: int) -> Any:
    """Return the booster of one quantile."""
    rows = len(data.get_label())
    settings = {
        "objective": "quantile",
        "alpha": level,
        "learning_rate": _RATE,
        "num_leaves": _LEAVES,
        "min_data_in_leaf": max(10, min(50, rows // 40)),
        "bagging_fraction": _SHARE if rows > 1 else 1.0,  # LightGBM refuses to take no row
        "bagging_freq": 1,
        "feature_fraction": _SHARE,
        "seed": seed % 2**31,
        "deterministic": True,
        "force_row_wise": True,  # which "deterministic" asks for
        "num_threads": threads_for(rows),
        "verbosity": -1,
    }
    if valid is None:
        return lightgbm.train(settings, data, rounds)
    stop = lightgbm.early_stopping(_PATIENCE, verbose=False)
    # A booster that may be trained further keeps the trees after its best.
    options = {"callbacks": [stop], "keep_training_booster": True}
    return lightgbm.train(settings, data, rounds, valid_sets=[valid], **options)
