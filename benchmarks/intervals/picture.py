"""A picture of intervals on three kinds of noise: growing, the same everywhere, skewed."""

from __future__ import annotations

import math
import textwrap
import warnings
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

import ffcp
from benchmarks.intervals.cases import ALPHA
from ffcp import metrics, plots
from ffcp.cli import demo
from ffcp.regression.regression_predictor import RegressionPredictor

_EPOCHS, _SEED = 100, 0
_SHOWN = 800  # test points in a panel; numbers are those of all


def _skewed(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.rand(rows, 1, generator=generator)
    late = -torch.rand(rows, generator=generator).clamp_min(1e-6).log()  # exponential
    return x, torch.sin(3 * math.pi * x[:, 0]) + 0.5 * late


_DATA = (*demo.DATA_SETS, demo.DataSet("late", "errors to one side only", _skewed))
_TITLES = ("growing noise", "the same noise everywhere", "skewed noise")


def draw(path: Path) -> None:
    """Train a small network on each data set, and draw the intervals of four methods."""
    torch.set_num_threads(1)
    figure = Figure(figsize=(14, 8.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 4, sharex=True, sharey="row")
    for line, data, title in zip(axes, _DATA, _TITLES, strict=True):
        generator = torch.Generator().manual_seed(_SEED)
        train, cal, test = (
            data.draw(rows, generator) for rows in (demo.TRAIN, demo.CALIBRATE, demo.TEST)
        )
        with torch.random.fork_rng():
            torch.manual_seed(_SEED)
            model = demo.network(1)
        x, y = train
        demo.train(model, x, y[:, None], epochs=_EPOCHS, seed=_SEED, progress=lambda: None)
        methods = {
            "CP": ffcp.CP(model),
            "FFCP, layer chosen": ffcp.FFCP(model, selection_alpha=ALPHA, seed=_SEED),
            "Auto": ffcp.Auto(model, selection_alpha=ALPHA, seed=_SEED).fit(x, y),
            "Auto, by length": ffcp.Auto(model, "length", selection_alpha=ALPHA, seed=_SEED).fit(
                x, y
            ),
        }
        limits: list[tuple[float, float]] = []
        for panel, (name, predictor) in zip(line, methods.items(), strict=True):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ffcp.FFCPWarning)
                predictor.calibrate(*cal)
            chosen = name
            if isinstance(predictor, ffcp.Auto):
                chosen = textwrap.fill(f"{name}: {predictor.method}", 46)
            _panel(panel, predictor, chosen, *test)
            limits.append(panel.get_ylim())
        lows, highs = zip(*limits, strict=True)
        line[0].set_ylim(min(lows), max(highs))
        line[0].set_ylabel(title)
    for panel in axes[-1]:
        panel.set_xlabel("x")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=4, frameon=False, markerscale=2
    )
    figure.savefig(path, dpi=100)


def _panel(panel: Axes, predictor: RegressionPredictor, name: str, x: Tensor, y: Tensor) -> None:
    interval = predictor.predict_interval(x, ALPHA)
    lower, upper, prediction = (part[:_SHOWN] for part in interval)
    some = ffcp.Interval(lower, upper, prediction, ALPHA)
    plots.intervals(some, x[:_SHOWN, 0], y[:_SHOWN], ax=panel, xlabel=" ", ylabel=" ")
    if (legend := panel.get_legend()) is not None:
        legend.remove()  # there is one for all
    score, length = metrics.interval_score(interval, y, ALPHA), metrics.mean_length(interval)
    coverage = metrics.coverage(interval, y)
    panel.set_title(
        f"{name}\nscore {score:.2f}, length {length:.2f}, coverage {coverage:.1%}",
        fontsize=9,
        loc="left",
    )
    panel.spines[["top", "right"]].set_visible(False)
