"""Conditional calibration: coverage under every reweighting that is linear in given features.

Gibbs, Cherian and Candes, "Conformal prediction with conditional guarantees" (2023). The threshold
of a new row is that of a quantile regression of the scores on a constant and on features, fitted
with the row itself among the others: the largest score that it can have and still lie on or below
the fitted quantile. With f any non-negative linear function of constant and features,

    E[f(X) (1{covered} - (1 - alpha))] >= 0,

with equality if thresholds are randomised and scores have no ties. An indicator f makes it the
coverage of a group, and groups may overlap; any other f makes it the coverage under the shift of
inputs with density ratio f. :mod:`ffcp.conformal.quantile_regression` finds thresholds exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.batch import BatchOutput, Requires
from ffcp.conformal.calibration import Calibration, Traits, too_few
from ffcp.conformal.columns import PREDICTION, Columns, embedded, requires_of
from ffcp.conformal.quantile_regression import Design, QuantileRegression
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import exact_alpha, rows_needed
from ffcp.conformal.selection import Aside, Selected, Selection

MOST_DIRECTIONS = 16
ROWS_PER_DIRECTION = 50  # that calibrate: each direction adds up to 1 / n to the coverage
_NOTHING = 0.01  # directions with a smaller share of the largest variation are dropped


@dataclass(frozen=True)
class Conditional(Calibration):
    """Coverage for every group, and under every shift, that given features can express.

    Parameters
    ----------
    on : callable, list or str
        The features: a function from a batch of inputs to a matrix with a row for each row, of
        0 and 1 for groups, which may overlap, or of other numbers; names of columns, a list, of
        the frames that are calibrated and predicted; ``"prediction"``; or the dotted name of a
        layer, or ``"input"``, whose values are reduced to their first principal directions, at
        most 16 and one for every 50 rows that calibrate. The directions come from calibration
        rows set aside, which then do not calibrate, or from the rows of ``predictor.fit``. A
        constant is always among the features.
    randomized : bool, default=False
        Whether thresholds are randomised, so that coverage is exactly 1 - alpha. Without it
        coverage is at least that, and at most (features + 1) / (rows + 1) above.
    rows : dict of Tensor, default={}
        Scores and metadata of the calibration rows; filled by :meth:`fit`.
    directions : Tensor, default=None
        The principal directions that were learned, of a calibration that a file holds.

    Examples
    --------
    >>> groups = torch.tensor([[1.0], [0.0]]).repeat(50, 1)  # a row is in the group, or not
    >>> scores = torch.arange(1.0, 101)[:, None] * (1 + groups)
    >>> fitted = Conditional(lambda x: x > 0).fit(scores, {"features": groups.double()})
    >>> fitted.quantile(0.1, {"features": torch.tensor([[1.0], [0.0]]).double()})[:, 0]
    tensor([182.0000,  92.0000], dtype=torch.float64)
    """

    on: Callable[[Any], Any] | Sequence[str | int] | str
    randomized: bool = False
    #: The directions of a layer, (numbers of the layer, directions).
    directions: Tensor | None = field(default=None, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if callable(self.on) or isinstance(self.on, str):
            return
        are_names = isinstance(self.on, (list, tuple)) and len(self.on) > 0
        if not are_names or not all(isinstance(name, (str, int)) for name in self.on):
            raise TypeError(
                "'on' must be a function of the input, the name of a layer, or columns of "
                f"a frame, got {self.on!r}"
            )

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments."""
        return {"on": self.on, "randomized": self.randomized}

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Thresholds depend on the row, and perhaps on random numbers."""
        return Traits(missing=True, rows=True, random=self.randomized)

    @property
    def _is_of_layer(self) -> bool:
        return isinstance(self.on, str) and self.on != PREDICTION

    def selection(self) -> Selection | None:
        """Return what finds the directions of a layer."""
        return _Directions() if self._is_of_layer and self.directions is None else None

    def requires(self) -> Requires:
        """Return the layer, or the input, that features are taken from."""
        if callable(self.on) or isinstance(self.on, str):
            return requires_of(self.on)
        return Requires(input=True)

    def metadata(self, out: BatchOutput, y: Tensor | None = None) -> dict[str, Any]:
        """Return the features of each row, (n, p) in float64."""
        if callable(self.on) or isinstance(self.on, str):
            features = embedded(out, self.on, torch.float64)
        else:
            places = _places(self.on, out.columns)
            features = embedded(out, lambda x: x[:, places], torch.float64)
        if self.directions is not None:
            if features.shape[1] != len(self.directions):
                raise ValueError(
                    f"{self.on!r} has {features.shape[1]} numbers per row, but had "
                    f"{len(self.directions)} when its directions were found"
                )
            features = features @ self.directions
        return {"features": features}

    # -- rows -------------------------------------------------------------------------------

    def fit(self, scores: Tensor, metadata: Columns | None = None) -> Conditional:
        """Return this calibration with these rows; ``metadata["features"]`` are their features."""
        filled = super().fit(scores, metadata)
        features = filled.rows["features"]
        is_table = features.dim() == 2 and features.dtype == torch.float64
        if not is_table or not bool(features.isfinite().all()):
            raise ValueError("expected 'features' to be finite float64 numbers")
        if self.directions is not None and features.shape[1] != self.directions.shape[1]:
            raise ValueError("'features' do not match the directions")
        if bool(filled.scores.isinf().any()):
            row = int(filled.scores.isinf().any(dim=1).nonzero()[0, 0])
            raise ValueError(
                f"the score of row {row} is infinite, and a quantile regression needs finite "
                "scores: leave these rows out, or use another calibration"
            )
        return filled

    def merge(self, other: Conditional) -> Conditional:
        """Return a calibration with the rows of both, whose directions must be the same."""
        own, added = self.directions, other.directions
        if own is not None and added is not None and not torch.equal(own, added):
            raise ValueError(
                f"the predictors learned different directions of {self.on!r}: "
                "let one worker learn them, and give its predictor.settled() to all others"
            )
        return super().merge(other)

    def state(self) -> dict[str, Tensor]:
        """Return scores, features and directions."""
        state = super().state()
        if self.directions is None:
            return state
        return {**state, "directions": self.directions.clone()}  # no tensor of another group

    def with_state(self, state: Mapping[str, Tensor]) -> Conditional:
        """Return this calibration with the tensors of a file."""
        rows = {name: tensor for name, tensor in state.items() if name != "directions"}
        if "directions" not in state:
            return super().with_state(rows)
        directions = state["directions"]
        is_matrix = directions.dim() == 2 and directions.dtype == torch.float64
        is_valid = is_matrix and directions.shape[1] > 0 and bool(directions.isfinite().all())
        if not self._is_of_layer or not is_valid:
            raise ValueError(f"its directions do not match {self.on!r}")
        return replace(self, directions=directions).with_state(rows)

    # -- thresholds -------------------------------------------------------------------------

    def quantile(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Return the conditional quantiles (n, m) at rows of these features."""
        assert metadata is not None
        features, exact = metadata["features"].numpy(), exact_alpha(alpha)
        if features.shape[1] != self.rows["features"].shape[1]:
            raise ValueError(
                f"calibrated with {self.rows['features'].shape[1]} features, got "
                f"{features.shape[1]}"
            )
        duals = np.full(len(features), float(1 - exact))
        if self.randomized:
            assert random is not None
            duals = random.uniform(metadata["row"])[:, 0].numpy() - float(exact)
        thresholds = [
            self._solved(exact, output).thresholds(features, duals)
            for output in range(self.scores.shape[1])
        ]
        return torch.from_numpy(np.stack(thresholds, axis=1))

    @cached_property
    def _designs(self) -> list[tuple[Design, np.ndarray]]:
        """The features and scores of the rows that know an output, for each output."""
        known = (~self.scores.isnan()).numpy().T
        features, scores = self.rows["features"].numpy(), self.scores.numpy().T
        return [(Design(features[k]), s[k]) for k, s in zip(known, scores, strict=True)]

    @cached_property
    def _regressions(self) -> dict[tuple[Fraction, int], QuantileRegression]:
        return {}

    def _solved(self, alpha: Fraction, output: int) -> QuantileRegression:
        """Return the quantile regression of a level and an output, solved once."""
        # Two threads may both solve it, with the same result.
        solved, key = self._regressions, (alpha, output)
        if key not in solved:
            solved[key] = QuantileRegression(*self._designs[output], float(1 - alpha))
        return solved[key]

    def explain(self, alpha: Any, metadata: Columns) -> str:
        """Explain that there are too few calibration rows with features like these."""
        features = self.rows["features"].shape[1]
        return too_few(self.scores, alpha) or (
            f": too few of {len(self)} calibration rows have features like these. A group needs "
            f"at least {rows_needed(alpha)} rows, and numbers far from those of the calibration "
            f"many more. Calibrate with rows like them, or with fewer features than {features}"
        )


