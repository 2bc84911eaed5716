"""Base interval and scale give score and prediction interval, for all regression methods.

    score(x, y)   = max( (lo - y) / s_lo , (y - hi) / s_hi )
    interval(x,q) = [ lo - q * s_lo , hi + q * s_hi ]

CP has lo = hi = f(x) and scale 1; FFCP has the gradient norm as scale; the quantile methods
have two quantiles as lo and hi. Arithmetic is in float64 whatever the model's type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ffcp import plots
from ffcp.batch import BatchOutput
from ffcp.description import Described
from ffcp.extras import needed
from ffcp.network import arrays
from ffcp.notebooks import ShownAsText, number
from ffcp.regression.support import checked_support

_SHOWN = 3  # rows that are printed
_INFINITE = (
    "null is an infinite end: the interval is one-sided, or there are too few calibration rows "
    "for this alpha"
)


class _Interval(NamedTuple):
    lower: Tensor
    upper: Tensor
    prediction: Tensor


class Interval(ShownAsText, _Interval):
    """A prediction interval for each row: ``lower, upper, prediction``.

    They have the shape of the calibration targets: (n,), (n, 1) or (n, m). For several levels the
    two ends have one more dimension, the first, with an entry for each of ``alpha``.

    Parameters
    ----------
    lower, upper : Tensor
        The ends of the intervals.
    prediction : Tensor
        The model's point prediction.
    alpha : float or tuple of float, default=None
        The miscoverage level, or the levels of the first dimension.

    Examples
    --------
    >>> interval = Interval(torch.zeros(2), torch.ones(2), torch.full((2,), 0.5))
    >>> interval.width
    tensor([1., 1.])
    >>> lower, upper, prediction = interval
    """

    #: The miscoverage level, or the levels of the first dimension.
    alpha: float | tuple[float, ...] | None = None
    #: Whether a row lies inside if each of its outputs does.
    is_box = True

    def __new__(
        cls,
        lower: Tensor,
        upper: Tensor,
        prediction: Tensor,
        alpha: float | tuple[float, ...] | None = None,
    ) -> Interval:
        """Build the tuple, and keep the level."""
        self = super().__new__(cls, lower, upper, prediction)
        self.alpha = alpha
        return self

    @property
    def width(self) -> Tensor:
        """The widths: upper - lower."""
        return self.upper - self.lower

    @property
    def _has_levels(self) -> bool:
        return self.lower.dim() > self.prediction.dim()

    def __repr__(self) -> str:
        """Describe the intervals, and show the first of them.

        >>> Interval(torch.zeros(2), torch.ones(2), torch.full((2,), 0.5), 0.1)
        Interval: 2 rows, coverage 90 % (alpha=0.1), mean width 1
        row       lower  prediction       upper
        0             0         0.5           1
        1             0         0.5           1
        """
        count = len(self.prediction)
        rows = f"Interval: {count:,} row{'s' if count != 1 else ''}"
        if self._has_levels:
            levels = self.alpha if isinstance(self.alpha, tuple) else [None] * len(self.lower)
            each = zip(levels, self.lower, self.upper, strict=True)
            return "\n  ".join([rows, *(_level(*one) for one in each)])
        lines = [f"{rows}, {_level(self.alpha, self.lower, self.upper)}"]
        if self.prediction[:1].numel() == 1:
            lines.append(f"{'row':<4}{'lower':>11}{'prediction':>12}{'upper':>12}")
            for row in range(min(_SHOWN, len(self.prediction))):
                lower, upper, point = (float(part[row]) for part in self)
                cells = f"{number(lower):>11}{number(point):>12}{number(upper):>12}"
                lines.append(f"{row:<4}{cells}")
            lines += ["..."] if len(self.prediction) > _SHOWN else []
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers for JSON, with ``None`` for an infinite end.

        ``reason`` explains why some ends are ``None``.

        >>> Interval(torch.tensor([0.0]), torch.tensor([torch.inf]), torch.tensor([1.0])).to_dict()
        {'lower': [0.0], 'upper': [None], 'prediction': [1.0], 'alpha': None,
         'reason': 'null is an infinite end: the interval is one-sided, or there are too few
         calibration rows for this alpha'}
        """
        parts = {name: _plain(getattr(self, name).tolist()) for name in self._fields}
        alpha = list(self.alpha) if isinstance(self.alpha, tuple) else self.alpha
        is_finite = bool(self.width.isfinite().all())
        return {**parts, "alpha": alpha, "reason": None if is_finite else _INFINITE}

    def contains(self, y: Any) -> Tensor:
        """Return which targets lie in their interval, in the shape of the ends; NaN lies in none.

        Parameters
        ----------
        y : array-like
            Targets, in the shape of the ends.

        Examples
        --------
        >>> interval = Interval(torch.zeros(2), torch.ones(2), torch.full((2,), 0.5))
        >>> interval.contains([0.5, 3.0])
        tensor([ True, False])
        """
        target = arrays.target_like(arrays.target_tensor(y).to(self.lower.device), self.prediction)
        if self.lower.shape[int(self._has_levels) :] != target.shape:
            raise ValueError(
                f"target has shape {tuple(target.shape)}, the ends of the interval "
                f"{tuple(self.lower.shape)}: they must be equal, but for a first dimension of "
                "levels"
            )
        return (self.lower <= target) & (target <= self.upper)

    def clip(self, low: float | None = None, high: float | None = None) -> Interval:
        """Return the intervals clipped to a range; one outside it becomes its nearest end.

        If the range is known before calibrating, give ``support=`` to the predictor instead.

        Parameters
        ----------
        low, high : float, default=None
            Ends of the range; ``None`` where there is none.

        Examples
        --------
        >>> interval = Interval(torch.tensor([-1.0]), torch.tensor([1.0]), torch.tensor([0.0]))
        >>> interval.clip(0).lower
        tensor([0.])
        """
        ends = checked_support((low, high))
        lower, upper = (
            (self.lower, self.upper) if ends is None else ends.cut(self.lower, self.upper)
        )
        return Interval(lower, upper, self.prediction, self.alpha)

    def to_frame(self, index: Any = None, names: Sequence[str] | None = None) -> Any:
        """Return a pandas frame with a row for each row.

        Columns are ``prediction``, ``lower`` and ``upper``; for several levels ``lower 0.1`` and so
        on. Several outputs add an outer level of columns, by number or by ``names``.

        Parameters
        ----------
        index : array-like, default=None
            Index of the frame.
        names : sequence of str, default=None
            Names of the outputs.
        """
        pandas = needed("pandas", "frames", "to_frame()")
        rows = len(self.prediction)
        levels = self.alpha if isinstance(self.alpha, tuple) else (None,)
        if self._has_levels and len(levels) != len(self.lower):
            levels = tuple(range(len(self.lower)))
        parts = {"prediction": self.prediction}
        for place, level in enumerate(levels):
            ends = (self.lower[place], self.upper[place]) if self._has_levels else self[:2]
            word = "" if level is None or not self._has_levels else f" {level:g}"
            parts.update({f"lower{word}": ends[0], f"upper{word}": ends[1]})
        columns = {n: t.detach().cpu().reshape(rows, -1).numpy() for n, t in parts.items()}
        outputs = columns["prediction"].shape[1]
        if names is not None and len(names) != outputs:
            raise ValueError(f"'names' has {len(names)} entries, expected {outputs}, the outputs")
        if outputs == 1 and names is None:
            return pandas.DataFrame({n: c[:, 0] for n, c in columns.items()}, index=index)
        labels = range(outputs) if names is None else names
        return pandas.DataFrame(
            {(label, n): c[:, j] for j, label in enumerate(labels) for n, c in columns.items()},
            index=index,
        ).rename_axis(columns=["output", "part"])

    def plot(self, x: Any = None, y: Any = None, **options: Any) -> Any:
        """Draw intervals against a feature, or the prediction; see :func:`ffcp.plots.intervals`.

        Parameters
        ----------
        x : array-like, default=None
            One number per row; the prediction by default.
        y : array-like, default=None
            Targets, drawn as dots.
        **options : dict
            Further arguments of :func:`ffcp.plots.intervals`.
        """
        return plots.intervals(self, x, y, **options)


