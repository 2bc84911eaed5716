"""Coverage over time of CP, FFCP and online methods, on hourly rentals and on synthetic drift.

The first rows of a series train a network, the next ones calibrate, and the rest form a stream of
batches: all rows of a batch are predicted before any of their labels is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import ffcp
from ffcp_paper.data import datasets
from ffcp_paper.networks.regression import mlp
from ffcp_paper.training.regression import train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("bike", "break")
FEATURE = "3"
LOCAL = 200  # rows of a moving average
_COLOURS = {"CP": "#6e7781", "FFCP": "#0969da", "aci": "#cf222e", "dtaci": "#8250df"}
_COLOURS["pid"] = "#1a7f37"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Series:
    """Rows in the order of time, and how they are split."""

    name: str
    x: Tensor
    y: Tensor
    train: int
    calibrate: int
    batch: int
    epochs: int
    marks: dict[int, str]  # change points, by row of the stream


@dataclass(frozen=True)
class Tracked:
    """Hits and band lengths of a method, for every row of the stream."""

    hits: np.ndarray
    lengths: np.ndarray

    @property
    def local(self) -> np.ndarray:
        """Coverage over a moving window of rows."""
        sums = np.concatenate([[0], np.cumsum(self.hits)])
        local: np.ndarray = (sums[LOCAL:] - sums[:-LOCAL]) / LOCAL
        return local


@dataclass(frozen=True)
class Result:
    """The results of all methods on a series."""

    series: Series
    alpha: float
    tracked: dict[str, Tracked]
    alarms: dict[str, int | None]
    novelty: dict[str, float]


def series_of(name: str, seed: int = 0) -> Series:
    """Return a series: hourly rentals, or a synthetic one with two change points."""
    if name == "bike":
        table = datasets.load("bike")
        rows = len(table.y)
        count = int(0.4 * rows)
        x = torch.from_numpy(table.x)
        # Drop constant columns: the year of the stream does not occur in training.
        varies = x[:count].std(dim=0) > 0
        x = x[:, varies]
        x = (x - x[:count].mean(dim=0)) / x[:count].std(dim=0)
        y = torch.from_numpy(table.y).float()
        calibrated = int(0.2 * rows)
        return Series(name, x, y / y[:count].mean(), count, calibrated, 24, 100, {})
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6000, 4, generator=generator)
    x[5000:] *= 1.6
    level = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2]
    noise = (0.2 + 0.2 * x[:, 1].abs()) * torch.randn(6000, generator=generator)
    noise[4000:] *= 2.5
    marks = {1000: "noise x 2.5", 2000: "inputs x 1.6"}
    return Series(name, x, level + noise, 2000, 1000, 10, 60, marks)


def run(
    name: str, alpha: float = 0.1, seed: int = 0, progress: Progress = lambda line: None
) -> Result:
    """Train, calibrate, and run every method on the stream."""
    series = series_of(name, seed)
    a, b = series.train, series.train + series.calibrate
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = mlp(series.x.shape[1])
    progress("training")
    train(model, series.x[:a], series.y[:a, None], epochs=series.epochs, seed=seed)
    cal, new = (series.x[a:b], series.y[a:b]), (series.x[b:], series.y[b:])
    plain = ffcp.CP(model).calibrate(*cal)
    fast = ffcp.FFCP(model, FEATURE).calibrate(*cal)
    tracked = {
        "CP": _measured(plain.predict_interval(new[0], alpha), new[1]),
        "FFCP": _measured(fast.predict_interval(new[0], alpha), new[1]),
    }
    for method in ("aci", "dtaci", "pid"):
        progress(f"Online(FFCP, {method!r})")
        tracked[method] = _streamed(ffcp.Online(fast, method, alpha), *new, series.batch)
    progress("Monitor")
    monitor = ffcp.Monitor(fast, alpha, seed=seed).start(cal[0])
    for part in torch.arange(len(new[0])).split(500):
        monitor.update(new[0][part], new[1][part])
    novelty = _novelty(monitor, cal[0], new[0][max(series.marks, default=0) :])
    return Result(series, alpha, tracked, monitor.alarms, novelty)


def _streamed(online: ffcp.Online, x: Tensor, y: Tensor, batch: int) -> Tracked:
    parts = []
    for rows in torch.arange(len(x)).split(batch):
        parts.append(_measured(online.predict_interval(x[rows]), y[rows]))
        online.update(x[rows], y[rows])
    return Tracked(
        np.concatenate([part.hits for part in parts]),
        np.concatenate([part.lengths for part in parts]),
    )


def _measured(band: ffcp.Interval, y: Tensor) -> Tracked:
    return Tracked(band.contains(y).numpy(), band.width.double().numpy())


def _novelty(monitor: ffcp.Monitor, old: Tensor, new: Tensor) -> dict[str, float]:
    """Return how well each monitored feature separates drifted rows from calibration rows.

    Measured by the area under the ROC curve of the distance from the old median; 0.5 is chance.
    """
    half = len(old) // 2
    areas = {}
    for name, numbers in monitor.features(torch.cat([old[half:], new])).items():
        before, after = numbers[: len(old) - half], numbers[len(old) - half :]
        if name == "prediction":
            middle = before.median()
            before, after = (before - middle).abs(), (after - middle).abs()
        ordered = before.sort().values
        areas[name] = float(torch.searchsorted(ordered, after).double().mean() / len(before))
    return areas


def rows_of(result: Result) -> list[list[str]]:
    """Return table rows: method, coverage, worst local coverage, median length, infinite bands."""
    rows = []
    for name, tracked in result.tracked.items():
        title = name if name in ("CP", "FFCP") else f"Online(FFCP, {name})"
        infinite = np.isinf(tracked.lengths).mean()
        rows.append(
            [
                title,
                f"{100 * tracked.hits.mean():.1f} %",
                f"{100 * tracked.local.min():.1f} %",
                f"{np.median(tracked.lengths):.3f}",
                f"{100 * infinite:.1f} %",
            ]
        )
    return rows


def picture(results: list[Result]) -> Figure:
    """Draw local coverage over time, a panel for each series."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.3 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(len(results), 1, squeeze=False)[:, 0]
    for axis, result in zip(axes, results, strict=True):
        for name, tracked in result.tracked.items():
            thick = 1.2 if name in ("dtaci", "pid") else 1.9
            label = name if name in ("CP", "FFCP") else f"Online {name}"
            at = np.arange(LOCAL, LOCAL + len(tracked.local))
            axis.plot(at, tracked.local, color=_COLOURS[name], linewidth=thick, label=label)
        axis.axhline(1 - result.alpha, color="black", linestyle="--", linewidth=0.9)
        axis.set_ylim(top=1.03)
        for row, mark in result.series.marks.items():
            axis.axvline(row, color="#8c959f", linewidth=0.9, linestyle=":")
            axis.annotate(mark, (row, axis.get_ylim()[0]), (4, 4), textcoords="offset points",
                          fontsize=8, color="#57606a")  # fmt: skip
        alarm = result.alarms["target"]
        if alarm is not None:
            axis.axvline(alarm, color="#cf222e", linewidth=0.9, linestyle="-.")
            axis.annotate("alarm", (alarm, 1.0), (4, -10), textcoords="offset points",
                          fontsize=8, color="#cf222e")  # fmt: skip
        axis.set_title(f"{result.series.name}: coverage over the last {LOCAL} rows", loc="left")
        axis.set_xlabel("row of the stream")
        axis.set_ylabel("covered")
        axis.spines[["top", "right"]].set_visible(False)
    lines, labels = axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, frameon=False, ncols=5, fontsize=9, loc="outside upper center")
    return figure
