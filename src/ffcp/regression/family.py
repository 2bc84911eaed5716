"""Bands of a base and a slack: the family of nested bands behind most regression methods."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ffcp import files
from ffcp.conformal.columns import Columns
from ffcp.conformal.rank import exact_alpha
from ffcp.conformal.selection import Chosen, Scorer
from ffcp.network import checks, inputs, passes
from ffcp.network.features import OUTPUT
from ffcp.pieces import Needs, Seen
from ffcp.regression import bands, layers, waiting
from ffcp.regression.bands import Ends, as_float64
from ffcp.regression.bases import Base, columns
from ffcp.regression.joint import (
    AUTO,
    Joint,
    Scales,
    checked_scales,
    has_own_thresholds,
    learned_scales,
    reduced,
)
from ffcp.regression.layers import Trial
from ffcp.regression.sides import (
    BOTH,
    EACH,
    columns_of,
    growth,
    kept_scores,
    reduced_sides,
    two_sided,
)
from ffcp.regression.slacks import checked_slack

_MOST_OUTPUTS = 4096  # of a model whose slack is chosen
_FEW_OUTPUTS = 64  # of which all candidates are worked out for every row
_NUMBERS = 10**6  # scores of the rows that choose; fewer rows do where outputs are many


class Family(Scorer):
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

    def score(self, seen: Seen, y: Tensor) -> Tensor:
        """Give the scores of targets (n, m): as many, or (n, 1) if outputs share a threshold."""
        below, above = self.sides(seen, y)
        return reduced(torch.maximum(below, above), self.joint)

    def interval(self, seen: Seen, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """Give the ends (levels, n, m) of the bands of thresholds (levels, n or 1, m or 1)."""
        return self.reach(seen, threshold, threshold)

    def sides(self, seen: Seen, y: Tensor) -> tuple[Tensor, Tensor]:
        """Say how far targets lie below the lower and above the upper end, (n, m) each."""
        raise NotImplementedError

    def reach(self, seen: Seen, below: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
        """Give the ends (levels, n, m) whose targets have at most these one-sided scores."""
        raise NotImplementedError

    def note(self, seen: Seen, y: Any) -> dict[str, Any]:
        """Note the scores of the sides that are promised, and their signs if they have any."""
        target = self.target(seen, y)
        return {"score": kept_scores(self, seen, target), **self._sign(seen, target)}

    def _sign(self, seen: Seen, y: Tensor) -> dict[str, Tensor]:
        """Note which targets lie below, where the score of each is the size of a signed one."""
        is_folded = self.side == BOTH and (has_own_thresholds(self.joint) or y.shape[1] == 1)
        curve = self.curve(seen) if is_folded else None
        if curve is None:
            return {}
        return {"sign": self.signed(curve, as_float64(y).cpu()) < 0}

    # -- only where the score is the size of a signed one -------------------------------------

    #: Why there is no distribution of the target, where there is none.
    why_unsigned = "its score is not the size of a number that grows with the target"

    def curve(self, seen: Seen) -> dict[str, Tensor] | None:
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

    def again(self, noted: Columns) -> tuple[Seen, Tensor] | None:
        """Give what was seen of rows that waited for a choice, if it was noted."""
        return waiting.again(noted)

    def target(self, seen: Seen, y: Tensor) -> Tensor:
        """Bring targets to (n, m)."""
        return columns(checks.target(y, self.prediction(seen.output)))


class SlackBands(Family):
    """Bands ``[lo - q s_lo, hi + q s_hi]`` of a base and a slack.

    ``scales`` multiply the slacks of outputs that share one threshold; ``"auto"`` are to be
    learned on rows that do not calibrate.
    """

    def __init__(
        self,
        base: Base,
        slack: Any,
        joint: Joint = False,
        side: str = BOTH,
        column: str = "score",
        scales: Scales | str | None = None,
    ) -> None:
        self.base, self.slack, self.joint, self.side = base, slack, joint, side
        self._column = column  # where scores were noted before this slack was chosen
        self.scales: Scales | None = None if isinstance(scales, str) else scales
        self.learns_scales = scales == AUTO

    def with_scales(self, scales: Scales | str | None) -> SlackBands:
        """Give the same with other scales, or without any."""
        return SlackBands(self.base, self.slack, self.joint, self.side, self._column, scales)

    def needs(self) -> Needs:
        """Ask for what the slack asks for."""
        needs: Needs = self.slack.needs()
        return needs

    def settings(self) -> dict[str, Any]:
        """Say what base and slack are."""
        known = {**self.base.settings(), **self.slack.settings()}
        if self.learns_scales or self.scales is not None:
            known["scales"] = None if self.scales is None else list(self.scales)
        return known

    takes_infinity = False
    gives_new = True

    @property
    def lowest(self) -> float:  # type: ignore[override]
        """No score is below this: those of a point prediction are distances."""
        return float(getattr(self.base, "lowest", -math.inf)) if self.side == BOTH else -math.inf

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        """Whether the slack is still to be chosen, or scales to be learned."""
        return self._slack_is_open or self.learns_scales

    @property
    def _slack_is_open(self) -> bool:
        return bool(getattr(self.slack, "is_open", False))

    @property
    def what_is_open(self) -> str:  # type: ignore[override]
        """What is to be chosen, in words."""
        if not self._slack_is_open and self.learns_scales:
            return "the scale of each output"
        return str(getattr(self.slack, "what_is_open", "the slack"))

    def prediction(self, output: Tensor) -> Tensor:
        """Give the point prediction, in the shape of the target."""
        return self.base.prediction(output)

    def ends(self, seen: Seen) -> Ends:
        """Give the base band and its slacks."""
        return self.scaled(self.base(seen, checked_slack(self.slack(seen), seen)))

    def scaled(self, ends: Ends) -> Ends:
        """Multiply the slacks by the scales of the outputs."""
        if self.scales is None:
            return ends
        outputs = ends.lo.shape[1]
        if len(self.scales) != outputs:
            raise ValueError(
                f"there are {len(self.scales)} scales, but the model has {outputs} outputs"
            )
        scales = torch.tensor(self.scales, dtype=ends.lo.dtype, device=ends.lo.device)
        below = ends.slack_lo * scales
        above = below if ends.slack_hi is ends.slack_lo else ends.slack_hi * scales
        return Ends(ends.lo, ends.hi, below, above)

    def note(self, seen: Seen, y: Any) -> dict[str, Any]:
        """Note scores and signs; where one centre serves both ends it is worked out once."""
        if self.side != BOTH:
            return super().note(seen, y)
        target, ends = self.target(seen, y), self.ends(seen)
        is_folded = has_own_thresholds(self.joint) or target.shape[1] == 1
        if not (is_folded and ends.is_symmetric):
            return {"score": reduced(bands.score(ends, target), self.joint)}
        score, below = bands.signed_score(ends, target)
        return {"score": reduced(score, self.joint), "sign": below}

    def target(self, seen: Seen, y: Tensor) -> Tensor:
        """Bring targets to (n, m), by what has their shape and takes least to work out."""
        like = getattr(self.base, "target_like", self.base.prediction)
        return columns(checks.target(y, like(seen.output)))

    def score(self, seen: Seen, y: Tensor) -> Tensor:
        """Say how far targets lie outside the base band, in units of the slack."""
        return reduced(bands.score(self.ends(seen), y), self.joint)

    def sides(self, seen: Seen, y: Tensor) -> tuple[Tensor, Tensor]:
        """Say how far targets lie outside each end, in units of its slack."""
        return bands.sides(self.ends(seen), y)

    why_unsigned = "its base has two ends, each with a score of its own: give a point prediction"

    def curve(self, seen: Seen) -> dict[str, Tensor] | None:
        """Give centre and slack, where both ends share them."""
        ends = self.ends(seen)
        if not ends.is_symmetric:
            return None
        return {"centre": ends.lo.cpu(), "slack": ends.slack_lo.expand_as(ends.lo).cpu()}

    def signed(self, curve: Columns, y: Tensor) -> Tensor:
        """Say how far targets lie above the centre, in units of the slack."""
        return torch.as_tensor((y - curve["centre"]) / curve["slack"])

    def at(self, curve: Columns, signed: Tensor) -> Tensor:
        """Move the centre by so many slacks."""
        return torch.as_tensor(curve["centre"] + signed * curve["slack"])

    def scores(self, noted: Columns) -> Tensor:
        """Give the scores of rows that were noted, also before this slack was chosen."""
        if "score" in noted:
            return torch.as_tensor(noted["score"])
        scores = torch.as_tensor(noted[self._column])  # of every output, where scales were open
        if scores.shape[1] == columns_of(self.side, self.joint, 1):
            return scores
        return reduced_sides(_divided(scores, self.scales), self.side, self.joint)

    def reach(self, seen: Seen, below: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
        """Move each end of the base band by its threshold times its slack."""
        return bands.reach(self.ends(seen), below, above, seen.output.dtype)

    def restored(self, settings: Mapping[str, Any]) -> SlackBands:
        """Give the family with the slack that was chosen and saved."""
        slack = self.slack.restored(settings) if self._slack_is_open else self.slack
        scales: Scales | str | None = self.scales
        if self.learns_scales:
            saved = files.rebuilt(tuple[float, ...] | None, settings.get("scales"))
            scales = checked_scales(saved, self.joint)
        return SlackBands(self.base, slack, self.joint, self.side, scales=scales)

    def prepared(self, model: nn.Module, x: Any) -> Any:
        """Find the slacks there are to choose from, and whether there are scales to learn."""
        if not self.is_open:
            return self
        # Two rows: on a single one batch statistics fail, in a way that says nothing of mixing.
        first = passes.see(model, inputs.take(x, slice(0, 2)))
        outputs = self.prediction(first.output)[0].numel()
        what = self.what_is_open.removeprefix("the ")
        # A single output has no other to be compared with, and the outputs of a map, whose size may
        # change from row to row, have one unit.
        is_map = self.prediction(first.output).dim() > 2
        learns = self.learns_scales and 1 < outputs <= _MOST_OUTPUTS and not is_map
        scales = AUTO if learns else self.scales
        if not self._slack_is_open:
            alone = self.with_scales(scales)
            return SlackChoice(alone, {OUTPUT: self.slack}, outputs) if learns else alone
        if outputs > _MOST_OUTPUTS:
            raise ValueError(
                f"the model has {outputs} outputs, and the automatic choice keeps the scores of "
                f"all candidates: name one {what} above {_MOST_OUTPUTS} outputs"
            )
        options = self.slack.options(model, x)
        return SlackChoice(self.with_scales(scales), options, outputs, what)

    def choices_from(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Build the choice of the slack again."""
        layer = saved.get("layer")
        return {} if layer is None else {"layer": files.rebuilt(layers.Choice, layer)}


