"""Weighted calibration: points count by how likely their inputs are where new ones come from.

If the inputs of new points have the density ratio w to those of the calibration (covariate shift:
the law of y given x is the same), the scores of n calibration points and of the new one are
weighted exchangeable, and the 1 - alpha quantile of the calibration scores under weights w(x_i),
with the new point's own weight w(x) at infinity, covers with probability at least 1 - alpha
(Tibshirani, Barber, Candes and Ramdas, 2019, Corollary 1).

Weights are whole numbers, units of 2**-23 of the largest, so that sums are exact. Those of the
calibration are rounded down, the new point's own is rounded up, and what the rounding took is
added to the mass at infinity: the threshold can only grow by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ffcp import files
from ffcp.batch import BatchOutput, Requires, name_of
from ffcp.conformal import density_ratio
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Columns
from ffcp.conformal.density_ratio import ShiftChoice
from ffcp.conformal.embedding import On, embedded, requires_of
from ffcp.conformal.kernel_weights import ONE, plain_target
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import exact_alpha, rows_needed
from ffcp.recipes import public

LEARN, GIVEN = "learn", "given"
_MOST = 2**61  # of units at infinity: beyond, thresholds are infinite anyway
Self = TypeVar("Self", bound="Reweighted")


class Ladder(NamedTuple):
    """The sorted scores of one output, infinity behind them, and the running sum of weights."""

    scores: Tensor
    sums: Tensor
    lost: int  # units, at most, that rounding took from the weights

    def quantile(self, own: Tensor, alpha: Any) -> Tensor:
        """Give the weighted quantile at points of their own weight, in whole numbers, (n,)."""
        total = own + (int(self.sums[-1]) if len(self.sums) else 0) + self.lost
        target = plain_target(total, alpha).clamp_min(1)
        return self.scores[torch.searchsorted(self.sums, target)]


def ladder(scores: Tensor, weights: Tensor) -> Ladder:
    """Sort scores with their weights, which are at most 1; NaN are no scores.

    >>> steps = ladder(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 0.5, 1.0]))
    >>> steps.scores, steps.sums / ONE, steps.lost
    (tensor([1., 2., 3., inf]), tensor([0.5000, 1.5000, 2.5000]), 0)
    """
    known = ~scores.isnan()
    order = scores[known].argsort(stable=True)
    whole, lost = units_of(weights[known][order])
    beyond = scores.new_full((1,), math.inf)
    return Ladder(torch.cat([scores[known][order], beyond]), whole.cumsum(0), lost)


def units_of(weights: Tensor) -> tuple[Tensor, int]:
    """Round weights of at most 1 down to whole units; say how many, at most, that took in all."""
    units = weights.double() * ONE
    whole = units.floor()
    return whole.long(), int((whole != units).sum())


def own_units(own: Tensor) -> Tensor:
    """Round the weights of new points up to whole units."""
    return (own * ONE).ceil().clamp_max(_MOST).long()


def effective_size(weights: Tensor) -> float:
    """Say how many points of equal weight say as much: (sum of weights)^2 / sum of squares.

    >>> effective_size(torch.tensor([1.0, 1.0, 0.0]))
    2.0
    """
    shares = weights / weights.max() if len(weights) and weights.max() > 0 else weights
    squares = float(shares.square().sum())
    return float(shares.sum()) ** 2 / squares if squares else 0.0


def weighted_quantile(scores: Tensor, weights: Tensor, own: Any, alpha: Any) -> Tensor:
    """Give the 1 - alpha quantile of weighted scores, with weight ``own`` at infinity.

    Parameters
    ----------
    scores, weights
        Scores and how much they count, both (n,).
    own
        The weight of the new point, or of several, (b,).
    alpha
        Share of misses allowed.

    Examples
    --------
    >>> scores = torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> weighted_quantile(scores, torch.ones(4), [1.0, 3.0], alpha=0.4)
    tensor([3., inf])
    """
    own = torch.as_tensor(own, dtype=torch.float64).reshape(-1)
    weights = weights.double()
    largest = weights.max() if len(weights) else weights.new_zeros(())
    if not largest > 0:
        return scores.new_full(own.shape, math.inf)
    return ladder(scores, weights / largest).quantile(own_units(own / largest), alpha)


class Reweighted(Calibration):
    """What calibrations by weights share: weights beside the scores, and how much they leave."""

    takes_missing = True
    is_local = True

    def weights(self) -> Tensor:
        """Give the weight of every calibration point, (n,), the largest being 1."""
        raise NotImplementedError

    @property
    def effective_size(self) -> float:
        """How many points of equal weight say as much: (sum of weights)^2 / sum of squares."""
        return effective_size(self.weights())

    def _ladder(self, output: int) -> Ladder:
        key, cache = ("ladder", output), self._cache
        if key not in cache:
            cache[key] = ladder(self.scores[:, output], self.weights())
        steps: Ladder = cache[key]
        return steps

    def _thresholds(self, own: Tensor, alpha: Any) -> Tensor:
        """Look up quantiles (n, m) for points of these weights, in units of the largest."""
        units = own_units(own)
        columns = [self._ladder(i).quantile(units, alpha) for i in range(self.coordinates)]
        return torch.stack(columns, dim=1)

    def _why_infinite(self, own: Tensor, alpha: Any, what: str) -> str:
        """Say how much the new points weigh against all calibration points."""
        exact, needed = exact_alpha(alpha), rows_needed(alpha)
        has_score = ~self.scores.isnan()
        fewest = int(has_score.sum(dim=0).min())
        if fewest < needed:
            return (
                f": alpha={float(alpha):g} needs at least {needed} calibration points and there "
                f"are {fewest}"
            )
        total = float((self.weights()[:, None] * has_score).sum(dim=0).min())
        allowed = float(exact / (1 - exact))
        if not total:
            return f": every calibration point has weight 0, so nothing there resembles {what}"
        return (
            f", for nothing in the calibration resembles {what}: one of them weighs up to "
            f"{float(own.max()) / total:.2g} times what all {len(self)} calibration points do "
            f"together (effective sample size {self.effective_size:.4g}), and "
            f"alpha={float(alpha):g} allows for {allowed:.2g}. Calibrate with points like them, "
            "or with a ratio that is bounded"
        )

    def extra_repr(self) -> str:
        """Show how many points there are, and how many equal ones say as much."""
        return f"{len(self)} points, effective sample size {self.effective_size:.4g}"


@public
class Weighted(Reweighted):
    """Weights points by the ratio of the densities of new inputs and calibration inputs.

    Parameters
    ----------
    ratio
        How much likelier an input is among new points than among those that calibrate; only
        ratios of ratios matter. A function from a batch of inputs to one number per row;
        ``"given"``: numbers for every row, as ``weights=`` of ``calibrate`` and of
        ``predict_interval`` or ``predict_set``; or ``"learn"``: the odds of a logistic classifier
        between calibration inputs set aside, which then do not calibrate, and the inputs given as
        ``calibrate(x, y, new=...)``, which need no targets.
    on
        What ``"learn"`` looks at: ``"input"``, ``"prediction"``, the dotted name of a layer, or a
        function from a batch of inputs to rows of numbers (whose squares, say, are among them).
    clip
        Learned ratios are kept within [1 / clip, clip].

    Notes
    -----
    Promised, if the law of y given x is the same for both: coverage of at least 1 - alpha for new
    points whose inputs have this very ratio to those of the calibration. With ``"learn"`` that is
    the learned ratio, not the true one: what the classifier did not see is not corrected. Points
    in ``new`` that are predicted later, too, were seen by the classifier; give others if you can.

    Examples
    --------
    >>> scores = Weighted("given")
    >>> scores.add(torch.tensor([[4.0], [1.0], [3.0], [2.0]]), {"weight": torch.ones(4)})
    >>> scores.threshold(0.4, {"weight": torch.tensor([1.0, 3.0])})[:, 0]
    tensor([3., inf], dtype=torch.float64)
    """

    weight: Tensor
    what_is_open = "the density ratio"
    choice_name = "shift"
    looks_at_scores = False
    most_rows = 10_000

    def __init__(
        self,
        ratio: Callable[[Any], Any] | str = GIVEN,
        on: On = "input",
        clip: float = 50.0,
    ) -> None:
        super().__init__()
        if not callable(ratio) and ratio not in (LEARN, GIVEN):
            raise ValueError(
                f"ratio must be a function of the input, {GIVEN!r} or {LEARN!r}, got {ratio!r}: "
                "numbers per row go into calibrate(x, y, weights=...)"
            )
        if isinstance(clip, bool) or not 1 < clip < math.inf:
            raise ValueError(f"clip must be a number above 1, got {clip!r}")
        self.ratio, self.on, self.clip = ratio, on, float(clip)
        self.tilt: tuple[float, ...] | None = None
        self.new_inputs: Callable[[], Columns] | None = None
        self.register_buffer("weight", torch.empty(0, dtype=torch.float64))

    # -- what it is -------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        """Whether the ratio is still to be learned."""
        return self.ratio == LEARN and self.tilt is None

    @property
    def takes_new(self) -> bool:  # type: ignore[override]
        """Whether it learns from new inputs."""
        return self.ratio == LEARN

    @property
    def takes_weights(self) -> bool:  # type: ignore[override]
        """Whether every row comes with its weight."""
        return self.ratio == GIVEN

    def requires(self) -> Requires:
        """Ask for the layer that the classifier looks at."""
        return requires_of(self.on) if self.ratio == LEARN else Requires()

    def settings(self) -> dict[str, Any]:
        """Say what thresholds depend on besides the points; a function by its name."""
        said = {**super().settings(), "ratio": _name(self.ratio)}
        if self.ratio == LEARN:
            tilt = None if self.tilt is None else list(self.tilt)
            said.update(on=_name(self.on), clip=self.clip, tilt=tilt)
            said["numbers"] = None if self.tilt is None else len(self.tilt) - 1  # of each row
        return said

    def metadata(self, out: BatchOutput, y: Tensor | None = None) -> dict[str, Any]:
        """Note what each row weighs, or where it lies if that is learned."""
        if self.ratio == LEARN:
            return {"embedding": embedded(out, self.on)}
        if callable(self.ratio):
            return {"weight": checked_weights(self.ratio(out.x), out.rows, "the ratio")}
        if out.weights is None:
            raise ValueError(
                "Weighted('given') needs the weight of every row: pass weights=..., numbers per "
                "row, when calibrating and predicting"
            )
        return {"weight": checked_weights(out.weights, out.rows, "weights")}

    # -- learning ---------------------------------------------------------------------------

    def with_target_inputs(self, new: Callable[[], Columns]) -> Weighted:
        """Give a calibration that can learn the ratio; ``new`` notes new inputs when called."""
        fresh = self.empty()
        fresh.new_inputs = new
        return fresh

    def choose(
        self, scores: Tensor, metadata: Columns, planned: int, alpha: Any
    ) -> tuple[Weighted, ShiftChoice]:
        """Learn the ratio on points that do not calibrate, and on new inputs."""
        assert self.new_inputs is not None
        tilt, choice = density_ratio.learned(
            metadata["embedding"], self.new_inputs()["embedding"], self.clip
        )
        chosen = self.empty()
        chosen.tilt, chosen.new_inputs = tilt, None
        return chosen, choice

    def restored(self, settings: Mapping[str, Any]) -> Weighted:
        """Take the learned ratio that was saved, if it is open here."""
        known = self.empty()
        if self.is_open:
            known.tilt = tilt = files.rebuilt(tuple[float, ...] | None, settings.get("tilt"))
            if tilt is not None and not all(map(math.isfinite, tilt)):
                raise ValueError(f"the learned density ratio is {tilt}")
            if known.settings()["numbers"] != settings.get("numbers"):
                raise ValueError("the learned density ratio is of another number of columns")
        return known

    def choices_from(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Build what was said of the learned ratio again."""
        if saved.get("shift") is None:
            return {}
        return {"shift": files.rebuilt(ShiftChoice, saved["shift"])}

    def weight_of(self, metadata: Columns) -> Tensor:
        """Give the weights of points that were noted."""
        if "weight" in metadata:
            return torch.as_tensor(metadata["weight"]).double()
        assert self.tilt is not None
        return density_ratio.ratio(metadata["embedding"], self.tilt, self.clip)

    # -- keeping points, and thresholds -----------------------------------------------------

    def add(self, scores: Tensor, metadata: Columns | None = None) -> None:
        """Keep these points; the notes say what they weigh, or where they lie."""
        super().add(scores, {"weight": self.weight_of(metadata or {})})

    def check(self, points: Mapping[str, Tensor]) -> None:
        """Refuse weights that are none."""
        super().check(points)
        weight = points["weight"]
        if weight.dim() != 1 or not bool((weight.isfinite() & (weight >= 0)).all()):
            raise ValueError("weights are not numbers of at least 0, one for each point")

    def weights(self) -> Tensor:
        """Give the weight of every calibration point, (n,), the largest being 1."""
        return self.weight / self._largest

    @property
    def _largest(self) -> float:
        largest = float(self.weight.max()) if len(self) else 0.0
        return largest or 1.0

    def threshold(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Give the weighted quantiles (n, m), each with its point's own weight at infinity."""
        assert metadata is not None
        return self._thresholds(self.weight_of(metadata) / self._largest, alpha)

    def why_infinite(self, alpha: Any, metadata: Columns) -> str:
        """Say how much the new points weigh against all calibration points."""
        return self._why_infinite(self.weight_of(metadata) / self._largest, alpha, "these inputs")


def checked_weights(weights: Any, rows: range, what: str) -> Tensor:
    """Read the weights of some rows; what is no weight is a ValueError that names the row."""
    values = torch.as_tensor(weights).detach().to("cpu", torch.float64)
    if values.shape == (len(rows), 1):
        values = values[:, 0]
    if values.shape != (len(rows),):
        raise ValueError(
            f"{what} has shape {tuple(values.shape)} for {len(rows)} rows: it needs one number "
            "for each"
        )
    bad = ~(values.isfinite() & (values >= 0))
    if bool(bad.any()):
        first = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"{what} of row {rows[first]} is {float(values[first])}: a density ratio is a number "
            "of at least 0"
        )
    return values


def _name(value: Any) -> Any:
    return name_of(value) if callable(value) else value
