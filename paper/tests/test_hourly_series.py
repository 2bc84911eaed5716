"""Hourly series: hours that are missing look back, and the clock goes on."""

from __future__ import annotations

import numpy as np

from ffcp_paper.data import datasets, hourly_series


def made(minutes: list[int]) -> hourly_series.Hourly:
    """Rows at these minutes of a Sunday night and after; their targets count up."""
    time = np.array(minutes) + 6 * 24 * 60
    x = np.stack([time % 1440 / 60, time // 1440 % 7], axis=1).astype(np.float32)
    return hourly_series.hourly(
        datasets.Table(x, np.arange(len(minutes), dtype=float), ("hour", "day"))
    )


def test_ten_minutes_become_hours() -> None:
    found = made(list(range(0, 240, 10)))
    assert found.values.tolist() == [2.5, 8.5, 14.5, 20.5]
    assert found.known.all()


def test_a_missing_hour_has_the_value_before_it_and_the_week_begins_again() -> None:
    found = made([60 * hour for hour in (22, 23, 26)])
    assert found.values.tolist() == [0, 1, 1, 1, 2]
    assert found.known.tolist() == [True, True, False, False, True]
    assert found.clock.tolist() == [166, 167, 0, 1, 2]


def test_what_comes_later_changes_nothing_before() -> None:
    whole, start = made([0, 60, 240, 540, 600]), made([0, 60, 240])
    assert whole.values[:9].tolist() == [*start.values.tolist(), 2, 2, 2, 2]
