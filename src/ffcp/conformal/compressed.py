"""Calibrations that keep a summary of the scores in place of all of them.

Of every group and output some ten thousand scores stand for all, and thresholds are rounded up: the
threshold of rank k is at least the k-th smallest score, so whatever is promised of that holds, and
at most the (k + E)-th, with E known. :mod:`ffcp.conformal.summaries` says how, and proves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Columns
from ffcp.conformal.marginal import Marginal
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import conformal_rank, exact_alpha, pac_rank, rows_needed
from ffcp.conformal.summaries import (
    Numbers,
    Piece,
    Rounded,
    exactly,
    gathered,
    restored,
    room,
    settled,
)
from ffcp.locks import lock

_PACKING = lock()
ERROR = "rank_error"  # among the settings of a summary


class _Held(NamedTuple):
    """The pieces of every output, and its smallest score."""

    pieces: list[list[Piece]]
    lowest: Numbers


class Compressed(Calibration):
    """One threshold for all points, as Marginal has, from a summary of the scores.

    Parameters
    ----------
    rank_error
        The rank error that is aimed at, a share of the points. The one that was reached is
        :attr:`rank_error`.

    Examples
    --------
    >>> everything, scores = Marginal(), Compressed(rank_error=0.01)
    >>> everything.add(torch.arange(100_000.0)[:, None])
    >>> scores.summarise(everything)
    >>> len(scores), len(scores.scores), scores.rank_error
    (100000, 100, 0.01)
    >>> everything.threshold(0.1), scores.threshold(0.1)
    (tensor([90000.], dtype=torch.float64), tensor([90089.], dtype=torch.float64))
    """

    pieces: Tensor
    lowest: Tensor
    takes_missing = True
    draws = False
    is_summary = True

    def __init__(self, rank_error: Any) -> None:
        super().__init__()
        self.wanted = exact_alpha(rank_error, ERROR)
        # Behind each other, output by output: the numbers of all pieces, NaN where others have
        # more; and of every piece its weight, its count and its error.
        self.register_buffer("pieces", torch.empty(0, 0, 3, dtype=torch.int64))
        self.register_buffer("lowest", torch.empty(0, 0, dtype=torch.float64))

    @property
    def rank_error(self) -> float:  # type: ignore[override]
        """By how many ranks, as a share of the points, thresholds may be too large: proven."""
        return max((float(Fraction(c.error, max(1, c.count))) for c in self.columns()), default=0.0)

    def columns(self) -> list[Rounded]:
        """Give the summary of every output."""
        if "columns" not in self._cache:
            held = self.held()
            both = zip(held.pieces, held.lowest.tolist(), strict=True)
            self._cache["columns"] = [Rounded(pieces, lowest) for pieces, lowest in both]
        columns: list[Rounded] = self._cache["columns"]
        return columns

    # -- pieces, and buffers made of them when somebody looks at these --------------------------

    def held(self) -> _Held:
        """Return the pieces of every output, and its smallest score."""
        if "held" not in self._cache:
            points = super().points()
            lowest = points["lowest"].numpy()
            self._cache["held"] = _Held(_unpacked(points), lowest[0] if len(lowest) else lowest[:0])
        held: _Held = self._cache["held"]
        return held

    def _hold(self, pieces: Sequence[Sequence[Piece]], lowest: Numbers) -> None:
        """Keep exactly these pieces of every output, and the smallest score of each."""
        self._cache = {"held": _Held([list(column) for column in pieces], lowest)}
        self._is_loose = True

    _is_loose = False  # what is held is not in the buffers yet

    def _pack(self) -> None:
        if self.__dict__.get("_is_loose", False):
            with _PACKING:
                if self._is_loose:
                    self._buffers.update(_packed(self.held()))
                    self._is_loose = False  # last: who sees it sees all

    def __getattr__(self, name: str) -> Any:
        """Give buffers as they are now, whoever asks."""
        if name in ("scores", "pieces", "lowest"):
            self._pack()
        return super().__getattr__(name)

    def _points(self, name: str) -> Tensor:
        self._pack()
        return super()._points(name)

    def points(self) -> dict[str, Tensor]:
        """Give all that is kept of the points."""
        self._pack()
        return super().points()

    def keep(self, points: Mapping[str, Tensor]) -> None:
        """Keep exactly these points."""
        super().keep(points)
        self._is_loose = False

    def empty(self) -> Compressed:
        """Give a summary of the same settings without points."""
        return Compressed(self.wanted)

    def _save_to_state_dict(self, *args: Any) -> None:
        self._pack()
        super()._save_to_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        self._pack()
        return super().__getstate__()

    def _grow(self, new: Sequence[Sequence[Piece]], lowest: Numbers) -> None:
        """Put pieces beside those there are; thin out what becomes too many."""
        held = self.held()
        here = held.pieces or [[] for _ in new]
        if len(new) != len(here):
            raise ValueError(f"the calibration has scores for {len(here)} outputs, got {len(new)}")
        most = room(self.wanted)
        pieces = [gathered([*mine, *theirs], most) for mine, theirs in zip(here, new, strict=True)]
        self._hold(pieces, np.minimum(held.lowest, lowest) if len(held.lowest) else lowest)

    def settle(self, rank_error: Any = None) -> None:
        """Thin out as far as the rank error allows; a larger one may be asked for."""
        self.wanted = allowed(self, rank_error)
        if len(self):
            held = self.held()
            self._hold([settled(column, self.wanted) for column in held.pieces], held.lowest)

    def check(self, points: Mapping[str, Tensor]) -> None:
        """Refuse summaries that cannot be."""
        super().check(points)
        scores, told, lowest = (points[name] for name in ("scores", "pieces", "lowest"))
        columns = scores.shape[1]
        if told.dim() != 3 or told.shape[1:] != (columns, 3) or bool((told < 0).any()):
            raise ValueError("a summary has weights, counts or errors that cannot be")
        if lowest.shape not in ((1, columns), (0, columns)) or len(lowest) != bool(len(told)):
            raise ValueError(f"smallest scores of shape {tuple(lowest.shape)} stand beside others")
        for number, pieces in enumerate(_unpacked(points)):
            first = min((float(p.values[0]) for p in pieces), default=math.inf)
            if not (bool(len(lowest)) and float(lowest[0, number]) <= first):
                raise ValueError("the smallest score is not the smallest")

    def _check_rows(self, points: Mapping[str, Tensor]) -> None:
        pass  # no buffer has a row for every point

    def __len__(self) -> int:
        if "rows" not in self._cache:
            counts = [sum(piece.total for piece in column) for column in self.held().pieces]
            self._cache["rows"] = max(counts, default=0)
        rows: int = self._cache["rows"]
        return rows

    def settings(self) -> dict[str, Any]:
        """Say what thresholds depend on: those of all scores, and the rank error."""
        return {**Marginal().settings(), ERROR: float(self.wanted)}

    def add(self, scores: Tensor, metadata: Columns | None = None) -> None:
        """Take these scores in; NaN are no scores."""
        self._grow(*_exact(scores.detach().to("cpu", torch.float64)))

    def merge(self, other: Calibration) -> None:
        """Take over the points of another calibration, all of them or a summary."""
        if isinstance(other, Compressed):
            self.wanted = max(self.wanted, other.wanted)
        if len(other):
            self._grow(*_pieces_of(other))

    def summarise(self, other: Calibration) -> None:
        """Take over the points of another calibration, as few of them as the error allows."""
        if len(other):
            pieces, lowest = _pieces_of(other)
            self._grow([settled(column, self.wanted) for column in pieces], lowest)

    def threshold(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Look up the conformal quantile of each output, rounded up, shape (m,)."""
        return self._upper([partial(conformal_rank, alpha=exact_alpha(alpha))])[0, 0]

    def pac_thresholds(
        self, alphas: Sequence[Any], pac: Any, metadata: Columns | None = None
    ) -> Tensor:
        """Look up thresholds that cover 1 - alpha given these points, so surely: (levels, 1, m)."""
        rank_of = partial(pac_rank, pac=pac)
        return self._upper([partial(rank_of, alpha=alpha) for alpha in alphas])

    def _upper(self, rank_of: Iterable[Callable[[int], int]]) -> Tensor:
        table = [
            [column.upper(rank(column.count)) for column in self.columns()] for rank in rank_of
        ]
        return torch.tensor(table, dtype=torch.float64)[:, None]

    def why_infinite(self, alpha: Any, metadata: Columns) -> str:
        """Say how many points there are, or that scores are infinite."""
        fewest, needed = min(column.count for column in self.columns()), rows_needed(alpha)
        if fewest < needed:
            return (
                f": alpha={float(alpha):g} needs at least {needed} calibration points and there "
                f"are {fewest}"
            )
        return (
            f": more of {len(self)} calibration scores are infinite than alpha={float(alpha):g} "
            f"and a rank error of {self.rank_error:.3g} allow for"
        )


