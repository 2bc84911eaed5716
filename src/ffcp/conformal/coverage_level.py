"""How much coverage a user asks for: by ``alpha`` or by ``confidence_level``, read in one place."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from ffcp.conformal.rank import exact_alphas
from ffcp.warnings import FFCPWarning, lines_up

USUAL = Fraction(1, 10)
ONE_LEVEL = (0.1,)  # what is exported if nothing is given; ``None`` means an input there
#: Names that other libraries have for it.
NOT_OURS = ("confidence", "confidence_level", "significance", "coverage")
_UNKNOWN: Mapping[str, Any] = {}


def requested_alphas(
    alpha: Any,
    confidence_level: Any = None,
    unknown: Mapping[str, Any] = _UNKNOWN,
    default: Fraction = USUAL,
) -> tuple[list[Fraction], bool]:
    """Return the shares of misses that are asked for, exactly, and whether they came as several.

    ``unknown`` are keywords that the caller's method does not have. A share above one half, of
    several all of them, is taken for a mistake and warned of. A Fraction is not: by them the
    library itself asks, which may be for any share.

    >>> requested_alphas(None, 0.95), requested_alphas((0.1, 0.2))
    (([Fraction(1, 20)], False), ([Fraction(1, 10), Fraction(1, 5)], True))
    """
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
    """Return the one share of misses that is asked for; see :func:`asked_alphas`.

    >>> requested_alpha(None), requested_alpha(0.2), requested_alpha(None, 0.8)
    (Fraction(1, 10), Fraction(1, 5), Fraction(1, 5))
    """
    levels, are_many = requested_alphas(alpha, confidence_level, unknown, default)
    if are_many:
        raise TypeError(f"one alpha is wanted here, got {len(levels)}: ask for one after the other")
    return levels[0]


def refuse_unknown(unknown: Mapping[str, Any]) -> None:
    """Refuse keywords that a method does not have; where another library's is meant, say ours.

    >>> refuse_unknown({"confidence": 0.95})
    Traceback (most recent call last):
    TypeError: unexpected keyword argument 'confidence': give alpha, the share of misses allowed;
    alpha=0.1 asks for 90 % coverage. For PAC coverage give pac=0.95 to predict_interval
    """
    for name in unknown:
        meant = (
            ": give alpha, the share of misses allowed; alpha=0.1 asks for 90 % coverage. For PAC "
            "coverage give pac=0.95 to predict_interval"
        )
        raise TypeError(f"unexpected keyword argument {name!r}{meant if name in NOT_OURS else ''}")


def _warn(name: str, level: Fraction, coverage: Fraction) -> None:
    warnings.warn(
        f"{name}={float(level):g} asks for coverage {float(coverage):g}; did you mean "
        f"{name}={float(1 - level):g}?",
        FFCPWarning,
        stacklevel=lines_up(),
    )
