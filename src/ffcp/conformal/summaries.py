"""Summaries of many numbers: a few of them stand for all, with a rank error that is proven.

What is promised. Let S be n numbers, s_(1) <= ... <= s_(n), and S(t) how many of them are at most
t. A summary is n numbers U, most of them equal to others and so kept in little room, and a whole
number E, such that for every t

    S(t) - E  <=  U(t)  <=  S(t)                                                        (1)

and that every number of U is one of S. Then, for every rank k,

    s_(k)  <=  u_(k)  <=  s_(min(k + E, n))                                             (2)
    u_(k - E)  <=  s_(k)    if k > E                                                    (3)

since U(t) >= k gives S(t) >= k at t = u_(k); S(t) >= k + E gives U(t) >= k at t = s_(k + E), and
U(t) = n at t = s_(n); and S(t) >= k gives U(t) >= k - E at t = s_(k). So u_(k) is the k-th number
rounded up by at most E ranks, and u_(k - E), or the smallest number of all where k <= E, is it
rounded down by at most E ranks: s_(k - E) <= u_(k - E) by (2).

*Put together.* If (U, E) is a summary of S and (V, F) one of T, (U and V, E + F) is one of S and T:
add the inequalities (1). Errors add up, as do the numbers, so that their ratio does not grow.

*Thinned out.* Cut U, sorted, into blocks of g consecutive numbers, the last one shorter, and put
in place of each number the last of its block. What is at most t are then whole blocks: of U(t)
numbers the g * floor(U(t) / g) in full blocks stay, or all n of them if t >= u_(n). So (1) holds
with E + r in place of E, r the largest remainder of U(t) by g over all t with U(t) < n; it is at
most g - 1. What is kept is one number per block: ceil(n / g) of them.

*On the way.* Numbers that come in a stream are kept as pieces whose g is of some *height* h, the
number of its binary digits. Where the pieces of one height have more than K kept numbers between
them, they are put together and thinned out with a g of 2**h, which is of the next height. Those
stood for about K * 2**(h-1) numbers or more, so that every height costs a share of about 2 / K of
the numbers in rank at most, and a stream of n numbers has no more than log2(n / K) + 2 heights, of
K kept numbers at most: both memory and rank error grow with the logarithm of n. With K = 64 / e
that is e / 32 for every height: less than e / 2 for a billion numbers at e = 1e-4.

*How few.* Whatever keeps m numbers of n different ones, and fulfils (1), has m >= n / (E + 1):
below the next kept number U does not grow, so that S may not grow by more than E, and by one more
where that number stands. So 1 / e numbers, 80 kB at e = 1e-4, are the fewest. What :func:`settled`
makes of all numbers has no more; what it makes of a stream that has lost a share c of the error on
its way has 1 / (1 - c) times as many.

Numbers that count by weights are the same: a number of weight w, in whole units, is there w times,
and ranks, errors and g are units of weight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """A summary of some numbers, sorted: each stands for ``weight``, the last for what is left."""

    values: Numbers
    weight: int  # g
    total: int  # n
    error: int  # E

    @property
    def ends(self) -> Counts:
        """How many numbers stand up to each of those kept."""
        return np.minimum(np.arange(1, len(self.values) + 1) * self.weight, self.total)

    @property
    def height(self) -> int:
        """The number of binary digits of the weight."""
        return self.weight.bit_length()


class Rounded:
    """All pieces of a column together: looks up its numbers by rank, rounded up or down.

    >>> exact = exactly(np.array([3.0, 1.0, 2.0, 4.0]))
    >>> halved = Rounded([thinned([exact], 2)], lowest=1.0)
    >>> [halved.upper(rank) for rank in range(1, 6)]
    [2.0, 2.0, 4.0, 4.0, inf]
    >>> [halved.lower(rank) for rank in range(5)]
    [-inf, 1.0, 2.0, 2.0, 4.0]
    >>> halved.count, halved.error
    (4, 1)
    """

    def __init__(self, pieces: Sequence[Piece], lowest: float) -> None:
        self._values, self._ends = _together(pieces)
        self._lowest = lowest
        self.count = sum(piece.total for piece in pieces)
        self.error = sum(piece.error for piece in pieces)

    def upper(self, rank: int) -> float:
        """Give the number of this rank, or one up to ``error`` ranks above it."""
        if rank > self.count:
            return math.inf
        return float(self._values[np.searchsorted(self._ends, max(rank, 1))])

    def lower(self, rank: int) -> float:
        """Give the number of this rank, or one up to ``error`` ranks below it."""
        if rank < 1:
            return -math.inf
        return self._lowest if rank <= self.error else self.upper(rank - self.error)

    @property
    def steps(self) -> tuple[Numbers, Counts]:
        """The numbers kept, in order, and how many of all stand up to each."""
        return self._values, self._ends


def exactly(values: Numbers) -> Piece:
    """Keep all numbers, which need not be sorted."""
    return Piece(np.sort(values), 1, len(values), 0)


def thinned(pieces: Sequence[Piece], weight: int) -> Piece:
    """Put pieces together, and keep one number of every ``weight``.

    >>> thinned([exactly(np.arange(10.0))], 4)
    Piece(values=array([3., 7., 9.]), weight=4, total=10, error=3)
    """
    count, error = sum(p.total for p in pieces), sum(p.error for p in pieces)
    one = pieces[0].weight
    if not weight % one and all(p.weight == one and not p.total % one for p in pieces):
        values, more = _each(pieces, weight // one)  # the same, in a third of the memory
        return Piece(values, weight, count, error + more * one)
    kept, more, before = [np.empty(0)], 0, 0
    for values, ends in _in_ranges(pieces):
        last, left = last_of_blocks(values, ends, weight, before, count)
        kept.append(last)
        more, before = max(more, left), int(ends[-1])
    return Piece(np.concatenate(kept), weight, count, error + more)


def _each(pieces: Sequence[Piece], step: int) -> tuple[Numbers, int]:
    """Give every so many-th number, and the last; and how many may be left over before it."""
    values = np.sort(np.concatenate([piece.values for piece in pieces]), kind="stable")
    kept = values[step - 1 :: step]
    left = min(step, len(values)) - 1
    return (np.append(kept, values[-1]) if len(values) % step else kept.copy()), left


def last_of_blocks(
    values: Numbers, ends: Counts, weight: int, before: int = 0, count: int | None = None
) -> tuple[Numbers, int]:
    """Give the last number of every ``weight``, and the rank error that this adds.

    ``ends`` say how many numbers, or how much weight, stand up to each. Of ``count`` in all some
    may have been there ``before``, and some may be yet to come.

    >>> last_of_blocks(np.array([1.0, 2.0, 3.0]), np.array([5, 6, 8]), weight=3)
    (array([1., 2., 3.]), 2)
    """
    here = int(ends[-1]) if len(ends) else before
    count = here if count is None else count
    places = np.arange(before // weight + 1, here // weight + 1) * weight
    if here == count and count % weight:
        places = np.append(places, count)
    left = ends[ends < count] % weight
    return values[np.searchsorted(ends, places)], int(left.max(initial=0))


_AT_ONCE = 2**17  # numbers that are sorted at once, about


def _together(pieces: Sequence[Piece]) -> tuple[Numbers, Counts]:
    """Sort what pieces have kept; count what stands up to each."""
    if len(pieces) == 1:
        return pieces[0].values, pieces[0].ends
    ranges = [(np.empty(0), np.empty(0, np.int64)), *_in_ranges(pieces)]
    values, ends = zip(*ranges, strict=True)
    return np.concatenate(values), np.concatenate(ends)


def _in_ranges(pieces: Sequence[Piece]) -> Iterator[tuple[Numbers, Counts]]:
    """Sort what pieces have kept, a range of values at a time; count what stands up to each.

    What is needed to sort them all at once would be several times what is kept.
    """
    longest = max((piece.values for piece in pieces), key=len, default=np.empty(0))
    step = max(1, _AT_ONCE // max(1, len(pieces)))
    starts, before = [0] * len(pieces), 0
    for end in [*longest[step - 1 : -1 : step], math.inf]:
        stops = [int(np.searchsorted(piece.values, end, side="right")) for piece in pieces]
        parts = [
            (piece.values[start:stop], _standing_for(piece, start, stop))
            for piece, start, stop in zip(pieces, starts, stops, strict=True)
        ]
        values = np.concatenate([np.empty(0), *(part[0] for part in parts)])
        if len(values):
            order = np.argsort(values, kind="stable")  # finds that parts are sorted
            ends = before + np.cumsum(np.concatenate([part[1] for part in parts])[order])
            yield values[order], ends
            starts, before = stops, int(ends[-1])


def _standing_for(piece: Piece, start: int, stop: int) -> Counts:
    """Say how many numbers each of some kept ones stands for."""
    counts = np.full(stop - start, piece.weight)
    if stop == len(piece.values) > start:
        counts[-1] = piece.total - (stop - 1) * piece.weight
    return counts


def room(error: Fraction) -> int:
    """Say how many numbers pieces of one height may keep between them: K."""
    return max(128, math.ceil(64 / error))


def gathered(pieces: Sequence[Piece], most: int) -> list[Piece]:
    """Keep at most so many numbers for every height: thin out what has more.

    >>> stream = [exactly(np.random.default_rng(0).random(1000))] * 16
    >>> [(p.weight, len(p.values), p.total) for p in gathered(stream, most=2000)]
    [(8, 2000, 16000)]
    """
    by_height: dict[int, list[Piece]] = {}
    for piece in pieces:
        if piece.total:
            by_height.setdefault(piece.height, []).append(piece)
    done: list[Piece] = []
    for height in itertools.count(1):
        if not by_height:
            return done
        some = by_height.pop(height, [])
        if height == 1 and len(some) > 1:
            some = [exactly(np.concatenate([piece.values for piece in some]))]
        if sum(len(piece.values) for piece in some) <= most:
            done += some
            continue
        by_height.setdefault(height + 1, []).append(thinned(some, 2**height))
    raise AssertionError  # the count has no end


def settled(pieces: Sequence[Piece], error: Fraction) -> list[Piece]:
    """Thin pieces out as far as a share of all as rank error allows, if anything is gained.

    >>> [piece] = settled([exactly(np.arange(1000.0))], Fraction(1, 100))
    >>> len(piece.values), piece.error
    (91, 10)
    """
    count, has = sum(p.total for p in pieces), sum(p.error for p in pieces)
    weight = math.floor(error * count) - has + 1
    kept = sum(len(piece.values) for piece in pieces)
    if weight < 1 or -(-count // weight) >= kept:
        return list(pieces)
    return [thinned(pieces, weight)]


def restored(values: Numbers, told: Any) -> list[Piece]:
    """Make the pieces of a column again from their numbers, one piece behind the other.

    ``told`` has a row (weight, count, error) for each; where they cannot be, a ValueError.
    """
    pieces, start = [], 0
    for weight, count, error in told:
        if weight < 1 or count < 0 or not 0 <= error <= count or (weight > max(1, count)):
            raise ValueError("a summary has weights, counts or errors that cannot be")
        stop = start + -(-count // weight)
        pieces.append(Piece(values[start:stop], weight, count, error))
        start = stop
    if start > len(values) or not np.isnan(values[start:]).all() or np.isnan(values[:start]).any():
        raise ValueError("a summary has other numbers than its counts say")
    for piece in pieces:
        if (piece.values[1:] < piece.values[:-1]).any():
            raise ValueError("the numbers of a summary are not sorted")
    return [piece for piece in pieces if piece.total]
