"""Shares and their confidence intervals."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ffcp.metrics import Coverage, wilson


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
