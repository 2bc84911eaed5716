"""The split of rows into training, early stopping, calibration and test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ffcp.conformal.rank import exact_alpha, rows_needed
from ffcp.regression.cross_conformal import CrossConformal
from ffcp.tables.errors import TableError

Rows = np.ndarray[Any, Any]
_MOST = 20_000  # calibration rows, and test rows: more add little
_FEW = 400  # rows; with fewer a split in four would leave too few for each part
_LEAST = 100  # smallest number of calibration rows in a split, and ...
_TIMES = 10  # ... times 1 / alpha
_OF_A_GROUP = 3  # times the calibration rows that alpha needs, for each group that has them
_AT_LEAST = 1.0  # seconds that are allowed for the rows, for any time limit of the training
_PREPARED = 1e6  # cells that are prepared in half a second on one core, and ...
_PASSED = 1.5e5  # ... cells that are learned, calibrated and tested in half a second, where ...
_OF_A_ROW = 400  # ... a row counts as this many more cells, for the layers of the network


@dataclass(frozen=True)
class RowSplit:
    """The row numbers of each part. With ``folds``, one per training row, there are no others.

    Rows of fold -1 are used to train every network and not for calibration, so that folds are of
    equal size.
    """

    train: Rows
    stop: Rows
    calibrate: Rows
    test: Rows
    folds: Rows | None = None

    def counts(self, calibrated: int | None = None) -> dict[str, int]:
        """Return the number of rows of each part; some calibration rows may select the method."""
        if self.folds is not None:
            left_out = int((self.folds < 0).sum())
            inside = len(self.train) - left_out
            counts = {"training and calibration in folds": inside, "training only": left_out}
        else:
            calibrated = len(self.calibrate) if calibrated is None else calibrated
            counts = {
                "training": len(self.train),
                "early stopping": len(self.stop),
                "method selection": len(self.calibrate) - calibrated,
                "calibration": calibrated,
                "test": len(self.test),
            }
        return {name: count for name, count in counts.items() if count}


def rows_in_time(columns: int, seconds: float, alpha: Any) -> int:
    """Return how many rows can be prepared in half the time limit of the training.

    >>> rows_in_time(10, 180, 0.1), rows_in_time(3000, 180, 0.1), rows_in_time(3000, 1.2, 0.1)
    (18100000, 60333, 733)
    """
    in_time = _PREPARED * (seconds + _AT_LEAST) / columns
    return max(4 * _least_calibration(alpha), int(min(1e9, in_time)))


def _least_calibration(alpha: Any) -> int:
    """Return the smallest number of calibration rows in a split."""
    return max(_LEAST, int(_TIMES / exact_alpha(alpha)))


def most_rows(columns: int, seconds: float) -> int:
    """Return the largest number of calibration or test rows, given the training's time limit.

    >>> most_rows(10, 180), most_rows(3000, 180), most_rows(10, 1.2), most_rows(3000, 1.2)
    (20000, 7985, 804, 97)
    """
    return min(_MOST, int(_PASSED * (seconds + _AT_LEAST) / (columns + _OF_A_ROW)))


def first_of_groups(groups: Rows, alpha: Any, quarter: bool = False) -> Rows:
    """Mark the first rows of each group, four times as many as should calibrate of it.

    Or a quarter of them, and at most a quarter of the group.

    >>> groups = np.array(["a"] * 12 + ["b"] * 200)
    >>> int(first_of_groups(groups, 0.1).sum())  # 12 and 4 * 27
    120
    >>> int(first_of_groups(groups, 0.1, quarter=True).sum())  # 3 and 27
    30
    """
    by_group, enough = pd.Series(groups).groupby(groups), _OF_A_GROUP * rows_needed(alpha)
    number, size = by_group.cumcount().to_numpy(), by_group.transform("size").to_numpy()
    is_first: Rows = number < (np.minimum(enough, size // 4) if quarter else 4 * enough)
    return is_first


def divide(
    rows: int,
    alpha: Any,
    seed: int,
    *,
    crossing: bool,
    order: Rows | None = None,
    most: int = _MOST,
    groups: Rows | None = None,
) -> RowSplit:
    """Return a random split of rows, or by their order: training on the first, test on the last.

    There are at most ``most`` calibration rows, or more where ``groups`` need them, and as many
    test rows. With few rows, and if ``crossing`` is allowed, all rows are used for training and
    calibration, in folds.

    >>> divide(1000, 0.1, 0, crossing=True).counts()
    {'training': 472, 'early stopping': 78, 'calibration': 250, 'test': 200}
    """
    needed = max(10, rows_needed(alpha))
    if rows < needed:
        raise TableError(f"'alpha' = {alpha} needs {needed} rows with a target, got {rows}")
    shuffled = np.random.default_rng(seed).permutation(rows) if order is None else order
    first = np.zeros(rows, dtype=bool)
    if groups is not None:
        first = first_of_groups(groups[shuffled], alpha, quarter=True)
    calibrate = min(max(most, _least_calibration(alpha), first.sum()), rows // 4)
    test = min(most, rows // 5)
    if crossing and order is None and (rows < _FEW or calibrate < _least_calibration(alpha)):
        none = np.empty(0, dtype=np.int64)
        folds = CrossConformal.even_folds(rows, seed).numpy()
        return RowSplit(np.arange(rows), none, none, none, folds)
    train = rows - calibrate - test
    stop = min(most // 2, max(1, train // 7))
    ends = np.cumsum([train - stop, stop, calibrate])
    if order is None:
        rest = shuffled[~first]
        shuffled = np.concatenate([rest[:train], shuffled[first], rest[train:]])
    return RowSplit(*(np.sort(part) for part in np.split(shuffled, ends)))
