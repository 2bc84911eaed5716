"""Which rows train, which stop the training, which calibrate and which test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ffcp.conformal.rank import exact_alpha, rows_needed
from ffcp.regression.cross_conformal import CrossConformal
from ffcp.tables.errors import TableError

Rows = np.ndarray[Any, Any]
_MOST = 20_000  # rows that calibrate, and rows that test: more tell little more
_WIDE = 350  # columns; of wider tables fewer rows, since no time limit holds for passes over them
_FEWEST = 1_000  # of these rows, however wide the table
_FEW = 400  # rows; with fewer a division in four would leave too little of each
_LEAST = 100  # calibration rows that a division must leave, and ...
_TIMES = 10  # ... times 1 / alpha
_PREPARED = 2_000  # rows that are prepared however short the training, and ...
_CELLS = 4e6  # ... cells of a table for each second of it


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
    """Return how many rows of a table so wide are worth preparing for a training so short.

    About four times as many as one core can train with once.

    >>> rows_in_time(10, 180, 0.1), rows_in_time(3000, 180, 0.1), rows_in_time(3000, 1.2, 0.1)
    (72000000, 240000, 2000)
    """
    return max(_PREPARED, 4 * _enough(alpha), int(min(1e9, _CELLS * seconds / columns)))


def _enough(alpha: Any) -> int:
    """Return the fewest calibration rows that a division must leave."""
    return max(_LEAST, int(_TIMES / exact_alpha(alpha)))


def least_rows(alpha: Any) -> int:
    """Return the fewest rows with which any finite band at this level can be promised.

    >>> least_rows(0.1)
    10
    """
    return max(10, rows_needed(alpha))


def most_rows(columns: int) -> int:
    """Return how many rows of a table so wide calibrate or test at most.

    >>> most_rows(10), most_rows(700), most_rows(3000)
    (20000, 5000, 1000)
    """
    share = min(1.0, _WIDE / max(1, columns)) ** 2
    return max(_FEWEST, int(_MOST * share))


def divide(
    rows: int,
    alpha: Any,
    seed: int,
    *,
    crossing: bool,
    order: Rows | None = None,
    most: int = _MOST,
) -> RowSplit:
    """Divide rows by chance, or by their order: the past trains, the last rows test.

    At most ``most`` rows calibrate, and as many test. With few rows, and if ``crossing`` is
    allowed, all of them train and calibrate in folds.

    >>> divide(1000, 0.1, 0, crossing=True).counts()
    {'train': 472, 'stop the training': 78, 'calibrate': 250, 'test': 200}
    """
    if rows < least_rows(alpha):
        raise TableError(f"alpha = {alpha} needs {least_rows(alpha)} rows and targets, got {rows}")
    shuffled = np.random.default_rng(seed).permutation(rows) if order is None else order
    calibrate = min(max(most, _enough(alpha)), rows // 4)
    test = min(most, rows // 5)
    if crossing and order is None and (rows < _FEW or calibrate < _enough(alpha)):
        none = np.empty(0, dtype=np.int64)
        folds = CrossConformal.even_folds(rows, seed).numpy()
        return RowSplit(np.arange(rows), none, none, none, folds)
    train = rows - calibrate - test
    stop = min(most // 2, max(1, train // 7))
    ends = np.cumsum([train - stop, stop, calibrate])
    parts = np.split(shuffled, ends)
    return RowSplit(*(np.sort(part) for part in parts))
