"""The base of interval scores, and the score of a base and a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ffcp.batch import BatchOutput, Requires
from ffcp.conformal.columns import Columns
from ffcp.conformal.score import Score
from ffcp.conformal.selection import Selection
from ffcp.network import arrays
from ffcp.regression.intervals import Base, Ends, as_float64, columns, interval_ends
from ffcp.regression.joint import (
    AUTO,
    BOTH,
    EACH,
    LOWER,
    Joint,
    OutputScales,
    checked_joint,
    checked_output_scales,
    checked_side,
    has_own_thresholds,
    kept_scores,
    reduced,
    reduced_sides,
    with_output_scales,
)
from ffcp.regression.layer_selection import ScaleSelection
from ffcp.regression.scales import as_scale, ends_of


class IntervalScore(Score):
    """Nested intervals, one for every threshold; the base of all interval scores.

    A score of your own defines :meth:`score` and :meth:`region`.
    """

    #: How several outputs of a row are covered.
    joint: Joint = False
    #: Which ends are promised: ``"both"``, ``"lower"``, ``"upper"`` or ``"each"``.
    side: str = BOTH

    def prediction(self, output: Tensor) -> Tensor:
        """Return the point prediction, in the shape of the target.

        Parameters
        ----------
        output : Tensor
            What the model returned.
        """
        return output

    def target(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Return targets as (n, m).

        Parameters
        ----------
        out : BatchOutput
            Output of the model for a batch.
        y : Tensor
            Targets, as given.
        """
        return columns(arrays.target_like(y, self.prediction(out.output)))

    def region(self, out: BatchOutput, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends (levels, n, m) at thresholds (levels, n or 1, columns of the scores).

        Parameters
        ----------
        out : BatchOutput
            Output of the model for a batch.
        q : Tensor
            Thresholds, (levels, n or 1, columns of the scores).
        """
        raise NotImplementedError


class TwoSidedScore(IntervalScore):
    """An interval score with a distance beyond each end.

    It supports every ``side=`` and ``joint=``, and is defined by :meth:`sides` and
    :meth:`region_of_sides`.
    """

    def score(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Return the scores that are kept: (n, m), or (n, 1) if outputs share a threshold."""
        target = self.target(out, y)
        if self.side == BOTH:
            return reduced(self.outside(out, target), self.joint)
        return reduced_sides(*self.sides(out, target), self.side, self.joint)

    def region(self, out: BatchOutput, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends (levels, n, m) at thresholds (levels, n or 1, columns of the scores)."""
        if self.side == BOTH:
            return self.region_of_sides(out, q, q)
        if self.side == EACH:
            return self.region_of_sides(out, *q.chunk(2, dim=-1))
        infinite = torch.full_like(q, math.inf)
        if self.side == LOWER:
            return self.region_of_sides(out, q, infinite)
        return self.region_of_sides(out, infinite, q)

    def outside(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Return the two-sided scores of targets (n, m), before outputs are joined."""
        return torch.maximum(*self.sides(out, y))

    def sides(self, out: BatchOutput, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return how far targets lie below the lower and above the upper end, (n, m) each."""
        raise NotImplementedError

    def region_of_sides(
        self, out: BatchOutput, below: Tensor, above: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the ends (levels, n, m) whose targets have at most these one-sided scores."""
        raise NotImplementedError

    # -- only where the score is the size of a signed one -------------------------------------

    #: Why there is no distribution of the target, where there is none.
    why_unsigned = "its score is not the size of a number that grows with the target"

    def signs(self, out: BatchOutput, y: Tensor) -> Tensor | None:
        """Return which targets lie below the centre; ``None`` if scores have no sign."""
        target = self.target(out, y)
        is_folded = self.side == BOTH and (has_own_thresholds(self.joint) or target.shape[1] == 1)
        curve = self.curve(out) if is_folded else None
        return None if curve is None else self.signed(curve, as_float64(target).cpu()) < 0

    def curve(self, out: BatchOutput) -> dict[str, Tensor] | None:
        """Return the columns (n, m, ...), on the CPU, that signed scores of some rows depend on.

        ``None`` if scores are not the size of signed ones: ``max(below, above)`` of
        :meth:`sides`, with ``below = -above``.
        """
        return None

    def signed(self, curve: Columns, y: Tensor) -> Tensor:
        """Return the signed scores, which grow with y, of targets (..., n, m)."""
        raise NotImplementedError

    def at(self, curve: Columns, signed: Tensor) -> Tensor:
        """Return the targets that have these signed scores (..., n, m)."""
        raise NotImplementedError


@dataclass(frozen=True)
class ScaledScore(TwoSidedScore):
    """Intervals ``[lo - q s_lo, hi + q s_hi]`` of a base and a scale.

    ``output_scales`` multiply the scales of outputs that share one threshold; ``"auto"``: learn
    them on rows that do not calibrate.
    """

    base: Base
    scale: Any = None
    joint: Joint = False
    side: str = BOTH
    output_scales: OutputScales | str | None = None
    takes_infinity = False

    def __post_init__(self) -> None:
        joint = checked_joint(self.joint)
        settled = {
            "joint": joint,
            "scale": as_scale(self.scale),
            "side": checked_side(self.side, joint),
            "output_scales": checked_output_scales(self.output_scales, joint),
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)

    def requires(self) -> Requires:
        """Return the features that the scale requires."""
        requires: Requires = self.scale.requires()
        return requires

    @property
    def lowest(self) -> float:  # type: ignore[override]
        """No score is below this: those of a point prediction are distances."""
        return float(getattr(self.base, "lowest", -math.inf)) if self.side == BOTH else -math.inf

    def selection(self) -> Selection | None:
        """Return the selection of the scale and the output scales; ``None`` if all are given."""
        is_open = hasattr(self.scale, "options") and self.scale.is_open
        return ScaleSelection(self) if is_open or self.output_scales == AUTO else None

    def prediction(self, output: Tensor) -> Tensor:
        """Return the point prediction, in the shape of the target."""
        return self.base.prediction(output)

    def ends(self, out: BatchOutput) -> Ends:
        """Return the base interval and its scales."""
        ends = ends_of(self.base, self.scale, out)
        if self.output_scales is None:
            return ends
        assert not isinstance(self.output_scales, str)
        return with_output_scales(ends, self.output_scales)

    def score(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Return how far targets lie outside the base interval, in units of the scale."""
        return kept_scores(self.ends(out), self.target(out, y), self.side, self.joint)

    def region_of_sides(
        self, out: BatchOutput, below: Tensor, above: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Move each end of the base interval by its threshold times its scale."""
        return interval_ends(self.ends(out), below, above, out.output.dtype)

    why_unsigned = "its base has two ends, each with a score of its own: give a point prediction"

    def curve(self, out: BatchOutput) -> dict[str, Tensor] | None:
        """Return centre and scale, where both ends share them."""
        ends = self.ends(out)
        if not ends.is_symmetric:
            return None
        return {"centre": ends.lo.cpu(), "scale": ends.scale_lo.expand_as(ends.lo).cpu()}

    def signed(self, curve: Columns, y: Tensor) -> Tensor:
        """Return how far targets lie above the centre, in units of the scale."""
        return torch.as_tensor((y - curve["centre"]) / curve["scale"])

    def at(self, curve: Columns, signed: Tensor) -> Tensor:
        """Return the centre plus signed scores times the scale."""
        return torch.as_tensor(curve["centre"] + signed * curve["scale"])
