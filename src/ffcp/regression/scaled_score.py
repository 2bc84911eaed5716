"""Interval scores: those of a base and a scale, behind most regression methods, and their base."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from ffcp.batch import BatchOutput, Requires
from ffcp.conformal.columns import Columns
from ffcp.conformal.rank import exact_alpha
from ffcp.conformal.score import Score
from ffcp.conformal.selection import Aside, Selected, Selection
from ffcp.network import checks, forward, inputs
from ffcp.network.features import OUTPUT
from ffcp.regression import intervals, layer_selection
from ffcp.regression.intervals import Base, Ends, as_float64, columns
from ffcp.regression.joint import (
    AUTO,
    BOTH,
    EACH,
    LOWER,
    UPPER,
    Joint,
    OutputScales,
    checked_joint,
    checked_output_scales,
    checked_side,
    growth,
    has_own_thresholds,
    learned_output_scales,
    reduced,
    reduced_sides,
    two_sided,
)
from ffcp.regression.layer_selection import Trial
from ffcp.regression.scales import as_scale, checked_scale

_MOST_OUTPUTS = 4096  # of a model whose scale is selected
_NUMBERS = 10**6  # scores of the rows that select; fewer rows do where outputs are many


class IntervalScore(Score):
    """Nested intervals, one for every threshold; the base of all interval scores.

    A score of your own defines :meth:`score` and :meth:`region`.
    """

    #: How several outputs of a row are covered.
    joint: Joint = False
    #: Which ends are promised: ``"both"``, ``"lower"``, ``"upper"`` or ``"each"``.
    side: str = BOTH

    def prediction(self, output: Tensor) -> Tensor:
        """Return the point prediction, in the shape of the target."""
        return output

    def target(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Bring targets to (n, m)."""
        return columns(checks.target(y, self.prediction(out.output)))

    def region(self, out: BatchOutput, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends (levels, n, m) at thresholds (levels, n or 1, columns of the scores)."""
        raise NotImplementedError


class TwoSidedScore(IntervalScore):
    """An interval score that knows how far a target lies beyond each end.

    It goes with every ``side=`` and ``joint=``, and is defined by :meth:`sides` and
    :meth:`region_of_sides`.
    """

    def score(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Return the scores that are kept: (n, m), or (n, 1) if outputs share a threshold."""
        target = self.target(out, y)
        if self.side == BOTH:
            return reduced(self.outside(out, target), self.joint)
        below, above = self.sides(out, target)
        parts = {LOWER: [below], UPPER: [above], EACH: [below, above]}[self.side]
        return reduced_sides(torch.cat(parts, dim=1), self.side, self.joint)

    def region(self, out: BatchOutput, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends (levels, n, m) at thresholds (levels, n or 1, columns of the scores)."""
        if self.side == BOTH:
            return self.region_of_sides(out, q, q)
        if self.side == EACH:
            return self.region_of_sides(out, *q.chunk(2, dim=-1))
        infinite = torch.full_like(q, math.inf)
        return self.region_of_sides(out, *((q, infinite) if self.side == LOWER else (infinite, q)))

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
        """Return which targets lie below, where the score of each is the size of a signed one."""
        target = self.target(out, y)
        is_folded = self.side == BOTH and (has_own_thresholds(self.joint) or target.shape[1] == 1)
        curve = self.curve(out) if is_folded else None
        return None if curve is None else self.signed(curve, as_float64(target).cpu()) < 0

    def curve(self, out: BatchOutput) -> dict[str, Tensor] | None:
        """Return what signed scores of some rows depend on, on the CPU: columns (n, m, ...).

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

    ``output_scales`` multiply the scales of outputs that share one threshold; ``"auto"`` are to be
    learned on rows that do not calibrate.
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
        """Return what the scale requires."""
        requires: Requires = self.scale.requires()
        return requires

    @property
    def lowest(self) -> float:  # type: ignore[override]
        """No score is below this: those of a point prediction are distances."""
        return float(getattr(self.base, "lowest", -math.inf)) if self.side == BOTH else -math.inf

    def selection(self) -> Selection | None:
        """Return what selects the scale, or learns the scales of outputs, where they are open."""
        is_open = hasattr(self.scale, "options") and self.scale.is_open
        return ScaleSelection(self) if is_open or self.output_scales == AUTO else None

    def prediction(self, output: Tensor) -> Tensor:
        """Return the point prediction, in the shape of the target."""
        return self.base.prediction(output)

    def ends(self, out: BatchOutput) -> Ends:
        """Return the base interval and its scales."""
        ends = self.base(out, checked_scale(self.scale(out), out))
        if self.output_scales is None:
            return ends
        outputs = ends.lo.shape[1]
        if len(self.output_scales) != outputs:
            raise ValueError(
                f"there are {len(self.output_scales)} scales, but the model has {outputs} outputs"
            )
        by = torch.tensor(self.output_scales, dtype=ends.lo.dtype, device=ends.lo.device)
        below = ends.scale_lo * by
        above = below if ends.scale_hi is ends.scale_lo else ends.scale_hi * by
        return Ends(ends.lo, ends.hi, below, above)

    def outside(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Return how far targets lie outside the base interval, in units of the scale."""
        return intervals.score(self.ends(out), y)

    def sides(self, out: BatchOutput, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return how far targets lie outside each end, in units of its scale."""
        return intervals.sides(self.ends(out), y)

    def region_of_sides(
        self, out: BatchOutput, below: Tensor, above: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Move each end of the base interval by its threshold times its scale."""
        return intervals.interval_ends(self.ends(out), below, above, out.output.dtype)

    why_unsigned = "its base has two ends, each with a score of its own: give a point prediction"

    def signs(self, out: BatchOutput, y: Tensor) -> Tensor | None:
        """Return which targets lie below the centre, where one centre serves both ends."""
        target, ends = self.target(out, y), self.ends(out)
        is_folded = self.side == BOTH and (has_own_thresholds(self.joint) or target.shape[1] == 1)
        return (target < ends.lo) if is_folded and ends.is_symmetric else None

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
        """Move the centre by so many scales."""
        return torch.as_tensor(curve["centre"] + signed * curve["scale"])


class ScaleSelection(Selection):
    """Selects the scale with the shortest mean interval, and learns the scales of outputs."""

    def __init__(
        self, score: ScaledScore, options: Mapping[str, ScaledScore] | None = None
    ) -> None:
        self.score = score
        self.options = {} if options is None else dict(options)
        self.what = getattr(score.scale, "what", "the scale of each output")

    def prepared(self, model: nn.Module, x: Any) -> Selection | ScaledScore:
        """Find the scales there are to select from, and whether outputs are to be scaled."""
        # Two rows: on a single one batch statistics fail, in a way that says nothing of mixing.
        first = forward.see(model, inputs.take(x, slice(0, 2)))
        prediction = self.score.prediction(first.output)
        outputs = prediction[0].numel()
        score, is_open = self.score, getattr(self.score.scale, "is_open", False)
        # A single output has no other to be compared with, and the outputs of a map, whose size may
        # change from row to row, have one unit.
        if score.output_scales == AUTO and not (
            1 < outputs <= _MOST_OUTPUTS and prediction.dim() == 2
        ):
            score = replace(score, output_scales=None)
        if is_open and outputs > _MOST_OUTPUTS:
            raise ValueError(
                f"the model has {outputs} outputs: name {self.what} above {_MOST_OUTPUTS} outputs"
            )
        options = score.scale.options(model, x) if is_open else {OUTPUT: score.scale}
        if not is_open and score.output_scales != AUTO:
            return score
        made = {name: replace(score, scale=scale) for name, scale in options.items()}
        prepared = ScaleSelection(score, made)
        prepared.most_rows = max(1000, min(10_000, _NUMBERS // outputs))
        return prepared

    def requires(self) -> Requires:
        """Return what any candidate requires."""
        pieces = self.options.values() or [self.score]
        return reduce(Requires.joined, (piece.requires() for piece in pieces))

    def select(self, aside: Aside) -> Selected:
        """Learn scales of outputs, and take the scale with the shortest mean interval.

        Of one end that is promised, the scale that goes least far.
        """
        options = {name: self._with_scales(one, aside) for name, one in self.options.items()}
        if not getattr(self.score.scale, "is_open", False):
            return Selected(options[OUTPUT], aside.calibration, {})
        trials = {}
        for name, option in options.items():
            width, scale = growth(option.ends(aside.out), option.side)
            trials[name] = Trial(option.score(aside.out, aside.y).cpu(), scale.cpu())
        of_each = exact_alpha(aside.alpha) / (2 if self.score.side == EACH else 1)
        choice = layer_selection.choose(width.cpu(), trials, of_each)
        choice = replace(choice, alpha=float(exact_alpha(aside.alpha)), side=self.score.side)
        is_plain = choice.feature == OUTPUT
        warning = layer_selection.why_plain(choice, self._called) if is_plain else None
        return Selected(options[choice.feature], aside.calibration, {"layer": choice}, warning)

    def _with_scales(self, option: ScaledScore, aside: Aside) -> ScaledScore:
        """Learn the scales of outputs that share a threshold."""
        if option.output_scales != AUTO:
            return option
        alone = replace(option, joint=False, output_scales=None)
        scores = two_sided(alone.score(aside.out, aside.y).cpu(), option.side)
        return replace(option, output_scales=learned_output_scales(scores, aside.alpha))

    @property
    def _called(self) -> str:
        return self.what.removeprefix("the ")

    def without_rows(self, rows: int, alpha: Any) -> Selected:
        """Take plain CP, and no row to select it; outputs count as they are."""
        plain = replace(self.options[OUTPUT], output_scales=None)
        is_open = getattr(self.score.scale, "is_open", False)
        warning = layer_selection.why_no_choice(rows, alpha, self._called) if is_open else None
        return Selected(plain, None, {}, warning)
