"""Figures of scores: FCP against FFCP, and histograms of CP and FFCP."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ffcp import FCP, FFCP, FFCPWarning
from ffcp_paper.experiments.square_conditions import Spread, spreads
from ffcp_paper.figures.drawing import (
    DARK,
    GREY,
    LIGHT,
    SPLIT,
    TRAINED_SHARE,
    Drawn,
    Request,
    canvas,
    level_text,
    share_text,
    without_frame,
)
from ffcp_paper.networks.regression import SPLIT_POINTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INSIDE = range(4)  # split point 4 is the output, where FFCP is CP
_MOST_POINTS = 1500  # in a scatter plot; more hide each other
_RHO, _MINUS = "\N{GREEK SMALL LETTER RHO}", "\N{MINUS SIGN}"

# -- scores of FCP and FFCP ----------------------------------------------------------------------

#: FCP's two ways to a score: what rows of panels are called, and the arguments of ``FCP``.
_WAYS = {"descent": "descent, as published", "exact": "exact distance"}


@dataclass(frozen=True)
class Pair:
    """Scores of the same points by FFCP and FCP at one split point, where both can be drawn.

    Zero and infinite scores are left out, since the axes are logarithmic.
    """

    split: int
    way: str
    ffcp: Tensor
    fcp: Tensor
    matched: Tensor  # FFCP's score with the norm that belongs to FCP's
    left_out: int
    steps: int | None

    @property
    def rank_correlation(self) -> float:
        """Spearman's, of the points that are drawn."""
        return _spearman(self.ffcp, self.fcp)

    @property
    def matched_correlation(self) -> float:
        """The same if FFCP measured the gradient in the norm that belongs to FCP's."""
        return _spearman(self.matched, self.fcp)


def _spearman(one: Tensor, other: Tensor) -> float:
    """Return Spearman's rank correlation.

    >>> _spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 4.0, 9.0]))
    1.0
    """
    from scipy import stats

    return float(stats.spearmanr(one.numpy(), other.numpy()).statistic)


def score_pairs(model: nn.Module, x: Tensor, y: Tensor, *, alpha: float, seed: int) -> list[Pair]:
    """Score points by FFCP and by FCP, cut at the same layer, for every split point inside.

    Parameters
    ----------
    model
        A network of the paper's shape.
    x, y
        Calibration points; FCP chooses its number of descent steps on a part of them.
    alpha, seed
        Of that choice.

    Returns
    -------
    list of Pair
        For FCP's descent, then for its exact distance, the split points 0 to 3.

    Examples
    --------
    >>> from ffcp_paper.networks.regression import mlp
    >>> x, y = torch.rand(60, 2), torch.rand(60)
    >>> [(pair.way, pair.split) for pair in score_pairs(mlp(2), x, y, alpha=0.1, seed=0)][3:5]
    [('descent', 3), ('exact', 0)]
    """
    result = []
    for way in _WAYS:
        for split in _INSIDE:
            layer = SPLIT_POINTS[split]
            slow = FCP(model, layer, invert=way, selection_alpha=alpha, seed=seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FFCPWarning)  # lost points are counted below
                slow.calibrate(x, y)
                theirs = slow.score(x, y).reshape(-1)
            ours, matched = (FFCP(model, layer, norm).score(x, y).reshape(-1) for norm in (2, 1))
            shown = theirs.isfinite() & ours.isfinite() & (theirs > 0) & (ours > 0)
            ours, theirs, matched = (scores[shown] for scores in (ours, theirs, matched))
            steps = slow.steps if way == "descent" else None
            result.append(Pair(split, way, ours, theirs, matched, int((~shown).sum()), steps))
    return result


