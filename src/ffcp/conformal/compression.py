"""Which calibrations can be compressed, and how calibrations of either kind are put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ffcp.conformal.calibration import Calibration
from ffcp.conformal.compressed import ERROR, Compressed
from ffcp.conformal.marginal import Marginal
from ffcp.conformal.mondrian import Mondrian


def summary_like(calibration: Calibration, rank_error: Any) -> Calibration:
    """Give a summary without points that can take those of a calibration; refuse where none can.

    >>> type(summary_like(Marginal(), 1e-4)).__name__
    'Compressed'
    """
    if isinstance(calibration, Mondrian):
        return Mondrian(summary_like(calibration.inner, rank_error), calibration.by)
    if isinstance(calibration, Compressed):
        fresh = calibration.empty()
        fresh.wanted = max(fresh.wanted, Compressed(rank_error).wanted)
        return fresh
    kind = type(calibration)
    # A calibration of one's own may be a kind of Marginal, with another threshold.
    if isinstance(calibration, Marginal) and kind.threshold is Marginal.threshold:
        return Compressed(rank_error)
    why = "its thresholds look at more than the order of scores"
    if calibration.is_local:
        why = "its thresholds depend on every single calibration row, by its weight or its place"
    raise ValueError(
        f"{kind.__name__} cannot be compressed: {why}. ffcp.calibrations.Marginal can, also in the "
        f"groups of "
        "ffcp.calibrations.Mondrian; or calibrate with fewer rows"
    )


def compressed(calibration: Calibration, rank_error: Any) -> Calibration:
    """Give a summary of a calibration's points; one that is a summary may become a smaller one."""
    if isinstance(calibration, Mondrian):
        inner = summary_like(calibration.inner, rank_error)
        parts = {n: compressed(part, rank_error) for n, part in calibration.parts().items()}
        return Mondrian(inner, calibration.by).of(parts)
    if isinstance(calibration, Compressed):
        return settled(calibration, rank_error)
    fresh = summary_like(calibration, rank_error)
    assert isinstance(fresh, Compressed)
    fresh.summarise(calibration)
    return fresh


def settled(calibration: Calibration, rank_error: Any = None) -> Calibration:
    """Make a summary as small as its rank error allows, each group's by itself."""
    if isinstance(calibration, Mondrian):
        return calibration.of({n: settled(part) for n, part in calibration.parts().items()})
    assert isinstance(calibration, Compressed)
    fresh = calibration.empty()
    fresh.keep(calibration.points())
    fresh.settle(rank_error)
    return fresh


def joined(one: Calibration, other: Calibration) -> Calibration:
    """Put the points of two calibrations together: a summary, if either is."""
    kinds = [c for c in (one, other) if c.is_summary]
    merged = kinds[0].empty() if kinds else other.empty()
    if kinds:
        merged.merge(one)
    elif len(one):
        merged.keep(one.points())
    merged.merge(other)
    return merged


def recalled(calibration: Calibration, settings: Mapping[str, Any]) -> Calibration:
    """Give a calibration that takes what was saved: a summary, if that is what the settings say."""
    if settings.get(ERROR) is None:
        return calibration
    return summary_like(calibration, settings[ERROR])
