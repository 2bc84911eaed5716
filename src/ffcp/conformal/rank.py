"""Levels as exact fractions, the conformal rank and the conformal quantile."""

from __future__ import annotations

import functools
import math
import numbers
import warnings
from collections.abc import Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.conformal.binomial import binomial_terms
from ffcp.warnings import FFCPWarning, lines_up


def exact_alpha(alpha: Any, what: str = "alpha") -> Fraction:
    """Return ``alpha`` as the exact decimal number the user wrote, which must lie in (0, 1).

    A float stands for the decimal number it prints as, rounded to 12 significant digits: 0.7 is
    7/10, although the nearest double is a little less, and 1 - 0.9 is 1/10. With n = 9 the double
    would give rank 4 where 3 is right. Fractions and decimals are used unchanged.

    >>> exact_alpha(0.7), exact_alpha(1 - 0.9)
    (Fraction(7, 10), Fraction(1, 10))
    """
    if type(alpha) is float:
        return _exact_float(alpha, what)
    if isinstance(alpha, Fraction) and 0 < alpha.numerator < alpha.denominator:
        return alpha
    if isinstance(alpha, Tensor) and alpha.dim() == 0:
        alpha = alpha.detach().cpu().numpy()[()]  # keeps float32 apart from float64
    return _exact(alpha, what)


def _exact(alpha: Any, what: str) -> Fraction:
    if isinstance(alpha, bool) or not isinstance(alpha, (numbers.Real, Decimal)):
        raise TypeError(f"{what!r} must be a number between 0 and 1, got {alpha!r}")
    if math.isfinite(alpha):
        exact = isinstance(alpha, (numbers.Rational, Decimal))
        # A float as it prints, rounded to 12 digits, which removes rounding errors.
        value = Fraction(alpha if exact else f"{Decimal(str(alpha)):.12g}")  # type: ignore[arg-type]
        if 0 < value < 1:
            return value
    says = {
        "alpha": "it is the allowed share of misses: 0.1 means 90 % coverage",
        "confidence_level": "it is the nominal coverage: 0.9 means 10 % of misses",
        "pac": "it is a probability over calibration sets: 0.95 fails for one of 20",
        "level": "0.5 is the median",
        "fdr": "it is the allowed share of false discoveries: 0.1 means one in ten",
        "rank_error": "it is the share of calibration scores by which a threshold may be too large",
    }
    raise ValueError(f"{what!r} must lie strictly between 0 and 1, got {alpha}: {says[what]}")


_exact_float = functools.lru_cache(maxsize=256)(_exact)  # servers repeat a few levels


def exact_alphas(alpha: Any, what: str = "alpha") -> tuple[list[Fraction], bool]:
    """Return one level or several as fractions, and whether they came as a sequence.

    >>> exact_alphas((0.1, 0.05))
    ([Fraction(1, 10), Fraction(1, 20)], True)
    """
    is_one = isinstance(alpha, (numbers.Number, Decimal, str)) or getattr(alpha, "ndim", 1) == 0
    if is_one or not isinstance(alpha, Iterable):
        return [exact_alpha(alpha, what)], False
    levels = [exact_alpha(level, what) for level in alpha]
    if not levels:
        raise ValueError(f"{what!r} is empty: expected a number, or a sequence of numbers")
    return levels, True


