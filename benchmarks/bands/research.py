"""Other families of sets on the same learned quantiles: what research code would make of them.

Conformal histogram regression (Sesia and Romano, 2021): a conditional histogram, and nested sets
of bins, the shortest that hold 1 - alpha, grown outward and shrunk inward from there. Conditional
interquantile regression (Guo, Luo and Zhou, 2026), as we read it: of all intervals between two
estimated quantiles that hold 1 - alpha the shortest, both ends moved by one calibrated distance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ffcp.conformal.rank import conformal_quantile
from ffcp.regression.learned.nested import LEVELS

IntervalPredictor = Callable[
    [Tensor], tuple[Tensor, Tensor]
]  # from quantiles (n, levels) to both ends
_BINS, _FINE, _ROWS = 200, 191, 4096
_HELD = torch.cat([torch.arange(0.1, 0.8, 0.1), torch.arange(0.8, 0.997, 0.004)]).double()


def interquantile(quantiles: Tensor, residuals: Tensor, alpha: float) -> IntervalPredictor:
    """Calibrate the shortest intervals between two quantiles."""
    fine = torch.linspace(float(LEVELS[0]), float(LEVELS[-1]), _FINE, dtype=torch.float64)
    steps = round((1 - alpha) / float(fine[1] - fine[0]))

    def shortest(q: Tensor) -> tuple[Tensor, Tensor]:
        ends = _interpolated(fine.expand(len(q), -1).contiguous(), LEVELS.expand(len(q), -1), q)
        start = (ends[:, steps:] - ends[:, :-steps]).argmin(dim=1, keepdim=True)
        return ends.gather(1, start)[:, 0], ends.gather(1, start + steps)[:, 0]

    lower, upper = shortest(quantiles)
    by = conformal_quantile(torch.maximum(lower - residuals, residuals - upper), alpha)

    def bands(q: Tensor) -> tuple[Tensor, Tensor]:
        low, high = shortest(q)
        return low - by, high + by

    return bands


def histogram(
    quantiles: Tensor, residuals: Tensor, alpha: float, teaching: Tensor
) -> IntervalPredictor:
    """Calibrate nested sets of bins, whose edges are quantiles of residuals that taught."""
    shares = torch.linspace(0, 1, _BINS + 1, dtype=torch.float64)
    edges = torch.quantile(teaching.double()[:100_000], shares).unique()

    def sets(q: Tensor) -> Iterator[tuple[slice, list[Tensor], list[Tensor]]]:
        for start in range(0, len(q), _ROWS):
            rows = slice(start, start + _ROWS)
            yield rows, *_nested(q[rows], edges, alpha)

    places = torch.cat([_place(low, high, edges, residuals[r]) for r, low, high in sets(quantiles)])
    number = conformal_quantile(places.double(), alpha)

    def bands(q: Tensor) -> tuple[Tensor, Tensor]:
        if number >= len(_HELD):  # further out than all bins
            return torch.full((len(q),), -torch.inf), torch.full((len(q),), torch.inf)
        result = [(edges[low[int(number)]], edges[high[int(number)]]) for _, low, high in sets(q)]
        low, high = zip(*result, strict=True)
        return torch.cat(low), torch.cat(high)

    return bands


def _interpolated(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Give y at these x, row by row, on lines between the points; flat outside."""
    right = torch.searchsorted(x.contiguous(), at).clamp(1, x.shape[1] - 1)
    x0, x1 = x.gather(1, right - 1), x.gather(1, right)
    y0, y1 = y.gather(1, right - 1), y.gather(1, right)
    share = ((at - x0) / (x1 - x0).clamp_min(1e-300)).clamp(0, 1)
    return y0 + share * (y1 - y0)


def _nested(q: Tensor, edges: Tensor, alpha: float) -> tuple[list[Tensor], list[Tensor]]:
    """Give the first and last edge of every set, the sets in the order of what they hold."""
    n = len(q)
    cdf = _interpolated(edges.expand(n, -1).contiguous(), q, LEVELS.expand(n, -1))
    cdf = (cdf - cdf[:, :1]) / (cdf[:, -1:] - cdf[:, :1]).clamp_min(1e-12)
    middle = int(torch.searchsorted(_HELD, 1 - alpha - 1e-9))
    first, last = torch.zeros(n, dtype=torch.long), torch.full((n,), len(edges) - 1)
    sets = {middle: _shortest(cdf, edges, float(_HELD[middle]), first, last, inside=True)}
    for number in range(middle + 1, len(_HELD)):
        sets[number] = _shortest(cdf, edges, float(_HELD[number]), *sets[number - 1], inside=False)
    for number in reversed(range(middle)):
        sets[number] = _shortest(cdf, edges, float(_HELD[number]), *sets[number + 1], inside=True)
    ordered = [sets[number] for number in range(len(_HELD))]
    return [low for low, _ in ordered], [high for _, high in ordered]


def _shortest(
    cdf: Tensor, edges: Tensor, held: float, first: Tensor, last: Tensor, inside: bool
) -> tuple[Tensor, Tensor]:
    """Find the shortest set of bins that holds so much, inside or around the one given."""
    start = torch.arange(len(edges)).expand(len(cdf), -1)
    end = torch.searchsorted(cdf.contiguous(), (cdf + held - 1e-12).contiguous())
    if not inside:
        end = torch.maximum(end, last[:, None])
    reachable = end < len(edges)
    allowed = (
        (start >= first[:, None]) & (end <= last[:, None]) if inside else (start <= first[:, None])
    )
    ends = edges[end.clamp_max(len(edges) - 1)]
    widths = (ends - edges).masked_fill(~(reachable & allowed), torch.inf)
    best = widths.argmin(dim=1, keepdim=True)
    none = widths.gather(1, best)[:, 0].isinf()  # then it stays, or becomes everything
    low = torch.where(none, first if inside else torch.zeros_like(first), best[:, 0])
    high = torch.where(
        none,
        last if inside else torch.full_like(last, len(edges) - 1),
        end.gather(1, best)[:, 0].clamp_max(len(edges) - 1),
    )
    return low, high


def _place(low: list[Tensor], high: list[Tensor], edges: Tensor, y: Tensor) -> Tensor:
    """Count the sets that do not hold a target: the number of the first that does."""
    outside = [(y < edges[a]) | (y > edges[b]) for a, b in zip(low, high, strict=True)]
    return torch.stack(outside).sum(dim=0)
