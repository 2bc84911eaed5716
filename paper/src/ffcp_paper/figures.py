"""The paper's figures with our data, each as SVG, PNG and a JSON file with its words.

A figure is a function of a :class:`Request` that gives a :class:`Drawn`; :data:`FIGURES` lists
them and :func:`write` puts them into a folder, where :mod:`ffcp_paper.report` finds them.
Everything is drawn to be read in grey too: marks, line styles and hatches tell things apart.
"""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ffcp import CP, FCP, FFCP, FFCPWarning, Interval, conformal_quantile, gradient_norms, metrics
from ffcp_paper import runs, segments
from ffcp_paper.core import BandPredictor, put
from ffcp_paper.data import DataFile
from ffcp_paper.datasets import Split
from ffcp_paper.experiments import TRAINED, Report, Settings, Study, available
from ffcp_paper.networks import SPLIT_POINTS, mlp
from ffcp_paper.training import train

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Progress = Callable[[float, float, str], None]  # done, total, and what is being done

SPLIT = 2  # where the paper's histograms and our overview take the gradient
_INSIDE = range(4)  # split point 4 is the output, where FFCP is CP
_MOST_POINTS = 1500  # in a scatter plot; more hide each other
_WIDE = 9.0  # inches; at 900 px a point of type is 1.4 px
_RHO, _MINUS = "\N{GREEK SMALL LETTER RHO}", "\N{MINUS SIGN}"
_DARK, _GREY, _LIGHT = "#1a1a1a", "#8c8c8c", "#d9d9d9"
_TRAINED_SHARE = 0.9  # of the time of a figure, if its network has to be trained
# As ``ffcp demo``: rows that train, calibrate and test, and how long its network is trained.
_DEMO_ROWS, _DEMO_EPOCHS = (2000, 4000, 10_000), 150
_VERSION = 1  # of the network of the overview; a change makes the stored one stale


@dataclass(frozen=True)
class Request:
    """What a figure is drawn from.

    Parameters
    ----------
    settings
        How much is computed, as for the tables.
    data
        The data set of the figures about scores; see :func:`default_data`.
    seed
        Of the division of the rows and of the network.
    alpha
        Share of misses allowed.
    report
        Called with the share that is done of a figure, and what is being done.
    """

    settings: Settings = field(default_factory=Settings)
    data: str = "synthetic"
    seed: int = 0
    alpha: float = 0.1
    report: Report = lambda share, text: None

    def trained(self) -> tuple[nn.Module, Split]:
        """Give the network and the rows of the tables, from the cache if they are there."""
        # The networks of other seeds are not needed; those of the tables serve, for each is kept
        # under its own seed.
        study = Study(
            self.data,
            replace(self.settings, seeds=self.seed + 1),
            lambda share, text: self.report(_TRAINED_SHARE * share, text),
        )
        return study.models(TRAINED)[self.seed], study.parts(self.seed)


@dataclass(frozen=True)
class Drawn:
    """A figure with its words: heading, caption, and what to say to those who cannot see it."""

    figure: Figure
    title: str
    caption: str
    alt: str


def default_data(settings: Settings) -> str:
    """Choose the data set of the figures: bike if its file is there, else synthetic.

    >>> default_data(Settings(only=("synthetic",)))
    'synthetic'
    """
    wanted = ("bike", "synthetic", *(settings.only or ()))
    allowed = [name for name in wanted if settings.only is None or name in settings.only]
    return next((name for name in allowed if available(name)), "synthetic")


def _canvas(height: float) -> Figure:
    # The object-oriented interface: no window system, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDE, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _plain(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=9)


def _share(share: float) -> str:
    """Write a share as a percentage.

    >>> _share(0.9)
    '90.0 %'
    """
    return f"{100 * share:.1f} %"


def _level(alpha: float) -> str:
    """Write the level of a band.

    >>> _level(0.1), _level(0.025)
    ('90 %', '97.5 %')
    """
    return f"{100 * (1 - alpha):g} %"


# -- scores of FCP and FFCP ----------------------------------------------------------------------

#: FCP's two ways to a score: what rows of panels are called, and the arguments of ``FCP``.
_WAYS = {"descent": "descent, as published", "exact": "exact distance"}


