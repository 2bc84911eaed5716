"""Binomial tails in whole numbers, and p-values for the mean of a bounded loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

_BITS = 256  # of the largest term of a binomial law in whole numbers


def binomial_terms(n: int, p: Fraction) -> tuple[int, list[int]]:
    """Return the terms of Binomial(n, p) that are not negligible, as integers, and the first's k.

    >>> first, terms = binomial_terms(2, Fraction(1, 2))
    >>> first, [term / sum(terms) for term in terms]
    (0, [0.25, 0.5, 0.25])
    """
    odds = p / (1 - p)
    middle = min(n, int((n + 1) * p))
    up, down, term = [1 << _BITS], [], 1 << _BITS
    for i in range(middle, n):
        term = term * (n - i) * odds.numerator // ((i + 1) * odds.denominator)
        if not term:
            break
        up.append(term)
    term = 1 << _BITS
    for i in range(middle, 0, -1):
        term = term * i * odds.denominator // ((n - i + 1) * odds.numerator)
        if not term:
            break
        down.append(term)
    return middle - len(down), down[::-1] + up


def binomial_cdf(hits: Sequence[int], n: int, p: Fraction) -> list[float]:
    """Return P(Binomial(n, p) <= k) for each k of ``hits``; below 2**-256 it is 0.

    >>> binomial_cdf([0, 1, 2], 2, Fraction(1, 4))
    [0.5625, 0.9375, 1.0]
    """
    first, terms = binomial_terms(n, p)
    sums = [0, *accumulate(terms)]
    places = [min(max(k - first + 1, 0), len(terms)) for k in hits]
    return [sums[place] / sums[-1] for place in places]


def mean_p_values(sums: Sequence[Fraction], n: int, alpha: Fraction, binary: bool) -> list[float]:
    """Return p-values of "the expected loss exceeds alpha", for losses in [0, 1] with these sums.

    Losses of 0 and 1 have an exact one, the binomial tail. For others it is the smaller one of
    Hoeffding's, exp(-n kl(mean, alpha)), and Bentkus', e P(Binomial(n, alpha) <= ceil(sum)).

    >>> tenth = Fraction(1, 10)
    >>> [round(p, 4) for p in mean_p_values([Fraction(2), Fraction(8)], 50, tenth, binary=True)]
    [0.1117, 0.9421]
    >>> [round(p, 4) for p in mean_p_values([Fraction(2), Fraction(8)], 50, tenth, binary=False)]
    [0.2822, 1.0]
    """
    if not n:
        return [1.0] * len(sums)
    tails = binomial_cdf([math.ceil(total) for total in sums], n, alpha)
    if binary:
        return tails
    pairs = zip(sums, tails, strict=True)
    return [min(_hoeffding(total / n, n, alpha), math.e * tail, 1.0) for total, tail in pairs]


def _hoeffding(mean: Fraction, n: int, alpha: Fraction) -> float:
    """Return exp(-n kl(mean, alpha)), 1 for means above alpha."""
    if mean >= alpha:
        return 1.0
    divergence = sum(
        float(share) * math.log(float(share / base))
        for share, base in ((mean, alpha), (1 - mean, 1 - alpha))
        if share
    )
    return math.exp(-n * divergence)
