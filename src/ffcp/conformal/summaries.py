"""Summaries of many numbers: a few of them represent all, with a proven rank error.

What is promised. Let S be n numbers, s_(1) <= ... <= s_(n), and S(t) how many of them are at most
t. A summary is n numbers U, most of them equal to others and so kept in little room, and a whole
number E, such that for every t

    S(t) - E  <=  U(t)  <=  S(t)                                                        (1)

and that every number of U is one of S. Then, for every rank k,

    s_(k)  <=  u_(k)  <=  s_(min(k + E, n))                                             (2)

since U(t) >= k gives S(t) >= k at t = u_(k); S(t) >= k + E gives U(t) >= k at t = s_(k + E), and
U(t) = n at t = s_(n). So u_(k) is the k-th number rounded up by at most E ranks.

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
where that number stands. So 1 / e numbers, 80 kB at e = 1e-4, are the fewest. What :func:`shrunk`
makes of all numbers has no more; what it makes of a stream that has lost a share c of the error on
its way has 1 / (1 - c) times as many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """A summary of some numbers, sorted: each represents ``weight``, the last the remainder."""

    values: Numbers
    weight: int  # g
    total: int  # n
    error: int  # E

    @property
    def ends(self) -> Counts:
        """How many numbers are represented up to each of those kept."""
        return np.minimum(np.arange(1, len(self.values) + 1) * self.weight, self.total)

    @property
    def height(self) -> int:
        """The number of binary digits of the weight."""
        return self.weight.bit_length()


class Rounded:
    """All pieces of a column together: looks up its numbers by rank, rounded up.

    >>> exact = exactly(np.array([3.0, 1.0, 2.0, 4.0]))
    >>> halved = Rounded([thinned([exact], 2)])
    >>> [halved.upper(rank) for rank in range(1, 6)]
    [2.0, 2.0, 4.0, 4.0, inf]
    >>> halved.count, halved.error
    (4, 1)
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._values, self._ends = _together(pieces)
        self.count = count_of(pieces)
        self.error = sum(piece.error for piece in pieces)

    def upper(self, rank: int) -> float:
        """Return the number of this rank, or one up to ``error`` ranks above it."""
        if rank > self.count:
            return math.inf
        return float(self._values[np.searchsorted(self._ends, max(rank, 1))])


def count_of(pieces: Sequence[Piece]) -> int:
    """Return how many numbers pieces represent."""
    return sum(piece.total for piece in pieces)


def exactly(values: Numbers) -> Piece:
    """Keep all numbers, which need not be sorted."""
    return Piece(np.sort(values), 1, len(values), 0)


def thinned(pieces: Sequence[Piece], weight: int) -> Piece:
    """Merge pieces, and keep one number of every ``weight``.

    >>> thinned([exactly(np.arange(10.0))], 4)
    Piece(values=array([3., 7., 9.]), weight=4, total=10, error=3)
    """
    values, ends = _together(pieces)
    count, error = count_of(pieces), sum(p.error for p in pieces)
    places = np.minimum(np.arange(1, -(-count // weight) + 1) * weight, count)
    left = int((ends[ends < count] % weight).max(initial=0))
    return Piece(values[np.searchsorted(ends, places)], weight, count, error + left)


def _together(pieces: Sequence[Piece]) -> tuple[Numbers, Counts]:
    """Return the kept numbers of pieces, sorted, and how many are represented up to each."""
    if len(pieces) == 1:
        return pieces[0].values, pieces[0].ends
    values = np.concatenate([np.empty(0), *(piece.values for piece in pieces)])
    counts = [np.diff(piece.ends, prepend=0) for piece in pieces]
    ends = np.concatenate([np.empty(0, np.int64), *counts])
    del counts  # memory is at its peak here
    order = np.argsort(values, kind="stable")  # fast on sorted pieces
    np.cumsum(ends[order], out=ends)
    return values[order], ends


def room(error: Fraction) -> int:
    """Return how many numbers the pieces of one height may keep together: K."""
    return max(128, math.ceil(64 / error))


def gathered(pieces: Sequence[Piece], most: int) -> list[Piece]:
    """Keep at most ``most`` numbers for every height: thin out the pieces of those with more.

    >>> stream = [exactly(np.random.default_rng(0).random(1000))] * 16
    >>> [(p.weight, len(p.values), p.total) for p in gathered(stream, most=2000)]
    [(8, 2000, 16000)]
    """
    by_height: dict[int, list[Piece]] = {}
    for piece in pieces:
        if piece.total:
            by_height.setdefault(piece.height, []).append(piece)
    kept: list[Piece] = []
    while by_height:
        height = min(by_height)
        level = by_height.pop(height)
        if height == 1 and len(level) > 1:
            level = [exactly(np.concatenate([piece.values for piece in level]))]
        if sum(len(piece.values) for piece in level) <= most:
            kept += level
        else:
            by_height.setdefault(height + 1, []).append(thinned(level, 2**height))
    return kept


def shrunk(pieces: Sequence[Piece], error: Fraction) -> list[Piece]:
    """Thin out pieces as far as a rank error allows, if that makes them smaller.

    >>> [piece] = shrunk([exactly(np.arange(1000.0))], Fraction(1, 100))
    >>> len(piece.values), piece.error
    (91, 10)
    """
    count, used = count_of(pieces), sum(piece.error for piece in pieces)
    weight = math.floor(error * count) - used + 1
    kept = sum(len(piece.values) for piece in pieces)
    if weight < 1 or -(-count // weight) >= kept:
        return list(pieces)
    return [thinned(pieces, weight)]


def restored(values: Numbers, records: Any) -> list[Piece]:
    """Return the pieces of a column from their concatenated numbers.

    ``records`` has a row (weight, count, error) for each; impossible ones are a ValueError.
    """
    pieces, start = [], 0
    for weight, count, error in records:
        if weight < 1 or count < 0 or not 0 <= error <= count or (weight > max(1, count)):
            raise ValueError("a summary has impossible weights, counts or errors")
        stop = start + -(-count // weight)
        pieces.append(Piece(values[start:stop], weight, count, error))
        start = stop
    if start > len(values) or not np.isnan(values[start:]).all() or np.isnan(values[:start]).any():
        raise ValueError("the length of a summary does not match its counts")
    for piece in pieces:
        if (piece.values[1:] < piece.values[:-1]).any():
            raise ValueError("the numbers of a summary are not sorted")
    return [piece for piece in pieces if piece.total]
