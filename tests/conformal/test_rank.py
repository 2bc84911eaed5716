"""The conformal rank and quantile against rational arithmetic."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffcp import conformal_quantile, conformal_rank
from ffcp.conformal.rank import exact_alpha, rows_needed

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


@pytest.mark.long
@given(alpha=decimals)
def test_points_needed_is_the_smallest_finite_size(alpha: Fraction) -> None:
    n = rows_needed(alpha)
    assert conformal_rank(n, alpha) <= n
    assert conformal_rank(n - 1, alpha) > n - 1


scores_lists = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=40)


@pytest.mark.long
@given(values=scores_lists, alpha=decimals)
def test_quantile_is_the_ranked_score_or_infinity(values: list[float], alpha: Fraction) -> None:
    k = conformal_rank(len(values), alpha)
    expected = sorted([*values, math.inf])[min(k, len(values) + 1) - 1]
    assert conformal_quantile(torch.tensor(values), alpha).item() == expected


@pytest.mark.heavy
def test_quantile_takes_more_values_than_torch_quantile_does() -> None:
    scores = torch.arange(2**24 + 10, dtype=torch.float32).flip(0)
    with pytest.raises(RuntimeError):
        torch.quantile(scores, 0.9)
    assert conformal_quantile(scores, 0.5).item() == pytest.approx(2**23, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_reaches_the_score_at_the_quantile(dtype: torch.dtype) -> None:
    scores = torch.tensor([3.0, 1.0, 2.0, 4.0], dtype=dtype, requires_grad=True)
    conformal_quantile(scores, 0.4).backward()  # the third smallest of four
    assert scores.grad is not None
    assert scores.grad.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_a_float_is_the_decimal_number_it_prints_as_to_twelve_digits() -> None:
    assert exact_alpha(1 - 0.9) == exact_alpha(0.1) == Fraction(1, 10)
    assert exact_alpha(0.1 + 0.2) == Fraction(3, 10)
    assert exact_alpha(0.123456789012) == Fraction("0.123456789012")
    assert exact_alpha(1e-20) == Fraction(1, 10**20)
    assert exact_alpha(np.float32(0.1)) == Fraction(1, 10)


def test_fractions_and_decimals_are_taken_as_they_are() -> None:
    assert exact_alpha(Fraction(1, 3)) == Fraction(1, 3)
    assert exact_alpha(Decimal("0.10000000000000001")) == Fraction("0.10000000000000001")
