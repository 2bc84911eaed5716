"""Localized calibration: rows near the new one have more weight.

A kernel H in [0, 1] on an embedding of the input gives calibration row i the weight H(x, x_i);
the new row itself has H(x, x) = 1 at infinity. The plain localized quantile at x is the
1 - alpha quantile of the scores under these weights. It has no guarantee in finite samples.
Two corrections have one:

``"level"`` (after Guan, 2023). Let L_i be the weighted share, around row i, of rows with a smaller
score. With the new row among them, L_1, ..., L_(n+1) are exchangeable, so the new L is at most the
k-th smallest with probability 1 - alpha, k the conformal rank. The interval at x contains the
scores for which that is so: :mod:`ffcp.conformal.guan_level` finds its end.

``"random"`` (Hore and Barber, 2023). The weights are taken around a random point near x, drawn
from the kernel as a density.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.batch import BatchOutput, Requires
from ffcp.conformal import bandwidth_selection
from ffcp.conformal.calibration import Calibration, Traits
from ffcp.conformal.columns import PREDICTION, Columns, embedded, requires_of
from ffcp.conformal.guan_level import Level, UndecidedRows
from ffcp.conformal.kernel_weights import KernelWeights, Surroundings, Weighed
from ffcp.conformal.kernels import Kernel, as_kernel
from ffcp.conformal.neighbours import NearestWeights, Neighbours
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import exact_alpha, exact_share, rows_needed
from ffcp.conformal.selection import Aside, Selected, Selection
from ffcp.description import Described

AUTO = "auto"
FEATURE = "feature"
GUARANTEES = {"marginal": "level", "level": "level", "random": "random", "none": "none"}
CHOOSING_ROWS = 2000  # enough for a bandwidth; the work grows with their square
LEVEL_ROWS = 5000  # calibration rows that set the recalibrated level
_BLOCK = 2**22  # weights held at once: 16 MB
_COLUMNS = (16, 128)  # test rows at once: fewer are slow, more gain nothing
_ROUNDS, _AFFORDABLE = 8, 4 * 10**8  # of the advice: tries, and pairs of points for each
_SHOWN = 16  # infinite intervals that the advice on the bandwidth is about


@dataclass(frozen=True)
class Localizer(Described):
    """Which calibration rows are near: a kernel on an embedding of the input.

    Parameters
    ----------
    kernel : str or Kernel, default="nearest"
        ``"nearest"``, weight 1 for the nearest calibration rows, however far; or, with d the
        Euclidean distance of the embeddings and h the bandwidth, ``"gaussian"`` exp(-d^2 / 2h^2),
        ``"laplace"`` exp(-d / h), ``"box"`` 1 where d <= h; or an :class:`ffcp.kernels.Kernel`.
    on : str or callable, default="prediction"
        The embedding: ``"prediction"``, ``"input"``, the dotted name of a layer, ``"feature"``
        for the layer whose gradient FFLCP takes, or a function from a batch of inputs to a
        tensor of rows. In many dimensions all rows are about equally far; a few dimensions that
        matter localize better.
    bandwidth : float or str, default="auto"
        The bandwidth h; for ``"nearest"`` the number of neighbours. ``"auto"`` selects it on
        rows that do not calibrate.

    Examples
    --------
    >>> Localizer("box", on="prediction", bandwidth=0.5)
    Localizer(kernel='box', on='prediction', bandwidth=0.5)
    """

    kernel: str | Kernel = "nearest"
    on: str | Callable[[Any], Any] = PREDICTION
    bandwidth: float | str = AUTO

    def __post_init__(self) -> None:
        kernel = as_kernel(self.kernel)
        if not (isinstance(self.on, str) or callable(self.on)):
            raise TypeError(f"'on' must name an embedding or be a function, got {self.on!r}")
        if self.bandwidth == AUTO:
            return
        if isinstance(self.bandwidth, (str, bool)) or not 0 < self.bandwidth < math.inf:
            raise ValueError(f"'bandwidth' must be positive or 'auto', got {self.bandwidth}")
        if kernel.is_by_rank and self.bandwidth != int(self.bandwidth):
            raise ValueError(
                f"the bandwidth of kernel {kernel.name!r} is the number of neighbours, a whole "
                f"number; got {self.bandwidth}"
            )


@dataclass(frozen=True)
class Local(Calibration):
    """A threshold for every row, from the calibration rows near it.

    Parameters
    ----------
    localizer : Localizer or str, default="nearest"
        A :class:`Localizer`, or the name of a kernel.
    guarantee : str, default="marginal"
        ``"marginal"`` or ``"level"``, ``"random"`` or ``"none"``, see :class:`ffcp.LCP`.
    bandwidth : float, default=None
        The bandwidth that was selected, of a calibration that a file holds.
    rows : dict of Tensor, default={}
        Scores and metadata of the calibration rows; filled by :meth:`fit`.

    Examples
    --------
    >>> rows = torch.arange(40.0)[:, None]
    >>> near = Local(Localizer("box", bandwidth=5.0), guarantee="none")
    >>> near = near.fit(rows, {"embedding": rows})
    >>> near.quantile(0.2, {"embedding": torch.tensor([[10.0], [30.0]])})[:, 0]
    tensor([14., 34.], dtype=torch.float64)
    """

    localizer: Localizer | str = "nearest"
    guarantee: str = "marginal"
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.localizer, str):
            object.__setattr__(self, "localizer", Localizer(self.localizer))
        if not isinstance(self.localizer, Localizer):
            raise TypeError(
                f"'localizer' must be an ffcp.kernels.Localizer or a kernel, got {self.localizer!r}"
            )
        if self.guarantee not in GUARANTEES:
            raise ValueError(
                f"unknown guarantee {self.guarantee!r}: choose one of {', '.join(GUARANTEES)}"
            )
        object.__setattr__(self, "guarantee", GUARANTEES[self.guarantee])
        if self.guarantee == "random" and not self.kernel.is_density:
            raise ValueError(
                f"guarantee 'random' draws from the kernel as a density, which "
                f"{self.kernel.name!r} is not: use guarantee='marginal', or another kernel"
            )
        if self._near.on == FEATURE:
            raise ValueError(
                "on='feature' is the layer whose gradient FFLCP takes; this method takes none: "
                "pass the name of a layer"
            )
        if self._near.bandwidth != AUTO:
            object.__setattr__(self, "bandwidth", float(self._near.bandwidth))
        elif self.bandwidth is not None:
            replace(self._near, bandwidth=self.bandwidth)  # which checks it

    @property
    def _near(self) -> Localizer:
        assert isinstance(self.localizer, Localizer)
        return self.localizer

    @property
    def kernel(self) -> Kernel:
        """The kernel, which weights rows by their distance."""
        return as_kernel(self._near.kernel)

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Thresholds depend on the row, and perhaps on random numbers."""
        return Traits(rows=True, random=self.guarantee == "random")

    def selection(self) -> Selection | None:
        """Return the selection of the bandwidth; ``None`` if it is given."""
        return _Bandwidth() if self.bandwidth is None else None

    def requires(self) -> Requires:
        """Return what the embedding requires."""
        return requires_of(self._near.on)

    def metadata(self, out: BatchOutput, y: Tensor | None = None) -> dict[str, Any]:
        """Return the embedding of each row, (n, e) in float32 on the CPU."""
        return {"embedding": embedded(out, self._near.on)}

    def fit(self, scores: Tensor, metadata: Columns | None = None) -> Local:
        """Return this calibration with these rows and their ``metadata["embedding"]``."""
        filled = super().fit(scores, metadata)
        embedding = filled.rows["embedding"]
        is_table = embedding.dim() == 2 and embedding.dtype == torch.float32 and embedding.shape[1]
        if not is_table or not bool(embedding.isfinite().all()):
            raise ValueError("expected embeddings to be finite float32 numbers")
        return filled

    @property
    def embedding(self) -> Tensor:
        """The embedding of the calibration rows, (n, e)."""
        return self.rows["embedding"]

    # -- thresholds -------------------------------------------------------------------------

    def quantile(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Return the localized quantiles (n, m) at embedded rows."""
        return self.quantiles([alpha], metadata, random)[0]

    def quantiles(
        self, alphas: Sequence[Any], metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Return the localized quantiles (levels, n, m) of several levels by the same weights."""
        if type(self).quantile is not Local.quantile:  # a user's subclass has its own
            return super().quantiles(alphas, metadata, random)
        assert metadata is not None
        x, outputs = metadata["embedding"], range(self.scores.shape[1])
        if x.shape[1] != self.embedding.shape[1]:
            raise ValueError(
                f"calibrated with embeddings of {self.embedding.shape[1]} numbers, got {x.shape[1]}"
            )
        levels: list[list[UndecidedRows | None]] = []
        if self.guarantee == "level":
            levels = [
                [self._levels[output].at(alpha, self._weights) for output in outputs]
                for alpha in alphas
            ]
        result = torch.empty(len(alphas), *x.shape[:1], len(outputs), dtype=torch.float64)
        for rows in _blocks(len(x), len(self)):
            near, own = self._around(x[rows], metadata, rows, random)
            for output in outputs:
                sums = near.sums(output)
                total = sums.total + own
                for number, alpha in enumerate(alphas):
                    if self.guarantee != "level":
                        misses = exact_share(total, exact_alpha(alpha))
                        place = sums.position((total - misses).clamp_min(1))
                    elif (decides := levels[number][output]) is None:
                        place = torch.full_like(total, len(self))  # infinite
                    else:
                        place = decides.position(near, sums, x[rows], total)
                    result[number, rows, output] = self._ends[output][place]
        return result

    def _around(
        self, x: Tensor, metadata: Columns, rows: slice, random: Draws | None
    ) -> tuple[Weighed | Neighbours, Tensor | int]:
        """Weigh the calibration rows around some rows, and these rows themselves."""
        if self.guarantee != "random":
            return self._weights.around(x), self._weights.own
        assert isinstance(self._weights, KernelWeights)
        assert random is not None
        steps = random.by(self.kernel.steps, metadata["row"][rows], x.shape[1])
        return self._weights.around_random(x, steps)

    @cached_property
    def _orders(self) -> list[Tensor]:
        return [column.argsort(stable=True) for column in self.scores.T]

    @cached_property
    def _ends(self) -> list[Tensor]:
        """Ascending scores of each output, and infinity behind the last."""
        beyond = self.scores.new_full((1,), math.inf)
        columns = zip(self.scores.T, self._orders, strict=True)
        return [torch.cat([column[order], beyond]) for column, order in columns]

    @cached_property
    def _weights(self) -> KernelWeights | NearestWeights:
        """The weights of calibration rows around others."""
        assert self.bandwidth is not None
        if not self.kernel.is_by_rank:
            return KernelWeights(self.embedding, self._orders, self.kernel, self.bandwidth)
        # A small group may have fewer rows than were selected as neighbours: all of them then.
        is_selected = self._near.bandwidth == AUTO
        neighbours = min(int(self.bandwidth), len(self)) if is_selected else int(self.bandwidth)
        return NearestWeights(self.embedding, self._orders, neighbours)

    @cached_property
    def _levels(self) -> list[Level]:
        """How the scores of each output lie among those around them, for the recalibrated level."""
        # Rows picked at random are exchangeable with a new row.
        picked = torch.from_numpy(np.random.default_rng(0).permutation(len(self))[:LEVEL_ROWS])
        levels = []
        for output, ends in enumerate(self._ends):
            left = torch.searchsorted(ends[:-1], self.scores[picked, output].contiguous())
            parts = [
                self._weights.around_calibration(
                    self.embedding[picked[rows]], picked[rows], left[rows], output
                )
                for rows in _blocks(len(picked), len(self))
            ]
            around = Surroundings(*map(torch.cat, zip(*parts, strict=True)))
            levels.append(Level(picked, left, around, self._weights.own))
        return levels

    # -- advice -----------------------------------------------------------------------------

    def explain(self, alpha: Any, metadata: Columns) -> str:
        """Explain which bandwidth would make intervals finite at these rows."""
        few = ": too few calibration rows lie around these rows; "
        bandwidth = self.bandwidth_for(metadata["embedding"], alpha)
        if bandwidth is None:
            return f"{few}alpha={float(alpha):g} needs more rows than the {len(self)} there are"
        what = "neighbours" if self.kernel.is_by_rank else "or more"
        return f"{few}bandwidth={bandwidth:.4g} {what} would do, instead of {self.bandwidth:.4g}"

    def bandwidth_for(self, embedding: Tensor, alpha: Any = 0.1) -> float | None:
        """Return a bandwidth with finite intervals at embedded rows; None if none has."""
        if len(self) < rows_needed(alpha):
            return None
        if self.kernel.is_by_rank:
            return self._neighbours_for(alpha)
        totals = [self._weights.around(part).sums(0).total for part in embedding.split(_SHOWN)]
        thinnest = embedding[torch.cat(totals).argsort()[:_SHOWN]]
        tried, enough = self, float(self.bandwidth or 1)
        for _ in range(_ROUNDS):
            needed = tried.weight_needed(alpha)
            if needed is None or needed >= len(self):
                return None
            before = float(tried.bandwidth or 1)
            enough = bandwidth_selection.enough_bandwidth(
                self.embedding, thinnest, self.kernel, before, needed
            )
            # The recalibrated level moves with the bandwidth; on much data, once must do.
            is_small = len(self) * min(len(self), LEVEL_ROWS) <= _AFFORDABLE
            if enough <= before or self.guarantee != "level" or not is_small:
                break
            tried = self._at(enough)
        # A little more than enough, because weights are rounded.
        return 1.01 * enough

    def _at(self, bandwidth: float) -> Local:
        return replace(self, localizer=replace(self._near, bandwidth=bandwidth))

    def weight_needed(self, alpha: Any) -> float | None:
        """Return how much weight around a row makes its interval finite; None if none does."""
        level: Fraction | None = 1 - exact_alpha(alpha)
        if self.guarantee == "level":
            bounds = [level.bound(alpha) for level in self._levels]
            level = None if None in bounds else max(bound for bound in bounds if bound is not None)
        # A level of 1 needs infinitely more weight than the new row's own.
        return None if level is None or level >= 1 else float(level / (1 - level))

    def _neighbours_for(self, alpha: Any) -> float | None:
        wanted = rows_needed(alpha)
        while wanted <= len(self) and not self._at(wanted).are_enough(alpha):
            wanted += max(1, wanted // 2)
        return float(wanted) if wanted <= len(self) else None

    def are_enough(self, alpha: Any) -> bool:
        """Whether the neighbours give finite intervals, for every output."""
        neighbours = int(self.bandwidth or 1)
        if self.guarantee != "level":
            return neighbours >= rows_needed(alpha)
        total = torch.tensor([neighbours + 1])
        bounds = [level.bound(alpha) for level in self._levels]
        return all(
            bound is not None and int(exact_share(total, bound)) < neighbours for bound in bounds
        )


class _Bandwidth(Selection):
    """Selects the bandwidth whose local quantiles fit best."""

    what = "the bandwidth"
    most_rows = CHOOSING_ROWS

    def select(self, aside: Aside) -> Selected:
        """Return the calibration with a bandwidth for as many rows as will calibrate."""
        local, few = aside.calibration, slice(0, CHOOSING_ROWS)
        scores = aside.score.score(aside.out, aside.y).cpu()
        alpha = aside.alpha_of_each(aside.alpha, scores.shape[1])
        embedding = local.metadata(aside.out)["embedding"]
        choice = bandwidth_selection.choose_bandwidth(
            local.kernel, scores[few], embedding[few], alpha, aside.left
        )
        chosen = replace(local, bandwidth=choice.bandwidth)
        return Selected(aside.score, chosen, {"bandwidth": choice})


def _blocks(rows: int, points: int) -> Iterator[slice]:
    fewest, most = _COLUMNS
    size = max(fewest, min(most, _BLOCK // max(1, points)))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))