def scores_fcp_ffcp(request: Request) -> Drawn:
    """Draw FCP's score against FFCP's, a column for each split point.

    The score of FCP is that of its descent in the upper row, as published, and the distance that
    the descent stands for in the lower.
    """
    model, parts = request.trained()
    some = slice(_MOST_POINTS)  # the division has shuffled them
    x, y = parts.x_cal[some], parts.y_cal[some]
    request.report(TRAINED_SHARE, f"{request.data}: scores of FCP and FFCP")
    pairs = score_pairs(model, x, y, alpha=request.alpha, seed=request.seed)
    figure = canvas(5.2)
    axes = figure.subplots(2, len(_INSIDE), squeeze=False)
    for axis, pair in zip(axes.flat, pairs, strict=True):
        _scatter(axis, pair)
    for line, name in zip(axes, _WAYS.values(), strict=True):
        line[0].set_ylabel(f"FCP score\n({name})", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("FFCP score", fontsize=10)
    figure.align_ylabels(axes[:, 0])
    return Drawn(
        figure,
        "Scores of FCP and FFCP at each layer",
        _pairs_caption(request, pairs, len(y)),
        f"Eight scatter plots on logarithmic axes, FCP's score over FFCP's for {len(y):,} points "
        f"of {request.data}, at split points 0 to 3. Rank correlations: {_listed(pairs)}.",
    )


def _scatter(axis: Axes, pair: Pair) -> None:
    # As an image inside the SVG: thousands of marks would make it slow.
    axis.scatter(pair.ffcp.numpy(), pair.fcp.numpy(), s=5, c=DARK, alpha=0.35, linewidths=0,
                 rasterized=True)  # fmt: skip
    axis.set(xscale="log", yscale="log")
    for place, limit, values in (
        (axis.xaxis, axis.set_xlim, pair.ffcp),
        (axis.yaxis, axis.set_ylim, pair.fcp),
    ):
        limit(_most(values))
        # Small raised exponents do not read.
        place.set_major_formatter(lambda value, _: f"{value:g}")
        place.set_minor_formatter(lambda value, _: "")
    axis.set_title(
        f"split point {pair.split}:  {_RHO} = {pair.rank_correlation:.2f}", fontsize=10, loc="left"
    )
    without_frame(axis)


def _most(values: Tensor) -> tuple[float, float]:
    """Return axis limits without the lowest hundredth, which would take half of the axis."""
    low, high = float(torch.quantile(values, 0.01)), float(values.max())
    return low / 1.3, high * 1.3


def _listed(pairs: Sequence[Pair]) -> str:
    def values(way: str) -> str:
        return ", ".join(f"{pair.rank_correlation:.2f}" for pair in pairs if pair.way == way)

    return f"{values('descent')} with the descent; {values('exact')} with the exact distance"


def _pairs_caption(request: Request, pairs: Sequence[Pair], points: int) -> str:
    steps = ", ".join(str(pair.steps) for pair in pairs if pair.way == "descent")
    matched = ", ".join(f"{pair.matched_correlation:.2f}" for pair in pairs if pair.way == "exact")
    lost = ", ".join(str(pair.left_out) for pair in pairs)
    return (
        f"{points:,} calibration points of {request.data}, seed {request.seed}; both methods cut "
        f"the network at the same layer. {_RHO} is Spearman's rank correlation. Above: FCP's "
        "score as published, how far gradient descent gets from the feature in a number of steps "
        f"chosen on calibration rows ({steps} at split points 0 to 3). The descent goes far where "
        "the gradient is large, FFCP divides by it: stopped early, the two scores are "
        "different things. Below: the distance that the descent stands for, until the head "
        f"says y; FFCP's score approximates it to first order. FCP measures in the maximum norm, "
        "FFCP takes the Euclidean norm of the gradient, as in the tables; with the sum of absolute "
        f"values, which belongs to the maximum norm, {_RHO} would be {matched} below. "
        "Logarithmic axes, without the lowest 1 % "
        f"on each; scores that are zero or infinite are left out everywhere ({lost} points, by "
        "panel)."
    )


# -- histograms of scores ------------------------------------------------------------------------


def score_histograms(request: Request) -> Drawn:
    """Draw histograms of the scores of CP and FFCP with their quantile."""
    model, parts = request.trained()
    request.report(TRAINED_SHARE, f"{request.data}: scores of CP and FFCP")
    plain, fast = spreads(model, parts.x_cal, parts.y_cal, request.alpha, [SPLIT])
    if math.isinf(plain.quantile):
        raise ValueError(
            f"{len(plain.scores)} calibration points are too few for alpha = {request.alpha:g}"
        )
    figure = canvas(3.6)
    left, right = figure.subplots(1, 2, sharey=True)
    name = f"{level_text(request.alpha)} quantile"
    _histogram(left, plain, name, None)
    _histogram(right, fast, name, "////")
    left.set_xlabel(f"score  |y {_MINUS} f(x)|", fontsize=11)
    right.set_xlabel(f"score  |y {_MINUS} f(x)| / ‖gradient‖", fontsize=11)
    left.set_ylabel("calibration points", fontsize=11)
    left.set_title("CP", fontsize=12, loc="left")
    right.set_title(f"FFCP, split point {SPLIT}", fontsize=12, loc="left")
    return Drawn(
        figure,
        "Scores of CP and FFCP around their quantile",
        _spread_caption(request, plain, fast),
        f"Two histograms of the scores of {len(plain.scores):,} calibration points of "
        f"{request.data}. A dashed line marks the quantile: {plain.quantile:.3g} for CP, "
        f"{fast.quantile:.3g} for FFCP.",
    )


_REACH = 2.5  # how many times the quantile a histogram shows


def _histogram(axis: Axes, spread: Spread, name: str, hatch: str | None) -> None:
    # Both reach as far in terms of their quantile, so that their shapes can be compared.
    end = _REACH * spread.quantile
    axis.hist(spread.scores.numpy(), bins=40, range=(0, end), color=LIGHT, edgecolor=GREY,
              linewidth=0.6, hatch=hatch)  # fmt: skip
    axis.axvline(spread.quantile, color=DARK, linewidth=2, linestyle="--")
    axis.annotate(
        f"{name}\nQ = {spread.quantile:.3g}", (spread.quantile, 0.95), (6, 0),
        xycoords=("data", "axes fraction"), textcoords="offset points", va="top", fontsize=11,
        color=DARK,
    )  # fmt: skip
    axis.set_xlim(0, end)
    without_frame(axis)


def _spread_caption(request: Request, plain: Spread, fast: Spread) -> str:
    beyond = [
        share_text(float((s.scores > _REACH * s.quantile).double().mean())) for s in (plain, fast)
    ]
    closer = "closer to" if fast.scaled < plain.distance else "no closer to"
    holds = "holds" if fast.scaled < plain.shortfall else "does not hold"
    shorter = "shorter" if fast.half_length < plain.half_length else "no shorter"
    return (
        f"{len(plain.scores):,} calibration points of {request.data}, seed {request.seed}. Both "
        f"axes end at {_REACH:g} Q; {beyond[0]} of CP's scores and {beyond[1]} of FFCP's lie "
        f"beyond. The mean of |Q {_MINUS} score| over these points, on which the paper's square "
        f"conditions rest, is {plain.distance:.3g} for CP, in the unit of y, and "
        f"{fast.distance:.3g} for FFCP, in another unit: it changes if the feature is only "
        f"multiplied by a constant. Times the mean gradient norm, {fast.norm:.3g}, FFCP's is "
        f"{fast.scaled:.3g} in the unit of y: its scores are {closer} their quantile than CP's. "
        f"The expansion condition has the mean of Q {_MINUS} score, without bars, on CP's side: "
        f"{plain.shortfall:.3g}. With the mean norm in the place of its constant, exponent 1 and "
        f"without its last term, it {holds}. The bands it is about, of mean half length "
        f"{fast.half_length:.3g} for FFCP (mean norm times Q) and {plain.half_length:.3g} for CP "
        f"(Q), are {shorter}."
    )
