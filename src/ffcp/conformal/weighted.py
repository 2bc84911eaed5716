"""Weighted calibration: rows are weighted by the density ratio of new inputs.

If the inputs of new rows have the density ratio w to those of the calibration (covariate shift:
the law of y given x is the same), the scores of n calibration rows and of the new one are
weighted exchangeable, and the 1 - alpha quantile of the calibration scores under weights w(x_i),
with the new row's own weight w(x) at infinity, covers with probability at least 1 - alpha
(Tibshirani, Barber, Candes and Ramdas, 2019, Corollary 1).

Weights are whole numbers, units of 2**-23 of the largest, so that sums are exact. Those of the
calibration are rounded down, the new row's own is rounded up, and what rounding removed is added
to the mass at infinity: the threshold can only grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ffcp.batch import BatchOutput, Requires
from ffcp.conformal import density_ratio
from ffcp.conformal.calibration import Calibration, Traits, too_few
from ffcp.conformal.columns import Columns, On, embedded, requires_of
from ffcp.conformal.kernel_weights import ONE
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import exact_alpha, exact_share
from ffcp.conformal.selection import Aside, Selected, Selection

LEARN, GIVEN = "learn", "given"
_MOST = 2**61  # units at infinity: with more, thresholds are infinite anyway


class Ladder(NamedTuple):
    """The sorted scores of one output, infinity behind them, and the running sum of weights."""

    scores: Tensor
    sums: Tensor
    lost: int  # upper bound on the units that rounding removed

    def quantile(self, own: Tensor, alpha: Any) -> Tensor:
        """Return the weighted quantile for rows of these weights, (n,)."""
        own = (own * ONE).ceil().clamp_max(_MOST).long()
        total = own + (int(self.sums[-1]) if len(self.sums) else 0) + self.lost
        target = (total - exact_share(total, exact_alpha(alpha))).clamp_min(1)
        return self.scores[torch.searchsorted(self.sums, target)]


def ladder(scores: Tensor, weights: Tensor) -> Ladder:
    """Return sorted scores and summed weights, which are at most 1; NaN scores are left out.

    >>> steps = ladder(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 0.5, 1.0]))
    >>> steps.scores, steps.sums / ONE, steps.lost
    (tensor([1., 2., 3., inf]), tensor([0.5000, 1.5000, 2.5000]), 0)
    """
    known = ~scores.isnan()
    order = scores[known].argsort(stable=True)
    units = weights[known][order].double() * ONE
    rounded, beyond = units.floor(), scores.new_full((1,), math.inf)
    lost = int((rounded != units).sum())
    return Ladder(torch.cat([scores[known][order], beyond]), rounded.long().cumsum(0), lost)


def effective_size(weights: Tensor) -> float:
    """Return the effective sample size: (sum of weights)^2 / sum of squares.

    >>> effective_size(torch.tensor([1.0, 1.0, 0.0]))
    2.0
    """
    shares = weights / weights.max() if len(weights) and weights.max() > 0 else weights
    squares = float(shares.square().sum())
    return float(shares.sum()) ** 2 / squares if squares else 0.0


def weighted_quantile(scores: Tensor, weights: Tensor, own: Any, alpha: Any) -> Tensor:
    """Return the 1 - alpha quantile of weighted scores, with weight ``own`` at infinity.

    Parameters
    ----------
    scores, weights : Tensor
        Scores and their weights, both (n,).
    own : Tensor
        The weight of the new row, or of several, (b,).
    alpha : float
        The miscoverage level.

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
    return ladder(scores, weights / largest).quantile(own / largest, alpha)


@dataclass(frozen=True)
class Reweighted(Calibration):
    """The base of calibrations with weights; subclasses define :attr:`weights`."""

    traits = Traits(missing=True, rows=True)

    @property
    def weights(self) -> Tensor:
        """The weight of every calibration row, (n,), the largest being 1."""
        raise NotImplementedError

    @property
    def effective_size(self) -> float:
        """The effective sample size: (sum of weights)^2 / sum of squares."""
        return effective_size(self.weights)

    @cached_property
    def _ladders(self) -> list[Ladder]:
        return [ladder(column, self.weights) for column in self.scores.T]

    def weighted_quantiles(self, own: Tensor, alpha: Any) -> Tensor:
        """Return quantiles (n, m) for rows of these weights, in units of the largest."""
        return torch.stack([ladder.quantile(own, alpha) for ladder in self._ladders], dim=1)

    def explain_weights(self, own: Tensor, alpha: Any, what: str) -> str:
        """Explain how much new rows weigh against all calibration rows."""
        if reason := too_few(self.scores, alpha):
            return reason
        total = float((self.weights[:, None] * ~self.scores.isnan()).sum(dim=0).min())
        if not total:
            return f": every calibration row has weight 0, so none resembles {what}"
        exact = exact_alpha(alpha)
        return (
            f": density ratio too large, no calibration row resembles {what}. One of them weighs "
            f"up to {float(own.max()) / total:.2g} times what all {len(self)} calibration rows do "
            f"together (effective sample size {self.effective_size:.4g}), and "
            f"alpha={float(alpha):g} allows for {float(exact / (1 - exact)):.2g}. Calibrate with "
            "rows like them, or with a ratio that is bounded"
        )