def _level(alpha: Any, lower: Tensor, upper: Tensor) -> str:
    """Describe the intervals of one level: nominal coverage, mean width, how many are infinite.

    >>> _level(0.1, torch.zeros(3), torch.tensor([1.0, 2.0, torch.inf]))
    'coverage 90 % (alpha=0.1), mean width 1.5, 1 infinite'
    """
    width = upper - lower
    finite = width[width.isfinite()].double()
    coverage = [] if alpha is None else [f"coverage {100 * (1 - alpha):g} % (alpha={alpha:g})"]
    mean = [f"mean width {number(float(finite.mean()))}"] if len(finite) else []
    infinite = width.numel() - len(finite)
    for name, end in (("lower", lower), ("upper", upper)):
        if infinite and not len(finite) and bool(end.isfinite().all()):
            return ", ".join([*coverage, f"{name} ends only"])
    return ", ".join([*coverage, *mean, *([f"{infinite:,} infinite"] if infinite else [])])


def _plain(value: Any) -> Any:
    """Replace infinity and NaN in nested lists by ``None``, for JSON."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value if math.isfinite(value) else None


class Ends(NamedTuple):
    """The base intervals of a batch and a scale on each side, (n, m) each.

    Your own base returns it; the interval of a threshold t is [lo - t scale_lo, hi + t scale_hi].

    Parameters
    ----------
    lo, hi : Tensor
        The ends of the base interval; the same tensor if the base is a point.
    scale_lo, scale_hi : Tensor
        How much each end moves with the threshold.

    Examples
    --------
    >>> centre, scale = torch.zeros(3, 1), torch.ones(3, 1)
    >>> Ends(centre, centre, scale, scale).is_symmetric
    True
    >>> Ends(centre - 1, centre + 1, scale, scale).is_symmetric
    False
    """

    lo: Tensor
    hi: Tensor
    scale_lo: Tensor
    scale_hi: Tensor

    @property
    def is_symmetric(self) -> bool:
        """Whether both sides share one centre and one scale, which halves the arithmetic."""
        return self.lo is self.hi and self.scale_lo is self.scale_hi


def score(ends: Ends, y: Tensor) -> Tensor:
    """Return how far ``y`` lies outside the base interval, in scales (negative inside).

    >>> one, two = torch.tensor([1.0]), torch.tensor([2.0])
    >>> ends = Ends(one, one, two, two)
    >>> score(ends, torch.tensor([5.0]))
    tensor([2.], dtype=torch.float64)
    """
    y = as_float64(y).to(ends.lo.device)
    if ends.is_symmetric:
        return (y - ends.lo).abs_().div_(ends.scale_lo)
    return torch.maximum((ends.lo - y).div_(ends.scale_lo), (y - ends.hi).div_(ends.scale_hi))


def sides(ends: Ends, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far ``y`` lies below the lower and above the upper end, in their scales.

    >>> one, two = torch.tensor([1.0]), torch.tensor([2.0])
    >>> [side.item() for side in sides(Ends(one, one, two, two), torch.tensor([5.0]))]
    [-2.0, 2.0]
    """
    y = as_float64(y).to(ends.lo.device)
    above = (y - ends.hi) / ends.scale_hi
    return -above if ends.is_symmetric else (ends.lo - y) / ends.scale_lo, above


