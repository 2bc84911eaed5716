"""Which rows train, which stop the training, which calibrate and which test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ffcp.conformal.rank import exact_alpha, rows_needed
from ffcp.regression.cross_conformal import CrossConformal
from ffcp.tables.errors import TableError

Rows = np.ndarray[Any, Any]
_MOST = 20_000  # rows that calibrate, and rows that test: more tell little more
_FEW = 400  # rows; with fewer a division in four would leave too little of each
_LEAST = 100  # calibration rows that a division must leave, and ...
_TIMES = 10  # ... times 1 / alpha
_OF_A_GROUP = 3  # times the calibration rows that alpha needs, which a group has, if it can
_AT_LEAST = 1.0  # second that is allowed for the rows, however short the training
_PREPARED = 1e6  # cells that are prepared in half a second of one core, and ...
_PASSED = 1.5e5  # ... cells that teach, calibrate and test in half a second, where ...
_OF_A_ROW = 400  # ... a row has so many besides its own, since the network is as deep for each


@dataclass(frozen=True)
class RowSplit:
    """Numbers of rows. With ``folds`` (one for each training row) there are no others.

    Rows of fold -1 train every network and calibrate none, so that folds have one size.
    """

    train: Rows
    stop: Rows
    calibrate: Rows
    test: Rows
    folds: Rows | None = None

    def counts(self, calibrated: int | None = None) -> dict[str, int]:
        """Return how many rows do what; of those to calibrate, others may choose the method."""
        given = len(self.calibrate)
        own = given if calibrated is None else calibrated
        counts = {
            "train": len(self.train),
            "stop the training": len(self.stop),
            "choose the method": given - own,
            "calibrate": own,
            "test": len(self.test),
        }
        if self.folds is not None:
            left_out = int((self.folds < 0).sum())
            inside = len(self.train) - left_out
            counts = {"train and calibrate, in folds": inside, "train only": left_out}
        return {name: count for name, count in counts.items() if count}


def rows_in_time(columns: int, seconds: float, alpha: Any) -> int:
    """Return how many rows are prepared for a training so long, which may last half as long.

    >>> rows_in_time(10, 180, 0.1), rows_in_time(3000, 180, 0.1), rows_in_time(3000, 1.2, 0.1)
    (18100000, 60333, 733)
    """
    in_time = _PREPARED * (seconds + _AT_LEAST) / columns
    return max(4 * _enough(alpha), int(min(1e9, in_time)))


def _enough(alpha: Any) -> int:
    """Return the fewest calibration rows that a division must leave."""
    return max(_LEAST, int(_TIMES / exact_alpha(alpha)))


def least_rows(alpha: Any) -> int:
    """Return the fewest rows with which any finite band at this level can be promised.

    >>> least_rows(0.1)
    10
    """
    return max(10, rows_needed(alpha))


def most_rows(columns: int, seconds: float) -> int:
    """Return how many rows calibrate or test at most, beside a training so long.

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
    place, size = by_group.cumcount().to_numpy(), by_group.transform("size").to_numpy()
    marked: Rows = place < (np.minimum(enough, size // 4) if quarter else 4 * enough)
    return marked


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
    """Divide rows by chance, or by their order: the past trains, the last rows test.

    At most ``most`` rows calibrate, or more where ``groups`` need them, and as many test. With few
    rows, and if ``crossing`` is allowed, all of them train and calibrate in folds.

    >>> divide(1000, 0.1, 0, crossing=True).counts()
    {'train': 472, 'stop the training': 78, 'calibrate': 250, 'test': 200}
    """
    if rows < least_rows(alpha):
        raise TableError(f"alpha = {alpha} needs {least_rows(alpha)} rows and targets, got {rows}")
    shuffled = np.random.default_rng(seed).permutation(rows) if order is None else order
    first = np.zeros(rows, dtype=bool)
    if groups is not None:
        first = first_of_groups(groups[shuffled], alpha, quarter=True)
    calibrate = min(max(most, _enough(alpha), first.sum()), rows // 4)
    test = min(most, rows // 5)
    if crossing and order is None and (rows < _FEW or calibrate < _enough(alpha)):
        none = np.empty(0, dtype=np.int64)
        folds = CrossConformal.even_folds(rows, seed).numpy()
        return RowSplit(np.arange(rows), none, none, none, folds)
    train = rows - calibrate - test
    stop = min(most // 2, max(1, train // 7))
    ends = np.cumsum([train - stop, stop, calibrate])
    if order is None:
        rest = shuffled[~first]
        shuffled = np.concatenate([rest[:train], shuffled[first], rest[train:]])
    parts = np.split(shuffled, ends)
    return RowSplit(*(np.sort(part) for part in parts))
