"""Printed tables of a segmentation experiment, and maps of band length beside the images."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor

from ffcp_paper.console import print_table
from ffcp_paper.experiments.segmentation import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("method", "coverage", "length", "boundary", "interior", "ratio", "calibrate", "predict")
SET_COLUMNS = ("score", "guarantee", "coverage", "labels", "one label", "boundary", "interior")


def report(console: Console, result: Result) -> None:
    """Print the accuracy of the network, its bands and its prediction sets."""
    known = {name: share for name, share in result.recall.items() if not math.isnan(share)}
    recall = [f"{name} {share:.0%}" for name, share in known.items()]
    console.print(
        f"\n[bold]{result.experiment.title}[/bold]: {result.accuracy:.1%} of pixels right, "
        f"mean IoU {result.mean_iou:.2f}; recall of each class: {', '.join(recall)}",
        highlight=False,
    )
    print_table(console, COLUMNS, tabulate(result))
    for row in result.rows:
        if row.infinite:
            console.print(
                f"{row.method}: {row.infinite:.1%} of the places have no finite band, because too "
                "few calibration images are labelled there; lengths exclude them.",
                highlight=False,
            )
    console.print("\nPrediction sets for every pixel", highlight=False)
    print_table(console, SET_COLUMNS, tabulate_sets(result))


def tabulate(result: Result) -> list[list[str]]:
    """Format the lines of the table of bands."""
    return [
        [
            row.method, f"{row.coverage:.1%}", f"{row.length:.2f}", f"{row.boundary:.2f}",
            f"{row.interior:.2f}", f"{row.contrast:.2f}", f"{row.calibrate:.1f} s",
            f"{row.predict:.1f} s",
        ]
        for row in result.rows
    ]  # fmt: skip


def tabulate_sets(result: Result) -> list[list[str]]:
    """Format the lines of the table of prediction sets."""
    return [
        [
            row.score, row.promise, f"{row.kept:.1%}", f"{row.size:.2f}",
            f"{row.certain:.0%}", f"{row.boundary:.2f}", f"{row.interior:.2f}",
        ]
        for row in result.sets
    ]  # fmt: skip


def picture(result: Result) -> Figure:
    """Draw image, label, prediction and the maps of band length side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = result.drawn
    outcome = [row for row in result.rows if row.method in ("CP", "FCP", "FFCP")]
    height, width = shown.labels.shape[1:]
    columns = 3 + len(outcome)
    tall = 2.3 * height / width
    figure = Figure(figsize=(2.35 * columns, (tall + 0.05) * len(shown) + 0.6))
    FigureCanvasAgg(figure)
    # A thin last line holds the scales, so that all images are of one size.
    grid = figure.add_gridspec(
        len(shown) + 1, columns, height_ratios=[*[tall] * len(shown), 0.08],
        left=0.005, right=0.995, top=1 - 0.28 / figure.get_figheight(),
        bottom=0.3 / figure.get_figheight(), wspace=0.03, hspace=0.04,
    )  # fmt: skip
    titles = ["image", "label", "prediction", *(f"{row.method}: band length" for row in outcome)]
    for line in range(len(shown)):
        for column, drawn in enumerate(
            [*_views(result, line), *(row.maps[line] for row in outcome)]
        ):
            axis = figure.add_subplot(grid[line, column])
            axis.set_axis_off()
            if not line:
                axis.set_title(titles[column], fontsize=9)
            # A length takes the scale of its method, which serves all images.
            scale = _scale(outcome[column - 3].maps) if column > 2 else {}
            image = axis.imshow(drawn.numpy(), aspect="auto", interpolation="nearest", **scale)
            if column > 2 and line == len(shown) - 1:
                bar = figure.add_subplot(grid[-1, column])
                figure.colorbar(image, cax=bar, orientation="horizontal", extend="max")
                bar.tick_params(labelsize=7)
    return figure


def _views(result: Result, line: int) -> list[Tensor]:
    """Return the image, its label map and the prediction, each as colours (height, width, 3)."""
    shown = result.drawn
    labels = shown.labels[line].long()
    if shown.ignore is not None:
        labels = labels.masked_fill(labels == shown.ignore, shown.classes)
    colours = torch.tensor([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in _COLOURS])
    colours = torch.cat([colours[: shown.classes], torch.zeros(1, 3, dtype=torch.long)])  # ignored
    painted = [colours[label_map].byte() for label_map in (labels, result.predicted[line])]
    return [shown.pixels[line].permute(1, 2, 0), *painted]


def _scale(maps: Tensor) -> dict[str, Any]:
    """Return the colour scale of lengths, by quantiles, so that extreme pixels do not set it."""
    known = maps[maps.isfinite()]
    thinned = known[:: 1 + known.numel() // 2**20]  # torch.quantile has a limit
    low, high = torch.quantile(thinned, _SCALE).tolist()
    return {"cmap": "inferno", "vmin": low, "vmax": high}


_SCALE = torch.tensor([0.01, 0.96])  # quantiles; what is above is drawn as the brightest
# Dark and light alternate, so that neighbours differ in grey too.
_COLOURS = (
    "#9ecae9", "#7a3b2e", "#f7f7f7", "#8a6fa8", "#f2a7c3", "#3f8f4f", "#f0e442", "#b08d57",
    "#1f3b8c", "#e6550d", "#40c8c8",
)  # fmt: skip
