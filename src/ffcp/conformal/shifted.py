"""Localized calibration where inputs have moved: points count by nearness and by density ratio.

If new inputs have the density ratio w to those of the calibration, then given all n + 1 points, in
no order, the new one is point i with probability p_i = w(x_i) / sum_j w(x_j) (Tibshirani, Barber,
Candes and Ramdas, 2019). Both corrections of localized quantiles keep their proof with it:

``"level"``. The shares L_i of :mod:`ffcp.conformal.local` are the same function of the points in
any order, so the new point's L is at most the 1 - alpha quantile of all n + 1 under the p_i with
probability 1 - alpha. The band holds the scores v at which the calibration points with an L_i below
that of the new point count less than (1 - alpha) sum_j w(x_j) together, instead of fewer than k.
The shares themselves go by nearness alone.

``"random"``. A random point near the new one is drawn from the kernel H as a density. Given all
n + 1 points in no order, and the point a that was drawn, the new one is point i with probability
proportional to w(x_i) H(x_i, a) (Hore and Barber, 2023, with the ratio beside): these products are
the weights, the new point's own at infinity.

The plain localized quantile has no guarantee, with a ratio or without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ffcp.conformal.columns import Columns, prefixed, with_prefix
from ffcp.conformal.level import Enterable, Level, Undecided
from ffcp.conformal.local import Local, Localizer
from ffcp.conformal.rank import points_needed
from ffcp.conformal.weighted import Weighted, effective_size, own_units, units_of
from ffcp.conformal.weights import Tilt, plain_target
from ffcp.pieces import Needs, Seen
from ffcp.recipes import public

_RATIO = "ratio."  # before the notes and settings of the ratio


@public
class WeightedLocal(Local):
    """A threshold for every point, from those near it, each counted by its density ratio.

    Parameters
    ----------
    weighted
        Where the ratio comes from, an :class:`ffcp.Weighted`.
    localizer, guarantee
        As for :class:`ffcp.Local`; the guarantee ``"none"`` is refused.

    Examples
    --------
    >>> near = WeightedLocal(Weighted("given"), Localizer("box", bandwidth=5.0))
    >>> points = torch.arange(40.0)[:, None]
    >>> near.add(points, {"embedding": points, "weight": torch.ones(40)})
    >>> new = {"embedding": torch.tensor([[10.0], [10.0]])}
    >>> near.threshold(0.2, {**new, "ratio.weight": torch.tensor([1.0, 20.0])})[:, 0]
    tensor([11., inf], dtype=torch.float64)
    """

    weight: Tensor

    def __init__(
        self,
        weighted: Weighted,
        localizer: Localizer | str = "nearest",
        guarantee: str = "marginal",
    ) -> None:
        super().__init__(localizer, guarantee)
        if not isinstance(weighted, Weighted):
            raise TypeError(
                f"a localized method takes ffcp.Weighted(...) as its calibration, got "
                f"{type(weighted).__name__}: for others use ffcp.Bands"
            )
        if self.guarantee == "none":
            raise ValueError(
                "the plain localized quantile, guarantee='none', covers nothing for sure, and a "
                "density ratio does not mend that: use guarantee='level' or 'random'"
            )
        self._weighted = (weighted.empty(),)  # in a tuple: not a module of its own
        self.register_buffer("weight", torch.empty(0, dtype=torch.float64))

    @property
    def weighted(self) -> Weighted:
        """Where the ratio comes from, without points."""
        return self._weighted[0]

    # -- what it is -------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        """Whether the ratio or the bandwidth is still to be found."""
        return self.weighted.is_open or super().is_open

    @property
    def what_is_open(self) -> str:  # type: ignore[override]
        """What that is, in words."""
        both = [self.weighted.what_is_open] * self.weighted.is_open
        return " and ".join([*both, *[Local.what_is_open] * super().is_open])

    @property
    def looks_at_scores(self) -> bool:  # type: ignore[override]
        """Whether the ratio is known, and the bandwidth is next."""
        return not self.weighted.is_open

    @property
    def choice_name(self) -> str:  # type: ignore[override]
        """What the next choice is called."""
        return (self.weighted if self.weighted.is_open else Local).choice_name

    @property
    def most_rows(self) -> int:  # type: ignore[override]
        """How many rows are enough to choose."""
        return max(self.weighted.most_rows if self.weighted.is_open else 0, Local.most_rows)

    @property
    def takes_new(self) -> bool:  # type: ignore[override]
        """Whether it learns from new inputs."""
        return self.weighted.takes_new

    @property
    def takes_weights(self) -> bool:  # type: ignore[override]
        """Whether every row comes with its weight."""
        return self.weighted.takes_weights

    def needs(self) -> Needs:
        """Ask for the layers that points are embedded by, and that the ratio looks at."""
        return super().needs().joined(self.weighted.needs())

    def settings(self) -> dict[str, Any]:
        """Say what thresholds depend on besides the points."""
        return {**super().settings(), **prefixed(_RATIO, self.weighted.settings())}

    def note(self, seen: Seen, y: Tensor | None = None) -> dict[str, Any]:
        """Note where each point lies, and what its ratio needs."""
        return {**super().note(seen), **prefixed(_RATIO, self.weighted.note(seen))}

    def noted_again(self, seen: Seen, y: Tensor, notes: Columns) -> dict[str, Any]:
        """Note where points lie, whose ratio was noted before."""
        return {**super().note(seen), **prefixed(_RATIO, notes)}

    def weight_of(self, notes: Columns) -> Tensor:
        """Give the ratio of points that were noted."""
        return self.weighted.weight_of(with_prefix(_RATIO, notes))

    def note_new(self, seen: Seen) -> dict[str, Any]:
        """Note of new inputs what the ratio is learned from."""
        return self.weighted.note_new(seen)

    # -- learning and choosing --------------------------------------------------------------

    def _with(self, weighted: Weighted) -> WeightedLocal:
        fresh = self.empty()
        fresh._weighted = (weighted,)
        return fresh

    def facing(self, new: Callable[[], Columns]) -> WeightedLocal:
        """Give a calibration that can learn the ratio; ``new`` notes new inputs when called."""
        return self._with(self.weighted.facing(new))

    def choose(
        self, scores: Tensor, notes: Columns, planned: int, alpha: Any
    ) -> tuple[WeightedLocal, Any]:
        """Learn the ratio, if that is open, and else choose the bandwidth."""
        if self.weighted.is_open:
            ratio, shift = self.weighted.choose(scores, with_prefix(_RATIO, notes), planned, alpha)
            return self._with(ratio), shift
        chosen, choice = super().choose(scores, notes, planned, alpha)
        assert isinstance(chosen, WeightedLocal)
        return chosen, choice

    def restored(self, settings: Mapping[str, Any]) -> WeightedLocal:
        """Take the ratio and the bandwidth that were saved, where they are open here."""
        known = super().restored(settings)
        assert isinstance(known, WeightedLocal)
        return known._with(self.weighted.restored(with_prefix(_RATIO, settings)))

    def choices_from(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Build both choices again."""
        return {**super().choices_from(saved), **self.weighted.choices_from(saved)}

    # -- keeping points ---------------------------------------------------------------------

    def add(self, scores: Tensor, notes: Columns | None = None) -> None:
        """Keep these points; the notes say where they lie and what they weigh."""
        assert notes is not None
        own = notes["weight"] if "weight" in notes else self.weight_of(notes)
        super().add(scores, {"embedding": notes["embedding"], "weight": own.double()})

    def check(self, points: Mapping[str, Tensor]) -> None:
        """Refuse weights that are none, and what localized points are refused for."""
        super().check(points)
        self.weighted.check({name: points[name] for name in ("scores", "weight")})

    @property
    def effective_size(self) -> float:
        """How many points of equal ratio say as much, all places taken together."""
        return effective_size(self.weight)

    # -- thresholds -------------------------------------------------------------------------

    def _counts(self, picked: Tensor) -> Tensor:
        return units_of(self.weight[picked] / self._largest)[0]

    @property
    def _largest(self) -> float:
        return (float(self.weight.max()) if len(self) else 0.0) or 1.0

    def _decided(
        self, level: Level, alpha: Any, weights: Enterable, notes: Columns
    ) -> tuple[Undecided | None, Tensor | None]:
        counts, lost = units_of(self.weight[level.rows] / self._largest)
        # What rounding took goes to the new point: bands can only grow by it.
        total = own_units(self.weight_of(notes) / self._largest) + int(counts.sum()) + lost
        wanted = plain_target(total, alpha).clamp_min(1)
        possible = wanted[wanted <= int(counts.sum())]
        if not len(possible):
            return None, None
        return level.between(int(possible.min()), int(possible.max()), weights), wanted

    def _tilt(self, notes: Columns, rows: slice) -> Tilt:
        ratio = self.weight_of(notes)[rows]
        return Tilt((self.weight / self._largest).log(), (ratio / self._largest).log())

    def why_infinite(self, alpha: Any, notes: Columns) -> str:
        """Say that too little lies around these points, and what would help."""
        needed = points_needed(alpha)
        if len(self) < needed:
            return (
                f": alpha={float(alpha):g} needs at least {needed} calibration points and there "
                f"are {len(self)}"
            )
        return (
            f", for too little of the calibration is near these points and resembles them "
            f"({len(self)} points, effective sample size {self.effective_size:.4g}): take a "
            f"bandwidth above {self.bandwidth:.3g}, points like them, or a ratio that is bounded"
        )

    def extra_repr(self) -> str:
        """Show how many points there are, and how many equal ones say as much."""
        return f"{len(self)} points, effective sample size {self.effective_size:.4g}"