@dataclass(frozen=True)
class Pair:
    """Scores of the same points by FFCP and FCP at one split point, where both can be drawn.

    A logarithmic axis has no place for zero, nor for a point that FCP cannot reach.
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
    """Give the rank correlation.

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
    >>> x, y = torch.rand(60, 2), torch.rand(60)
    >>> [(pair.way, pair.split) for pair in score_pairs(mlp(2), x, y, alpha=0.1, seed=0)][3:5]
    [('descent', 3), ('exact', 0)]
    """
    found = []
    for way in _WAYS:
        for split in _INSIDE:
            layer = SPLIT_POINTS[split]
            slow = FCP(model, layer, invert=way, choose_alpha=alpha, seed=seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FFCPWarning)  # lost points are counted below
                slow.calibrate(x, y)
                theirs = slow.score(x, y).reshape(-1)
            ours, matched = (FFCP(model, layer, norm).score(x, y).reshape(-1) for norm in (2, 1))
            shown = theirs.isfinite() & ours.isfinite() & (theirs > 0) & (ours > 0)
            ours, theirs, matched = (scores[shown] for scores in (ours, theirs, matched))
            steps = slow.steps if way == "descent" else None
            found.append(Pair(split, way, ours, theirs, matched, int((~shown).sum()), steps))
    return found


def scores_fcp_ffcp(request: Request) -> Drawn:
    """Draw FCP's score against FFCP's, a column for each split point.

    The score of FCP is that of its descent in the upper row, as published, and the distance that
    the descent stands for in the lower.
    """
    model, parts = request.trained()
    some = slice(_MOST_POINTS)  # the division has shuffled them
    x, y = parts.x_cal[some], parts.y_cal[some]
    request.report(_TRAINED_SHARE, f"{request.data}: scores of FCP and FFCP")
    pairs = score_pairs(model, x, y, alpha=request.alpha, seed=request.seed)
    figure = _canvas(5.2)
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
    axis.scatter(pair.ffcp.numpy(), pair.fcp.numpy(), s=5, c=_DARK, alpha=0.35, linewidths=0,
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
    _plain(axis)


def _most(values: Tensor) -> tuple[float, float]:
    """Give limits for an axis that leave out the lowest hundredth, which takes half of its room."""
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


@dataclass(frozen=True)
class Spread:
    """How far scores are from their quantile, in their own unit and in that of y.

    Parameters
    ----------
    method
        CP or FFCP.
    scores
        Of the calibration points.
    quantile
        Their (1 - alpha) quantile Q, with the conformal rank.
    norm
        Mean gradient norm over the same points, which takes a score to the unit of y; 1 for CP.
    """

    method: str
    scores: Tensor
    quantile: float
    norm: float = 1.0

    @property
    def distance(self) -> float:
        """Mean distance between Q and a score, the quantity of the paper's expansion condition."""
        return float((self.quantile - self.scores).abs().mean())

    @property
    def shortfall(self) -> float:
        """Mean of Q - score, which the condition has on CP's side."""
        return float((self.quantile - self.scores).mean())

    @property
    def scaled(self) -> float:
        """Mean distance between Q and a score, times the mean gradient norm: in the unit of y."""
        return self.norm * self.distance

    @property
    def half_length(self) -> float:
        """Mean half length of the bands at these points."""
        return self.norm * self.quantile


def spreads(model: nn.Module, x: Tensor, y: Tensor, alpha: float) -> tuple[Spread, Spread]:
    """Give scores and quantiles of CP and of FFCP at split point 2, on the same points.

    >>> x, y = torch.rand(60, 2), torch.rand(60)
    >>> plain, fast = spreads(mlp(2), x, y, alpha=0.1)
    >>> plain.norm, bool((fast.scores >= 0).all())
    (1.0, True)
    """
    layer = SPLIT_POINTS[SPLIT]
    fast = FFCP(model, layer)
    _, norms = gradient_norms(model, x, [layer])
    mean = float(norms[layer].double().clamp_min(fast.floor).mean())
    found = []
    for made, norm in ((CP(model), 1.0), (fast, mean)):
        scores = made.score(x, y).reshape(-1)
        quantile = float(conformal_quantile(scores, alpha))
        found.append(Spread(type(made).__name__, scores, quantile, norm))
    return found[0], found[1]


