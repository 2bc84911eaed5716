"""Nested sets from quantiles: the position of a target among them, and the ends at a position.

A row has quantiles (..., levels), ascending. A family turns them into sets 0, 1, 2, ..., each
inside the next; between two of them sets are interpolated, and beyond the last they grow by a
tenth of its width for every step. So every number s >= 0 has a set, and the *position* of a target
is the smallest s whose set contains it: a score that does not depend on alpha.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: The levels at which quantiles are learned: evenly inside, denser towards both ends.
LEVELS = torch.cat(
    [
        torch.tensor([0.0025, 0.005, 0.01, 0.02, 0.035], dtype=torch.float64),
        torch.linspace(0.05, 0.95, 31, dtype=torch.float64),
        torch.tensor([0.965, 0.98, 0.99, 0.995, 0.9975], dtype=torch.float64),
    ]
)
MIDDLE = len(LEVELS) // 2
#: A few levels, the knots: levels between them are interpolated, those outside extrapolated.
KNOTS = torch.tensor([0.01, 0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99], dtype=torch.float64)
CENTRAL, GROWN = FAMILIES = ("central", "grown")
_STEPS = 10  # steps beyond the last set to grow by its width

# The probabilities that sets grown from the densest part hold, and the fine grid of levels on
# which their ends lie.
_HELD = (0.3, 0.5, 0.7, 0.8, 0.85, 0.88, 0.9, 0.92, 0.94, 0.96, 0.98, 0.995)
_FINE = 161
_EQUAL = 1e-6  # lengths closer than this share of the whole range are equal


class Sets(NamedTuple):
    """Nested sets: ends (..., sets), the first a single point."""

    lower: Tensor
    upper: Tensor


def central(quantiles: Tensor) -> Sets:
    """Return the sets between two quantiles as far below as above the median.

    >>> sets = central(((torch.arange(41) - 20) / 20)[None])
    >>> sets.lower[0, [0, -1]], sets.upper[0, [0, -1]]
    (tensor([ 0., -1.]), tensor([0., 1.]))
    """
    return Sets(quantiles[..., : MIDDLE + 1].flip(-1), quantiles[..., MIDDLE:])


def grown(quantiles: Tensor) -> Sets:
    """Return sets grown from the densest part: each the shortest that contains the one before.

    Shorter than central ones where noise is skewed (compare conformal histogram regression,
    Sesia and Romano, 2021).

    >>> skewed = LEVELS.square()[None]  # dense below
    >>> sets = grown(skewed)
    >>> bool(sets.upper[0, 1] < skewed[0, MIDDLE])
    True
    """
    ends = quantiles @ _TO_FINE.to(quantiles)
    firsts, lasts = [], []
    first = last = torch.zeros(ends.shape[:-1], dtype=torch.long, device=ends.device)
    starts = torch.arange(_FINE, device=ends.device)
    equal = _EQUAL * (ends[..., -1:] - ends[..., :1])
    for number, held in enumerate(_HELD):
        steps = min(round(held / _SPAN * (_FINE - 1)), _FINE - 1)
        widths = ends[..., steps:] - ends[..., : _FINE - steps]
        start = starts[: _FINE - steps]
        if number:  # no end may move inward
            outside = (start > first[..., None]) | (start + steps < last[..., None])
            widths = widths.masked_fill(outside, torch.inf)
        # The first of the shortest up to rounding errors, which depend on the batch.
        shortest = widths.amin(dim=-1, keepdim=True) + equal
        first = (widths <= shortest).int().argmax(dim=-1)
        last = first + steps
        firsts.append(first)
        lasts.append(last)
    lower, upper = (ends.gather(-1, torch.stack(places, -1)) for places in (firsts, lasts))
    middle = (lower[..., :1] + upper[..., :1]) / 2
    return Sets(torch.cat([middle, lower], -1), torch.cat([middle, upper], -1))


def _on_lines(places: Tensor, wanted: Tensor) -> Tensor:
    """Return the matrix of linear interpolation from some places to wanted ones."""
    right = torch.searchsorted(places, wanted).clamp(1, len(places) - 1)
    share = (wanted - places[right - 1]) / (places[right] - places[right - 1])
    matrix = torch.zeros(len(places), len(wanted), dtype=torch.float64)
    columns = torch.arange(len(wanted))
    matrix[right - 1, columns] = 1 - share
    matrix[right, columns] += share
    return matrix


_SPAN = float(LEVELS[-1] - LEVELS[0])
_TO_FINE = _on_lines(
    LEVELS, torch.linspace(float(LEVELS[0]), float(LEVELS[-1]), _FINE, dtype=torch.float64)
)


def to_levels(knots: Tensor) -> Tensor:
    """Return the matrix that takes quantiles at knots to all levels.

    Interpolation is linear in the quantiles of the normal distribution. Outside the knots a share
    of the distance between the outer two is added, which is known better than the last slope.
    """
    places, wanted = torch.special.ndtri(knots), torch.special.ndtri(LEVELS)
    matrix = _on_lines(places, wanted.clamp(places[0], places[-1]))
    span = places[-1] - places[0]
    for outer, other, beyond in ((0, -1, places[0] - wanted), (-1, 0, wanted - places[-1])):
        share = beyond.clamp_min(0) / span
        matrix[outer] += share
        matrix[other] -= share
    return matrix


_TO_LEVELS = to_levels(KNOTS)


def at_levels(knots: Tensor, apart: Tensor | float, to_levels: Tensor = _TO_LEVELS) -> Tensor:
    """Return quantiles (..., levels) from those at knots, in any order, ``apart`` at least.

    >>> knots = torch.special.ndtri(KNOTS)
    >>> torch.allclose(at_levels(knots.flip(-1), 0.0), torch.special.ndtri(LEVELS))
    True
    """
    steps = torch.arange(len(LEVELS), dtype=torch.float64)
    return knots.double().sort(dim=-1).values @ to_levels + apart * steps


def nested(quantiles: Tensor, family: str) -> Sets:
    """Return the nested sets of a family."""
    return central(quantiles) if family == CENTRAL else grown(quantiles)


def position(sets: Sets, y: Tensor) -> Tensor:
    """Return the positions of targets: the smallest number whose set contains them.

    >>> sets = central(((torch.arange(41) - 20) / 20)[None])
    >>> position(sets, torch.tensor([0.0])), position(sets, torch.tensor([-1.0]))
    (tensor([0.]), tensor([20.]))
    """
    lower, upper = sets
    width = _width(sets)
    below = _steps(lower[..., :1] - lower, lower[..., 0] - y, width)
    above = _steps(upper - upper[..., :1], y - upper[..., 0], width)
    return torch.maximum(below, above)


def ends_at(sets: Sets, number: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two ends of the set of a nonnegative number.

    >>> sets = central(((torch.arange(41) - 20) / 20)[None])
    >>> ends_at(sets, torch.tensor([10.0]))
    (tensor([-0.5000]), tensor([0.5000]))
    """
    number, width = number.expand(sets.lower.shape[:-1]), _width(sets)
    within = number.clamp(0, sets.lower.shape[-1] - 1)
    return _end_at(sets.lower, number, within, -width), _end_at(sets.upper, number, within, width)


