"""Joint sets that follow the correlation of outputs: ellipsoids around the prediction.

With r the residuals of a row, each divided by its scale, and C their covariance, the score is the
Mahalanobis norm sqrt(r' C^-1 r), and the set of a threshold q is the ellipsoid of all targets whose
score is at most q. The smallest box around it has half the length q scale_j sqrt(C_jj) in output j,
so that box and correlation determine it. C comes from rows that do not calibrate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ffcp import plots
from ffcp.batch import BatchOutput, Requires
from ffcp.conformal.selection import Aside, Selected, Selection
from ffcp.metrics.intervals import coverage
from ffcp.metrics.shares import Coverage
from ffcp.network import arrays
from ffcp.regression import intervals
from ffcp.regression.intervals import Ends, Interval, Point, as_float64, columns
from ffcp.regression.joint import AUTO, BOTH, ELLIPSOID, FEWEST_ROWS, Joint
from ffcp.regression.scaled_score import ScaledScore
from ffcp.regression.scales import as_scale

MOST_OUTPUTS = 1024
_LEAST = 1e-6  # least shrinkage: identical outputs would make the covariance singular


class Ellipsoid(Interval):
    """A prediction ellipsoid for each row: ``lower, upper, prediction`` are those of its box.

    Parameters
    ----------
    lower, upper : Tensor
        The ends of the smallest box around it, (n, m), in float64.
    prediction : Tensor
        The model's point prediction, its centre.
    alpha : float, tuple of floats or None
        The miscoverage level, or the levels of the first dimension.
    correlation : Tensor
        That of the outputs, (m, m): y lies inside if z' correlation^-1 z <= 1, z the distance
        from the centre in units of half the box.

    Examples
    --------
    >>> ends, none = torch.ones(1, 2), torch.eye(2)
    >>> disc = Ellipsoid(-ends, ends, torch.zeros(1, 2), correlation=none)
    >>> disc.contains([[0.9, 0.0]]), disc.contains([[0.9, 0.9]]), disc.volume
    (tensor([True]), tensor([False]), tensor([3.1416], dtype=torch.float64))
    >>> disc.contains([[0.9, torch.nan]])  # its projection on the outputs that are known
    tensor([True])
    """

    is_box = False
    correlation: Tensor

    def __new__(
        cls,
        lower: Tensor,
        upper: Tensor,
        prediction: Tensor,
        alpha: float | tuple[float, ...] | None = None,
        correlation: Tensor | None = None,
    ) -> Ellipsoid:
        """Build the tuple, and keep level and correlation."""
        self = super().__new__(cls, lower, upper, prediction, alpha)
        assert isinstance(self, Ellipsoid)
        outputs = prediction[0].numel() if len(prediction) else 0
        self.correlation = torch.eye(outputs).double() if correlation is None else correlation
        return self

    @property
    def levels(self) -> list[Ellipsoid]:
        """The ellipsoids of each of several levels."""
        return [
            Ellipsoid(lower, upper, self.prediction, correlation=self.correlation)
            for lower, upper in zip(self.lower, self.upper, strict=True)
        ]

    @property
    def _half(self) -> Tensor:
        """Half the lengths of the box, (..., n, m) in float64 on the CPU."""
        half = (as_float64(self.upper).cpu() - as_float64(self.lower).cpu()) / 2
        levels = self.lower.shape[:1] if self._has_levels else ()
        return half.reshape(*levels, len(self.prediction), -1)

    @property
    def volume(self) -> Tensor:
        """The volume of each ellipsoid, (n,), or (levels, n): in units of all outputs multiplied.

        The ball's, times half the lengths of the box, times the root of the correlation's
        determinant.
        """
        outputs = len(self.correlation)
        ball = outputs / 2 * math.log(math.pi) - math.lgamma(outputs / 2 + 1)
        shape = float(torch.linalg.slogdet(self.correlation).logabsdet) / 2
        return (ball + shape + self._half.log().sum(dim=-1)).exp()

    def contains(self, y: Any) -> Tensor:
        """Return which rows lie in their ellipsoid, (n,), or (levels, n).

        A row with some NaN targets is tested in the projection on the others, and one without any
        target lies in none.
        """
        target = arrays.target_tensor(y).to(self.lower.device)
        target = columns(as_float64(arrays.target_like(target, self.prediction))).cpu()
        half, centre = self._half, columns(as_float64(self.prediction)).cpu()
        distance = (target - centre) / half
        # A bound on the rounding of the ends, for rows at the edge.
        unit = 2 * torch.finfo(self.lower.dtype).eps
        slack = (unit * (1 + centre.abs() / half)).nan_to_num(0.0).amax(dim=-1)
        inside = torch.zeros(distance.shape[:-1], dtype=torch.bool)
        known, which = (~target.isnan()).unique(dim=0, return_inverse=True)
        for number, outputs in enumerate(known):
            rows, correlation = which == number, self.correlation[outputs][:, outputs]
            if not len(correlation):
                continue
            sizes = norms(distance[..., rows, :][..., outputs], correlation)
            factor = (len(correlation) / float(torch.linalg.eigvalsh(correlation)[0])) ** 0.5
            inside[..., rows] = sizes <= 1 + factor * slack[..., rows]
        return inside.to(self.lower.device)

    def coverage(self, y: Any, *, missing: bool = False) -> Coverage | list[Coverage]:
        """Return the share of rows inside, as :func:`ffcp.metrics.coverage` does."""
        shares: Coverage | list[Coverage] = coverage(self, y, joint=True, missing=missing)
        return shares

    def plot(self, x: Any = None, y: Any = None, **options: Any) -> Any:
        """Draw ellipses of two outputs, see :func:`ffcp.plots.ellipses`; of others their boxes."""
        if len(self.correlation) == 2 and x is None:
            return plots.ellipses(self, y, **options)
        return super().plot(x, y, **options)


def norms(distance: Tensor, correlation: Tensor) -> Tensor:
    """Return the Mahalanobis norms (...,) of rows (..., m).

    >>> norms(torch.tensor([[3.0, 4.0]]).double(), torch.eye(2).double())
    tensor([5.], dtype=torch.float64)
    """
    root = torch.linalg.cholesky(correlation)
    rows = distance.reshape(-1, len(correlation)).T
    whitened: Tensor = torch.linalg.solve_triangular(root, rows, upper=False)
    return whitened.square().sum(dim=0).sqrt().reshape(distance.shape[:-1])


def shrunk_covariance(residuals: Tensor) -> Tensor:
    """Return the second moments (m, m) of rows (n, m), shrunk to their diagonal where n is small.

    By how much is the estimate of Ledoit and Wolf (2004), on residuals in units of their own size.
    Moments are about 0, as ellipsoids lie around the prediction.

    >>> errors = torch.tensor([[1.0, 2.0], [-1.0, -2.0]]).repeat(500, 1).double()
    >>> shrunk_covariance(errors).round(decimals=3)
    tensor([[1., 2.],
            [2., 4.]], dtype=torch.float64)
    """
    rows = len(residuals)
    spread = residuals.square().mean(dim=0).sqrt()
    spread = spread.where(spread > 0, 1.0)
    unit = residuals / spread
    moments = unit.T @ unit / rows
    target = torch.eye(len(spread), dtype=torch.float64)
    gap = float((moments - target).square().sum())
    # The mean over rows of |u u' - moments|^2, without a matrix for each.
    noise = float(unit.square().sum(dim=1).square().mean() - moments.square().sum()) / rows
    share = 1.0 if rows < FEWEST_ROWS else max(_LEAST, min(1.0, noise / gap if gap else 1.0))
    correlation = ((1 - share) * (moments + moments.T) / 2).fill_diagonal_(1.0)
    return correlation * (spread[:, None] * spread)


@dataclass(frozen=True)
class EllipsoidScore(ScaledScore):
    """The Mahalanobis norm of the residuals of a row, each divided by its scale.

    Its covariance is learned on rows that do not calibrate.
    """

    joint: Joint = ELLIPSOID
    covariance: Tensor | None = field(default=None, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if type(self.base) is not Point:
            raise ValueError(
                "joint='ellipsoid' lies around a point prediction: use CP, FFCP or LCP, or "
                "joint=True for quantiles"
            )
        if self.side != BOTH:
            raise ValueError(
                f"side={self.side!r} needs ends, and joint='ellipsoid' has none: use joint=True"
            )
        if self.output_scales not in (None, AUTO):
            raise ValueError(
                "joint='ellipsoid' learns the covariance of errors: leave out output_scales"
            )
        object.__setattr__(self, "scale", as_scale(self.scale))
        object.__setattr__(self, "output_scales", None)

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments."""
        return {name: value for name, value in super().config().items() if name != "covariance"}

    def selection(self) -> Selection | None:
        """Return the selection that learns the covariance, and selects the scale if not given."""
        is_open = getattr(self.scale, "is_open", False)
        return Covariance(self) if is_open or self.covariance is None else None

    @property
    def interval(self) -> Callable[..., Interval]:
        """The class of the result: ellipsoids."""
        return partial(Ellipsoid, correlation=self.correlation)

    @property
    def correlation(self) -> Tensor:
        """The correlation of residuals, (m, m)."""
        assert self.covariance is not None
        spread = self.covariance.diagonal().sqrt()
        return self.covariance / spread / spread[:, None]

    def ends(self, out: BatchOutput) -> Ends:
        """Return the prediction and half the box of the threshold 1."""
        ends = super().ends(out)
        if self.covariance is None:
            return ends
        if len(self.covariance) != ends.lo.shape[1]:
            raise ValueError(
                f"the covariance has {len(self.covariance)} outputs, but the model has "
                f"{ends.lo.shape[1]}"
            )
        half = ends.scale_lo * self.covariance.diagonal().sqrt().to(ends.lo.device)
        return Ends(ends.lo, ends.hi, half, half)

    def region_of_sides(
        self, out: BatchOutput, below: Tensor, above: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the ends of the box, in float64: rounding each would distort the ellipsoid."""
        dtype = torch.float32 if out.output.device.type == "mps" else torch.float64
        return intervals.interval_ends(self.ends(out), below, above, dtype)

    def score(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Return the norms (n, 1); NaN where a target is missing."""
        return norms(self.residuals(out, y).cpu(), self.correlation)[:, None]

    def residuals(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Return the residuals (n, m), in units of half the box of the threshold 1."""
        ends = self.ends(out)
        return (as_float64(self.target(out, y)).to(ends.lo.device) - ends.lo) / ends.scale_lo

    def fitted(self, residuals: Tensor) -> EllipsoidScore:
        """Return this score with the covariance of residuals (n, m), those of complete rows."""
        complete = residuals[~residuals.isnan().any(dim=1)].cpu()
        if not len(complete) or residuals.shape[1] > MOST_OUTPUTS:
            raise ValueError(
                f"joint='ellipsoid' learns a covariance from rows with all targets, of at most "
                f"{MOST_OUTPUTS} outputs; got {len(complete)} rows of {residuals.shape[1]} outputs"
            )
        return replace(self, covariance=shrunk_covariance(complete))

    why_unsigned = "an ellipsoid has no order of targets: leave out joint="

    def curve(self, out: BatchOutput) -> dict[str, Tensor] | None:
        """Return nothing: a norm has no sign."""
        return None

    def state(self) -> dict[str, Tensor]:
        """Return the covariance."""
        return {} if self.covariance is None else {"covariance": self.covariance}

    def with_state(self, state: Mapping[str, Tensor]) -> EllipsoidScore:
        """Return this score with the covariance of a file."""
        if set(state) != {"covariance"}:
            return super().with_state(state)
        matrix = state["covariance"]
        is_matrix = matrix.dim() == 2 and matrix.dtype == torch.float64 and len(matrix) > 0
        if not is_matrix or matrix.shape[0] != matrix.shape[1] or not torch.equal(matrix, matrix.T):
            raise ValueError("its covariance is not a symmetric matrix")
        if not bool(matrix.isfinite().all()) or int(torch.linalg.cholesky_ex(matrix).info):
            raise ValueError("its covariance is not positive definite")
        return replace(self, covariance=matrix)


class Covariance(Selection):
    """Learns the covariance of residuals; first selects the scale, if it is not given."""

    what = "the covariance of errors"

    def __init__(self, score: EllipsoidScore, box: Selection | ScaledScore | None = None) -> None:
        self.score, self.box = score, score if box is None else box

    def prepared(self, model: nn.Module, x: Any) -> Selection:
        """Find the candidate scales."""
        if not getattr(self.score.scale, "is_open", False):
            return self
        selection = ScaledScore(self.score.base, self.score.scale, True).selection()
        assert selection is not None
        return Covariance(self.score, selection.prepared(model, x))

    def requires(self) -> Requires:
        """Return what any candidate requires."""
        return self.box.requires()

    def select(self, aside: Aside) -> Selected:
        """Select the scale with the shortest mean box, and learn the covariance with it."""
        selected = Selected(self.box, aside.calibration, {})
        if isinstance(self.box, Selection):
            selected = self.box.select(aside)
        plain = replace(self.score, scale=selected.score.scale)
        return selected._replace(score=plain.fitted(plain.residuals(aside.out, aside.y)))
