"""Calibrations that keep a summary of the scores instead of all of them.

Some ten thousand scores represent those of every group and output, and thresholds are rounded up:
the threshold of rank k is at least the k-th smallest score, so guarantees hold, and at most the
(k + E)-th, with E known. :mod:`ffcp.conformal.summaries` has the algorithm and the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.conformal import summaries
from ffcp.conformal.calibration import Calibration, Marginal, Traits
from ffcp.conformal.columns import Columns
from ffcp.conformal.mondrian import Mondrian
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import conformal_rank, exact_alpha, pac_rank, rows_needed
from ffcp.conformal.summaries import Piece, Rounded, count_of

ERROR = "rank_error"


@dataclass(frozen=True)
class Compressed(Calibration):
    """One threshold for all rows, as Marginal has, from a summary of the scores.

    Parameters
    ----------
    wanted : float
        The rank error to aim at, as a share of the rows. :attr:`rank_error` is the actual one.

    Examples
    --------
    >>> everything = Marginal().fit(torch.arange(100_000.0)[:, None])
    >>> summary = compressed(everything, 0.01)
    >>> len(summary), len(summary.scores), summary.rank_error
    (100000, 100, 0.01)
    >>> everything.quantile(0.1), summary.quantile(0.1)
    (tensor([90000.], dtype=torch.float64), tensor([90089.], dtype=torch.float64))
    """

    wanted: Any
    #: The pieces of every output.
    pieces: Sequence[Sequence[Piece]] = field(default=(), repr=False, compare=False, kw_only=True)
    traits = Traits(missing=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "wanted", exact_alpha(self.wanted, ERROR))

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments."""
        return {"wanted": self.wanted}

    @cached_property
    def columns(self) -> list[Rounded]:
        """The summary of every output."""
        return [Rounded(pieces) for pieces in self.pieces]

    @property
    def rank_error(self) -> float:
        """The proven bound on how many ranks thresholds are too large, as a share of the rows."""
        shares = (Fraction(sum(p.error for p in c), max(1, count_of(c))) for c in self.pieces)
        return float(max(shares, default=0))

    @cached_property
    def scores(self) -> Tensor:
        """The numbers kept of every output, NaN where others have more."""
        return self.state()["scores"]

    def __len__(self) -> int:
        return max(map(count_of, self.pieces), default=0)

    def fit(self, scores: Tensor, metadata: Columns | None = None) -> Compressed:
        """Return a summary of these scores; it is exact until :meth:`shrunk`."""
        columns = scores.detach().to("cpu", torch.float64).numpy().T
        pieces = [[summaries.exactly(column[~np.isnan(column)])] for column in columns]
        return replace(self, pieces=pieces)

    def merge(self, other: Calibration) -> Compressed:
        """Return a summary of the rows of both; the other may be uncompressed."""
        added = other if isinstance(other, Compressed) else self.fit(other.scores)
        if not self.pieces or not added.pieces:
            return self if not added.pieces else added
        if len(self.pieces) != len(added.pieces):
            raise ValueError(
                f"the calibration has scores for {len(self.pieces)} outputs, got "
                f"{len(added.pieces)}"
            )
        wanted = max(self.wanted, added.wanted)
        most = summaries.room(wanted)
        pieces = [
            summaries.gathered([*own, *new], most)
            for own, new in zip(self.pieces, added.pieces, strict=True)
        ]
        return replace(self, wanted=wanted, pieces=pieces)

    def shrunk(self, rank_error: Any = None) -> Compressed:
        """Return the smallest summary within a rank error, by default that of this summary."""
        wanted = self.wanted if rank_error is None else exact_alpha(rank_error, ERROR)
        if rank_error is not None and wanted < self.rank_error:
            raise ValueError(
                f"the scores were compressed with a rank error of {self.rank_error:.3g}: it "
                f"cannot become {float(wanted):g}. Use a larger rank error, or calibrate again"
            )
        pieces = [summaries.shrunk(column, wanted) for column in self.pieces]
        return replace(self, wanted=wanted, pieces=pieces)

    def state(self) -> dict[str, Tensor]:
        """Return the numbers kept, and of every piece its weight, count and error."""
        if not self.pieces:
            return {}
        values = [np.concatenate([np.empty(0), *(p.values for p in c)]) for c in self.pieces]
        table = np.full((max(map(len, values)), len(values)), np.nan)
        records = np.zeros((max(map(len, self.pieces)), len(values), 3), dtype=np.int64)
        records[:, :, 0] = 1
        for number, (column, pieces) in enumerate(zip(values, self.pieces, strict=True)):
            table[: len(column), number] = column
            if pieces:
                records[: len(pieces), number] = [piece[1:] for piece in pieces]
        return {"scores": torch.from_numpy(table), "pieces": torch.from_numpy(records)}

    def with_state(self, state: Mapping[str, Tensor]) -> Compressed:
        """Return the summary that a file holds."""
        if not state:
            return replace(self, pieces=())
        scores, records = state["scores"].numpy(), state["pieces"].numpy()
        columns = range(scores.shape[1])
        if records.shape[1:] != (len(columns), 3):
            raise ValueError("the pieces of a summary do not match its outputs")
        pieces = [summaries.restored(scores[:, i], records[:, i].tolist()) for i in columns]
        return replace(self, pieces=pieces)

    def quantile(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Return the conformal quantile of each output, rounded up, shape (m,)."""
        return self._upper(partial(conformal_rank, alpha=exact_alpha(alpha)))

    def pac_quantiles(self, alphas: Sequence[Any], pac: Any, metadata: Columns) -> Tensor:
        """Return thresholds with PAC coverage, (levels, 1, m)."""
        rank_of = [partial(pac_rank, alpha=alpha, pac=pac) for alpha in alphas]
        return torch.stack([self._upper(rank) for rank in rank_of])[:, None]

    def _upper(self, rank_of: Callable[[int], int]) -> Tensor:
        upper = [column.upper(rank_of(column.count)) for column in self.columns]
        return torch.tensor(upper, dtype=torch.float64)

    def explain(self, alpha: Any, metadata: Columns) -> str:
        """Explain how many rows are needed, or that scores are infinite."""
        fewest, needed = min(map(count_of, self.pieces)), rows_needed(alpha)
        if fewest < needed:
            return (
                f": alpha={float(alpha):g} needs at least {needed} calibration rows and there are "
                f"{fewest}"
            )
        return (
            f": more of {len(self)} calibration scores are infinite than alpha={float(alpha):g} "
            f"and a rank error of {self.rank_error:.3g} allow for"
        )


def summary_of(calibration: Calibration, rank_error: Any) -> Any:
    """Return an empty summary for a calibration; raise ValueError if it cannot be compressed.

    >>> type(summary_of(Marginal(), 1e-4)).__name__
    'Compressed'
    """
    if isinstance(calibration, Mondrian):
        return Mondrian(summary_of(calibration.inner, rank_error), calibration.by)
    if isinstance(calibration, Compressed):
        return Compressed(max(calibration.wanted, Compressed(rank_error).wanted))
    if type(calibration) is not Marginal:  # a user's subclass may have other thresholds
        raise ValueError(
            f"{type(calibration).__name__} cannot be compressed: its thresholds depend on more "
            "than the order of scores. ffcp.calibrations.Marginal can, also in the groups of "
            "ffcp.calibrations.Mondrian; or calibrate with fewer rows"
        )
    return Compressed(rank_error)


def compressed(calibration: Calibration, rank_error: Any) -> Any:
    """Return a summary of a calibration's rows; of a summary, a smaller one."""
    if isinstance(calibration, Mondrian):
        parts = {n: compressed(part, rank_error) for n, part in calibration.parts.items()}
        return replace(summary_of(calibration, rank_error), parts=parts)
    if isinstance(calibration, Compressed):
        return calibration.shrunk(rank_error)
    return summary_of(calibration, rank_error).fit(calibration.scores).shrunk()


def shrunk(calibration: Calibration) -> Any:
    """Return the smallest summary within the rank error, for each group."""
    if isinstance(calibration, Mondrian):
        parts = {label: shrunk(part) for label, part in calibration.parts.items()}
        return replace(calibration, parts=parts)
    return calibration.shrunk() if isinstance(calibration, Compressed) else calibration


def is_summary(calibration: Calibration) -> bool:
    """Whether a calibration keeps a summary of its scores."""
    return isinstance(getattr(calibration, "inner", calibration), Compressed)


def uncompressed(calibration: Calibration) -> Calibration:
    """Return an empty calibration of the kind that was compressed."""
    if isinstance(calibration, Mondrian):
        return Mondrian(uncompressed(calibration.inner), calibration.by)
    return Marginal() if isinstance(calibration, Compressed) else calibration


def joined(calibration: Calibration, other: Calibration) -> Calibration:
    """Return a calibration with the rows of both: a summary, if either is."""
    if is_summary(other) and not is_summary(calibration):
        return other.merge(calibration)
    return calibration.merge(other)
