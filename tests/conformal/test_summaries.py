"""Summaries of scores: every bound against all scores, on data made to break it."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffcp.conformal.summaries import (
    Piece,
    Rounded,
    exactly,
    gathered,
    room,
    shrunk,
    thinned,
)

NUMBERS = st.sampled_from([0.0, 1.0, 1.5, 2.0, -3.0, 7.0, 1e300, math.inf])
SOME = st.lists(NUMBERS, min_size=1, max_size=60).map(np.array)


def must_bound(rounded: Rounded, scores: np.ndarray) -> None:
    """Compare every rank with all scores."""
    ordered, error = np.sort(scores), rounded.error
    n = len(ordered)
    assert rounded.count == n
    for k in range(1, n + 1):
        assert ordered[k - 1] <= rounded.upper(k) <= ordered[min(k + error, n) - 1]
    assert rounded.upper(n + 1) == math.inf


@pytest.mark.heavy
@settings(deadline=None, max_examples=200)
@given(st.lists(SOME, min_size=1, max_size=6), st.lists(st.integers(1, 40), min_size=6, max_size=6))
def test_every_rank_is_within_the_error_however_pieces_are_thinned_and_put_together(
    parts: list[np.ndarray], weights: list[int]
) -> None:
    pieces = [
        thinned([exactly(part)], weight) if weight <= len(part) else exactly(part)
        for part, weight in zip(parts, weights, strict=False)
    ]
    scores = np.concatenate(parts)
    must_bound(Rounded(pieces), scores)
    again = thinned(pieces, weights[0])
    assert again.error <= sum(piece.error for piece in pieces) + weights[0] - 1
    must_bound(Rounded([again]), scores)


@settings(deadline=None, max_examples=100)
@given(SOME, st.integers(1, 30))
def test_the_error_is_the_smallest_that_holds_for_numbers_without_ties(
    scores: np.ndarray, weight: int
) -> None:
    scores = np.arange(float(len(scores)))
    piece = thinned([exactly(scores)], weight)
    late = [Rounded([piece]).upper(k + 1) - scores[k] for k in range(len(scores))]
    assert max(late) == piece.error


@pytest.mark.long
@pytest.mark.parametrize("kind", ["rising", "falling", "tied", "random", "zigzag"])
def test_a_stream_stays_within_the_error_and_in_few_numbers(kind: str) -> None:
    n, wanted = 30_000, Fraction(1, 20)
    rows = np.arange(float(n))
    scores = {
        "rising": rows,
        "falling": rows[::-1],
        "tied": np.floor(rows / 17_000),
        "random": np.random.default_rng(0).standard_cauchy(n),
        "zigzag": np.where(rows % 2, rows, -rows),
    }[kind]
    pieces: list[Piece] = []
    most = 0
    for part in np.array_split(scores, 117):
        pieces = gathered([*pieces, exactly(part)], room(wanted))
        most = max(most, sum(len(piece.values) for piece in pieces))
    heights = math.log2(n / room(wanted)) + 2
    assert most <= heights * room(wanted) < n / 2
    rounded = Rounded(pieces)
    assert rounded.error <= 2 * heights / room(wanted) * n <= float(wanted) * n
    must_bound(rounded, scores)
    few = shrunk(pieces, wanted)
    assert len(few) == 1
    assert few[0].error <= wanted * n
    assert len(few[0].values) < 2 / wanted
    must_bound(Rounded(few), scores)


def test_numbers_kept_grow_with_the_logarithm_of_those_that_came() -> None:
    random = np.random.default_rng(0)
    pieces: list[Piece] = []
    kept, most = {}, room(Fraction(1, 4))
    for step in range(1, 2**11 + 1):
        pieces = gathered([*pieces, exactly(random.random(256))], most)
        kept[step] = sum(len(piece.values) for piece in pieces)
    for power in range(3, 12):
        so_far = max(kept[step] for step in range(1, 2**power + 1))
        assert so_far <= most * (power + 2)


def test_the_order_in_which_pieces_come_does_not_matter() -> None:
    random = np.random.default_rng(0)
    pieces = [thinned([exactly(random.random(500))], 7) for _ in range(40)]
    one, other = (gathered(some, 1000) for some in (pieces, pieces[::-1]))
    assert [p[1:] for p in one] == [p[1:] for p in other]
    for mine, theirs in zip(one, other, strict=True):
        assert (mine.values == theirs.values).all()
