"""Bases: which outputs of the model are the ends of the band that the scale widens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ffcp.batch import BatchOutput
from ffcp.description import Described
from ffcp.regression.intervals import Ends, as_float64


class Base(Protocol):
    """What a base of one's own must have."""

    def __call__(self, out: BatchOutput, scale: Tensor) -> Ends:
        """Give the two ends of the base band and the scale of each, (n, m) each.

        ``scale`` has the shape of the model's output, or is one number for all.
        """

    def prediction(self, output: Tensor) -> Tensor:
        """Give the point prediction, in the shape of the target."""


class Point(Described):
    """The model's output is a point prediction: both ends are it, and one scale serves both.

    It is made with nothing, and called with what a pass saw and with the scale.

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
        """Give the prediction as both ends."""
        centre, scale = columns(as_float64(out.output)), columns(as_float64(scale))
        return Ends(centre, centre, scale, scale)

    def prediction(self, output: Tensor) -> Tensor:
        """Give the output itself."""
        return output


@dataclass(frozen=True)
class Quantiles(Described):
    """The model's last dimension holds quantiles: which are the lower and the upper end.

    Quantiles that cross are put in order, each with its own scale: a fixed function of the
    input, so it costs no coverage.

    Parameters
    ----------
    lower, upper
        The places of the two ends in the last dimension.
    median
        The place of the quantile that is the prediction; without it the prediction is the
        middle of the two ends.
    of
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
        """Give the two quantiles in order, each with its scale."""
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
        """Give the median, or the middle of the two ends."""
        self._check(output)
        if self.median is not None:
            return output.select(-1, self.median)
        below, above = output.select(-1, self.lower), output.select(-1, self.upper)
        wide = torch.promote_types(output.dtype, torch.float32)  # where short ones can be added
        return (below.to(wide) + above.to(wide)).mul_(0.5).to(output.dtype)

    def _check(self, output: Tensor) -> None:
        if output.dim() < 2 or output.shape[-1] != self.of:
            words = "two outputs per target, the lower and the upper quantile,"
            if self.median is not None or self.of != 2:
                words = f"{self.of} quantiles per target"
            raise ValueError(
                f"the model's output has shape {tuple(output.shape)}; a quantile method needs "
                f"{words} in the last dimension: (n, {self.of}), or (n, m, {self.of}) for m "
                "targets. For a point prediction use CP or FFCP"
            )


def columns(values: Tensor) -> Tensor:
    """Lay out values as (rows, outputs); a single number stays one."""
    dimensions = values.dim()
    if dimensions == 1:
        return values.unsqueeze(1)
    return values if dimensions in (0, 2) else values.reshape(values.shape[0], -1)