def conformal_rank(n: int, alpha: Any) -> int:
    """Return k = ceil((n + 1)(1 - alpha)), computed in exact rational arithmetic.

    The k-th smallest of n scores covers a new exchangeable score with probability at least
    1 - alpha. If k > n no finite threshold does.

    Parameters
    ----------
    n : int
        The number of calibration rows.
    alpha : float
        The miscoverage level, between 0 and 1.

    Examples
    --------
    >>> conformal_rank(99, 0.1)
    90
    >>> conformal_rank(9, 0.7)  # in floating point this comes out as 4
    3
    """
    exact = exact_alpha(alpha)
    misses, of = exact.numerator, exact.denominator
    return -((n + 1) * (misses - of) // of)


def pac_rank(n: int, alpha: Any, pac: Any) -> int:
    """Return the smallest rank whose score has PAC coverage of 1 - alpha.

    Given n calibration rows, the k-th smallest score covers a share of new rows that follows
    Beta(k, n + 1 - k), or more where scores tie. It is at least p = 1 - alpha with the probability
    that Binomial(n, p) is below k. If no k up to n does, the result is n + 1.

    >>> pac_rank(1000, 0.1, 0.95), conformal_rank(1000, 0.1)
    (916, 901)
    >>> pac_rank(28, 0.1, 0.95), pac_rank(29, 0.1, 0.95)
    (29, 29)
    """
    p, wanted = 1 - exact_alpha(alpha), exact_alpha(pac, "pac")
    start, terms = binomial_terms(n, p)
    total = sum(terms)
    # Every step away from the largest term rounds by less than one.
    scale = 2 * (n + 1) * (len(terms) + 1)
    running = 0
    for k, term in enumerate(terms, start=start + 1):
        running += term  # in proportion to P(Binomial(n, p) < k)
        excess = running * wanted.denominator - total * wanted.numerator
        if abs(excess) <= scale * wanted.denominator:
            excess = _exact_excess(n, p, k, wanted)  # too close for rounded terms
        if excess >= 0:
            return k
    return n + 1


def _exact_excess(n: int, p: Fraction, k: int, wanted: Fraction) -> int:
    """Compare P(Binomial(n, p) < k) with a probability, in exact integers."""
    hit, miss = p.numerator, p.denominator - p.numerator
    below: int = sum(math.comb(n, i) * hit**i * miss ** (n - i) for i in range(k))
    whole: int = p.denominator**n
    return below * wanted.denominator - wanted.numerator * whole


def rows_needed(alpha: Any, pac: Any = None) -> int:
    """Return the smallest number of calibration rows with a finite threshold at ``alpha``.

    >>> rows_needed(0.1), rows_needed(0.1, pac=0.95)
    (9, 29)
    """
    exact = exact_alpha(alpha)
    if pac is not None:  # the largest of n scores suffices if (1 - alpha)^n <= 1 - pac
        doubt = 1 - exact_alpha(pac, "pac")
        n = max(1, math.floor(math.log(doubt) / math.log1p(-float(exact))) - 1)
        while (1 - exact) ** n > doubt:
            n += 1
        return n
    return math.ceil((1 - exact) / exact)


def conformal_quantile(scores: Tensor, alpha: Any) -> Tensor:
    """Return the k-th smallest score, or infinity where k exceeds the number of scores.

    Parameters
    ----------
    scores : Tensor
        Shape (n,) or (n, m) for m coordinates, each with its own quantile. Not sorted.
    alpha : float
        The miscoverage level, in (0, 1).

    Examples
    --------
    >>> import torch
    >>> conformal_quantile(torch.tensor([3.0, 1.0, 2.0]), alpha=0.5)
    tensor(2.)
    >>> conformal_quantile(torch.tensor([3.0, 1.0, 2.0]), alpha=0.1)
    tensor(inf)
    """
    k = conformal_rank(len(scores), alpha)
    if k > len(scores):
        return scores.new_full(scores.shape[1:], math.inf)
    is_plain = scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64)
    if scores.requires_grad or not is_plain:
        return scores.kthvalue(k, dim=0).values
    # By numpy, whose partition takes a tenth of the time.
    ordered = np.partition(scores.numpy(), k - 1, axis=0)
    return torch.from_numpy(ordered[k - 1 : k].copy())[0]


def exact_share(total: Tensor, share: Fraction) -> Tensor:
    """Return the largest whole numbers that are at most this share of others.

    >>> import torch
    >>> exact_share(torch.tensor([10, 11]), Fraction(9, 10))
    tensor([9, 9])
    """
    # Python's integers: the products exceed 64 bits.
    whole = total.numpy().astype(object) * share.numerator // share.denominator
    return torch.from_numpy(whole.astype(np.int64))


