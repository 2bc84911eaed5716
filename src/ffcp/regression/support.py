"""The known range of the target: intervals are clipped to it, targets outside are an error."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Support(NamedTuple):
    """The smallest and the largest value that a target can take.

    >>> Support(0.0, 10.0)
    from 0 to 10
    """

    low: float
    high: float

    def __repr__(self) -> str:
        words = [f"from {self.low:g}"] if math.isfinite(self.low) else []
        words += [f"to {self.high:g}"] if math.isfinite(self.high) else []
        return " ".join(words)

    def config(self) -> list[float | None]:
        """Return the argument: ``None`` where there is no end."""
        return [end if math.isfinite(end) else None for end in self]

    def check(self, y: Tensor, first_row: int) -> None:
        """Refuse targets outside, naming the first row that has one; NaN is not known."""
        bad = ((y < self.low) | (y > self.high)).reshape(len(y), -1)
        if bool(bad.any()):
            row = int(bad.any(dim=1).nonzero()[0, 0])
            value = y[row].reshape(-1)[bad[row]][0].item()
            raise ValueError(
                f"y holds {value:g} in row {first_row + row} (rows count from 0), and 'support' "
                f"says that targets lie {self!r}: repair these rows, or make the predictor with "
                "another support"
            )

    def cut(self, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """Return intervals clipped to the support; one outside it becomes its nearest end.

        >>> ends = Support(0.0, math.inf).cut(torch.tensor([-1.0, -3.0]), torch.tensor([1.0, -2.0]))
        >>> [end.tolist() for end in ends]
        [[0.0, 0.0], [1.0, 0.0]]
        """
        low, high = _outward(self.low, -1, lower.dtype), _outward(self.high, 1, lower.dtype)
        return lower.clamp(low, high), upper.clamp(low, high)


def checked_support(support: Any) -> Support | None:
    """Return a support from its two ends, of which one may be ``None``.

    >>> checked_support((0, None)).config()
    [0.0, None]
    """
    if support is None:
        return None
    try:
        low, high = support
        ends = Support(
            -math.inf if low is None else float(low), math.inf if high is None else float(high)
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"support is a pair, the smallest and the largest target or None: got {support!r}"
        ) from error
    if not ends.low < ends.high:
        raise ValueError(f"'support' must go from a smaller to a larger number, got {support!r}")
    return ends if any(map(math.isfinite, ends)) else None


def _outward(end: float, direction: int, dtype: torch.dtype) -> float:
    """Round an end outward to a number of this type, so that a target on it is covered."""
    rounded = torch.tensor(end, dtype=torch.float64).to(dtype).item()
    if not math.isfinite(end) or direction * (rounded - end) >= 0:
        return float(rounded)
    moved = end + direction * abs(end) * torch.finfo(dtype).eps
    return float(torch.tensor(moved, dtype=torch.float64).to(dtype).item())
