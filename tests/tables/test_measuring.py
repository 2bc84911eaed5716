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


def test_coverage_that_depends_on_a_column_of_words_is_found() -> None:
    random = np.random.default_rng(0)
    town = random.choice(["Ulm", "Bonn", "Kiel"], 1000)
    frame = pd.DataFrame({"town": town, "size": random.random(1000), "y": random.random(1000)})
    hits = (random.random(1000) < np.where(town == "Ulm", 0.7, 0.99)).astype(float)
    learned = columns.learn(frame, "y")
    found = evaluation._excess(hits, learned, frame, 0.1)
    assert found is not None
    assert 0 < found[1] < found[0] < found[2]
    assert evaluation._excess(hits[:199], learned, frame[:199], 0.1) is None


def test_without_lightgbm_there_is_no_excess_risk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "find_spec", lambda name: None)
    frame = pd.DataFrame({"x": np.arange(300.0) ** 2 % 11, "y": np.arange(300.0) % 7})
    assert evaluation._excess(np.ones(300), columns.learn(frame, "y"), frame, 0.1) is None
