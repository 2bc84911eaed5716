"""Figures of bands: the overview, and the maps of band length of segmented images."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ffcp import CP, FCP, FFCP, FFCPWarning, Interval, metrics
from ffcp_paper.data import result_cache
from ffcp_paper.experiments import segmentation
from ffcp_paper.ffcp_internals import RegressionPredictor
from ffcp_paper.figures import segmentation_maps
from ffcp_paper.figures.drawing import (
    DARK,
    GREY,
    SPLIT,
    TRAINED_SHARE,
    Drawn,
    Request,
    canvas,
    level_text,
    share_text,
    without_frame,
)
from ffcp_paper.networks.regression import SPLIT_POINTS, mlp
from ffcp_paper.training.regression import train

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# As ``ffcp demo``: rows that train, calibrate and test, and how long its network is trained.
_DEMO_ROWS, _DEMO_EPOCHS = (2000, 4000, 10_000), 150
_VERSION = 1  # of the network of the overview; a change makes the stored one stale

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
    slow = FCP(model, layer, selection_alpha=request.alpha, seed=request.seed)
    panels = []
    for title, predictor in (("CP", CP(model)), ("FCP", slow), ("FFCP", FFCP(model, layer))):
        request.report(0.95, f"growth: {title}")
        panels.append(_panel(title, predictor, (x_cal, y_cal), (x, y), request.alpha))
    figure = canvas(4.0)
    axes = figure.subplots(1, 3, sharex=True, sharey=True, gridspec_kw={"wspace": 0.08})
    hatches = ("", "////", r"\\\\")
    for axis, panel, hatch in zip(axes, panels, hatches, strict=True):
        _bands(axis, panel, x[:, 0], y, hatch, request.alpha)
    axes[0].set_ylabel("y", fontsize=11)
    axes[0].set_ylim(top=_top(panels))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=11,
                  markerscale=1.5)  # fmt: skip
    result = "; ".join(
        f"{p.title} mean length {p.length:.2f}, coverage {share_text(p.coverage)}" for p in panels
    )
    return Drawn(
        figure,
        "CP, FCP and FFCP on the same points",
        _overview_caption(request, panels, len(y_cal), len(y)),
        f"Three panels over one input x with the same points, whose noise grows with x. CP's band "
        f"has the same width everywhere; those of FCP and FFCP vary with x. {result}.",
    )


Points = tuple[Tensor, Tensor]


def _growth(rows: int, generator: torch.Generator) -> Points:
    """Draw the demo's data whose noise grows with the level."""
    x = torch.rand(rows, 1, generator=generator)
    noise = torch.randn(rows, generator=generator)
    return x, torch.exp(3 * x[:, 0] + 0.25 * noise) / 5


def _demonstration(request: Request) -> tuple[nn.Module, Points, Points]:
    """Return the demo's network, calibration rows and test rows; fewer in a quick run."""
    seed, most = request.seed, request.settings.rows
    sizes = [min(rows, most or rows) for rows in _DEMO_ROWS]
    epochs = min(_DEMO_EPOCHS, request.settings.epochs)
    generator = torch.Generator().manual_seed(seed)
    (x, y), calibration, test = (_growth(rows, generator) for rows in sizes)
    done = 0

    def progress() -> None:
        nonlocal done
        done += 1
        request.report(TRAINED_SHARE * done / epochs, "growth: training")

    def fresh() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return mlp(x.shape[1])

    key = {"figure": "overview", "version": _VERSION, "rows": sizes[0], "epochs": epochs,
           "seed": seed}  # fmt: skip
    model = result_cache.network(
        key,
        fresh,
        lambda: train(fresh(), x, y[:, None], epochs=epochs, seed=seed, progress=progress),
    )
    return model, calibration, test


