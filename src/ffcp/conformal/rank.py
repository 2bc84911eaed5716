"""The conformal rank and quantile, computed exactly."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from torch import Tensor


def exact_alpha(alpha: Any) -> Fraction:
    """Read ``alpha`` as the decimal number the user wrote, and check that it lies in (0, 1).

    A float stands for the decimal number it prints as, rounded to 12 significant digits: 0.7 is
    7/10, although the nearest double is a little less, and 1 - 0.9 is 1/10. With n = 9 the double
    would ask for 4 scores where 3 are right. Fractions and decimals are taken as they are.

    >>> exact_alpha(0.7), exact_alpha(1 - 0.9)
    (Fraction(7, 10), Fraction(1, 10))
    """
    if isinstance(alpha, Fraction) and 0 < alpha < 1:
        return alpha
    if isinstance(alpha, Tensor) and alpha.dim() == 0:
        alpha = alpha.detach().cpu().numpy()[()]  # keeps float32 apart from float64
    if isinstance(alpha, bool) or not isinstance(alpha, (numbers.Real, Decimal)):
        raise TypeError(f"alpha must be a number between 0 and 1, got {alpha!r}")
    if math.isfinite(alpha):
        exact = isinstance(alpha, (numbers.Rational, Decimal))
        value = Fraction(alpha) if exact else Fraction(_rounded(alpha))  # type: ignore[arg-type]
        if 0 < value < 1:
            return value
    raise ValueError(
        f"alpha must lie strictly between 0 and 1, got {alpha}: "
        "it is the share of misses allowed, so 0.1 asks for 90 % coverage"
    )


def exact_alphas(alpha: Any) -> tuple[list[Fraction], bool]:
    """Read one level or a sequence of them; say whether it was a sequence.

    >>> exact_alphas((0.1, 0.05))
    ([Fraction(1, 10), Fraction(1, 20)], True)
    """
    is_one = isinstance(alpha, (numbers.Number, Decimal, str)) or getattr(alpha, "ndim", 1) == 0
    if is_one or not isinstance(alpha, Iterable):
        return [exact_alpha(alpha)], False
    levels = [exact_alpha(level) for level in alpha]
    if not levels:
        raise ValueError("alpha holds no level: give one number, or a sequence of them")
    return levels, True


def _rounded(alpha: Any) -> str:
    """Print a float with at most 12 significant digits, more than rounding errors leave right.

    >>> _rounded(1 - 0.9)
    '0.100000000000'
    """
    return f"{Decimal(str(alpha)):.12g}"


def conformal_rank(n: int, alpha: Any) -> int:
    """Return k = ceil((n + 1)(1 - alpha)), computed in exact rational arithmetic.

    The k-th smallest of n scores covers a new exchangeable score with probability at least
    1 - alpha. If k > n no finite threshold does.

    >>> conformal_rank(9, 0.7)  # in floating point this comes out as 4
    3
    """
    return math.ceil((n + 1) * (1 - exact_alpha(alpha)))


def points_needed(alpha: Any) -> int:
    """Return the smallest number of calibration points with a finite threshold at ``alpha``.

    >>> points_needed(0.1)
    9
    """
    exact = exact_alpha(alpha)
    return math.ceil((1 - exact) / exact)


def conformal_quantile(scores: Tensor, alpha: Any) -> Tensor:
    """Return the k-th smallest score, or infinity where k exceeds the number of scores.

    Parameters
    ----------
    scores
        Shape (n,) or (n, m) for m coordinates, each with its own quantile. Not sorted.
    alpha
        Share of misses allowed, in (0, 1).

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
    return scores.kthvalue(k, dim=0).values