def score_histograms(request: Request) -> Drawn:
    """Draw how the scores of CP and FFCP are spread around their quantile."""
    model, parts = request.trained()
    request.report(_TRAINED_SHARE, f"{request.data}: scores of CP and FFCP")
    plain, fast = spreads(model, parts.x_cal, parts.y_cal, request.alpha)
    if math.isinf(plain.quantile):
        raise ValueError(
            f"{len(plain.scores)} calibration points are too few for alpha = {request.alpha:g}"
        )
    figure = _canvas(3.6)
    left, right = figure.subplots(1, 2, sharey=True)
    name = f"{_level(request.alpha)} quantile"
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
    axis.hist(spread.scores.numpy(), bins=40, range=(0, end), color=_LIGHT, edgecolor=_GREY,
              linewidth=0.6, hatch=hatch)  # fmt: skip
    axis.axvline(spread.quantile, color=_DARK, linewidth=2, linestyle="--")
    axis.annotate(
        f"{name}\nQ = {spread.quantile:.3g}", (spread.quantile, 0.95), (6, 0),
        xycoords=("data", "axes fraction"), textcoords="offset points", va="top", fontsize=11,
        color=_DARK,
    )  # fmt: skip
    axis.set_xlim(0, end)
    _plain(axis)


def _spread_caption(request: Request, plain: Spread, fast: Spread) -> str:
    beyond = [
        _share(float((s.scores > _REACH * s.quantile).double().mean())) for s in (plain, fast)
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


# -- overview ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Panel:
    """One method on the test points of the overview."""

    title: str
    band: Interval
    length: float
    coverage: float
    feature_coverage: float | None


def overview(request: Request) -> Drawn:
    """Draw the bands of CP, FCP and FFCP on the demo's data of growing noise."""
    model, (x_cal, y_cal), (x, y) = _demonstration(request)
    layer = SPLIT_POINTS[SPLIT]
    slow = FCP(model, layer, choose_alpha=request.alpha, seed=request.seed)
    panels = []
    for title, made in (("CP", CP(model)), ("FCP", slow), ("FFCP", FFCP(model, layer))):
        request.report(0.95, f"growth: {title}")
        panels.append(_panel(title, made, (x_cal, y_cal), (x, y), request.alpha))
    figure = _canvas(4.0)
    axes = figure.subplots(1, 3, sharex=True, sharey=True, gridspec_kw={"wspace": 0.08})
    hatches = ("", "////", r"\\\\")
    for axis, panel, hatch in zip(axes, panels, hatches, strict=True):
        _bands(axis, panel, x[:, 0], y, hatch, request.alpha)
    axes[0].set_ylabel("y", fontsize=11)
    axes[0].set_ylim(top=_top(panels))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=11,
                  markerscale=1.5)  # fmt: skip
    found = "; ".join(
        f"{p.title} mean length {p.length:.2f}, coverage {_share(p.coverage)}" for p in panels
    )
    return Drawn(
        figure,
        "CP, FCP and FFCP on the same points",
        _overview_caption(request, panels, len(y_cal), len(y)),
        f"Three panels over one input x with the same points, whose noise grows with x. CP's band "
        f"has the same width everywhere; those of FCP and FFCP vary with x. {found}.",
    )


Points = tuple[Tensor, Tensor]


def _growth(rows: int, generator: torch.Generator) -> Points:
    """Draw the demo's data whose noise grows with the level."""
    x = torch.rand(rows, 1, generator=generator)
    noise = torch.randn(rows, generator=generator)
    return x, torch.exp(3 * x[:, 0] + 0.25 * noise) / 5


def _demonstration(request: Request) -> tuple[nn.Module, Points, Points]:
    """Give the demo's network for growth, calibration and test points; smaller if asked."""
    seed, most = request.seed, request.settings.rows
    sizes = [min(rows, most or rows) for rows in _DEMO_ROWS]
    epochs = min(_DEMO_EPOCHS, request.settings.epochs)
    generator = torch.Generator().manual_seed(seed)
    (x, y), calibration, test = (_growth(rows, generator) for rows in sizes)
    done = 0

    def progress() -> None:
        nonlocal done
        done += 1
        request.report(_TRAINED_SHARE * done / epochs, "growth: training")

    def fresh() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return mlp(x.shape[1])

    key = {"figure": "overview", "version": _VERSION, "rows": sizes[0], "epochs": epochs,
           "seed": seed}  # fmt: skip
    model = runs.network(
        key,
        fresh,
        lambda: train(fresh(), x, y[:, None], epochs=epochs, seed=seed, progress=progress),
    )
    return model, calibration, test


def _panel(
    title: str, made: BandPredictor, calibration: Points, test: Points, alpha: float
) -> _Panel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FFCPWarning)  # the picture shows what came out
        band = made.calibrate(*calibration).predict_interval(test[0], alpha)
    ball = float(made.feature_coverage(*test, alpha)) if isinstance(made, FCP) else None
    coverage = float(metrics.coverage(band, test[1]))
    return _Panel(title, band, metrics.mean_length(band), coverage, ball)