@dataclass(frozen=True)
class Weighted(Reweighted):
    """Weights rows by the density ratio of new inputs and calibration inputs.

    Parameters
    ----------
    ratio : callable or str, default="given"
        How much likelier an input is among new rows than among calibration rows, up to a
        constant factor. A function from a batch of inputs to one number per row;
        ``"given"``: numbers for every row, as ``weights=`` of ``calibrate`` and of
        ``predict_interval`` or ``predict_set``; or ``"learn"``: the odds of a logistic classifier
        between calibration inputs set aside, which then do not calibrate, and the inputs given as
        ``calibrate(x, y, new=...)``, which need no targets.
    on : str or callable, default="input"
        What ``"learn"`` learns from: ``"input"``, ``"prediction"``, the dotted name of a layer, or
        a function from a batch of inputs to rows of numbers.
    clip : float, default=50.0
        Learned ratios are clipped to [1 / clip, clip].
    learned : sequence of float, default=None
        Intercept and slopes of the classifier, of a calibration that a file holds.
    rows : dict of Tensor, default={}
        Scores and metadata of the calibration rows; filled by :meth:`fit`.

    Notes
    -----
    If the law of y given x is the same for both, coverage is at least 1 - alpha for new rows whose
    inputs have this density ratio to those of the calibration. With ``"learn"`` that is the learned
    ratio, not the true one. Rows in ``new`` should not be predicted later: the classifier has been
    trained on them.

    Examples
    --------
    >>> weights = {"weight": torch.ones(4).double()}
    >>> scores = Weighted("given").fit(torch.tensor([[4.0], [1.0], [3.0], [2.0]]), weights)
    >>> scores.quantile(0.4, {"weight": torch.tensor([1.0, 3.0])})[:, 0]
    tensor([3., inf], dtype=torch.float64)
    """

    ratio: Callable[[Any], Any] | str = GIVEN
    on: On = "input"
    clip: float = 50.0
    learned: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not callable(self.ratio) and self.ratio not in (LEARN, GIVEN):
            raise ValueError(
                f"'ratio' must be a function of the input, {GIVEN!r} or {LEARN!r}, got "
                f"{self.ratio!r}: numbers per row go into calibrate(x, y, weights=...)"
            )
        if isinstance(self.clip, bool) or not 1 < self.clip < math.inf:
            raise ValueError(f"'clip' must be a number above 1, got {self.clip!r}")
        if self.learned is not None and not all(map(math.isfinite, self.learned)):
            raise ValueError(f"'learned' must be finite numbers, got {self.learned}")

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Rows come with a weight if the ratio is ``"given"``."""
        return Traits(missing=True, rows=True, weights=self.ratio == GIVEN)

    def selection(self) -> Selection | None:
        """Return the selection that learns the density ratio; ``None`` if it is given."""
        return _DensityRatio() if self.ratio == LEARN and self.learned is None else None

    def requires(self) -> Requires:
        """Return the layer that the classifier learns from."""
        if self.ratio == LEARN:
            return requires_of(self.on)
        return Requires(input=callable(self.ratio))

    def metadata(self, out: BatchOutput, y: Tensor | None = None) -> dict[str, Any]:
        """Return the weight of each row."""
        if self.ratio == LEARN:
            assert self.learned is not None
            ratio = density_ratio.ratio(embedded(out, self.on), self.learned, self.clip)
            return {"weight": ratio}
        if callable(self.ratio):
            return {"weight": checked_weights(self.ratio(out.x), out.rows, "the ratio")}
        if out.weights is None:
            raise ValueError(
                "Weighted('given') needs the weight of every row: pass weights=..., numbers per "
                "row, when calibrating and predicting"
            )
        return {"weight": checked_weights(out.weights, out.rows, "weights")}

    def fit(self, scores: Tensor, metadata: Columns | None = None) -> Weighted:
        """Return this calibration with these rows; ``metadata["weight"]`` are their weights."""
        filled = super().fit(scores, metadata)
        checked_weights(filled.rows["weight"], range(len(filled)), "the weight")
        return filled

    @cached_property
    def _largest(self) -> float:
        return float(self.rows["weight"].max()) or 1.0

    @cached_property
    def weights(self) -> Tensor:
        """The weight of every calibration row, (n,), the largest being 1."""
        return self.rows["weight"] / self._largest

    def quantile(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Return the weighted quantiles (n, m), each with its row's own weight at infinity."""
        assert metadata is not None
        return self.weighted_quantiles(metadata["weight"].double() / self._largest, alpha)

    def explain(self, alpha: Any, metadata: Columns) -> str:
        """Explain how much the new rows weigh against all calibration rows."""
        return self.explain_weights(metadata["weight"] / self._largest, alpha, "these inputs")


class _DensityRatio(Selection):
    """Learns the density ratio on rows set aside and on unlabelled inputs."""

    what = "the density ratio"
    takes_new = True

    def select(self, aside: Aside) -> Selected:
        """Return the calibration with the odds of a classifier between old and new inputs."""
        weighted = aside.calibration
        new = torch.cat([embedded(out, weighted.on) for out in aside.target_inputs()])
        old = embedded(aside.out, weighted.on)
        learned, choice = density_ratio.learned(old, new, weighted.clip)
        return Selected(aside.score, replace(weighted, learned=learned), {"shift": choice})


def checked_weights(weights: Any, rows: Sequence[int], what: str) -> Tensor:
    """Return the weights of rows; raise ValueError, naming the row, for an invalid one."""
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
