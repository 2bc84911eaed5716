"""What training rows teach: they are run once, and known again if they come to calibrate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ffcp.calibrated import Calibrated
from ffcp.calibration_loop import Batch
from ffcp.conformal.columns import Table
from ffcp.network import checks, forward, inputs
from ffcp.regression import recorded_rows
from ffcp.regression.common import Common
from ffcp.regression.joint import AUTO
from ffcp.regression.learned.feature_columns import FeatureColumns, On
from ffcp.regression.regression_predictor import RegressionPredictor
from ffcp.regression.scaled_score import RegressionScore

MOST_ROWS = 20_000  # that teach; more take their time and add little
# Data can hold equal rows by chance. What the share of known rows exceeds the share of repeated
# ones by, before it counts as a mistake: so much, and so many standard errors.
_EXCESS, _ERRORS = 0.05, 4.0
Self = TypeVar("Self", bound="LearnsFromTraining")


class Lesson(NamedTuple):
    """What the model said of rows that teach, and where to look for it."""

    sight: FeatureColumns
    rows: dict[str, Any]


class LearnsFromTraining(RegressionPredictor):
    """Bands that training rows can teach; rows that teach must not calibrate."""

    _on: tuple[On, ...]
    _taught: Tensor | None = None  # sorted hashes of the rows that taught

    def _lesson(self, x: Any, y: Any, disjoint: bool) -> Lesson:
        """Run the model on rows that teach, at most so many; hash all, unless ``disjoint``."""
        table, hashes, sight = Table(), [], None
        with torch.inference_mode(False):
            for batch in self._teaching_batches(x, y):
                hashes.append(row_hashes(batch.x, batch.y)[: 0 if disjoint else None])
                if len(table) >= MOST_ROWS:
                    continue
                if sight is None:
                    sight = FeatureColumns.of(self.model, batch.x, self._on)
                    forward.check_rows(self.model, batch.x, sight.norms)
                out = forward.see(self.model, batch.x, sight.requires(), batch.row)
                target = checks.target(batch.y, self._scorer.prediction(out.output))
                table.add(recorded_rows.noted(sight.watched(out), target, sight.takes_input))
        if sight is None:
            raise ValueError("there are no rows to learn from")
        self._taught = torch.cat(hashes).sort().values
        return Lesson(sight, table.columns)

    def restore_fit(self) -> None:
        """Take the hashes of training rows out of a state that was loaded."""
        self._taught = getattr(self._scorer, "rows", None)

    def _learn(self, family: RegressionScore) -> None:
        """Take what training rows taught; scores of before are dropped."""
        _, calibration = self._given
        self._given = (family, calibration)
        self._state = Calibrated(family, calibration.empty(), layout=self.layout)

    def _teaching_batches(self, x: Any, y: Any) -> Iterator[Batch]:
        """Give batches of the rows; of large arrays, in an order that leaves any out evenly."""
        count = None if y is None or inputs.is_loader(x) else len(y)
        if count is None or count <= MOST_ROWS:
            yield from self.batches(x, y, None, call="fit")
            return
        ((x, y),) = inputs.pairs(x, y, inputs.Reader(self.model, self.layout), self.read_target)
        order = torch.from_numpy(np.random.default_rng(self.seed or 0).permutation(count))
        yield from self.batches(inputs.take(x, order), y[order], None, call="fit")

    def count_fitted(self, batch: Batch) -> int:
        """Count rows that taught."""
        known = self._taught
        return 0 if known is None else int(torch.isin(row_hashes(batch.x, batch.y), known).sum())

    def _refuse_fitted(self, met: int, rows: int) -> None:
        """Refuse rows that taught, unless so few that chance may have made them equal.

        New rows drawn as those of ``fit`` equal one of them about as often as these equal one
        another. Refused is a share more than 5 percentage points and 4 standard errors above.
        """
        known = self._taught
        if known is None or not met:
            return
        share = met / rows
        error = (share / min(rows, len(known))) ** 0.5
        if share - _repeated(known) > max(_EXCESS, _ERRORS * error):
            raise ValueError(
                f"{met} of {rows} calibration rows were given to fit as well: what was learned "
                "from a row knows its error, and bands would cover too little. Calibrate with "
                "rows that neither trained the model nor were given to fit"
            )


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


def _repeated(hashes: Tensor) -> float:
    """Give the share of rows that the data holds more than once by itself."""
    _, counts = hashes.unique(return_counts=True)
    return float(counts[counts > 1].sum()) / len(hashes)


def no_output_scales(common: Common) -> None:
    """Refuse scales of outputs, which are learned where outputs share a threshold."""
    output_scales = common.pop("output_scales", AUTO)
    if not (isinstance(output_scales, str) and output_scales == AUTO):
        raise ValueError(
            "the scales of outputs that share a threshold are learned here: leave out output_scales"
        )
