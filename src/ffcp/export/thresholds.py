"""Thresholds as a graph looks them up: from an alpha that is known, or one that is an input.

An alpha that is an input is a whole number of millionths, so that ranks are exact in whole numbers:
k = ceil((n + 1)(1 - alpha)) = n + 1 - floor((n + 1) alpha).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ffcp.conformal.bylabel import ByLabel
from ffcp.conformal.calibration import Calibration, known
from ffcp.conformal.local import PREDICTION, Local
from ffcp.conformal.marginal import Marginal
from ffcp.conformal.mondrian import Label, Mondrian
from ffcp.conformal.neighbours import NearestWeights, Neighbours
from ffcp.conformal.rank import conformal_rank, points_needed
from ffcp.pieces import Seen

MILLION = 10**6
_BLOCK = 2**22  # neighbours gone through at once


class Share(NamedTuple):
    """The share of misses that each of ``parts`` thresholds allows: alpha / parts.

    ``alpha`` is a fraction that is known, or whole millionths that are not known yet.
    """

    alpha: Fraction | Tensor
    parts: int = 1

    def ranks(self, counts: Tensor) -> Tensor:
        """Give the conformal rank among each of these numbers of scores, one more if none is.

        >>> Share(Fraction(1, 10)).ranks(torch.tensor([9, 8]))
        tensor([9, 9])
        >>> Share(torch.tensor(100_000)).ranks(torch.tensor([9, 8, 19]))
        tensor([ 9,  9, 18])
        """
        if isinstance(self.alpha, Fraction):
            share = self.alpha / self.parts
            each = [conformal_rank(count, share) for count in counts.reshape(-1).tolist()]
            return torch.tensor(each).reshape(counts.shape)
        more = counts + 1
        ranks = more - (more * self.alpha) // (MILLION * self.parts)
        # What is no share of misses asks for all scores, and more.
        return ranks.where((self.alpha > 0) & (self.alpha < MILLION), more)


# The thresholds (m,) or (n, m) of rows, from what the pass saw and the places of their groups.
Thresholds = Callable[[Seen, Tensor | None], Tensor]
# What is known of the share of misses is worked out at once, the rest in the graph.
Lookup = Callable[[Share], Thresholds]


def lookup_of(calibration: Calibration, columns: int) -> Lookup | None:
    """Give the look-up of a calibration's thresholds, or None where there is none.

    A calibration of one's own may be a kind of one of ours, and look thresholds up in another
    way: only the very classes count.
    """
    kind = type(calibration)
    if kind in (Marginal, ByLabel):
        return Table.of([calibration], columns)
    if isinstance(calibration, Mondrian) and kind is Mondrian and calibration.by is None:
        parts = list(calibration.parts().values())
        if type(calibration.inner) in (Marginal, ByLabel):
            return Table.of(parts, columns, by_group=True)
        inner = [lookup_of(part, columns) for part in parts]
        return None if None in inner else Grouped([one for one in inner if one is not None])
    if isinstance(calibration, Local) and kind is Local and _is_on_a_line(calibration):
        return OnALine(calibration)
    return None


def _is_on_a_line(local: Local) -> bool:
    plain = local.kernel.is_by_rank and local.guarantee != "random"
    return plain and local.localizer.on == PREDICTION and local.embedding.shape[1] == 1


def group_labels(calibration: Calibration) -> list[Label] | None:
    """List the groups; None where there are none."""
    return list(calibration.groups) if isinstance(calibration, Mondrian) else None


class Table:
    """Sorted scores of several kinds in one row, an infinity behind each kind.

    Kinds are the outputs or classes, and those of every group, (groups, columns). Behind the
    last group stands one without scores, for rows whose group is unknown.
    """

    def __init__(self, kinds: list[list[Tensor]], by_group: bool) -> None:
        columns = [column for group in kinds for column in group]
        beyond = torch.full((1,), math.inf, dtype=torch.float64)
        self._scores = torch.cat([part for column in columns for part in (column, beyond)])
        shape = (len(kinds), len(kinds[0]))
        self._counts = torch.tensor([len(column) for column in columns]).view(shape)
        ends = (self._counts.reshape(-1) + 1).cumsum(0).view(shape)
        self._starts = ends - self._counts - 1
        self._by_group = by_group

    @classmethod
    def of(cls, parts: list[Calibration], columns: int, by_group: bool = False) -> Table:
        """Take the scores of calibrations, one of them for every group."""
        kinds = [_columns(part, columns) for part in parts]
        return cls([*kinds, [kinds[0][0][:0]] * len(kinds[0])] if by_group else kinds, by_group)

    def __call__(self, share: Share) -> Thresholds:
        """Look up the thresholds: (columns,), or (n, columns) by groups."""
        table = self._scores[self._starts + share.ranks(self._counts) - 1]

        def thresholds(seen: Seen, group: Tensor | None) -> Tensor:
            if not self._by_group:
                return table[0]
            assert group is not None
            unknown = len(self._counts) - 1
            return table[torch.where((group >= 0) & (group < unknown), group, unknown)]

        return thresholds


def _columns(calibration: Calibration, columns: int) -> list[Tensor]:
    """Give the sorted known scores of every output or class."""
    if isinstance(calibration, ByLabel):
        counts = torch.bincount(calibration.label, minlength=columns).tolist()
        return list(calibration.scores[:, 0].split(counts))
    counts = known(calibration.scores).tolist()
    return [column[:n] for column, n in zip(calibration.scores.unbind(1), counts, strict=True)]


class Grouped:
    """Localized thresholds of their own for every group."""

    def __init__(self, inner: list[Lookup]) -> None:
        self._inner = inner

    def __call__(self, share: Share) -> Thresholds:
        """Look up every group's, and take that of the row's group."""
        inner = [lookup(share) for lookup in self._inner]

        def thresholds(seen: Seen, group: Tensor | None) -> Tensor:
            assert group is not None
            result = torch.full_like(inner[0](seen, None), math.inf)
            for number, own in enumerate(inner):
                result = torch.where((group == number)[:, None], own(seen, None), result)
            return result

        return thresholds


class OnALine:
    """Thresholds from the nearest calibration points, where points lie on a line.

    The nearest stand side by side, so there is one threshold for every place where they may
    begin. Where the prediction is that of another machine, it may differ in its last digits, and
    another point be the nearest: the largest threshold within this distance is taken.
    """

    def __init__(self, local: Local) -> None:
        self._local = local
        weights = local._weights(local.bandwidth or 0)
        assert isinstance(weights, NearestWeights)
        self._weights, self._neighbours = weights, weights.neighbours
        self._line, self._rows = local.embedding[:, 0].sort(stable=True)
        self._ends = [local._sorted_scores(output) for output in range(local.coordinates)]
        near = float(self._line.abs().max()) * torch.finfo(torch.float32).eps
        self._moves = torch.tensor([-64 * near, 0.0, 64 * near])
        self._levels = [
            local._level(weights, output) if local.guarantee == "level" else None
            for output in range(local.coordinates)
        ]

    def __call__(self, share: Share) -> Thresholds:
        """Find where the neighbours begin, and take the threshold from there."""
        table: Tensor | None = None
        if isinstance(share.alpha, Fraction):
            table = self._table(share.alpha / share.parts)

        def thresholds(seen: Seen, group: Tensor | None) -> Tensor:
            first = self._first(seen.output.reshape(-1, 1).to(torch.float32) + self._moves)
            found = self._sorted(share, first) if table is None else table[first]
            return found.amax(dim=1)

        return thresholds

    def _first(self, at: Tensor) -> Tensor:
        """Search for the first neighbour of every point, by as many halvings as any may need."""
        low = torch.zeros_like(at, dtype=torch.int64)
        high = torch.full_like(low, len(self._line) - self._neighbours)
        for _ in range((len(self._line) - self._neighbours).bit_length()):
            middle = (low + high) // 2
            behind = self._line[(middle + self._neighbours).clamp_max(len(self._line) - 1)]
            on = (at - self._line[middle] > behind - at) & (low < high)
            low, high = torch.where(on, middle + 1, low), torch.where(on, high, middle)
        return low

    def _table(self, alpha: Fraction) -> Tensor:
        """Work out the thresholds (places, outputs) of every place to begin."""
        places = len(self._line) - self._neighbours + 1
        table = torch.empty(places, len(self._ends), dtype=torch.float64)
        for start in torch.arange(places).split(max(1, _BLOCK // self._neighbours)):
            rows = self._rows[start[:, None] + torch.arange(self._neighbours)]
            near = Neighbours(rows, self._weights._ranks)
            for output, ends in enumerate(self._ends):
                sums = near.sums(output)
                total = sums.total + self._weights.own
                target = self._local._target(total, alpha, self._weights, output)
                table[start, output] = ends[sums.reach(target)]
        return table

    def _sorted(self, share: Share, first: Tensor) -> Tensor:
        """Put the neighbours' scores in order, and take the one that the share asks for."""
        rows = self._rows[first[..., None] + torch.arange(self._neighbours)]
        columns = []
        for output, ends in enumerate(self._ends):
            scores = ends[self._weights._ranks[output][rows]].sort(dim=-1).values
            scores = torch.nn.functional.pad(scores, (0, 1), value=math.inf)
            place = (self._target(share, output) - 1).clamp(0, self._neighbours)
            columns.append(scores[..., place])
        return torch.cat(columns, dim=-1)

    def _target(self, share: Share, output: int) -> Tensor:
        """Say the how manieth neighbour is asked for; one more than there are for none."""
        total = torch.tensor([self._neighbours + self._weights.own])
        level = self._levels[output]
        if level is None:
            return share.ranks(total - 1)
        rank = share.ranks(torch.tensor([len(level.numerators)]))
        # Behind the last level there is none, and more neighbours than all are asked for.
        tops = torch.cat([level.numerators, torch.ones(1, dtype=torch.int64)])
        bottoms = torch.cat([level.denominators, torch.ones(1, dtype=torch.int64)])
        return total * tops[rank - 1] // bottoms[rank - 1] + 1


def is_infinite(calibration: Calibration, alpha: Any, columns: int) -> bool:
    """Say whether some output, class or group has too few points for a finite threshold."""
    parts = calibration.parts().values() if isinstance(calibration, Mondrian) else [calibration]
    kinds = [column for part in parts if not part.is_local for column in _columns(part, columns)]
    return any(len(column) < points_needed(alpha) for column in kinds)
