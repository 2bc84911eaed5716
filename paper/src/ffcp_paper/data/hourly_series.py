"""Hourly time series, aggregated from tables whose rows are in the order of time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ffcp_paper.data import datasets

WEEK = 7 * 24  # hours


class Hourly(NamedTuple):
    """A value for every hour, the hour of the week, and whether a row of that hour is there.

    A missing hour has the value of the last one before it; no later row is used.
    """

    values: Tensor
    clock: Tensor
    known: Tensor


def load(name: str) -> Hourly:
    """Load a series of :data:`ffcp_paper.data.datasets.FURTHER` by its name."""
    return hourly(datasets.load(name))


def hourly(table: datasets.Table) -> Hourly:
    """Return the mean target of every hour; gaps of a week and more lose their whole weeks.

    Parameters
    ----------
    table
        Rows in the order of time, with the columns ``hour`` and ``day`` (of the week).

    Examples
    --------
    >>> rows = np.array([[5.0, 0.0], [5.5, 0.0], [8.0, 0.0]])
    >>> found = hourly(datasets.Table(rows, np.array([1.0, 3.0, 9.0]), ("hour", "day")))
    >>> found.values.tolist(), found.clock.tolist(), found.known.tolist()
    ([2.0, 2.0, 2.0, 9.0], [5, 6, 7, 8], [True, False, False, True])
    """
    hour, day = (table.x[:, table.names.index(name)] for name in ("hour", "day"))
    clock = np.floor(24 * day + hour + 0.01).astype(int)  # minutes are rounded in float32
    passed = np.concatenate([[0], np.cumsum(np.diff(clock) % WEEK)])
    rows, totals = np.bincount(passed), np.bincount(passed, table.y)
    last = np.maximum.accumulate(np.where(rows > 0, np.arange(len(rows)), 0))
    values = (totals / np.maximum(rows, 1))[last].astype(np.float32)
    hours = (clock[0] + np.arange(len(rows))) % WEEK
    return Hourly(*(torch.from_numpy(part) for part in (values, hours, rows > 0)))