def _places(names: Sequence[str | int], columns: Sequence[str | int] | None) -> list[int]:
    """Return the places of a frame's columns in the input."""
    if columns is None:
        raise ValueError(
            f"Conditional({list(names)!r}) needs frames, whose columns have names: calibrate with "
            "a frame, or give a function of the input, lambda x: x[:, [0, 3]]"
        )
    unknown = [name for name in names if name not in columns]
    if unknown:
        raise ValueError(f"x has no columns {unknown}: there are {list(columns)}")
    return [list(columns).index(name) for name in names]


class _Directions(Selection):
    """Finds the principal directions of a layer on rows that do not calibrate."""

    what = "the directions of the layer"
    most_rows = 1000

    def select(self, aside: Aside) -> Selected:
        """Return the calibration with directions for as many rows as will calibrate."""
        most = min(MOST_DIRECTIONS, max(1, aside.left // ROWS_PER_DIRECTION))
        values = embedded(aside.out, aside.calibration.on, torch.float64)
        found = principal_directions(values, most)
        return Selected(aside.score, replace(aside.calibration, directions=found), {})


def principal_directions(values: Tensor, most: int) -> Tensor:
    """Return the directions (e, d) in which rows (n, e) vary most, in units of that variation.

    >>> rows = torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> principal_directions(rows, 1).abs()
    tensor([[0.4714],
            [0.0000]])
    """
    numbers = values.numpy()
    _, sizes, directions = np.linalg.svd(numbers - numbers.mean(axis=0), full_matrices=False)
    kept = (sizes > _NOTHING * sizes[0])[:most]
    if not kept.any():
        raise ValueError("the layer has the same values in all rows: choose another layer")
    spread = sizes[:most][kept] / len(numbers) ** 0.5
    scaled = (directions[:most][kept] / spread[:, None]).T
    return torch.from_numpy(np.ascontiguousarray(scaled))
