"""A summary of scores that count by weights; its rank error is a share of all weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Columns
from ffcp.conformal.compressed import ERROR, allowed
from ffcp.conformal.draws import Draws
from ffcp.conformal.rank import exact_alpha, points_needed
from ffcp.conformal.summaries import Counts, Numbers, last_of_blocks, room
from ffcp.conformal.weighted import Ladder, Weighted, own_units
from ffcp.conformal.weights import ONE
from ffcp.pieces import Needs, Seen

_MOST = 2**60  # units of weight in all: beyond, they are counted in larger ones
_TOLD = 4  # what is told of every output: see _Column


class _Column(NamedTuple):
    """Sorted scores of one output, and the units of weight that each stands for."""

    values: Numbers
    units: Counts
    error: int  # units by which what stands up to a score may be short
    lost: int  # units that rounding took from the weights, at most
    unknown: int  # points without a score

    @property
    def share(self) -> Fraction:
        """By which share of the weight a quantile may be too large.

        What stands up to a score is short by error and losses, and losses count at infinity.
        """
        return Fraction(self.error + 2 * self.lost, max(1, _total(self)))

    def thinned(self, error: Fraction) -> _Column:
        """Keep fewer scores, at the price of a share of the weight as error in all."""
        ends = np.cumsum(self.units)
        count = int(ends[-1]) if len(ends) else 0
        weight = math.floor(error * count) - self.error - 2 * self.lost + 1
        if not count or weight < 1 or -(-count // weight) >= len(ends):
            return self
        values, more = last_of_blocks(self.values, ends, weight)
        units = np.full(len(values), weight)
        units[-1] = count - weight * (len(values) - 1)
        return self._replace(values=values, units=units, error=self.error + more)

    def coarser(self, steps: int) -> _Column:
        """Count in units that are 2**steps times larger: what is cut off is lost."""
        units = self.units >> steps
        cut = int(((units << steps) != self.units).sum())
        error, lost = (-(-number >> steps) for number in (self.error, self.lost))
        return self._replace(units=units, error=error + cut, lost=lost + cut)

    def with_(self, other: _Column) -> _Column:
        """Put two columns together: errors and losses add up."""
        values = np.concatenate([self.values, other.values])
        units, order = np.concatenate([self.units, other.units]), np.argsort(values, kind="stable")
        sums = (mine + theirs for mine, theirs in zip(self[2:], other[2:], strict=True))
        return _Column(values[order], units[order], *sums)


class CompressedWeights(Calibration):
    """Points that count by weights, as :class:`ffcp.Weighted` has, from a summary of the scores.

    Weights are whole numbers of a unit that is a power of two. Scores stand for blocks of weight
    as in :mod:`ffcp.conformal.summaries`: what stands up to a score is never more than it is, and
    at most :attr:`rank_error` of all weight less. So the weighted quantile can only be too large,
    by that share of the weight.

    Parameters
    ----------
    rank_error
        The error that is aimed at, a share of the weight.
    base
        Where the weights of points come from; it has nothing open.
    """

    units: Tensor
    told: Tensor
    exponent: Tensor
    takes_missing = True
    is_local = True
    is_summary = True
    draws = False

    def __init__(self, rank_error: Any, base: Weighted) -> None:
        super().__init__()
        self.wanted = exact_alpha(rank_error, ERROR)
        self._base = (base.empty(),)  # in a tuple: not a module of its own
        self.register_buffer("units", torch.empty(0, 0, dtype=torch.int64))
        self.register_buffer("told", torch.empty(0, 0, _TOLD, dtype=torch.int64))
        self.register_buffer("exponent", torch.empty(0, dtype=torch.int64))

    @property
    def base(self) -> Weighted:
        """What says how much new points weigh; it has no points."""
        return self._base[0]

    @property
    def takes_weights(self) -> bool:  # type: ignore[override]
        """Whether every row comes with its weight."""
        return self.base.takes_weights

    @property
    def rank_error(self) -> float:  # type: ignore[override]
        """By which share of the weight a threshold may be too large: proven."""
        return float(max((column.share for column in self._columns()), default=0))

    def __len__(self) -> int:
        told = self._points("told")
        return int(told[0, 0, 3]) if told.numel() else 0

    def needs(self) -> Needs:
        """Ask for the layer that the ratio looks at."""
        return self.base.needs()

    def note(self, seen: Seen, y: Tensor | None = None) -> dict[str, Any]:
        """Note what each row weighs, or where it lies if that is learned."""
        return self.base.note(seen, y)

    def settings(self) -> dict[str, Any]:
        """Say what thresholds depend on: the ratio, and the rank error."""
        return {**self.base.settings(), ERROR: float(self.wanted)}

    def choices_from(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Build what was said of the learned ratio again."""
        return self.base.choices_from(saved)

    # -- keeping points ---------------------------------------------------------------------

    def _columns(self) -> list[_Column]:
        if "columns" not in self._cache:
            values, units = self.scores.numpy(), self.units.numpy()
            told = self.told[0].tolist() if len(self.told) else []
            known = [~np.isnan(column) for column in values.T]
            self._cache["columns"] = [
                _Column(values[rows, i], units[rows, i], *told[i][:3])
                for i, rows in enumerate(known[: len(told)])
            ]
        columns: list[_Column] = self._cache["columns"]
        return columns

    def _hold(self, columns: list[_Column], exponent: int, count: int) -> None:
        rows = max((len(column.values) for column in columns), default=0)
        values, units = np.full((rows, len(columns)), np.nan), np.zeros((rows, len(columns)), int)
        for number, column in enumerate(columns):
            values[: len(column.values), number] = column.values
            units[: len(column.values), number] = column.units
        told = [[*column[2:], count] for column in columns]
        self.keep(
            {
                "scores": torch.from_numpy(values),
                "units": torch.from_numpy(units),
                "told": torch.tensor([told], dtype=torch.int64),
                "exponent": torch.tensor([exponent]),
            }
        )

    def _grow(self, new: list[_Column], exponent: int, count: int) -> None:
        """Put columns beside those there are; thin out what becomes too many."""
        here, mine = self._columns(), int(self.exponent[0]) if len(self) else exponent
        if here and len(self) and len(here) != len(new):
            raise ValueError(f"the calibration has scores for {len(here)} outputs, got {len(new)}")
        if len(self):
            common = max(mine, exponent)
            here = [column.coarser(common - mine) for column in here]
            new = [column.coarser(common - exponent) for column in new]
            while any(_total(a) + _total(b) > _MOST for a, b in zip(here, new, strict=True)):
                here, new = [c.coarser(1) for c in here], [c.coarser(1) for c in new]
                common += 1
            new = [mine.with_(theirs) for mine, theirs in zip(here, new, strict=True)]
            exponent = common
        most = room(self.wanted)
        more = Fraction(2, most)
        few = [c.thinned(c.share + more) if len(c.values) > most else c for c in new]
        self._hold(few, exponent, len(self) + count)

    def add(self, scores: Tensor, notes: Columns | None = None) -> None:
        """Take these points in; the notes say what they weigh, or where they lie."""
        columns, exponent = self._exact(scores, self.base.weight_of(notes or {}))
        self._grow(columns, exponent, len(scores))

    def _exact(self, scores: Tensor, weight: Tensor) -> tuple[list[_Column], int]:
        """Count weights in units, 2**-23 of the largest or a little less, rounded down."""
        table = scores.detach().to("cpu", torch.float64).numpy()
        weights = weight.double().numpy()
        largest = float(weights.max(initial=0.0))
        exponent = math.frexp(largest)[1] - 23 if largest else 0
        exact = np.ldexp(weights, -exponent)
        whole = np.floor(exact)
        columns = []
        for column in table.T:
            rows = np.flatnonzero(~np.isnan(column))
            rows = rows[np.argsort(column[rows], kind="stable")]
            lost = int((whole != exact)[rows].sum())
            unknown = len(column) - len(rows)
            columns.append(_Column(column[rows], whole[rows].astype(int), 0, lost, unknown))
        return columns, exponent

    def merge(self, other: Calibration) -> None:
        """Take over the points of another calibration, all of them or a summary."""
        if isinstance(other, CompressedWeights):
            self.wanted = max(self.wanted, other.wanted)
        if len(other):
            self._grow(*self._columns_of(other), len(other))

    def summarise(self, other: Calibration) -> None:
        """Take over the points of another calibration, as few of them as the error allows."""
        if len(other):
            columns, exponent = self._columns_of(other)
            self._grow([c.thinned(self.wanted) for c in columns], exponent, len(other))

    def _columns_of(self, other: Calibration) -> tuple[list[_Column], int]:
        if isinstance(other, CompressedWeights):
            return other._columns(), int(other.exponent[0])
        assert isinstance(other, Weighted)
        return self._exact(other.scores, other.weight)

    def settle(self, rank_error: Any = None) -> None:
        """Thin out as far as the rank error allows; a larger one may be asked for."""
        self.wanted = allowed(self, rank_error)
        if len(self):
            columns = [column.thinned(self.wanted) for column in self._columns()]
            self._hold(columns, int(self.exponent[0]), len(self))

    def check(self, points: Mapping[str, Tensor]) -> None:
        """Refuse summaries that cannot be."""
        super().check(points)
        scores, units, told = (points[name] for name in ("scores", "units", "told"))
        some, exponent = int(bool(len(told))), points["exponent"]
        if told.shape != (some, scores.shape[1], _TOLD) or exponent.shape != (some,):
            raise ValueError("what is told of a summary has another shape")
        if units.shape != scores.shape or bool((units < 0).any()) or bool((told < 0).any()):
            raise ValueError("a summary has weights or errors that cannot be")
        if not bool(((scores[:-1] <= scores[1:]) | scores[1:].isnan()).all()):
            raise ValueError("scores are not sorted")
        if bool((units[scores.isnan()] != 0).any()) or (len(scores) and not some):
            raise ValueError("a summary has weights without scores, or the reverse")
        if some:
            counts, total = told[0, :, 3], units.double().sum(dim=0)
            if bool((counts != counts[0]).any()) or int(counts[0]) < 1:
                raise ValueError("a summary has counts that cannot be")
            if bool((told[0, :, 0] > total).any()) or bool((told[0, :, 1:3] > counts[0]).any()):
                raise ValueError("a summary has errors that cannot be")
            if bool((total > 2 * _MOST).any()) or abs(int(exponent[0])) > 1100:
                raise ValueError("a summary has weights that cannot be")

    def _check_rows(self, points: Mapping[str, Tensor]) -> None:
        pass  # no buffer has a row for every point

    # -- thresholds -------------------------------------------------------------------------

    def _ladders(self) -> list[Ladder]:
        if "ladders" not in self._cache:
            self._cache["ladders"] = [
                Ladder(
                    torch.from_numpy(np.append(column.values, math.inf)),
                    torch.from_numpy(column.units).cumsum(0),
                    column.lost,
                )
                for column in self._columns()
            ]
        ladders: list[Ladder] = self._cache["ladders"]
        return ladders

    def threshold(
        self, alpha: Any, notes: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Give the weighted quantiles (n, m), each with its point's own weight at infinity."""
        units = self._own(self.base.weight_of(notes or {}))
        return torch.stack([steps.reach(units, alpha) for steps in self._ladders()], dim=1)

    def _own(self, weights: Tensor) -> Tensor:
        step = int(self.exponent[0]) + int(math.log2(ONE))
        return own_units(torch.from_numpy(np.ldexp(weights.double().numpy(), -step)))

    def why_infinite(self, alpha: Any, notes: Columns) -> str:
        """Say how much the new points weigh against all calibration points."""
        exact, needed = exact_alpha(alpha), points_needed(alpha)
        if len(self) < needed:
            return (
                f": alpha={float(alpha):g} needs at least {needed} calibration points and there "
                f"are {len(self)}"
            )
        total = min(_total(column) for column in self._columns())
        if not total:
            return ": every calibration point has weight 0, so nothing there resembles these inputs"
        own = int(self._own(self.base.weight_of(notes)).max())
        return (
            f", for nothing in the calibration resembles these inputs: one of them weighs up to "
            f"{own / total:.2g} times what all {len(self)} calibration points do together, and "
            f"alpha={float(alpha):g} allows for {float(exact / (1 - exact)):.2g}. Calibrate with "
            "points like them, or with a ratio that is bounded"
        )


def _total(column: _Column) -> int:
    return int(column.units.sum())