class SlackChoice(Family):
    """Bands whose slack is being chosen: what all candidates say is noted of every row."""

    is_open = True

    def __init__(
        self,
        family: SlackBands,
        options: Mapping[str, Any],
        outputs: int,
        what: str = "feature",
    ) -> None:
        self.base, self.joint, self.side = family.base, family.joint, family.side
        self._learns = family.learns_scales
        self._what = what  # the candidates are called
        self._options = {
            name: SlackBands(
                self.base, slack, self.joint, self.side, f"score.{name}", family.scales
            )
            for name, slack in options.items()
        }
        self.most_rows = max(1000, min(10_000, _NUMBERS // outputs))
        # One gradient serves all layers; of many outputs each layer takes a product of its own.
        self.is_costly = outputs > _FEW_OUTPUTS and bool(self.needs().norms)

    def needs(self) -> Needs:
        """Ask for what any candidate asks for."""
        needs = Needs()
        for option in self._options.values():
            needs = needs.joined(option.needs())
        return needs

    def prediction(self, output: Tensor) -> Tensor:
        """Give the point prediction, in the shape of the target."""
        return self.base.prediction(output)

    def note(self, seen: Seen, y: Any) -> dict[str, Any]:
        """Note scores and slacks under every candidate, and the width of the base band."""
        target = self.target(seen, y)
        noted = {}
        for name, option in self._options.items():
            width, slack = growth(option.ends(seen), self.side)
            # While scales are open, all outputs are noted; they share a threshold afterwards.
            noting = (
                SlackBands(self.base, option.slack, False, self.side) if self._learns else option
            )
            noted[f"score.{name}"] = kept_scores(noting, seen, target).cpu()
            noted[f"slack.{name}"] = slack.cpu()
        return {**noted, "width": width.cpu(), **self._sign(seen, target)}

    def curve(self, seen: Seen) -> dict[str, Tensor] | None:
        """Give what plain CP does: the sign of a residual is the same for every slack."""
        return self._options[OUTPUT].curve(seen)

    def signed(self, curve: Columns, y: Tensor) -> Tensor:
        """Say how far targets lie above the centre."""
        return self._options[OUTPUT].signed(curve, y)

    def choose(
        self, aside: Columns, alpha: Any, left: int = 0, weights: Tensor | None = None
    ) -> Chosen:
        """Learn scales, and take the slack with the shortest mean band.

        Of one end that is promised, the slack that reaches least far.
        """
        if self._learns:
            self._options = {
                name: option.with_scales(
                    learned_scales(two_sided(aside[f"score.{name}"], self.side), alpha)
                )
                for name, option in self._options.items()
            }
        if len(self._options) == 1 and self._learns:
            return Chosen(self._options[OUTPUT], {})
        trials = {
            name: Trial(option.scores(aside), _times(aside[f"slack.{name}"], option.scales))
            for name, option in self._options.items()
        }
        of_each = exact_alpha(alpha) / (2 if self.side == EACH else 1)
        choice = layers.choose(aside["width"], trials, of_each)
        choice = replace(choice, alpha=float(exact_alpha(alpha)), side=self.side)
        warning = layers.why_plain(choice, self._what) if choice.feature == OUTPUT else None
        return Chosen(self._options[choice.feature], {"layer": choice}, warning)

    def without_choice(self, rows: int, alpha: Any) -> Chosen:
        """Take plain CP, and no row to choose it; outputs count as they are."""
        if len(self._options) == 1 and self._learns:
            return Chosen(self._options[OUTPUT], {})
        return Chosen(self._options[OUTPUT], {}, layers.why_no_choice(rows, alpha, self._what))


def _times(slacks: Tensor, scales: Scales | None) -> Tensor:
    return slacks if scales is None else slacks * _as_wide(scales, slacks)


def _divided(scores: Tensor, scales: Scales | None) -> Tensor:
    return scores if scales is None else scores / _as_wide(scales, scores)


def _as_wide(scales: Scales, values: Tensor) -> Tensor:
    """Give the scales of every column; those of the lower end stand before the upper's."""
    row = torch.tensor(scales, dtype=values.dtype)
    return row.repeat(values.shape[1] // len(row))
