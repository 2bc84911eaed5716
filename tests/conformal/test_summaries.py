"""Summaries of scores: every bound against all scores, on data made to break it."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffcp.conformal import summaries
from ffcp.conformal.summaries import (
    Piece,
    Rounded,
    exactly,
    gathered,
    last_of_blocks,
    room,
    settled,
    thinned,
)

NUMBERS = st.sampled_from([0.0, 1.0, 1.5, 2.0, -3.0, 7.0, 1e300, math.inf])
SOME = st.lists(NUMBERS, min_size=1, max_size=60).map(np.array)


def must_bound(rounded: Rounded, scores: np.ndarray) -> None:
    """Compare every rank, both ways, with all scores."""
    ordered, error = np.sort(scores), rounded.error
    n = len(ordered)
    assert rounded.count == n
    for k in range(1, n + 1):
        assert ordered[k - 1] <= rounded.upper(k) <= ordered[min(k + error, n) - 1]
        assert ordered[max(k - error, 1) - 1] <= rounded.lower(k) <= ordered[k - 1]
    assert rounded.upper(n + 1) == math.inf
    assert rounded.lower(0) == -math.inf


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
    must_bound(Rounded(pieces, scores.min()), scores)
    again = thinned(pieces, weights[0])
    assert again.error <= sum(piece.error for piece in pieces) + weights[0] - 1
    must_bound(Rounded([again], scores.min()), scores)


@settings(deadline=None, max_examples=100)
@given(SOME, st.integers(1, 30))
def test_the_error_is_the_smallest_that_holds_for_numbers_without_ties(
    scores: np.ndarray, weight: int
) -> None:
    scores = np.arange(float(len(scores)))
    piece = thinned([exactly(scores)], weight)
    late = [Rounded([piece], 0.0).upper(k + 1) - scores[k] for k in range(len(scores))]
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
    rounded = Rounded(pieces, scores.min())
    assert rounded.error <= 2 * heights / room(wanted) * n <= float(wanted) * n
    must_bound(rounded, scores)
    few = settled(pieces, wanted)
    assert len(few) == 1
    assert few[0].error <= wanted * n
    assert len(few[0].values) < 2 / wanted
    must_bound(Rounded(few, scores.min()), scores)


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


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=4), st.integers(1, 30))
def test_sorting_a_range_at_a_time_changes_nothing(parts: list[list[int]], weight: int) -> None:
    pieces = [thinned([exactly(np.array(p, dtype=float))], 2 + n) for n, p in enumerate(parts)]
    pieces = [piece for piece in pieces if piece.total]
    whole = Rounded(pieces, 0.0).steps, [thinned(pieces, weight)] if pieces else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summaries, "_AT_ONCE", 3)
        parted = Rounded(pieces, 0.0).steps, [thinned(pieces, weight)] if pieces else []
    assert all(map(np.array_equal, whole[0], parted[0]))
    for mine, theirs in zip(whole[1], parted[1], strict=True):
        assert np.array_equal(mine.values, theirs.values)
        assert mine[1:] == theirs[1:]


def test_the_order_in_which_pieces_come_does_not_matter() -> None:
    random = np.random.default_rng(0)
    pieces = [thinned([exactly(random.random(500))], 7) for _ in range(40)]
    one, other = (gathered(some, 1000) for some in (pieces, pieces[::-1]))
    assert [p[1:] for p in one] == [p[1:] for p in other]
    for mine, theirs in zip(one, other, strict=True):
        assert (mine.values == theirs.values).all()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(NUMBERS, st.integers(1, 9)), min_size=1, max_size=40), st.integers(1, 30))
def test_weights_in_blocks_are_those_of_numbers_that_come_several_times(
    points: list[tuple[float, int]], weight: int
) -> None:
    points = sorted(points)
    values, units = np.array([v for v, _ in points]), np.array([u for _, u in points])
    kept, error = last_of_blocks(values, np.cumsum(units), weight)
    scores = np.repeat(values, units)
    piece = Piece(kept, weight, len(scores), error)
    must_bound(Rounded([piece], scores.min()), scores)
