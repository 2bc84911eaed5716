"""The base of all calibrations, which turn scores into thresholds; and the marginal one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ffcp.batch import BatchOutput, Requires
from ffcp.conformal.columns import Columns
from ffcp.conformal.p_values import TailCounts, counts_beyond
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import conformal_rank, pac_rank, rows_needed
from ffcp.conformal.selection import Selection
from ffcp.description import Described

Self = TypeVar("Self", bound="Calibration")


class Traits(NamedTuple):
    """What a calibration needs of its rows, and what it can do with their scores.

    Attributes
    ----------
    groups, weights : bool
        Whether every row comes with a group, or with a weight.
    labels : bool
        Whether it uses the class of a target, and so is for prediction sets only.
    missing : bool
        Whether NaN may stand for the score of a missing target.
    signs : bool
        Whether it keeps the signs of residuals, for predictive distributions.
    random : bool
        Whether thresholds depend on random numbers, those of ``metadata["row"]``.
    rows : bool
        Whether thresholds depend on the row.
    """

    groups: bool = False
    weights: bool = False
    labels: bool = False
    missing: bool = False
    signs: bool = False
    random: bool = False
    rows: bool = False


@dataclass(frozen=True)
class Calibration(Described):
    """Calibration scores and their quantiles; the immutable base of all calibrations.

    A calibration of your own defines :meth:`quantile` and, if thresholds depend on more than
    scores, :meth:`metadata`. With arguments it is a frozen dataclass.

    Parameters
    ----------
    rows : dict of Tensor, default={}
        Scores and metadata of the calibration rows; filled by :meth:`fit`.

    Examples
    --------
    >>> class Largest(Calibration):
    ...     def quantile(self, alpha, metadata=None, random=None):
    ...         return self.scores.amax(dim=0)
    >>> Largest().fit(torch.tensor([[1.0], [3.0], [2.0]])).quantile(0.1)
    tensor([3.], dtype=torch.float64)
    """

    #: The scores (n, m) and a column for each metadata, by name.
    rows: Mapping[str, Tensor] = field(
        default_factory=dict, repr=False, compare=False, kw_only=True
    )
    traits = Traits(rows=True)

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments."""
        return {name: value for name, value in super().config().items() if name != "rows"}

    def selection(self) -> Selection | None:
        """Return the selection of arguments that are not given; ``None`` if all are."""
        return None

    def requires(self) -> Requires:
        """Return what the pass over the model must compute for :meth:`metadata`."""
        return Requires()

    def metadata(self, out: BatchOutput, y: Tensor | None = None) -> dict[str, Any]:
        """Return what thresholds depend on besides the scores: columns with a row for each row.

        Parameters
        ----------
        out : BatchOutput
            Output of the model for a batch.
        y : Tensor, default=None
            Targets; ``None`` when predicting.
        """
        return {}

    def fit(self: Self, scores: Tensor, metadata: Columns | None = None) -> Self:
        """Return this calibration with these rows, scores (n, m), replacing any others.

        Parameters
        ----------
        scores : Tensor
            Calibration scores, (n, m) for m thresholds.
        metadata : dict of Tensor, default=None
            Columns that :meth:`metadata` returned for these rows.
        """
        rows = {"scores": scores.detach().to("cpu", torch.float64), **(metadata or {})}
        if rows["scores"].dim() != 2:
            raise ValueError(f"scores have shape {tuple(scores.shape)}, expected (n, m)")
        for name, column in rows.items():
            if column.shape[:1] != scores.shape[:1]:
                raise ValueError(
                    f"{name} has shape {tuple(column.shape)} beside {len(scores)} scores"
                )
        return replace(self, rows=rows)

    def merge(self: Self, other: Self) -> Self:
        """Return a calibration with the rows of both."""
        if not len(self) or not len(other):
            return self if len(other) == 0 else other
        for name in self.rows.keys() & other.rows.keys():
            own, added = self.rows[name].shape[1:], other.rows[name].shape[1:]
            if own != added:
                raise ValueError(
                    f"{name} of {tuple(added)} numbers per row do not go with {tuple(own)}"
                )
        rows = {n: torch.cat([c, other.rows[n]]) for n, c in self.rows.items() if n in other.rows}
        return self.fit(rows.pop("scores"), rows)

    def quantile(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Return the thresholds: (m,) for all rows, or (n, m) with one for each row.

        Parameters
        ----------
        alpha : float
            Miscoverage level.
        metadata : dict of Tensor, default=None
            Columns of the new rows.
        random : Draws, default=None
            Random numbers by row number, ``metadata["row"]``, for randomised thresholds.
        """
        raise NotImplementedError

    def quantiles(
        self, alphas: Sequence[Any], metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Return the thresholds at several levels, (levels, 1 or n, m)."""
        result = [self.quantile(alpha, metadata, random) for alpha in alphas]
        return torch.stack([q if q.dim() > 1 else q[None] for q in result])

    def explain(self, alpha: Any, metadata: Columns) -> str:
        """Explain why a threshold is infinite, and what to do.

        Parameters
        ----------
        alpha : float
            Miscoverage level.
        metadata : dict of Tensor, default=None
            Columns of the new rows.
        """
        return too_few(self.scores, alpha) or (
            f": {int(self.scores.isinf().sum(dim=0).max())} of {len(self)} calibration scores are "
            f"infinite, more than alpha={float(alpha):g} allows for"
        )

    @property
    def scores(self) -> Tensor:
        """The calibration scores, (n, m) in float64."""
        return self.rows.get("scores", _NO_SCORES)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a file holds."""
        return dict(self.rows)

    def with_state(self: Self, state: Mapping[str, Tensor]) -> Self:
        """Return this calibration with the tensors of a file."""
        if not state:
            return replace(self, rows={})
        return self.fit(state["scores"], {n: t for n, t in state.items() if n != "scores"})

    def __len__(self) -> int:
        return len(self.scores)

    def __getstate__(self) -> dict[str, Any]:
        # Without cached values.
        return {field.name: getattr(self, field.name) for field in fields(self)}


_NO_SCORES = torch.empty(0, 0, dtype=torch.float64)


def too_few(scores: Tensor, alpha: Any) -> str:
    """Explain that there are too few scores for a finite threshold; empty if there are enough."""
    known = len(scores) - scores.isnan().sum(dim=0)
    fewest, needed = int(known.min()), rows_needed(alpha)
    if fewest >= needed:
        return ""
    return (
        f": alpha={float(alpha):g} needs at least {needed} calibration rows and there are {fewest}"
    )


@dataclass(frozen=True)
class Marginal(Calibration):
    """One threshold for all rows, with a guarantee on average over them.

    Parameters
    ----------
    rows : dict of Tensor, default={}
        Scores and metadata of the calibration rows; filled by :meth:`fit`.

    Examples
    --------
    >>> scores = Marginal().fit(torch.tensor([[4.0], [1.0], [3.0], [2.0]]))
    >>> scores.quantile(0.5)
    tensor([3.], dtype=torch.float64)
    """

    traits = Traits(missing=True, signs=True)

    def fit(self, scores: Tensor, metadata: Columns | None = None) -> Marginal:
        """Return this calibration with these scores, sorted, and their signs if all have one."""
        filled = super().fit(scores, {n: c for n, c in (metadata or {}).items() if n == "signs"})
        values, signs = filled.scores.numpy(), filled.rows.get("signs")
        # By numpy, which sorts in a tenth of torch's time.
        if signs is None:
            return super().fit(torch.from_numpy(np.sort(values, axis=0)))
        if signs.shape != filled.scores.shape or bool((filled.scores < 0).any()):
            raise ValueError("expected one sign per score, and scores of at least 0")
        order = torch.from_numpy(np.argsort(values, axis=0))
        return super().fit(filled.scores.gather(0, order), {"signs": signs.gather(0, order)})

    @cached_property
    def signed(self) -> Tensor | None:
        """The signed scores (n, m), each column sorted; ``None`` where signs are not known."""
        signs = self.rows.get("signs")
        return None if signs is None else self.scores.where(~signs, -self.scores).sort(dim=0).values

    @cached_property
    def _counts(self) -> list[int]:
        """How many scores of each output are not NaN."""
        return (len(self.scores) - self.scores.isnan().sum(dim=0)).tolist()

    def quantile(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Return the conformal quantile of each output, shape (m,)."""
        return ranked(self.scores, self._counts, partial(conformal_rank, alpha=alpha))

    def pac_quantiles(self, alphas: Sequence[Any], pac: Any, metadata: Columns) -> Tensor:
        """Return thresholds with PAC coverage, (levels, 1, m)."""
        rank_of = [partial(pac_rank, alpha=alpha, pac=pac) for alpha in alphas]
        return torch.stack([ranked(self.scores, self._counts, rank) for rank in rank_of])[:, None]

    def tail_counts(self, scores: Tensor, metadata: Columns) -> TailCounts:
        """Count the calibration scores beyond those of new rows, (n, labels)."""
        return counts_beyond(self.scores[:, 0].contiguous(), scores)


def ranked(scores: Tensor, counts: Sequence[int], rank_of: Callable[[int], int]) -> Tensor:
    """Return from each sorted column the score of a rank, which depends on the column's count.

    >>> ranked(torch.tensor([[1.0, 4.0], [2.0, torch.nan]]), [2, 1], lambda count: count)
    tensor([2., 4.])
    """
    ranks = {count: rank_of(count) for count in set(counts)}
    if all(rank <= count for count, rank in ranks.items()) and len(ranks) == 1:
        return scores[ranks[counts[0]] - 1]
    place = torch.tensor([ranks[count] if ranks[count] <= count else 0 for count in counts])
    beyond = scores.new_full((1, len(counts)), math.inf)
    return torch.cat([beyond, scores]).gather(0, place[None])[0]


def as_calibration(given: Any) -> Any:
    """Return a calibration as it is, by default :class:`Marginal`; raise TypeError for others.

    >>> as_calibration(None)
    Marginal()
    """
    if isinstance(given, type) or not (given is None or hasattr(given, "traits")):
        raise TypeError(f"expected a calibration such as ffcp.calibrations.Marginal(): {given!r}")
    return Marginal() if given is None else given
