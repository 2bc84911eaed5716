"""One threshold for all points: the conformal quantile of sorted scores."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffcp import conformal_quantile, conformal_rank
from ffcp.conformal.marginal import Marginal

decimals = st.integers(1, 6).flatmap(
    lambda places: st.integers(1, 10**places - 1).map(lambda i: Fraction(i, 10**places))
)
scores_lists = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=40)


@pytest.mark.long
@given(parts=st.lists(scores_lists, min_size=1, max_size=4), alpha=decimals)
def test_thresholds_do_not_depend_on_how_scores_arrive(
    parts: list[list[float]], alpha: Fraction
) -> None:
    whole, grown = Marginal(), Marginal()
    whole.add(torch.tensor([score for part in parts for score in part])[:, None])
    for part in parts:
        grown.add(torch.tensor(part)[:, None])
    assert torch.equal(whole.scores, grown.scores)
    if conformal_rank(len(whole), alpha) <= len(whole):
        expected = conformal_quantile(whole.scores, alpha)
        assert torch.equal(whole.threshold(alpha), expected)
    else:
        assert whole.threshold(alpha).item() == math.inf


def test_scores_keep_their_type_when_the_module_is_converted() -> None:
    scores = Marginal()
    scores.add(torch.tensor([[1 + 1e-12], [2.0]]))
    scores.half()
    scores.to(torch.float16)
    assert scores.scores.dtype == torch.float64


def test_another_number_of_outputs_is_refused() -> None:
    scores = Marginal()
    scores.add(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="scores for 2 outputs, got 1"):
        scores.add(torch.zeros(3, 1))


def test_adding_and_merging_leave_the_given_scores_as_they_are() -> None:
    given_scores = torch.tensor([[3.0], [1.0], [2.0]], dtype=torch.float64)
    one, two = Marginal(), Marginal()
    one.add(given_scores)
    two.merge(one)
    two.add(torch.zeros(1, 1))
    assert given_scores[:, 0].tolist() == [3, 1, 2]
    assert one.scores[:, 0].tolist() == [1, 2, 3]
    assert two.scores[:, 0].tolist() == [0, 1, 2, 3]


def test_an_emptied_calibration_shares_nothing_with_the_full_one() -> None:
    full = Marginal()
    full.add(torch.ones(3, 1))
    fresh = full.empty()
    assert len(fresh) == 0
    fresh.add(torch.zeros(2, 1))
    assert full.scores[:, 0].tolist() == [1, 1, 1]


def test_columns_count_the_scores_they_know() -> None:
    scores = Marginal()
    scores.add(torch.tensor([[1.0, math.nan], [2.0, 5.0], [3.0, math.nan]]))
    assert scores.threshold(0.5).tolist() == [2.0, 5.0]
    assert scores.threshold(0.3).tolist() == [3.0, math.inf]


def test_signs_stay_with_their_scores() -> None:
    signed = torch.randn(500, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kept = Marginal()
    kept.add(signed.abs(), {"signs": signed < 0})
    assert torch.equal(kept.scores, signed.abs().sort(dim=0).values)
    assert torch.equal(kept.signed(), signed.sort(dim=0).values)
    assert torch.equal(kept.thresholds([0.1, 0.2])[0, 0], kept.threshold(0.1))
