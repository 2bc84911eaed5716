"""The nested intervals of FCP: bounds on the head over balls around the feature."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ffcp import bounds
from ffcp.batch import BatchOutput, Requires
from ffcp.bounds import Bounds
from ffcp.conformal.rank import exact_alpha, plain_quantile
from ffcp.conformal.selection import Aside, Selected, Selection
from ffcp.description import Described
from ffcp.network import heads
from ffcp.network.cut import undisturbed
from ffcp.network.model import Stamp, frozen_copy, weights_of
from ffcp.regression.fcp import inversion
from ffcp.regression.intervals import as_float64
from ffcp.regression.joint import (
    Joint,
    has_own_thresholds,
    is_of_known,
    is_share,
    needs_whole_rows,
    reduced,
)
from ffcp.regression.scaled_score import IntervalScore

#: The numbers of descent steps that ``steps=None`` selects from.
STEP_COUNTS = (1, 2, 3, 5, 8, 12, 20, 30, 50, 80, 120, 200)
_MOST_OUTPUTS = 4096  # that are inverted one by one
_BOUNDS: dict[str, Callable[..., Bounds]] = {"ibp": bounds.ibp, "crown": bounds.crown}
# How far a feature moves along a ray: a fixed grid, interpolated linearly.
_RADII = (0.0, *(2.0 ** (k / 4) for k in range(-48, 49)))


class _CutHead(NamedTuple):
    """The head as a module, its trace, and the stamp of its model."""

    module: nn.Module
    traced: bounds.Head
    made_of: Stamp


class FeatureBallScore(IntervalScore):
    """Intervals that bound the head over a ball, whose radius is the threshold.

    Parameters are those of :class:`ffcp.FCP`.
    """

    lowest = 0.0
    why_unsigned = "its score is a distance in feature space, which has no side"

    def __init__(
        self,
        model: nn.Module,
        feature: str,
        head: nn.Module | None = None,
        *,
        norm: float,
        bound: str,
        invert: str,
        steps: int | None,
        lr: float,
        optimizer: str,
        joint: Joint,
    ) -> None:
        if is_share(joint) and invert == "descent":
            raise ValueError("a share of the outputs needs invert='exact'; or take joint=True")
        for name, value, known in (
            ("norm", norm, (2, math.inf)),
            ("bound", bound, tuple(_BOUNDS)),
            ("invert", invert, ("descent", "exact")),
            ("optimizer", optimizer, inversion.OPTIMIZERS),
        ):
            if value not in known:
                choices = " or ".join(map(repr, known))
                raise ValueError(f"{name} must be {choices}, got {value!r}")
        if steps is not None and steps < 1:
            raise ValueError(f"'steps' must be at least 1, or None to choose it, got {steps}")
        if not 0 < lr < math.inf:
            raise ValueError(f"'lr' must be a positive number, got {lr}")
        self._model, self._given_head, self.feature = model, head, feature
        self.norm, self.bound, self.invert = norm, bound, invert
        self.steps, self.lr, self.optimizer, self.joint = steps, lr, optimizer, joint
        self._cut: _CutHead | None = None
        self._head()  # raises for a head that cannot be extracted or bounded

    def __getstate__(self) -> dict[str, Any]:
        # Extracted from the layers of this model; a copy extracts and traces its own.
        return {**self.__dict__, "_cut": None}

    def _head(self) -> _CutHead:
        """Return the head of a copy of the model, extracted anew when the model has changed."""
        whole = self._model if self._given_head is None else self._given_head
        now = weights_of(whole).stamp
        cut = self._cut
        if cut is None or cut.made_of != now:
            frozen = frozen_copy(whole, with_hooks=True) or whole
            with undisturbed(frozen):  # so that tracing sees dropout switched off
                head = heads.head(frozen, self.feature) if self._given_head is None else frozen
            cut = self._cut = _CutHead(head, bounds.trace(head), now)
        return cut

    def requires(self) -> Requires:
        """Require the feature."""
        return Requires(values=(self.feature,))

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, but for the model."""
        names = ("feature", "norm", "bound", "invert", "steps", "lr", "optimizer", "joint")
        return {"head": self._given_head, **{name: getattr(self, name) for name in names}}

    def selection(self) -> Selection | None:
        """Return the selection of the number of steps; ``None`` if it is given."""
        return _Steps(self) if self.steps is None and self.invert == "descent" else None

    # -- the head ---------------------------------------------------------------------------

    @contextmanager
    def _frozen_head(self) -> Iterator[nn.Module]:
        """Return the head in eval mode with frozen parameters."""
        head = self._head().module
        with undisturbed(head):
            yield head

    def check_head(self, out: BatchOutput) -> None:
        """Raise ValueError if the head does not give the model's output from the feature."""
        output, v = out.output[:8], out.values[self.feature][:8]
        with self._frozen_head() as head, torch.no_grad():
            repeated = head(v)
        if repeated.shape != output.shape or not torch.allclose(
            repeated, output, rtol=1e-2, atol=1e-3 * float(output.abs().max())
        ):
            raise ValueError(
                f"the head behind {self.feature!r} does not give the model's output from the "
                "feature alone: cut elsewhere, or pass the right head=..."
            )

    def _distance(
        self, v: Tensor, y: Tensor, columns: Tensor | None, steps: Sequence[int]
    ) -> Tensor:
        """Return the distance to y, (n, outputs) or (n, 1) each, after each number of steps."""
        with self._frozen_head() as head:

            def chosen(moving: Tensor) -> Tensor:
                outputs: Tensor = head(moving)
                outputs = outputs.reshape(len(moving), -1)
                return outputs if columns is None else outputs.gather(1, columns)

            y = y.to(v)
            if self.invert == "exact":
                return inversion.exact_distance(
                    lambda moving: chosen(moving)[:, 0], v, y[:, 0], norm=self.norm
                )[None]
            return inversion.descend(
                chosen, v, y, steps, lr=self.lr, norm=self.norm, optimizer=self.optimizer
            )

    def _ball_bounds(self, v: Tensor, radius: Tensor) -> Bounds:
        """Return bounds on the head's outputs, (n, outputs), over a ball around each row."""
        with self._frozen_head():
            low, high = _BOUNDS[self.bound](self._head().traced, v, radius.to(v), self.norm)
        # The bounds round as the head does; widen them by more than that.
        guard = _guard(low, high)
        rows = len(v)
        return Bounds((low - guard).reshape(rows, -1), (high + guard).reshape(rows, -1))

    # -- scores and intervals ---------------------------------------------------------------

    def score(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Return how far the feature must move until the head gives y."""
        if out.rows[0] == 0:
            self.check_head(out)
        v, target = out.values[self.feature], self.target(out, y)
        return as_float64(self.scores_after(out.output, v, target, [self.steps or 1])[0])

    def scores_after(self, output: Tensor, v: Tensor, y: Tensor, steps: Sequence[int]) -> Tensor:
        """Return scores (len(steps), n, outputs or 1) after each number of steps."""
        if not has_own_thresholds(self.joint) and self.invert == "descent":
            unknown = y.isnan()
            lost = unknown.any(dim=1) if needs_whole_rows(self.joint) else unknown.all(dim=1)
            distances = self._distance(v, y, None, steps)
            return distances.masked_fill(lost.to(distances.device), math.nan)[..., None]
        each = self._each_distance(v, y, steps)
        return torch.stack([reduced(scores, self.joint) for scores in each])

    def _each_distance(self, v: Tensor, y: Tensor, steps: Sequence[int]) -> Tensor:
        """Return the distances (len(steps), n, outputs) of every output on its own."""
        rows, outputs = y.shape
        if outputs > _MOST_OUTPUTS:
            raise ValueError(
                f"FCP would have to invert each of {outputs} outputs on its own: take joint=True "
                "with invert='descent', which inverts all of them at once"
            )
        counts = len(steps) if self.invert == "descent" else 1
        distances = v.new_empty(counts, rows, outputs)
        for column in range(outputs):
            place = torch.full((rows, 1), column, device=v.device)
            distances[..., column] = self._distance(v, y[:, column : column + 1], place, steps)
        # The distance of a missing target means nothing.
        return distances.masked_fill(y.isnan().to(distances.device), math.nan)

    def region(self, out: BatchOutput, q: Tensor) -> tuple[Tensor, Tensor]:
        """Bound the head over the ball of this radius."""
        if out.rows[0] == 0:
            self.check_head(out)
        v = out.values[self.feature]
        radii = q.expand(len(q), len(v), q.shape[-1])
        ends = [self.ball_ends(out.output, v, radius) for radius in radii]
        return torch.stack([lower for lower, _ in ends]), torch.stack([upper for _, upper in ends])

    def ball_ends(self, output: Tensor, v: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends of intervals, (n, outputs) each, for thresholds (n, outputs or 1)."""
        if radius.shape[1] == 1:
            return self._ball_bounds(v, radius[:, 0])
        # Each output has its own ball, of whose bounds only that output is used.
        ends = [self._ball_bounds(v, own) for own in radius.T]
        lower = torch.stack([end.lower[:, column] for column, end in enumerate(ends)], dim=1)
        return lower, torch.stack([end.upper[:, column] for column, end in enumerate(ends)], dim=1)

    def with_steps(self, steps: int) -> FeatureBallScore:
        """Return the same with a number of steps, sharing the head."""
        settled = object.__new__(type(self))
        settled.__dict__.update({**self.__dict__, "steps": steps})
        return settled


class _Steps(Selection):
    """Selects the smallest number of descent steps whose intervals cover enough."""

    what = "the number of steps"
    most_rows = 1000

    def __init__(self, ball: FeatureBallScore) -> None:
        self.ball = ball

    def requires(self) -> Requires:
        """Require the feature."""
        return self.ball.requires()

    def select(self, aside: Aside) -> Selected:
        """Return the score with the number of steps that these rows select."""
        ball, out = self.ball, aside.out
        ball.check_head(out)
        y, v = ball.target(out, aside.y), out.values[ball.feature]
        scores = ball.scores_after(out.output, v, y, STEP_COUNTS)
        alpha = aside.alpha_of_each(aside.alpha, scores.shape[-1])
        thresholds = torch.stack([plain_quantile(one, alpha) for one in scores])
        thresholds = thresholds.nan_to_num(0.0)  # where no score is known
        coverage = {
            count: self._coverage(out.output, v, y, threshold)
            for count, threshold in zip(STEP_COUNTS, thresholds, strict=True)
        }
        level = float(1 - exact_alpha(aside.alpha))
        enough = [count for count, share in coverage.items() if share >= level]
        settled = ball.with_steps(enough[0] if enough else STEP_COUNTS[-1])
        return Selected(settled, aside.calibration, {"steps": StepChoice(coverage)})

    def _coverage(self, output: Tensor, v: Tensor, y: Tensor, threshold: Tensor) -> float:
        """Return the coverage of known targets, or of rows if joint."""
        joint = self.ball.joint
        lower, upper = self.ball.ball_ends(output, v, threshold.expand(len(v), len(threshold)))
        target = y.to(lower)
        inside, counted = (lower <= target) & (target <= upper), ~target.isnan()
        if joint is not False:
            inside = (inside | ~counted).all(dim=1, keepdim=True)
            counted = (counted.any(dim=1) if is_of_known(joint) else counted.all(dim=1))[:, None]
        return float((inside & counted).sum()) / max(1.0, float(counted.sum()))


@dataclass(frozen=True)
class StepChoice(Described):
    """For each number of steps tried, the coverage of its intervals on the rows set aside."""

    coverage: Mapping[Any, float]


class QuantileBallScore(FeatureBallScore):
    """The intervals of FCQR: lower bounds of the lower quantile over a ball, upper of the upper.

    Between the two quantiles the score is measured along rays: how far the feature moves along
    the steepest direction of each quantile before the quantile reaches y. A negative threshold
    moves both ends inward by as much.
    """

    lowest = -math.inf

    def prediction(self, output: Tensor) -> Tensor:
        """Return the middle of the two quantiles."""
        if output.dim() != 2 or output.shape[1] != 2:
            raise ValueError(
                f"the model's output has shape {tuple(output.shape)}; FCQR needs two outputs "
                "per row, the lower and the upper quantile: (n, 2). For a point prediction use FCP"
            )
        return output.mean(dim=-1)

    def scores_after(self, output: Tensor, v: Tensor, y: Tensor, steps: Sequence[int]) -> Tensor:
        """Return the scores (len(steps), n, 1) after each number of steps."""
        ends, order = output.sort(dim=1)
        # Both ends of all rows in one batch: columns[:n] are the lower ends.
        columns = order.T.reshape(-1, 1)
        twice = v.repeat(2, *[1] * (v.dim() - 1))
        below, above = self._distance(twice, y.repeat(2, 1), columns, steps).chunk(2, dim=1)
        y = y[:, 0].to(ends)
        from_lower, from_upper = self._radii_inside(v, order, ends, y)
        scores = torch.maximum(
            torch.where(ends[:, 0] > y, below, -from_lower),
            torch.where(y > ends[:, 1], above, -from_upper),
        )
        return scores.masked_fill(y.isnan(), math.nan)[..., None]  # unlike 0, not a score

    def ball_ends(self, output: Tensor, v: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends of the intervals, (n, 1) each; a negative radius moves them inward."""
        ends, order = output.sort(dim=1)
        low, high = self._ball_bounds(v, radius[:, 0].clamp_min(0))
        lower, upper = low.gather(1, order[:, :1]), high.gather(1, order[:, 1:])
        shrinks = (radius < 0).to(v.device)
        if bool(shrinks.any()):
            inner = self._shrunk(v, order, ends, -radius[:, 0].to(v.device))
            lower = torch.where(shrinks, inner[:, :1], lower)
            upper = torch.where(shrinks, inner[:, 1:], upper)
        return lower, upper

    def _along_rays(self, v: Tensor, order: Tensor, ends: Tensor) -> Iterator[tuple[float, Tensor]]:
        """Yield distances, from 0, with both ends (n, 2) moved inward by as much."""
        with self._frozen_head() as head, torch.inference_mode(False), torch.enable_grad():
            rays = [
                _steepest(head, v, order[:, side : side + 1], self.norm) * (1 - 2 * side)
                for side in (0, 1)
            ]
            lower, upper = ends.unbind(dim=1)
            for radius in _RADII:
                with torch.no_grad():
                    low, high = (
                        head(v + radius * ray).gather(1, order[:, side : side + 1])[:, 0]
                        for side, ray in enumerate(rays)
                    )
                lower, upper = torch.fmax(lower, low), torch.fmin(upper, high)
                yield radius, torch.stack([lower, upper], dim=1)

    def _radii_inside(self, v: Tensor, order: Tensor, ends: Tensor, y: Tensor) -> Tensor:
        """Return how far the feature moves before each end has passed y, (2, n)."""
        radii = torch.zeros(2, len(y), dtype=torch.float64, device=y.device)
        for (near, before), (far, after) in pairwise(self._along_rays(v, order, ends)):
            inside = torch.stack([y - before[:, 0], before[:, 1] - y]).double()
            share = (inside / (after - before).T.abs().double()).clamp(0, 1)
            radii = torch.where(inside >= 0, near + share * (far - near), radii)
        return radii

    def _shrunk(self, v: Tensor, order: Tensor, ends: Tensor, radii: Tensor) -> Tensor:
        """Return both ends, (n, 2), moved inward by a distance; an empty interval is a point."""
        inner = ends.clone()
        for (near, before), (far, after) in pairwise(self._along_rays(v, order, ends)):
            share = (radii - near) / (far - near)
            moved = torch.lerp(before, after, share.clamp(0, 1).to(ends)[:, None])
            inner = torch.where((share >= 0)[:, None], moved, inner)
        guard = _guard(*ends.unbind(dim=1))
        lower, upper = inner[:, 0] - guard, inner[:, 1] + guard
        middle = (lower + upper) / 2
        return torch.stack([torch.minimum(lower, middle), torch.maximum(upper, middle)], dim=1)


def _steepest(head: nn.Module, v: Tensor, column: Tensor, norm: float) -> Tensor:
    """Return the direction of norm 1 in which an output grows fastest; zero where it does not."""
    moving = v.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(head(moving).gather(1, column).sum(), moving)
    if norm != 2:
        return gradient.sign()
    length = torch.linalg.vector_norm(gradient.reshape(len(v), -1), dim=1)
    direction: Tensor = gradient / inversion.like(length, v).clamp_min(torch.finfo(v.dtype).tiny)
    return direction


def _guard(low: Tensor, high: Tensor) -> Tensor:
    """Return a bound on the rounding of two ends."""
    return (32 * torch.finfo(low.dtype).eps * (low.abs() + high.abs())).nan_to_num(0.0, 0.0)
