"""Learning from training rows, and recognising them among calibration rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ffcp.arguments import known_only
from ffcp.batch import BatchOutput, Requires
from ffcp.calibrated import Calibrated, Counts
from ffcp.calibration_loop import Batch, BatchRunner, Result
from ffcp.network import forward, inputs
from ffcp.regression.common import Common
from ffcp.regression.joint import AUTO, BOTH, checked_joint, checked_side
from ffcp.regression.learned.feature_columns import FeatureColumns, On, checked_on
from ffcp.regression.learned.quantile_fitting import MOST_ROWS, Rows
from ffcp.regression.regression_predictor import RegressionPredictor

# Data can hold equal rows by chance. By how much the share of known rows must exceed that of
# repeated ones to be an error: this difference, and this many standard errors.
_EXCESS, _ERRORS = 0.05, 4.0
_NO_CHANCE = 10  # rows that are not all repeated by chance


class TrainingRows(NamedTuple):
    """Columns and residuals of training rows, and their hashes, sorted."""

    features: FeatureColumns
    rows: Rows
    hashes: Tensor


class LearnsFromTraining(RegressionPredictor):
    """The base of predictors that learn from training rows, which must not calibrate."""

    on: tuple[On, ...] | None
    calibrate_rows: int | None
    _hashes: Tensor | None = None  # sorted hashes of the training rows

    def _checked_arguments(
        self, on: On | Sequence[On] | None, calibrate_rows: int | None, common: Common
    ) -> dict[str, Any]:
        """Check the arguments that these predictors share; return those of their selections."""
        known_only(type(self), common, Common)
        output_scales = common.pop("output_scales", AUTO)
        if not (isinstance(output_scales, str) and output_scales == AUTO):
            raise ValueError(
                "the scales of outputs that share a threshold are learned here: leave out "
                "output_scales"
            )
        if "selection_fraction" in common:
            raise ValueError(
                "rows that do not calibrate are learned from: pass the number of calibration rows, "
                "calibrate_rows=, in place of selection_fraction"
            )
        if calibrate_rows is not None and calibrate_rows < 1:
            raise ValueError(f"calibrate_rows must be at least 1, got {calibrate_rows}")
        self.on, self.calibrate_rows = checked_on(on), calibrate_rows
        common["joint"] = checked_joint(common.get("joint", False))
        common["side"] = checked_side(common.get("side", BOTH), common["joint"])
        return {
            "on": self.on,
            "joint": common["joint"],
            "side": common["side"],
            "seed": common.get("seed") or 0,
            "alpha": common.get("selection_alpha", 0.1),
            "calibrate_rows": calibrate_rows,
        }

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, but for the model."""
        shared = super().config()
        del shared["selection_fraction"]
        return {"on": self.on, "calibrate_rows": self.calibrate_rows, **shared}

    def _training_rows(self, x: Any, y: Any, disjoint: bool) -> TrainingRows:
        """Run the model on training rows, up to a limit; hash all of them unless ``disjoint``."""
        batches: list[Rows] = []
        hashes, features = [], None
        with torch.inference_mode(False):
            for batch in self._training_batches(x, y):
                hashes.append(row_hashes(batch.x, batch.y)[: 0 if disjoint else None])
                if sum(len(rows.weights) for rows in batches) >= MOST_ROWS:
                    continue
                if features is None:
                    features = FeatureColumns.of(self.model, batch.x, self.on)
                    forward.check_rows(self.model, batch.x, features.norms)
                out = forward.run_batch(self.model, batch.x, features.requires(), batch.row)
                batches.append(Rows.of(features, out, batch.y))
        if features is None:
            raise ValueError("there are no rows to learn from")
        self._hashes = torch.cat(hashes).sort().values
        rows = Rows(*map(torch.cat, zip(*batches, strict=True)))
        return TrainingRows(features, rows, self._hashes)

    def restore_fit(self) -> None:
        """Restore the hashes of training rows from a loaded state."""
        self._hashes = getattr(self._state.score, "rows", None)

    def _learn(self, score: Any) -> None:
        """Set the score learned from training rows; drop earlier scores."""
        self._given = (score, self._given[1])
        self._state = Calibrated(*self._given, layout=self._state.layout)

    def _training_batches(self, x: Any, y: Any) -> Iterator[Batch]:
        """Yield batches of the rows; those of large arrays in random order."""
        count = None if y is None or inputs.is_loader(x) else len(y)
        if count is None or count <= MOST_ROWS:
            yield from self.batches(x, y, call="fit")
            return
        ((x, y),) = inputs.pairs(
            x, y, inputs.Reader(self.model, self._state.layout), self.read_target
        )
        order = torch.from_numpy(np.random.default_rng(self.seed or 0).permutation(count))
        yield from self.batches(inputs.take(x, order), y[order], call="fit")

    def _runner(self, update: bool) -> BatchRunner:
        if self._hashes is None:
            return BatchRunner(self.model)
        return _RepeatedRowCounter(self.model, self._hashes)


class _RepeatedRowCounter(BatchRunner):
    """Counts the calibration rows that were given to fit; many are an error."""

    def __init__(self, model: nn.Module, hashes: Tensor) -> None:
        super().__init__(model)
        self._hashes, self._repeated, self._rows = hashes, 0, 0

    def __call__(self, batch: Batch, requires: Requires) -> BatchOutput:
        """Run the model on one batch."""
        self._repeated += int(torch.isin(row_hashes(batch.x, batch.y), self._hashes).sum())
        self._rows += len(batch.y)
        return super().__call__(batch, requires)

    def finish(self, result: Result) -> Counts:
        """Raise ValueError for training rows, unless they are too few to be no coincidence."""
        if self._repeated:
            share = self._repeated / self._rows
            error = (share / min(self._rows, len(self._hashes))) ** 0.5
            # Data can hold the same row more than once by itself.
            counts = self._hashes.unique(return_counts=True)[1]
            repeated = float(counts[counts > 1].sum()) / len(self._hashes)
            are_all = share == 1 and repeated < 0.5 and self._rows >= _NO_CHANCE
            if are_all or share - repeated > max(_EXCESS, _ERRORS * error):
                raise ValueError(
                    f"{self._repeated} of {self._rows} calibration rows were given to fit as well: "
                    "their residuals were learned, so intervals would cover too "
                    "little. Calibrate with rows that neither trained the model nor were given to "
                    "fit"
                )
        return super().finish(result)


def row_hashes(x: Any, y: Tensor) -> Tensor:
    """Hash each row of inputs and targets to 64 bits.

    >>> x, y = torch.tensor([[1.0, 2.0], [1.0, 2.0]]), torch.tensor([0.0, 1.0])
    >>> first, second = row_hashes(x, y)
    >>> bool(first == second), bool(first == row_hashes(x[:1], y[:1])[0])
    (False, True)
    """
    total = torch.zeros(len(y), dtype=torch.int64)
    for number, tensor in enumerate([y, *(leaf for _, leaf in inputs.leaves(x))]):
        flat = tensor.detach().cpu().reshape(len(y), -1).double().contiguous()
        odd = np.random.default_rng(number + 1).integers(-(2**62), 2**62, flat.shape[1] + 1)
        factors = torch.from_numpy(2 * odd + 1)
        # Sums of products with fixed odd numbers, modulo 2^64; halves are mixed in between.
        bits = flat.view(torch.int64)
        total = total * factors[-1] + ((bits ^ (bits >> 32)) * factors[:-1]).sum(dim=1)
    return total