def allowed(summary: Any, rank_error: Any) -> Fraction:
    """Give the rank error a summary may have, that asked for if it has no larger one already."""
    wanted: Fraction = summary.wanted if rank_error is None else exact_alpha(rank_error, ERROR)
    if rank_error is not None and wanted < summary.rank_error:
        raise ValueError(
            f"the scores there are were compressed with a rank error of {summary.rank_error:.3g}: "
            f"it cannot become {float(wanted):g}. Ask for more, or calibrate again"
        )
    return wanted


def _pieces_of(calibration: Calibration) -> _Held:
    if isinstance(calibration, Compressed):
        return calibration.held()
    return _exact(calibration.scores)


def _exact(scores: Tensor) -> _Held:
    """Keep all scores of every output, and the smallest; NaN are no scores."""
    known = [column[~np.isnan(column)] for column in scores.numpy().T]
    lowest = np.array([column.min(initial=math.inf) for column in known])
    return _Held([[exactly(column)] for column in known], lowest)


def _packed(held: _Held) -> dict[str, Tensor]:
    """Put pieces into buffers: behind each other, output by output."""
    values = [np.concatenate([np.empty(0), *(p.values for p in c)]) for c in held.pieces]
    table = np.full((max(map(len, values), default=0), len(values)), np.nan)
    told = np.zeros((max(map(len, held.pieces), default=0), len(values), 3), dtype=np.int64)
    told[:, :, 0] = 1
    for number, (column, pieces) in enumerate(zip(values, held.pieces, strict=True)):
        table[: len(column), number] = column
        if pieces:
            told[: len(pieces), number] = [piece[1:] for piece in pieces]
    points = {"scores": table, "pieces": told, "lowest": held.lowest[None]}
    return {name: torch.from_numpy(points[name]) for name in points}


def _unpacked(points: Mapping[str, Tensor]) -> list[list[Piece]]:
    """Make the pieces of every output again."""
    values, told = points["scores"].numpy(), points["pieces"].tolist()
    columns = range(values.shape[1])
    return [restored(values[:, number], [row[number] for row in told]) for number in columns]