def _panel(
    title: str, predictor: RegressionPredictor, calibration: Points, test: Points, alpha: float
) -> _Panel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FFCPWarning)  # infinite bands are visible in the figure
        band = predictor.calibrate(*calibration).predict_interval(test[0], alpha)
    ball = float(predictor.feature_coverage(*test, alpha)) if isinstance(predictor, FCP) else None
    coverage = float(metrics.coverage(band, test[1]))
    return _Panel(title, band, metrics.mean_length(band), coverage, ball)


def _bands(axis: Axes, panel: _Panel, x: Tensor, y: Tensor, hatch: str, alpha: float) -> None:
    order = x.argsort()
    line = order[:: 1 + len(order) // 1000]
    lower, upper, centre = (part[line].numpy() for part in panel.band)
    at = x[line].numpy()
    level = f"{level_text(alpha)} band"
    axis.fill_between(at, lower, upper, facecolor="#e4e4e4", edgecolor="#b5b5b5", hatch=hatch,
                      linewidth=0)  # fmt: skip
    axis.plot(at, lower, color=DARK, linewidth=1.2, linestyle="--", label=level)
    axis.plot(at, upper, color=DARK, linewidth=1.2, linestyle="--")
    axis.plot(at, centre, color=DARK, linewidth=2, label="prediction")
    few = torch.arange(0, len(y), 1 + len(y) // 400)
    inside = panel.band.contains(y)[few]
    covered, missed = few[inside], few[~inside]
    axis.scatter(x[covered].numpy(), y[covered].numpy(), s=8, c=GREY, linewidths=0,
                 label="covered", zorder=1.5)  # fmt: skip
    axis.scatter(x[missed].numpy(), y[missed].numpy(), s=26, c="#8f2d00", marker="x",
                 linewidths=1.4, label="missed", zorder=3)  # fmt: skip
    axis.set_title(
        f"{panel.title}\nmean length {panel.length:.2f}\ncoverage {share_text(panel.coverage)}",
        fontsize=11, loc="left",
    )  # fmt: skip
    axis.set_xlabel("x", fontsize=11)
    axis.margins(x=0.02)
    axis.set_xticks([0, 0.5, 1])
    without_frame(axis)


def _top(panels: Sequence[_Panel]) -> float | None:
    """Return the upper limit of the y axis, which outliers would push far above all bands."""
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
        f"guarantee is about its ball, which holds {share_text(ball)} of the test points; its band "
        "is another object."
    )


# -- segmentation --------------------------------------------------------------------------------

_DRAWN = 3  # images
SEGMENTATION = "segmentation_"  # prefix of the names of these figures


def band_lengths(name: str, request: Request) -> Drawn:
    """Draw the band lengths for one of the networks of ``ffcp-paper segment``."""
    request.report(0.0, f"{name}: starting")
    result = segmentation.run(
        name, drawn=_DRAWN, methods=("CP", "FCP", "FFCP"), sets=False,
        progress=lambda text: request.report(0.0, f"{name}: {text}"),
    )  # fmt: skip
    figure = segmentation_maps.picture(result)
    _enlarge(figure)
    ratios = ", ".join(f"{row.method} {row.contrast:.2f}" for row in result.rows)
    return Drawn(
        figure,
        f"Where bands are long: {result.experiment.title}",
        f"Test images of {result.experiment.title}: image, label, prediction, and the length of "
        "the bands for a pixel, averaged over classes; brighter is longer. Each method has its "
        "own scale, which leaves out a few extreme pixels. Mean length on boundaries over mean "
        f"length inside objects: {ratios}.",
        f"{_DRAWN} test images in rows: image, label map, predicted label map, and maps of band "
        f"length for CP, FCP and FFCP. Length on boundaries over length inside objects: "
        f"{ratios}.",
    )


def _enlarge(figure: Figure) -> None:
    """Enlarge the text of the wide picture so that it is legible at 900 px."""
    for axis in figure.axes:
        axis.title.set_fontsize(14)
        axis.tick_params(labelsize=12)
