"""One threshold for all rows: the conformal quantile of the calibration scores."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ffcp

decimals = st.integers(1, 6).flatmap(
    lambda places: st.integers(1, 10**places - 1).map(lambda i: Fraction(i, 10**places))
)
scores_lists = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=40)


def with_scores(*parts: Tensor, **common: bool) -> ffcp.CP:
    """Calibrate on targets whose predictions are 0, one part after the other."""
    predictor = ffcp.CP(ffcp.Stored(), **common)
    for part in parts:
        predictor.calibrate(torch.zeros_like(part), part, update=True)
    return predictor


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@given(parts=st.lists(scores_lists, min_size=1, max_size=4), alpha=decimals)
def test_thresholds_do_not_depend_on_how_scores_arrive(
    parts: list[list[float]], alpha: Fraction
) -> None:
    given_parts = [torch.tensor(part) for part in parts]
    whole, grown = with_scores(torch.cat(given_parts)), with_scores(*given_parts)
    assert torch.equal(whole.calibration.scores, grown.calibration.scores)
    n = len(whole.calibration)
    if ffcp.conformal_rank(n, alpha) <= n:
        expected = float(ffcp.conformal_quantile(torch.cat(given_parts), alpha))
    else:
        expected = math.inf
    for predictor in (whole, grown):
        upper = predictor.predict_interval(torch.zeros(1), alpha).upper
        assert upper.item() == pytest.approx(expected)


def test_another_number_of_outputs_is_refused() -> None:
    predictor = with_scores(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="2"):
        predictor.calibrate(torch.zeros(3, 1), torch.zeros(3, 1), update=True)
    assert len(predictor.calibration) == 3


def test_updating_and_merging_leave_what_was_given_as_it_is() -> None:
    y = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)
    one = with_scores(y)
    two = ffcp.CP(one.model).merge(one)
    two.calibrate(torch.zeros(1).double(), torch.zeros(1).double(), update=True)
    assert y.tolist() == [3, 1, 2]
    assert one.calibration.scores[:, 0].tolist() == [1, 2, 3]
    assert two.calibration.scores[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_columns_count_the_scores_they_know() -> None:
    y = torch.tensor([[1.0, math.nan], [2.0, 5.0], [3.0, math.nan]])
    predictor = with_scores(y, missing=True)
    upper = predictor.predict_interval(torch.zeros(1, 2), (0.5, 0.3)).upper
    assert upper.flatten().tolist() == pytest.approx([2.0, 5.0, 3.0, math.inf])