def _bands(axis: Axes, panel: _Panel, x: Tensor, y: Tensor, hatch: str, alpha: float) -> None:
    order = x.argsort()
    line = order[:: 1 + len(order) // 1000]
    lower, upper, centre = (part[line, 0].numpy() for part in panel.band)
    at = x[line].numpy()
    level = f"{_level(alpha)} band"
    axis.fill_between(at, lower, upper, facecolor="#e4e4e4", edgecolor="#b5b5b5", hatch=hatch,
                      linewidth=0)  # fmt: skip
    axis.plot(at, lower, color=_DARK, linewidth=1.2, linestyle="--", label=level)
    axis.plot(at, upper, color=_DARK, linewidth=1.2, linestyle="--")
    axis.plot(at, centre, color=_DARK, linewidth=2, label="prediction")
    few = torch.arange(0, len(y), 1 + len(y) // 400)
    inside = (panel.band.lower[few, 0] <= y[few]) & (y[few] <= panel.band.upper[few, 0])
    covered, missed = few[inside], few[~inside]
    axis.scatter(x[covered].numpy(), y[covered].numpy(), s=8, c=_GREY, linewidths=0,
                 label="covered", zorder=1.5)  # fmt: skip
    axis.scatter(x[missed].numpy(), y[missed].numpy(), s=26, c="#8f2d00", marker="x",
                 linewidths=1.4, label="missed", zorder=3)  # fmt: skip
    axis.set_title(
        f"{panel.title}\nmean length {panel.length:.2f}\ncoverage {_share(panel.coverage)}",
        fontsize=11, loc="left",
    )  # fmt: skip
    axis.set_xlabel("x", fontsize=11)
    axis.margins(x=0.02)
    axis.set_xticks([0, 0.5, 1])
    _plain(axis)


def _top(panels: Sequence[_Panel]) -> float | None:
    """Give the end of the y axis: a point far above all bands would press them flat."""
    ends = torch.cat([panel.band.upper for panel in panels])
    return 1.1 * float(ends.max()) if ends.isfinite().all() else None


def _overview_caption(request: Request, panels: Sequence[_Panel], calibrate: int, test: int) -> str:
    ball = next(panel.feature_coverage for panel in panels if panel.feature_coverage is not None)
    return (
        "The demo's growth data, whose noise grows with the level, and one network for all three "
        f"panels; {calibrate:,} points calibrate and {test:,} test, of which some are drawn; the y "
        "axis leaves out points far above all bands. CP puts the same width around every "
        "prediction. FCP takes distances in feature space and "
        "bounds what the head does to a ball there; FFCP divides errors by the norm of the "
        f"gradient, which replaces both steps. FCP and FFCP cut at split point {SPLIT}. FCP's "
        f"guarantee is about its ball, which holds {_share(ball)} of the test points; its band "
        "is another object."
    )


# -- segmentation --------------------------------------------------------------------------------

_DRAWN = 3  # images
_SEGMENTATION = "segmentation_"  # what the names of these figures begin with


def segmentation(name: str, request: Request) -> Drawn:
    """Draw the band lengths for one of the networks of ``ffcp-paper segment``."""
    request.report(0.0, f"{name}: starting")
    result = segments.run(
        name, drawn=_DRAWN, methods=("CP", "FCP", "FFCP"), sets=False,
        progress=lambda text: request.report(0.0, f"{name}: {text}"),
    )  # fmt: skip
    figure = segments.picture(result)
    _enlarge(figure)
    ratios = ", ".join(f"{row.method} {row.contrast:.2f}" for row in result.rows)
    return Drawn(
        figure,
        f"Where bands are long: {result.experiment.title}",
        f"Test images of {result.experiment.title}: image, label, prediction, and the length of "
        "the bands for a pixel, averaged over classes; brighter is longer. Each method has its "
        "own scale, which leaves out a few extreme pixels. Mean length on boundaries over mean "
        f"length inside of objects: {ratios}.",
        f"{_DRAWN} test images in rows: image, label map, predicted label map, and maps of band "
        f"length for CP, FCP and FFCP. Length on boundaries over length inside of objects: "
        f"{ratios}.",
    )


def _enlarge(figure: Figure) -> None:
    """Make words of the wide picture large enough to be read at 900 px."""
    for axis in figure.axes:
        axis.title.set_fontsize(14)
        axis.tick_params(labelsize=12)


# -- writing -------------------------------------------------------------------------------------

#: The figures by name, in the order of the page.
FIGURES: dict[str, Callable[[Request], Drawn]] = {
    "overview": overview,
    "scores_fcp_ffcp": scores_fcp_ffcp,
    "score_histograms": score_histograms,
    **{f"{_SEGMENTATION}{name}": partial(segmentation, name) for name in segments.EXPERIMENTS},
}
DPI = 150
_SECONDS = {
    f"{_SEGMENTATION}shapes": 80.0,
    f"{_SEGMENTATION}camvid": 1200.0,
    f"{_SEGMENTATION}deeplab": 300.0,
}
_QUICK_NOTE = "A quick run: few rows and epochs, which say nothing about the paper."


def write(
    names: Sequence[str] = (),
    folder: str | Path = "reproduced",
    settings: Settings | None = None,
    progress: Progress = lambda done, total, text: None,
    *,
    data: str | None = None,
    seed: int = 0,
    alpha: float = 0.1,
) -> list[str]:
    """Draw figures and write each as SVG, PNG and JSON, every file whole or not at all.

    Parameters
    ----------
    names
        Which, of :data:`FIGURES`; those :func:`at_hand` if empty.
    folder
        Where to write: ``figures/NAME.svg``, ``figures/NAME.png`` and ``figures/NAME.json``.
    settings
        How much is computed, as for the tables, whose networks are used.
    progress
        Called with what is done and what there is in total, in rough seconds, and with what is
        being done.
    data
        The data set of the figures about scores, or that of :func:`default_data`.
    seed, alpha
        Seed of rows and network, and share of misses allowed.

    Returns
    -------
    list of str
        The names of the figures that were written.

    Raises
    ------
    ValueError
        If there is no figure of a name.

    Examples
    --------
    >>> write(["overview"], "somewhere")  # doctest: +SKIP
    ['overview']
    """
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        raise ValueError(f"there is no figure {unknown[0]!r}: choose from {', '.join(FIGURES)}")
    chosen = Settings() if settings is None else settings
    wanted = [name for name in FIGURES if name in names] if names else at_hand(chosen)
    used = default_data(chosen) if data is None else data
    total, done = sum(map(cost, wanted)), 0.0
    for name in wanted:

        def report(share: float, text: str, name: str = name, done: float = done) -> None:
            progress(done + min(1.0, share) * cost(name), total, text)

        drawn = FIGURES[name](Request(chosen, used, seed, alpha, report))
        if not name.startswith(_SEGMENTATION) and chosen.rows is not None:
            drawn = replace(drawn, caption=f"{drawn.caption} {_QUICK_NOTE}")
        save(name, drawn, Path(folder))
        done += cost(name)
        progress(done, total, name)
    return wanted


def at_hand(settings: Settings) -> list[str]:
    """List the figures that can be drawn; a quick run leaves out segmentation, which takes long.

    >>> at_hand(Settings(rows=2000))
    ['overview', 'scores_fcp_ffcp', 'score_histograms']
    """
    return [
        name
        for name in FIGURES
        if not name.startswith(_SEGMENTATION) or (settings.rows is None and not missing(name))
    ]


def missing(name: str) -> list[DataFile]:
    """List the files that a figure needs and that are not there."""
    wanted = segments.FILES.get(name.removeprefix(_SEGMENTATION), ())
    return [file for file in wanted if file.found is None]


def cost(name: str) -> float:
    """Guess the seconds that a figure takes if nothing is in the cache, for a progress bar.

    >>> cost("overview") < cost("segmentation_camvid")
    True
    """
    return _SECONDS.get(name, 10.0)


def save(name: str, drawn: Drawn, folder: Path) -> list[Path]:
    """Write one figure into ``folder/figures``; return the files."""
    words = {"title": drawn.title, "caption": drawn.caption, "alt": drawn.alt}
    contents = {
        ".svg": _rendered(drawn.figure, "svg"),
        ".png": _rendered(drawn.figure, "png"),
        # JSON last: who finds it finds the others too.
        ".json": (json.dumps(words, indent=1, ensure_ascii=False) + "\n").encode(),
    }
    places = []
    for suffix, content in contents.items():
        place = folder / "figures" / f"{name}{suffix}"
        put(place, content)
        places.append(place)
    return places


def _rendered(figure: Figure, kind: str) -> bytes:
    import matplotlib

    out = io.BytesIO()
    # Words stay words, which can be searched and read aloud; equal figures give equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ffcp"}):
        metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
        figure.savefig(out, format=kind, dpi=DPI, metadata=metadata)
    return out.getvalue()
