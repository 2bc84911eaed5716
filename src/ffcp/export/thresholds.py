"""Thresholds as a graph looks them up: from sorted scores, or from neighbours on a line."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ffcp.conformal.bylabel import ByLabel
from ffcp.conformal.calibration import Calibration, known
from ffcp.conformal.embedding import PREDICTION
from ffcp.conformal.local import Local
from ffcp.conformal.marginal import Marginal
from ffcp.conformal.mondrian import Label, Mondrian
from ffcp.conformal.rank import conformal_rank
from ffcp.export.line import OnALine
from ffcp.export.share import Lookup, Share, Thresholds
from ffcp.pieces import Seen

PLAIN = (Marginal, ByLabel)  # whose thresholds are ranks among sorted scores


def lookup_of(calibration: Calibration, columns: int) -> Lookup | None:
    """Give the look-up of a calibration's thresholds, or None where there is none.

    A calibration of one's own may be a kind of one of ours, and look thresholds up in another
    way: only the very classes count.
    """
    kind = type(calibration)
    if kind in PLAIN:
        return Table.of([calibration], columns)
    if isinstance(calibration, Mondrian) and kind is Mondrian and calibration.by is None:
        parts = list(calibration.parts().values())
        if type(calibration.inner) in PLAIN:
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


def is_infinite(calibration: Calibration, alpha: Any, columns: int) -> bool:
    """Say whether some output, class or group has too few finite scores for a finite threshold."""
    parts = calibration.parts().values() if isinstance(calibration, Mondrian) else [calibration]
    kinds = [column for part in parts if not part.is_local for column in _columns(part, columns)]
    return any(conformal_rank(len(one), alpha) > int(one.isfinite().sum()) for one in kinds)
