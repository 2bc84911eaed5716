"""Localized calibration: points near the new one count more.

A kernel H in [0, 1] on an embedding of the input gives calibration point i the weight H(x, x_i);
the new point itself carries H(x, x) = 1 at infinity. The plain localized quantile at x is the
1 - alpha quantile of the scores under these weights. It has no guarantee in finite samples.
Two corrections have one:

``"level"`` (after Guan, 2023). Let L_i be the weighted share, around point i, of points with a
smaller score. With the new point among them, L_1, ..., L_(n+1) are exchangeable, so the new L is
at most the k-th smallest with probability 1 - alpha, k the conformal rank. The band at x holds the
scores for which that is so: :mod:`ffcp.conformal.guan_level` finds where it ends.

``"random"`` (Hore and Barber, 2023). The weights are taken around a random point near x, drawn
from the kernel as a density.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp import files
from ffcp.batch import BatchOutput, Requires, name_of
from ffcp.conformal import bandwidth_selection
from ffcp.conformal.bandwidth_selection import BandwidthChoice
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Columns
from ffcp.conformal.embedding import PREDICTION, embedded, requires_of
from ffcp.conformal.guan_level import Level, UndecidedRows
from ffcp.conformal.kernel_weights import (
    KernelWeights,
    Surroundings,
    Weighed,
    level_target,
    plain_target,
)
from ffcp.conformal.kernels import Kernel, as_kernel
from ffcp.conformal.neighbours import NearestWeights, Neighbours
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import exact_alpha, rows_needed
from ffcp.recipes import public

AUTO = "auto"
FEATURE = "feature"
GUARANTEES = {"marginal": "level", "level": "level", "random": "random", "none": "none"}
CHOOSING_ROWS = 2000  # enough for a bandwidth; the work grows with their square
LEVEL_ROWS = 5000  # calibration points that set the recalibrated level
_BLOCK = 2**22  # weights held at once: 16 MB
_COLUMNS = (16, 128)  # test points at once: fewer are slow, more gain nothing
_ROUNDS, _AFFORDABLE = 8, 4 * 10**8  # of the advice: tries, and pairs of points for each
_SHOWN = 16  # infinite bands that the advice on the bandwidth looks at


@public
@dataclass(frozen=True)
class Localizer:
    """Which calibration points are near: a kernel on an embedding of the input.

    Parameters
    ----------
    kernel
        ``"nearest"``, weight 1 for the nearest calibration points, however far; or, with d the
        Euclidean distance of the embeddings and h the bandwidth, ``"gaussian"`` exp(-d^2 / 2h^2),
        ``"laplace"`` exp(-d / h), ``"box"`` 1 where d <= h; or an :class:`ffcp.kernels.Kernel`.
    on
        The embedding: ``"prediction"``, ``"input"``, the dotted name of a layer, ``"feature"``
        for the layer whose gradient FFLCP takes, or a function from a batch of inputs to a
        tensor of rows. In many dimensions all points are about equally far; a few that matter
        localize better.
    bandwidth
        The bandwidth h; for ``"nearest"`` the number of neighbours. ``"auto"`` chooses it on
        points that do not calibrate.

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
            raise TypeError(f"on must name an embedding or be a function, got {self.on!r}")
        if self.bandwidth == AUTO:
            return
        if isinstance(self.bandwidth, (str, bool)) or not 0 < self.bandwidth < math.inf:
            raise ValueError(f"bandwidth must be a positive number or 'auto', got {self.bandwidth}")
        if kernel.is_by_rank and self.bandwidth != int(self.bandwidth):
            raise ValueError(
                f"the bandwidth of kernel {kernel.name!r} is the number of neighbours, a whole "
                f"number; got {self.bandwidth}"
            )