def interval_ends(
    ends: Ends, below: Tensor, above: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the ends of intervals that exceed the base by thresholds on each side.

    Thresholds may have a further dimension, of levels, before those of the ends.

    The ends are rounded outward. A target whose score equals the threshold, on which the guarantee
    relies when scores tie, must not be lost by rounding: scores and ends are rounded in float64,
    and the ends once more to ``dtype``.

    >>> one, two = torch.tensor([1.0]), torch.tensor([2.0])
    >>> ends = Ends(one, one, two, two)
    >>> interval_ends(ends, torch.tensor(2.0), torch.tensor(torch.inf), torch.float32)
    (tensor([-3.0000]), tensor([inf]))
    """
    device, is_shared = ends.lo.device, ends.is_symmetric and below is above
    below = below.to(device, torch.float64)
    above = below if is_shared else above.to(device, torch.float64)
    is_inward = below.min().item() < 0 or (not is_shared and above.min().item() < 0)
    down = _lengthened(ends.lo, below * ends.scale_lo, is_inward, dtype)
    up = down if is_shared else _lengthened(ends.hi, above * ends.scale_hi, is_inward, dtype)
    lower, upper = ends.lo - down, ends.hi + up
    if is_inward:
        # Quantile intervals can shrink; an end may then exceed the largest number of a short
        # type, and the cast turn it into infinity on the wrong side.
        largest = torch.finfo(dtype).max
        lower, upper = lower.clamp_max(largest), upper.clamp_min(-largest)
        # An empty interval is returned as a point.
        is_empty, middle = lower > upper, (lower + upper) / 2
        lower, upper = lower.where(~is_empty, middle), upper.where(~is_empty, middle)
    return lower.to(dtype), upper.to(dtype)


def outward(start: Tensor, step: Tensor, sign: int, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``start + step``, rounded outward: down for sign -1, up for 1.

    ``scale`` is the size of the numbers that the step was computed from.

    >>> zero, third = torch.zeros(1, dtype=torch.float64), torch.full((1,), 1 / 3).double()
    >>> bool(outward(zero, third, 1, third, torch.float16) >= third)
    True
    """
    limits, exact = torch.finfo(dtype), 16 * torch.finfo(torch.float64).eps
    unit = max(0.51 * limits.eps, exact)
    guard = unit * (start.abs() + step.abs()) + exact * scale + limits.tiny
    return (start + step + sign * guard).to(dtype)


def _lengthened(start: Tensor, step: Tensor, is_inward: bool, dtype: torch.dtype) -> Tensor:
    """Return a step from ``start``, lengthened by a bound on its rounding error."""
    limits = torch.finfo(dtype)
    unit = max(0.51 * limits.eps, 4 * torch.finfo(torch.float64).eps)
    size = start.abs() + (step.abs() if is_inward else step)
    return torch.add(step, size, alpha=unit).add_(limits.tiny)


def as_float64(values: Tensor) -> Tensor:
    """Convert to float64, on the CPU for devices without this type."""
    return (values.cpu() if values.device.type == "mps" else values).double()


# -- bases: which outputs of the model are the ends of the base interval ------------------------


class Base(Protocol):
    """The interface of a base."""

    def __call__(self, out: BatchOutput, scale: Tensor) -> Ends:
        """Return the two ends of the base interval and the scale of each, (n, m) each.

        ``scale`` has the shape of the model's output, or is one number for all.
        """

    def prediction(self, output: Tensor) -> Tensor:
        """Return the point prediction, in the shape of the target."""


class Point(Described):
    """The model's output is a point prediction: both ends are the prediction.

    The constructor takes no arguments.

    Attributes
    ----------
    lowest : float
        No score is below this: 0, as scores are distances from the prediction.

    Examples
    --------
    >>> import torch
    >>> Point().prediction(torch.zeros(3, 1)).shape
    torch.Size([3, 1])
    """

    lowest = 0.0

    def __call__(self, out: BatchOutput, scale: Tensor) -> Ends:
        """Return the prediction as both ends."""
        centre, scale = columns(as_float64(out.output)), columns(as_float64(scale))
        return Ends(centre, centre, scale, scale)

    def prediction(self, output: Tensor) -> Tensor:
        """Return the output itself."""
        return output


@dataclass(frozen=True)
class Quantiles(Described):
    """The model's last dimension holds quantiles: which are the lower and the upper end.

    Quantiles that cross are put in order, each with its own scale: a fixed function of the
    input, so coverage is not affected.

    Parameters
    ----------
    lower : int, default=0
        Place of the lower end in the last dimension.
    upper : int, default=1
        Place of the upper end in the last dimension.
    median : int, default=None
        The place of the quantile that is the prediction; without it the prediction is the
        middle of the two ends.
    of : int, default=None
        How many quantiles the last dimension holds; by default the largest place, plus one.

    Examples
    --------
    >>> import torch
    >>> out = BatchOutput(None, torch.tensor([[2.0, 1.0]]), {}, {}, range(1))
    >>> ends = Quantiles()(out, torch.tensor([[0.1, 0.2]]))
    >>> ends.lo, ends.scale_lo.float()
    (tensor([[1.]], dtype=torch.float64), tensor([[0.2000]]))
    >>> Quantiles(0, 2, median=1).prediction(torch.tensor([[1.0, 2.0, 9.0]]))
    tensor([2.])
    """

    lower: int = 0
    upper: int = 1
    median: int | None = None
    of: int | None = None

    def __post_init__(self) -> None:
        places = [p for p in (self.lower, self.upper, self.median) if p is not None]
        if any(isinstance(p, bool) or not isinstance(p, int) or p < 0 for p in places):
            raise ValueError(f"places of quantiles count from 0, got {places}")
        if len(set(places)) < len(places):
            raise ValueError(f"lower, upper and median must be different places, got {places}")
        if self.of is None:
            object.__setattr__(self, "of", max(places) + 1)
        elif self.of <= max(places):
            raise ValueError(
                f"of={self.of} quantiles have no place {max(places)}: places count from 0"
            )

    def __call__(self, out: BatchOutput, scale: Tensor) -> Ends:
        """Return the two quantiles in order, each with its scale."""
        self._check(out.output)
        below, above = (as_float64(out.output.select(-1, p)) for p in (self.lower, self.upper))
        lo, hi = torch.minimum(below, above), torch.maximum(below, above)
        scale = as_float64(scale)
        if not scale.dim():  # the same for both
            return Ends(columns(lo), columns(hi), scale, scale)
        scale = scale.expand_as(out.output)
        under, over = scale[..., self.lower], scale[..., self.upper]
        crossed = below > above
        sides = (lo, hi, torch.where(crossed, over, under), torch.where(crossed, under, over))
        return Ends(*(columns(side) for side in sides))

    def prediction(self, output: Tensor) -> Tensor:
        """Return the median, or the middle of the two ends."""
        self._check(output)
        if self.median is not None:
            return output.select(-1, self.median)
        below, above = output.select(-1, self.lower), output.select(-1, self.upper)
        wide = torch.promote_types(output.dtype, torch.float32)  # in which sums do not overflow
        return (below.to(wide) + above.to(wide)).mul_(0.5).to(output.dtype)

    def _check(self, output: Tensor) -> None:
        if output.dim() < 2 or output.shape[-1] != self.of:
            words = "two outputs per target, the lower and the upper quantile,"
            if self.median is not None or self.of != 2:
                words = f"{self.of} quantiles per target"
            raise ValueError(
                f"the model's output has shape {tuple(output.shape)}; a quantile method needs "
                f"{words} in the last dimension: (n, {self.of}), or (n, m, {self.of}) for m "
                f"targets. {_other_places(output)}"
            )


def _other_places(output: Tensor) -> str:
    """Return the constructor call for an output with another number of quantiles."""
    places = output.shape[-1] if output.dim() > 1 else 1
    if places < 3:
        return "For a point prediction use CP or FFCP"
    base = f"Quantiles(lower=0, upper={places - 1}, median={places // 2})"
    return f"For {places} quantiles use ffcp.IntervalPredictor(model, base=ffcp.scores.{base})"


def columns(values: Tensor) -> Tensor:
    """Return values as (rows, outputs); a single number as it is."""
    dimensions = values.dim()
    if dimensions == 1:
        return values.unsqueeze(1)
    return values if dimensions in (0, 2) else values.reshape(values.shape[0], -1)
