"""Shares and their confidence intervals."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ffcp.metrics import Coverage, wilson
from ffcp.metrics.shares import GroupCoverage, clopper_pearson


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_agrees_with_scipy(case: tuple[int, int]) -> None:
    hits, n = case
    expected = stats.binomtest(hits, n).proportion_ci(0.95, method="wilson")
    assert wilson(hits / n, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_coverage_is_a_number_with_an_interval() -> None:
    value = Coverage(0.9, rows=100)
    assert value + 0 == 0.9
    assert value.low < 0.9 < value.high


def test_coverage_survives_pickle_with_its_interval() -> None:
    value = Coverage(0.9, rows=100, confidence=0.8)
    again = pickle.loads(pickle.dumps(value))
    assert (again, again.low, again.high, again.rows) == (value, value.low, value.high, 100)
    worst = Coverage(0.9, rows=100, among=7)
    assert pickle.loads(pickle.dumps(worst)).low == worst.low < value.low


@pytest.mark.heavy
@given(st.integers(1, 10**6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_clopper_pearson_interval_agrees_with_scipy(case: tuple[int, int]) -> None:
    hits, n = case
    for confidence in (0.95, 0.9975):
        expected = stats.binomtest(hits, n).proportion_ci(confidence, method="exact")
        found = clopper_pearson(hits, n, confidence)
        assert found == pytest.approx((expected.low, expected.high), abs=1e-9)


@pytest.mark.heavy
@pytest.mark.parametrize(("rows", "share"), [(50, 0.9), (200, 0.9)])
def test_the_interval_of_the_worst_of_twenty_groups_misses_in_at_most_5_percent(
    rows: int, share: float
) -> None:
    # All groups are covered alike; one interval for the worst alone would miss far more often.
    random, runs = np.random.default_rng(0), 400
    missed = alone = 0
    for hits in random.binomial(rows, share, size=(runs, 20)):
        groups = GroupCoverage({i: Coverage(h / rows, rows) for i, h in enumerate(hits)})
        worst, plain = groups.worst, groups.groups[groups.worst_group]
        missed += not worst.low <= share <= worst.high
        alone += not plain.low <= share <= plain.high
    assert missed <= 0.05 * runs
    assert alone > 0.15 * runs  # so the test has something to find


def test_a_single_group_has_the_interval_of_one() -> None:
    group = Coverage(0.9, rows=100)
    worst = GroupCoverage({"all": group}).worst
    assert (worst.low, worst.high, worst.among) == (group.low, group.high, 1)
