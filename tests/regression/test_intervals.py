"""Score and interval are inverse to each other, down to the last bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ffcp.regression.intervals import Ends, interval_ends, score

numbers = st.floats(-1e12, 1e12, allow_subnormal=False)
scales = st.floats(1e-6, 1e6)
types = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


def tensor(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def around(centre: float, scale: float) -> Ends:
    """Give the ends of a point prediction, one centre and one scale for both sides."""
    middle, side = tensor(centre), tensor(scale)
    return Ends(middle, middle, side, side)


@pytest.mark.long
def interval(ends: Ends, threshold: torch.Tensor, dtype: torch.dtype) -> tuple:
    return interval_ends(ends, threshold, threshold, dtype)


@given(lo=numbers, hi=numbers, s_lo=scales, s_hi=scales, y=numbers, dtype=types)
def test_a_target_never_falls_out_of_the_band_of_its_own_score(
    lo: float, hi: float, s_lo: float, s_hi: float, y: float, dtype: torch.dtype
) -> None:
    # A model's outputs are numbers of its own type.
    lo, hi = (torch.tensor([end], dtype=dtype).double().item() for end in (lo, hi))
    assume(math.isfinite(lo) and math.isfinite(hi))
    for ends in (
        Ends(tensor(lo), tensor(hi), tensor(s_lo), tensor(s_hi)),
        around(lo, s_lo),
    ):
        threshold = score(ends, tensor(y))
        lower, upper = interval(ends, threshold, dtype)
        assert lower.dtype == dtype
        assert lower.double().item() <= y <= upper.double().item()


@given(lo=st.floats(-1e6, 1e6), s=scales, q=st.floats(0, 1e3))
def test_rounding_outward_costs_next_to_nothing(lo: float, s: float, q: float) -> None:
    lower, upper = interval(around(lo, s), tensor(q), torch.float64)
    assert (upper - lower).item() <= 2 * q * s + 1e-14 * (abs(lo) + q * s) + 1e-300


@given(y=numbers, lo=numbers, s=scales)
def test_symmetric_shortcut_equals_the_general_formula(y: float, lo: float, s: float) -> None:
    short = around(lo, s)
    general = Ends(tensor(lo), tensor(lo), tensor(s), tensor(s))
    assert not general.is_symmetric
    assert torch.equal(score(short, tensor(y)), score(general, tensor(y)))


def test_score_is_negative_inside_the_base_band() -> None:
    ends = Ends(tensor(0.0), tensor(4.0), tensor(1.0), tensor(2.0))
    assert score(ends, tensor(1.0)).item() == -1.0
    assert score(ends, tensor(6.0)).item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_infinite_threshold_gives_the_whole_line(dtype: torch.dtype) -> None:
    lower, upper = interval(around(3.0, 1e-6), tensor(math.inf), dtype)
    assert lower.item() == -math.inf
    assert upper.item() == math.inf


def test_infinite_band_stays_infinite_beside_one_that_shrinks():
    zero, one = torch.zeros(2, 1), torch.ones(2, 1)
    threshold = torch.tensor([[-2.0], [torch.inf]], dtype=torch.float64)
    lower, upper = interval(Ends(zero, one, one, one), threshold, torch.float32)
    assert lower[0] == upper[0]
    assert lower[1] == -torch.inf
    assert upper[1] == torch.inf


vectors = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=6)


@given(
    lo=vectors, down=st.floats(0, 1e308), up=st.floats(0, 1e308), scale=scales,
    dtype=st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
@pytest.mark.filterwarnings("error")  # numpy speaks of numbers that become infinite
def test_one_step_for_all_rows_is_that_of_each_row(
    lo: list[float], down: float, up: float, scale: float, dtype: torch.dtype
) -> None:
    low = torch.tensor(lo, dtype=torch.float64)[:, None]
    high, one = low.abs() * 2, torch.tensor(scale, dtype=torch.float64)
    for ends, steps in (
        (Ends(low, low, one, one), (down, down)),
        (Ends(low, low, one, one), (down, up)),
        (Ends(low, high, one, one), (down, up)),
    ):
        at_once = [torch.tensor([[[step]]], dtype=torch.float64) for step in steps]
        if steps[0] == steps[1]:
            at_once[1] = at_once[0]
        row_by_row = [step.expand(1, *low.shape) for step in at_once]
        expected, bounds = (interval_ends(ends, *own, dtype) for own in (row_by_row, at_once))
        assert bounds[0].dtype == dtype
        assert all(map(torch.equal, bounds, expected))
        assert bounds[0].shape == (1, *low.shape)
