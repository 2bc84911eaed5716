"""What is measured on parts of a table."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("pandas")
import pandas as pd

from ffcp.tables import columns, evaluation
from ffcp.tables.evaluation import _parts


@pytest.mark.long
@pytest.mark.parametrize("share", [0.9, 0.99])
def test_intervals_of_all_parts_hold_at_once(share: float) -> None:
    # Exactly: the intervals of every number of hits, and how likely those are that miss.
    parts, count = 30, 60
    hits = np.concatenate([np.arange(count) < k for k in range(count + 1)])
    rows = np.repeat(np.arange(count + 1), count)
    slices = [("x", str(k), rows == k) for k in range(count + 1)]
    slices += slices[: parts - 1]  # the more parts, the wider
    measured = _parts(slices[:parts], hits, np.ones(len(hits)))
    measured += _parts(slices[parts : 2 * parts], hits, np.ones(len(hits)))
    measured += _parts(slices[-parts:], hits, np.ones(len(hits)))[:1]
    assert [round(part.coverage * count) for part in measured] == list(range(count + 1))
    missing = [k for k, part in enumerate(measured) if not part.low <= share <= part.high]
    assert parts * stats.binom(count, share).pmf(missing).sum() <= 0.05


def test_slices_by_date_are_named_by_their_days() -> None:
    days = pd.date_range("2023-05-06", periods=60, freq="D").strftime("%Y-%m-%d")
    frame = pd.DataFrame({"day": days, "y": range(60)})
    named = {value for _, value, _ in evaluation._slices(frame, columns.learn(frame, "y"))}
    assert named == {
        "2023-05-06 to 2023-05-25",
        "2023-05-26 to 2023-06-14",
        "2023-06-15 to 2023-07-04",
    }