def signed_position(quantiles: Tensor, y: Tensor) -> Tensor:
    """Return the signed positions of targets among quantiles: negative below the median.

    >>> quantiles = ((torch.arange(41) - 20) / 20)[None]
    >>> signed_position(quantiles, torch.tensor([-0.5]))
    tensor([-10.])
    """
    centre, (lower, upper) = quantiles[..., MIDDLE], central(quantiles)
    width = _width(Sets(lower, upper))
    above = _steps(upper - upper[..., :1], y - centre, width)
    return above - _steps(lower[..., :1] - lower, centre - y, width)


def quantile_at(quantiles: Tensor, number: Tensor) -> Tensor:
    """Return the quantile at a signed position.

    >>> quantile_at(((torch.arange(41) - 20) / 20)[None], torch.tensor([-10.0]))
    tensor([-0.5000])
    """
    lower, upper = ends_at(central(quantiles), number.abs())
    return torch.where(number < 0, lower, upper)


def _width(sets: Sets) -> Tensor:
    return sets.upper[..., -1] - sets.lower[..., -1]


def _steps(reached: Tensor, distance: Tensor, width: Tensor) -> Tensor:
    """Return after how many steps a distance is reached, given those of the sets."""
    last = reached.shape[-1] - 1
    place = (reached < distance[..., None]).sum(dim=-1)
    inner = place.clamp(1, last)
    before = reached.gather(-1, (inner - 1)[..., None])[..., 0]
    there = reached.gather(-1, inner[..., None])[..., 0]
    steps = inner - 1 + (distance - before) / (there - before)
    beyond = last + _STEPS * (distance - reached[..., -1]) / width
    steps = torch.where(place > last, beyond, steps)
    # A target that is not known has no position; on the first point it is 0.
    return torch.where(distance <= 0, torch.zeros_like(distance), steps)


def _end_at(ends: Tensor, number: Tensor, within: Tensor, growth: Tensor) -> Tensor:
    last = ends.shape[-1] - 1
    place = within.floor().long().clamp_max(last - 1)
    before = ends.gather(-1, place[..., None])[..., 0]
    there = ends.gather(-1, (place + 1)[..., None])[..., 0]
    inside = before + (within - place) * (there - before)
    more = growth * (number - last).clamp_min(0) / _STEPS
    return torch.where(number > last, ends[..., -1] + more, inside)
