"""The conformal rank against rational arithmetic, and the store of scores."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffcp import FFCPWarning, conformal_quantile, conformal_rank
from ffcp.conformal.rank import exact_alpha, points_needed
from ffcp.quantiles import ScoreStore

# A user writes alpha with a few decimals; the double nearest to it is a little off.
decimals = st.integers(1, 6).flatmap(
    lambda places: st.integers(1, 10**places - 1).map(lambda i: Fraction(i, 10**places))
)
sizes = st.integers(1, 10**7)


@given(n=sizes, alpha=decimals)
def test_rank_agrees_with_rational_arithmetic(n: int, alpha: Fraction) -> None:
    exact = -((-(n + 1) * (alpha.denominator - alpha.numerator)) // alpha.denominator)
    written = float(alpha)
    assert conformal_rank(n, written) == exact
    assert conformal_rank(n, alpha) == exact
    assert conformal_rank(n, np.float64(written)) == exact
    assert conformal_rank(n, Decimal(alpha.numerator) / Decimal(alpha.denominator)) == exact


def test_rank_where_floating_point_fails() -> None:
    assert math.ceil((9 + 1) * (1 - 0.7)) == 4  # what a careless program computes
    assert conformal_rank(9, 0.7) == 3


def test_short_floats_stand_for_their_decimals() -> None:
    assert exact_alpha(np.float32(0.1)) == exact_alpha(torch.tensor(0.1)) == Fraction(1, 10)


@given(alpha=decimals)
def test_points_needed_is_the_smallest_finite_size(alpha: Fraction) -> None:
    n = points_needed(alpha)
    assert conformal_rank(n, alpha) <= n
    assert conformal_rank(n - 1, alpha) > n - 1


scores_lists = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=40)


@given(values=scores_lists, alpha=decimals)
def test_quantile_is_the_ranked_score_or_infinity(values: list[float], alpha: Fraction) -> None:
    k = conformal_rank(len(values), alpha)
    expected = sorted([*values, math.inf])[min(k, len(values) + 1) - 1]
    assert conformal_quantile(torch.tensor(values), alpha).item() == expected


def test_quantile_takes_more_values_than_torch_quantile_does() -> None:
    scores = torch.arange(2**24 + 10, dtype=torch.float32).flip(0)
    with pytest.raises(RuntimeError):
        torch.quantile(scores, 0.9)
    assert conformal_quantile(scores, 0.5).item() == pytest.approx(2**23, rel=1e-6)


@given(parts=st.lists(scores_lists, min_size=1, max_size=4), alpha=decimals)
def test_store_does_not_depend_on_how_scores_arrive(
    parts: list[list[float]], alpha: Fraction
) -> None:
    whole, grown = ScoreStore(), ScoreStore()
    whole.replace(torch.tensor([score for part in parts for score in part])[:, None])
    for part in parts:
        grown.add(torch.tensor(part)[:, None])
    assert torch.equal(whole.scores, grown.scores)
    if conformal_rank(len(whole), alpha) <= len(whole):
        expected = conformal_quantile(whole.scores, alpha)
        assert torch.equal(whole.threshold(alpha), expected)
    else:
        with pytest.warns(FFCPWarning):
            assert whole.threshold(alpha).item() == math.inf


def test_scores_keep_their_type_when_the_module_is_converted() -> None:
    store = ScoreStore()
    store.replace(torch.tensor([[1 + 1e-12], [2.0]]))
    store.half()
    store.to(torch.float16)
    assert store.scores.dtype == torch.float64


def test_store_refuses_another_number_of_outputs() -> None:
    store = ScoreStore()
    store.replace(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="scores for 2 outputs, got 1"):
        store.add(torch.zeros(3, 1))
