"""Rows that are set aside to choose: which ones, how many, and that they do not calibrate."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffcp.conformal.selection import Division

fractions = st.floats(0.01, 0.99)


@given(
    fraction=fractions,
    seed=st.integers(0, 100),
    most=st.integers(0, 60),
    cuts=st.lists(st.integers(0, 50), min_size=1, max_size=6),
)
def test_the_division_depends_on_the_position_alone(
    fraction: float, seed: int, most: int, cuts: list[int]
) -> None:
    division = Division(fraction, seed, most)
    whole = division.mask(range(sum(cuts)))
    parts, start = [], 0
    for rows in cuts:
        parts.append(division.mask(range(start, start + rows)))
        start += rows
    assert torch.equal(whole, torch.cat(parts))


@given(start=st.integers(0, 10**7), seed=st.integers(0, 5))
def test_a_worker_knows_its_rows_without_those_before(start: int, seed: int) -> None:
    division = Division(0.2, seed, most=10**7)
    rows = range(start, start + 40)
    with_some_before = division.mask(range(start - min(start, 9), rows.stop))
    assert torch.equal(with_some_before[-40:], division.mask(rows))
    assert 7 <= int(division.mask(rows).sum()) <= 9


@given(fraction=fractions, seed=st.integers(0, 100), most=st.integers(0, 60))
def test_no_more_rows_than_allowed_are_set_aside(fraction: float, seed: int, most: int) -> None:
    division = Division(fraction, seed, most)
    rows = division.end + 100
    mask = division.mask(range(rows))
    assert int(mask.sum()) <= most
    assert not mask[division.end :].any()


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5])
def test_the_division_takes_the_asked_share(fraction: float) -> None:
    for most in (30, 10_000):
        mask = Division(fraction, 0, most).mask(range(1000))
        assert int(mask.sum()) == min(most, round(1000 * fraction))


def test_another_seed_divides_otherwise() -> None:
    one, two = (Division(0.2, seed, most=100).mask(range(100)) for seed in (0, 1))
    assert not torch.equal(one, two)


@pytest.mark.parametrize("fraction", [0.1, 0.2])
def test_every_row_is_as_likely_to_be_set_aside(fraction: float) -> None:
    masks = torch.stack([Division(fraction, seed, 99).mask(range(20)) for seed in range(2000)])
    torch.testing.assert_close(
        masks.double().mean(dim=0), torch.full((20,), fraction).double(), rtol=0, atol=0.04
    )