@public
class Local(Calibration):
    """A threshold for every point, from the calibration points near it.

    Parameters
    ----------
    localizer
        A :class:`Localizer`, or the name of a kernel.
    guarantee
        ``"marginal"`` or ``"level"``, ``"random"`` or ``"none"``, see :class:`ffcp.LCP`.

    Examples
    --------
    >>> near = Local(Localizer("box", bandwidth=5.0), guarantee="none")
    >>> near.add(torch.arange(40.0)[:, None], {"embedding": torch.arange(40.0)[:, None]})
    >>> near.threshold(0.2, {"embedding": torch.tensor([[10.0], [30.0]])})[:, 0]
    tensor([14., 34.], dtype=torch.float64)
    """

    embedding: Tensor
    most_rows = CHOOSING_ROWS
    is_local = True
    what_is_open = "the bandwidth"

    def __init__(self, localizer: Localizer | str = "nearest", guarantee: str = "marginal") -> None:
        super().__init__()
        if isinstance(localizer, str):
            localizer = Localizer(localizer)
        if not isinstance(localizer, Localizer):
            raise TypeError(
                f"localizer must be an ffcp.kernels.Localizer or a kernel, got {localizer!r}"
            )
        if guarantee not in GUARANTEES:
            raise ValueError(
                f"unknown guarantee {guarantee!r}: choose one of {', '.join(GUARANTEES)}"
            )
        self.localizer, self.guarantee = localizer, GUARANTEES[guarantee]
        self.kernel = as_kernel(localizer.kernel)
        if self.guarantee == "random" and not self.kernel.is_density:
            raise ValueError(
                f"guarantee 'random' draws from the kernel as a density, and "
                f"{self.kernel.name!r} is none: use guarantee='level', or another kernel"
            )
        if localizer.on == FEATURE:
            raise ValueError(
                "on='feature' is the layer whose gradient FFLCP takes; here none is taken: name "
                "the layer itself"
            )
        given = localizer.bandwidth
        self.bandwidth = None if given == AUTO else float(given)
        self.register_buffer("embedding", torch.empty(0, 0, dtype=torch.float32))

    # -- what it is -------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        """Whether the bandwidth is still to be chosen."""
        return self.bandwidth is None

    def requires(self) -> Requires:
        """Ask for the values of the layer that points are embedded by."""
        return requires_of(self.localizer.on)

    def settings(self) -> dict[str, Any]:
        """Say what thresholds depend on besides the points; a function by its name."""
        on = self.localizer.on
        return {
            **super().settings(),
            "kernel": self.kernel.name,
            "on": on if isinstance(on, str) else name_of(on),
            "bandwidth": self.bandwidth,
            "guarantee": self.guarantee,
        }

    def metadata(self, out: BatchOutput, y: Tensor | None = None) -> dict[str, Any]:
        """Note where each point lies: rows (n, e) in float32 on the CPU."""
        return {"embedding": embedded(out, self.localizer.on)}

    def choose(
        self, scores: Tensor, metadata: Columns, planned: int, alpha: Any
    ) -> tuple[Local, BandwidthChoice]:
        """Choose the bandwidth on points that do not calibrate; return what is to keep points."""
        few = slice(0, CHOOSING_ROWS)
        choice = bandwidth_selection.choose_bandwidth(
            self.kernel, scores[few], metadata["embedding"][few], alpha, planned
        )
        chosen = self.empty()
        chosen.bandwidth = choice.bandwidth
        return chosen, choice

    def restored(self, settings: Mapping[str, Any]) -> Local:
        """Take the bandwidth that was saved, if it is open here."""
        known, saved = self.empty(), files.rebuilt(float | None, settings.get("bandwidth"))
        if self.bandwidth is None and saved is not None:
            known.bandwidth = float(replace(self.localizer, bandwidth=saved).bandwidth)
        return known

    def choices_from(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Build the choice of the bandwidth again."""
        if saved.get("bandwidth") is None:
            return {}
        choice: BandwidthChoice = files.rebuilt(BandwidthChoice, saved["bandwidth"])
        if choice.bandwidth != self.bandwidth:
            raise ValueError(f"bandwidth {choice.bandwidth} was chosen, {self.bandwidth} is used")
        return {"bandwidth": choice}

    def check(self, points: Mapping[str, Tensor]) -> None:
        """Refuse scores that are not known, and embeddings that are not rows of finite numbers."""
        super().check(points)
        embedding = points["embedding"]
        if embedding.dim() != 2 or not bool(embedding.isfinite().all()):
            raise ValueError("embeddings are not rows of finite numbers")
        if len(embedding) and not embedding.shape[1]:
            raise ValueError("embeddings have no numbers")

    def add(self, scores: Tensor, metadata: Columns | None = None) -> None:
        """Keep these points; ``metadata["embedding"]`` says where they lie."""
        assert metadata is not None
        embedding = metadata["embedding"].detach().to("cpu", torch.float32)
        if len(self):
            self._check_width(embedding)
        super().add(scores, {**metadata, "embedding": embedding})

    def _check_width(self, embedding: Tensor) -> None:
        if embedding.shape[1] != self.embedding.shape[1]:
            raise ValueError(
                f"calibrated with embeddings of {self.embedding.shape[1]} numbers, got "
                f"{embedding.shape[1]}"
            )

    # -- thresholds -------------------------------------------------------------------------

    def threshold(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Give the localized quantiles (n, m) at embedded points."""
        return self.thresholds([alpha], metadata, random)[0]

    def thresholds(
        self, alphas: Sequence[Any], metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Return the localized quantiles (levels, n, m) of several levels by the same weights."""
        if type(self).threshold is not Local.threshold:  # a user's subclass has its own
            return super().thresholds(alphas, metadata, random)
        assert metadata is not None
        assert self.bandwidth is not None
        self._check_width(metadata["embedding"])
        x = metadata["embedding"].detach().to("cpu", torch.float32)
        weights = self._weights(self.bandwidth)
        outputs = range(self.coordinates)
        ends = [self._sorted_scores(output) for output in outputs]
        levels: list[list[UndecidedRows | None]] = []
        if self.guarantee == "level":
            levels = [
                [self._level(weights, output).at(alpha, weights) for output in outputs]
                for alpha in alphas
            ]
        result = torch.empty(len(alphas), len(x), self.coordinates, dtype=torch.float64)
        for rows in _blocks(len(x), len(self)):
            near: Weighed | Neighbours
            own: Tensor | int
            if self.guarantee == "random":
                assert isinstance(weights, KernelWeights)
                assert random is not None
                steps = random.by(self.kernel.steps, metadata["row"][rows], x.shape[1])
                near, own = weights.around_random(x[rows], steps)
            else:
                near, own = weights.around(x[rows]), weights.own
            for output, end in enumerate(ends):
                sums = near.sums(output)
                total = sums.total + own
                for number, alpha in enumerate(alphas):
                    if self.guarantee != "level":
                        place = sums.position(plain_target(total, alpha).clamp_min(1))
                    else:
                        decides = levels[number][output]
                        if decides is None:
                            place = torch.full_like(total, len(self))  # nothing is enough
                        else:
                            place = decides.position(near, sums, x[rows], total)
                    result[number, rows, output] = end[place]
        return result

    def _weights(self, bandwidth: float) -> KernelWeights | NearestWeights:
        """Give what weighs these points; of other bandwidths than the own nothing is kept."""
        if bandwidth != self.bandwidth:
            return self._weights_of(bandwidth)
        weights: KernelWeights | NearestWeights = self._once(
            "weights", lambda: self._weights_of(bandwidth)
        )
        return weights

    def _weights_of(self, bandwidth: float) -> KernelWeights | NearestWeights:
        orders = [self._order(output) for output in range(self.coordinates)]
        if self.kernel.is_by_rank:
            # A small group may have fewer points than were chosen as neighbours: all of them then.
            is_chosen = self.localizer.bandwidth == AUTO
            neighbours = min(int(bandwidth), len(self)) if is_chosen else int(bandwidth)
            return NearestWeights(self.embedding, orders, neighbours)
        return KernelWeights(self.embedding, orders, self.kernel, bandwidth)

    def _level(self, weights: KernelWeights | NearestWeights, output: int) -> Level:
        """Work out how the scores lie among those around them, for the recalibrated level."""
        if weights is not self._cache.get("weights"):
            return self._level_of(weights, output)
        level: Level = self._once(("level", output), lambda: self._level_of(weights, output))
        return level

    def _level_of(self, weights: KernelWeights | NearestWeights, output: int) -> Level:
        # Any rows that were picked without looking are exchangeable with a new point.
        picked = torch.from_numpy(np.random.default_rng(0).permutation(len(self))[:LEVEL_ROWS])
        left = torch.searchsorted(
            self._sorted_scores(output)[:-1], self.scores[picked, output].contiguous()
        )
        parts = [
            weights.around_calibration(self.embedding[some], some, left[rows], output)
            for rows in _blocks(len(picked), len(self))
            for some in [picked[rows]]
        ]
        around = Surroundings(*(torch.cat(column) for column in zip(*parts, strict=True)))
        return Level(picked, left, around, weights.own)

    def _order(self, output: int) -> Tensor:
        order: Tensor = self._once(
            ("order", output), lambda: self.scores[:, output].argsort(stable=True)
        )
        return order

    def _sorted_scores(self, output: int) -> Tensor:
        """Ascending scores of one output, and infinity behind the last."""
        beyond = self.scores.new_full((1,), math.inf)
        ends: Tensor = self._once(
            ("scores", output),
            lambda: torch.cat([self.scores[self._order(output), output], beyond]),
        )
        return ends

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        cache = self._cache  # which is exchanged, not emptied, when the points change
        if key not in cache:
            cache[key] = make()
        return cache[key]

    # -- advice -----------------------------------------------------------------------------

    def why_infinite(self, alpha: Any, metadata: Columns) -> str:
        """Say which bandwidth would make bands finite at these points."""
        few = ", for too little weight lies around these points: "
        bandwidth = self.bandwidth_for(metadata["embedding"], alpha)
        if bandwidth is None:
            return (
                f"{few}alpha={float(alpha):g} needs more calibration points than the {len(self)} "
                "there are"
            )
        if self.kernel.is_by_rank:
            return (
                f"{few}bandwidth={bandwidth:.0f} neighbours would do, instead of "
                f"{self.bandwidth:.0f}"
            )
        return (
            f"{few}a bandwidth of about {bandwidth:.3g} would do, instead of {self.bandwidth:.3g}"
        )

    def bandwidth_for(self, embedding: Tensor, alpha: Any = 0.1) -> float | None:
        """Find a bandwidth that gives finite bands at embedded points; None if none does.

        At most 16 of the points are looked at, those with the least weight around them.
        """
        if len(self) < rows_needed(alpha):
            return None
        if self.kernel.is_by_rank:
            return self._neighbours_for(alpha)
        bandwidth = float(self.bandwidth or 1)
        weights = self._weights(bandwidth)
        totals = [weights.around(part).sums(0).total for part in embedding.split(_SHOWN)]
        thinnest = embedding[torch.cat(totals).argsort()[:_SHOWN]]
        enough = bandwidth
        for _ in range(_ROUNDS):
            needed = self._weight_needed(bandwidth, alpha)
            if needed is None or needed >= len(self):
                return None
            enough = bandwidth_selection.enough_bandwidth(
                self.embedding, thinnest, self.kernel, bandwidth, needed
            )
            # The recalibrated level moves with the bandwidth; on much data, once must do.
            is_small = len(self) * min(len(self), LEVEL_ROWS) <= _AFFORDABLE
            if enough <= bandwidth or self.guarantee != "level" or not is_small:
                break
            bandwidth = enough
        # A little more than just enough: it is sums of rounded weights that count.
        return 1.01 * enough

    def _weight_needed(self, bandwidth: float, alpha: Any) -> float | None:
        """How much weight around a point makes its band finite; None if no weight does."""
        level: Fraction | None = 1 - exact_alpha(alpha)
        if self.guarantee == "level":
            weights = self._weights(bandwidth)
            levels = [
                self._level(weights, output).bound(alpha) for output in range(self.coordinates)
            ]
            level = None if None in levels else max(one for one in levels if one is not None)
        # A level of 1 asks for more weight than any sum can have beside the new point's own.
        return None if level is None or level >= 1 else float(level / (1 - level))

    def _neighbours_for(self, alpha: Any) -> float | None:
        wanted = rows_needed(alpha)
        while wanted <= len(self) and not self._are_enough(wanted, alpha):
            wanted += max(1, wanted // 2)
        return float(wanted) if wanted <= len(self) else None

    def _are_enough(self, neighbours: int, alpha: Any) -> bool:
        """Whether so many neighbours give finite bands, for every output."""
        if self.guarantee != "level":
            return neighbours >= rows_needed(alpha)
        weights, total = self._weights(neighbours), torch.tensor([neighbours + 1])
        levels = [self._level(weights, output).bound(alpha) for output in range(self.coordinates)]
        return all(
            level is not None and int(level_target(total, level)) <= neighbours for level in levels
        )


def _blocks(rows: int, points: int) -> Iterator[slice]:
    fewest, most = _COLUMNS
    size = max(fewest, min(most, _BLOCK // max(1, points)))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))
