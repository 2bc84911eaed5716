"""Nested sets: every target has the position of the first set that holds it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ffcp.regression.learned.nested import (
    FAMILIES,
    LEVELS,
    ends_at,
    grown,
    nested,
    position,
    quantile_at,
    signed_position,
)
from ffcp.regression.learned.network import ascending
from tests.conftest import normal


def quantiles(rows: int = 50) -> Tensor:
    return ascending(3 * normal(rows, len(LEVELS), seed=0).double())


@pytest.mark.parametrize("family", FAMILIES)
def test_sets_are_nested(family: str) -> None:
    sets = nested(quantiles(), family)
    assert (sets.lower.diff() <= 0).all()
    assert (sets.upper.diff() >= 0).all()
    assert (sets.lower[:, 0] == sets.upper[:, 0]).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_set_at_a_targets_position_is_the_first_that_holds_it(family: str) -> None:
    sets = nested(quantiles(), family)
    for scale in (0.1, 1.0, 30.0):
        y = scale * normal(50, seed=1).double()
        place = position(sets, y)
        lower, upper = ends_at(sets, place)
        assert ((lower <= y + 1e-9) & (y <= upper + 1e-9)).all()
        lower, upper = ends_at(sets, (place - 1e-3).clamp_min(0))
        inside = (lower < y) & (y < upper)
        assert not inside[place > 1e-3].any()


def test_signed_positions_grow_with_the_target_and_are_inverted_by_quantiles() -> None:
    many = quantiles(1).expand(400, -1)
    y = torch.linspace(-200, 200, 400, dtype=torch.float64)
    places = signed_position(many, y)
    assert (places.diff() > 0).all()
    assert torch.allclose(quantile_at(many, places), y, atol=1e-9)


def test_the_size_of_a_signed_position_is_the_position_among_central_sets() -> None:
    many, y = quantiles(), 5 * normal(50, seed=2).double()
    assert torch.equal(signed_position(many, y).abs(), position(nested(many, "central"), y))


def test_infinite_positions_are_the_whole_line_and_unknown_targets_have_none() -> None:
    sets = nested(quantiles(3), "central")
    lower, upper = ends_at(sets, torch.tensor([torch.inf] * 3).double())
    assert (lower == -torch.inf).all()
    assert (upper == torch.inf).all()
    assert position(sets, torch.full((3,), torch.nan).double()).isnan().all()


def test_grown_sets_are_shorter_than_central_ones_where_noise_is_skewed() -> None:
    skewed = -torch.log1p(-LEVELS)[None]  # quantiles of the exponential distribution
    central, grown = nested(skewed, "central"), nested(skewed, "grown")
    # Both hold about 90 %: levels 0.05 to 0.95, and the seventh of the grown sets.
    width = float(central.upper[0, 15] - central.lower[0, 15])
    assert float(grown.upper[0, 7] - grown.lower[0, 7]) < 0.9 * width


def test_sets_that_are_equally_short_are_not_told_apart_by_rounding_errors() -> None:
    even = LEVELS.double().repeat(50, 1)
    noisy = even + 1e-13 * normal(*even.shape, seed=1).double()
    for mine, theirs in zip(grown(noisy), grown(even), strict=True):
        torch.testing.assert_close(mine, theirs)