def plain_quantile(scores: Tensor, alpha: Any) -> Tensor:
    """Return the empirical quantile of each column; NaN are unknown scores.

    Without n + 1: a comparison needs no guarantee, and this is finite on few rows.

    >>> import torch
    >>> plain_quantile(torch.tensor([[1.0, 1.0], [2.0, torch.nan], [3.0, torch.nan]]), 0.1)
    tensor([3., 1.])
    """
    level, known = 1 - exact_alpha(alpha), (~scores.isnan()).sum(dim=0)
    places = [max(1, math.ceil(count * level)) - 1 for count in known.tolist()]
    ordered = scores.sort(dim=0).values  # NaN come last
    return ordered.gather(0, known.new_tensor(places)[None])[0]


# -- alpha or confidence_level -----------------------------------------------------------------

USUAL = Fraction(1, 10)
ONE_LEVEL = (0.1,)  # the default of export
#: Names that other libraries use for it.
NOT_OURS = ("confidence", "confidence_level", "significance", "coverage")
_UNKNOWN: Mapping[str, Any] = {}


def requested_alphas(
    alpha: Any,
    confidence_level: Any = None,
    unknown: Mapping[str, Any] = _UNKNOWN,
    default: Fraction = USUAL,
) -> tuple[list[Fraction], bool]:
    """Return the requested alphas as fractions, and whether there were several.

    ``unknown`` are keywords that the caller's method does not have. If all alphas exceed one half,
    a warning suggests that coverage was meant; not for fractions, which the library itself uses.

    >>> requested_alphas(None, 0.95), requested_alphas((0.1, 0.2))
    (([Fraction(1, 20)], False), ([Fraction(1, 10), Fraction(1, 5)], True))
    """
    if unknown:
        refuse_unknown(unknown)
    if confidence_level is None:
        if alpha is None:
            return [default], False
        levels, are_many = exact_alphas(alpha)
        given = alpha if are_many else [alpha]
        if min(levels) > Fraction(1, 2) and not all(isinstance(one, Fraction) for one in given):
            _warn("alpha", min(levels), 1 - min(levels))
        return levels, are_many
    if alpha is not None:
        raise TypeError(
            "give alpha or confidence_level, not both: confidence_level=0.9 is alpha=0.1"
        )
    levels, are_many = exact_alphas(confidence_level, "confidence_level")
    if max(levels) < Fraction(1, 2):
        _warn("confidence_level", max(levels), max(levels))
    return [1 - level for level in levels], are_many


def requested_alpha(
    alpha: Any,
    confidence_level: Any = None,
    unknown: Mapping[str, Any] = _UNKNOWN,
    default: Fraction = USUAL,
) -> Fraction:
    """Return the one requested alpha; see :func:`requested_alphas`.

    >>> requested_alpha(None), requested_alpha(0.2), requested_alpha(None, 0.8)
    (Fraction(1, 10), Fraction(1, 5), Fraction(1, 5))
    """
    levels, are_many = requested_alphas(alpha, confidence_level, unknown, default)
    if are_many:
        raise TypeError(f"expected one alpha, got {len(levels)}: call once for each")
    return levels[0]


def refuse_unknown(unknown: Mapping[str, Any]) -> None:
    """Raise TypeError for unknown keywords; explain those of other libraries.

    >>> refuse_unknown({"confidence": 0.95})
    Traceback (most recent call last):
    TypeError: unexpected keyword argument 'confidence': pass alpha, the allowed share of misses;
    alpha=0.1 means 90 % coverage. For PAC coverage pass pac=0.95 to predict_interval
    """
    for name in unknown:
        meant = (
            ": pass alpha, the allowed share of misses; alpha=0.1 means 90 % coverage. For PAC "
            "coverage pass pac=0.95 to predict_interval"
        )
        hint = meant if name in NOT_OURS else ": pass alphas=(0.1,)" if name == "alpha" else ""
        raise TypeError(f"unexpected keyword argument {name!r}{hint}")


def _warn(name: str, level: Fraction, coverage: Fraction) -> None:
    warnings.warn(
        f"{name}={float(level):g} asks for coverage {float(coverage):g}; did you mean "
        f"{name}={float(1 - level):g}?",
        FFCPWarning,
        stacklevel=lines_up(),
    )
