"""Bands of a base and a scale: the family of nested bands behind most regression methods."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ffcp import files
from ffcp.batch import BatchOutput, Requires
from ffcp.conformal.columns import Columns
from ffcp.conformal.rank import exact_alpha
from ffcp.conformal.selection import Chosen, Score
from ffcp.network import checks, forward, inputs
from ffcp.network.features import OUTPUT
from ffcp.regression import intervals, layer_selection, recorded_rows
from ffcp.regression.bases import Base, columns
from ffcp.regression.intervals import Ends, as_float64
from ffcp.regression.joint import (
    AUTO,
    Joint,
    OutputScales,
    checked_output_scales,
    has_own_thresholds,
    learned_output_scales,
    reduced,
)
from ffcp.regression.layer_selection import Trial
from ffcp.regression.scales import checked_scale
from ffcp.regression.sides import (
    BOTH,
    EACH,
    columns_of,
    growth,
    kept_scores,
    reduced_sides,
    two_sided,
)

_MOST_OUTPUTS = 4096  # of a model whose scale is chosen
_FEW_OUTPUTS = 64  # of which all candidates are worked out for every row
_NUMBERS = 10**6  # scores of the rows that choose; fewer rows do where outputs are many


class RegressionScore(Score):
    """Nested bands, one for every threshold; the base of all families.

    A family says what the score of a target is (:meth:`score`) and which targets have at most
    some score (:meth:`interval`); and the same for each end alone (:meth:`sides`, :meth:`reach`).
    Which of them ``side`` asks for is decided in :mod:`ffcp.regression.sides`.
    """

    #: How several outputs of a row are covered.
    joint: Joint = False
    #: Which ends are promised: ``"both"``, ``"lower"``, ``"upper"`` or ``"each"``.
    side: str = BOTH

    def prediction(self, output: Tensor) -> Tensor:
        """Give the point prediction, in the shape of the target."""
        return output

    def score(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Give the scores of targets (n, m): as many, or (n, 1) if outputs share a threshold."""
        below, above = self.sides(out, y)
        return reduced(torch.maximum(below, above), self.joint)

    def interval(self, out: BatchOutput, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """Give the ends (levels, n, m) of the bands of thresholds (levels, n or 1, m or 1)."""
        return self.interval_ends(out, threshold, threshold)

    def sides(self, out: BatchOutput, y: Tensor) -> tuple[Tensor, Tensor]:
        """Say how far targets lie below the lower and above the upper end, (n, m) each."""
        raise NotImplementedError

    def interval_ends(
        self, out: BatchOutput, below: Tensor, above: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Give the ends (levels, n, m) whose targets have at most these one-sided scores."""
        raise NotImplementedError

    def note(self, out: BatchOutput, y: Any) -> dict[str, Any]:
        """Note the scores of the sides that are promised, and their signs if they have any."""
        target = self.target(out, y)
        return {"score": kept_scores(self, out, target), **self._sign(out, target)}

    def _sign(self, out: BatchOutput, y: Tensor) -> dict[str, Tensor]:
        """Note which targets lie below, where the score of each is the size of a signed one."""
        is_folded = self.side == BOTH and (has_own_thresholds(self.joint) or y.shape[1] == 1)
        curve = self.curve(out) if is_folded else None
        if curve is None:
            return {}
        return {"sign": self.signed(curve, as_float64(y).cpu()) < 0}

    # -- only where the score is the size of a signed one -------------------------------------

    #: Why there is no distribution of the target, where there is none.
    why_unsigned = "its score is not the size of a number that grows with the target"

    def curve(self, out: BatchOutput) -> dict[str, Tensor] | None:
        """Give what signed scores of some rows depend on, on the CPU: columns (n, m, ...).

        ``None`` if scores are not the size of signed ones: ``max(below, above)`` of
        :meth:`sides`, with ``below = -above``.
        """
        return None

    def signed(self, curve: Columns, y: Tensor) -> Tensor:
        """Give the signed scores, which grow with y, of targets (..., n, m)."""
        raise NotImplementedError

    def at(self, curve: Columns, signed: Tensor) -> Tensor:
        """Give the targets that have these signed scores (..., n, m)."""
        raise NotImplementedError

    def again(self, noted: Columns) -> tuple[BatchOutput, Tensor] | None:
        """Give what was seen of rows that waited for a choice, if it was noted."""
        return recorded_rows.again(noted)

    def target(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Bring targets to (n, m)."""
        return columns(checks.target(y, self.prediction(out.output)))


class ScaledScore(RegressionScore):
    """Bands ``[lo - q s_lo, hi + q s_hi]`` of a base and a scale.

    ``scales`` multiply the scales of outputs that share one threshold; ``"auto"`` are to be
    learned on rows that do not calibrate.
    """

    def __init__(
        self,
        base: Base,
        scale: Any,
        joint: Joint = False,
        side: str = BOTH,
        column: str = "score",
        output_scales: OutputScales | str | None = None,
    ) -> None:
        self.base, self.scale, self.joint, self.side = base, scale, joint, side
        self._column = column  # where scores were noted before this scale was chosen
        self.output_scales: OutputScales | None = (
            None if isinstance(output_scales, str) else output_scales
        )
        self.learns_output_scales = output_scales == AUTO

    def with_output_scales(self, output_scales: OutputScales | str | None) -> ScaledScore:
        """Give the same with other scales, or without any."""
        return ScaledScore(
            self.base, self.scale, self.joint, self.side, self._column, output_scales
        )

    def requires(self) -> Requires:
        """Ask for what the scale asks for."""
        requires: Requires = self.scale.requires()
        return requires

    def settings(self) -> dict[str, Any]:
        """Say what base and scale are."""
        known = {**self.base.settings(), **self.scale.settings()}
        if self.learns_output_scales or self.output_scales is not None:
            known["output_scales"] = (
                None if self.output_scales is None else list(self.output_scales)
            )
        return known

    takes_infinity = False
    gives_new = True

    @property
    def lowest(self) -> float:  # type: ignore[override]
        """No score is below this: those of a point prediction are distances."""
        return float(getattr(self.base, "lowest", -math.inf)) if self.side == BOTH else -math.inf

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        """Whether the scale is still to be chosen, or scales to be learned."""
        return self._scale_is_open or self.learns_output_scales

    @property
    def _scale_is_open(self) -> bool:
        return bool(getattr(self.scale, "is_open", False))

    @property
    def what_is_open(self) -> str:  # type: ignore[override]
        """What is to be chosen, in words."""
        if not self._scale_is_open and self.learns_output_scales:
            return "the scale of each output"
        return str(getattr(self.scale, "what_is_open", "the scale"))

    def prediction(self, output: Tensor) -> Tensor:
        """Give the point prediction, in the shape of the target."""
        return self.base.prediction(output)

    def ends(self, out: BatchOutput) -> Ends:
        """Give the base band and its scales."""
        return self.scaled(self.base(out, checked_scale(self.scale(out), out)))

    def scaled(self, ends: Ends) -> Ends:
        """Multiply the scales by the scales of the outputs."""
        if self.output_scales is None:
            return ends
        outputs = ends.lo.shape[1]
        if len(self.output_scales) != outputs:
            raise ValueError(
                f"there are {len(self.output_scales)} scales, but the model has {outputs} outputs"
            )
        output_scales = torch.tensor(self.output_scales, dtype=ends.lo.dtype, device=ends.lo.device)
        below = ends.scale_lo * output_scales
        above = below if ends.scale_hi is ends.scale_lo else ends.scale_hi * output_scales
        return Ends(ends.lo, ends.hi, below, above)

    def note(self, out: BatchOutput, y: Any) -> dict[str, Any]:
        """Note scores and signs; where one centre serves both ends it is worked out once."""
        if self.side != BOTH:
            return super().note(out, y)
        target, ends = self.target(out, y), self.ends(out)
        is_folded = has_own_thresholds(self.joint) or target.shape[1] == 1
        if not (is_folded and ends.is_symmetric):
            return {"score": reduced(intervals.score(ends, target), self.joint)}
        score, below = intervals.signed_score(ends, target)
        return {"score": reduced(score, self.joint), "sign": below}

    def target(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Bring targets to (n, m), by what has their shape and takes least to work out."""
        like = getattr(self.base, "target_like", self.base.prediction)
        return columns(checks.target(y, like(out.output)))

    def score(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Say how far targets lie outside the base band, in units of the scale."""
        return reduced(intervals.score(self.ends(out), y), self.joint)

    def sides(self, out: BatchOutput, y: Tensor) -> tuple[Tensor, Tensor]:
        """Say how far targets lie outside each end, in units of its scale."""
        return intervals.sides(self.ends(out), y)

    why_unsigned = "its base has two ends, each with a score of its own: give a point prediction"

    def curve(self, out: BatchOutput) -> dict[str, Tensor] | None:
        """Give centre and scale, where both ends share them."""
        ends = self.ends(out)
        if not ends.is_symmetric:
            return None
        return {"centre": ends.lo.cpu(), "scale": ends.scale_lo.expand_as(ends.lo).cpu()}

    def signed(self, curve: Columns, y: Tensor) -> Tensor:
        """Say how far targets lie above the centre, in units of the scale."""
        return torch.as_tensor((y - curve["centre"]) / curve["scale"])

    def at(self, curve: Columns, signed: Tensor) -> Tensor:
        """Move the centre by so many scales."""
        return torch.as_tensor(curve["centre"] + signed * curve["scale"])

    def scores(self, noted: Columns) -> Tensor:
        """Give the scores of rows that were noted, also before this scale was chosen."""
        if "score" in noted:
            return torch.as_tensor(noted["score"])
        scores = torch.as_tensor(noted[self._column])  # of every output, where scales were open
        if scores.shape[1] == columns_of(self.side, self.joint, 1):
            return scores
        return reduced_sides(_divided(scores, self.output_scales), self.side, self.joint)

    def interval_ends(
        self, out: BatchOutput, below: Tensor, above: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Move each end of the base band by its threshold times its scale."""
        return intervals.interval_ends(self.ends(out), below, above, out.output.dtype)

    def restored(self, settings: Mapping[str, Any]) -> ScaledScore:
        """Give the family with the scale that was chosen and saved."""
        scale = self.scale.restored(settings) if self._scale_is_open else self.scale
        output_scales: OutputScales | str | None = self.output_scales
        if self.learns_output_scales:
            saved = files.rebuilt(tuple[float, ...] | None, settings.get("output_scales"))
            output_scales = checked_output_scales(saved, self.joint)
        return ScaledScore(self.base, scale, self.joint, self.side, output_scales=output_scales)

    def prepared(self, model: nn.Module, x: Any) -> Any:
        """Find the scales there are to choose from, and whether there are scales to learn."""
        if not self.is_open:
            return self
        # Two rows: on a single one batch statistics fail, in a way that says nothing of mixing.
        first = forward.see(model, inputs.take(x, slice(0, 2)))
        outputs = self.prediction(first.output)[0].numel()
        what = self.what_is_open.removeprefix("the ")
        # A single output has no other to be compared with, and the outputs of a map, whose size may
        # change from row to row, have one unit.
        is_map = self.prediction(first.output).dim() > 2
        learns = self.learns_output_scales and 1 < outputs <= _MOST_OUTPUTS and not is_map
        output_scales = AUTO if learns else self.output_scales
        if not self._scale_is_open:
            alone = self.with_output_scales(output_scales)
            return ScaleSelection(alone, {OUTPUT: self.scale}, outputs) if learns else alone
        if outputs > _MOST_OUTPUTS:
            raise ValueError(
                f"the model has {outputs} outputs, and the automatic choice keeps the scores of "
                f"all candidates: name one {what} above {_MOST_OUTPUTS} outputs"
            )
        options = self.scale.options(model, x)
        return ScaleSelection(self.with_output_scales(output_scales), options, outputs, what)

    def choices_from(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Build the choice of the scale again."""
        layer = saved.get("layer")
        return {} if layer is None else {"layer": files.rebuilt(layer_selection.Choice, layer)}


class ScaleSelection(RegressionScore):
    """Bands whose scale is being chosen: what all candidates say is noted of every row."""

    is_open = True

    def __init__(
        self,
        family: ScaledScore,
        options: Mapping[str, Any],
        outputs: int,
        what: str = "feature",
    ) -> None:
        self.base, self.joint, self.side = family.base, family.joint, family.side
        self._learns = family.learns_output_scales
        self._what = what  # the candidates are called
        self._options = {
            name: ScaledScore(
                self.base, scale, self.joint, self.side, f"score.{name}", family.output_scales
            )
            for name, scale in options.items()
        }
        self.most_rows = max(1000, min(10_000, _NUMBERS // outputs))
        # One gradient serves all layers; of many outputs each layer takes a product of its own.
        self.is_costly = outputs > _FEW_OUTPUTS and bool(self.requires().norms)

    def requires(self) -> Requires:
        """Ask for what any candidate asks for."""
        requires = Requires()
        for option in self._options.values():
            requires = requires.joined(option.requires())
        return requires

    def prediction(self, output: Tensor) -> Tensor:
        """Give the point prediction, in the shape of the target."""
        return self.base.prediction(output)

    def note(self, out: BatchOutput, y: Any) -> dict[str, Any]:
        """Note scores and scales under every candidate, and the width of the base band."""
        target = self.target(out, y)
        noted = {}
        for name, option in self._options.items():
            width, scale = growth(option.ends(out), self.side)
            # While scales are open, all outputs are noted; they share a threshold afterwards.
            noting = (
                ScaledScore(self.base, option.scale, False, self.side) if self._learns else option
            )
            noted[f"score.{name}"] = kept_scores(noting, out, target).cpu()
            noted[f"scale.{name}"] = scale.cpu()
        return {**noted, "width": width.cpu(), **self._sign(out, target)}

    def curve(self, out: BatchOutput) -> dict[str, Tensor] | None:
        """Give what plain CP does: the sign of a residual is the same for every scale."""
        return self._options[OUTPUT].curve(out)

    def signed(self, curve: Columns, y: Tensor) -> Tensor:
        """Say how far targets lie above the centre."""
        return self._options[OUTPUT].signed(curve, y)

    def choose(
        self, aside: Columns, alpha: Any, left: int = 0, weights: Tensor | None = None
    ) -> Chosen:
        """Learn scales, and take the scale with the shortest mean band.

        Of one end that is promised, the scale that reaches least far.
        """
        if self._learns:
            self._options = {
                name: option.with_output_scales(
                    learned_output_scales(two_sided(aside[f"score.{name}"], self.side), alpha)
                )
                for name, option in self._options.items()
            }
        if len(self._options) == 1 and self._learns:
            return Chosen(self._options[OUTPUT], {})
        trials = {
            name: Trial(option.scores(aside), _times(aside[f"scale.{name}"], option.output_scales))
            for name, option in self._options.items()
        }
        of_each = exact_alpha(alpha) / (2 if self.side == EACH else 1)
        choice = layer_selection.choose(aside["width"], trials, of_each)
        choice = replace(choice, alpha=float(exact_alpha(alpha)), side=self.side)
        warning = (
            layer_selection.why_plain(choice, self._what) if choice.feature == OUTPUT else None
        )
        return Chosen(self._options[choice.feature], {"layer": choice}, warning)

    def without_choice(self, rows: int, alpha: Any) -> Chosen:
        """Take plain CP, and no row to choose it; outputs count as they are."""
        if len(self._options) == 1 and self._learns:
            return Chosen(self._options[OUTPUT], {})
        return Chosen(
            self._options[OUTPUT], {}, layer_selection.why_no_choice(rows, alpha, self._what)
        )


def _times(scales: Tensor, output_scales: OutputScales | None) -> Tensor:
    return scales if output_scales is None else scales * _as_wide(output_scales, scales)


def _divided(scores: Tensor, output_scales: OutputScales | None) -> Tensor:
    return scores if output_scales is None else scores / _as_wide(output_scales, scores)


def _as_wide(output_scales: OutputScales, values: Tensor) -> Tensor:
    """Give the scales of every column; those of the lower end stand before the upper's."""
    row = torch.tensor(output_scales, dtype=values.dtype)
    return row.repeat(values.shape[1] // len(row))
