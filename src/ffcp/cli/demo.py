"""The demonstration: two embedded data sets, a small network, CP and FFCP side by side.

On ``growth`` errors grow with the level, as counts, prices and visits do; a steeper network is
a less certain one, and FFCP gives shorter bands. On ``waves`` the noise is the same everywhere,
the slope says nothing about it, FFCP is wider than CP, and the automatic choice takes CP.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes

# The object-oriented interface: no window system, no global state.
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

from ffcp import CP, FFCP, FFCPWarning, Interval, metrics
from ffcp.regression.layer_selection import Choice

TRAIN, CALIBRATE, TEST = 2000, 4000, 10_000


@dataclass(frozen=True)
class DataSet:
    """An embedded data set, drawn from a formula."""

    name: str
    about: str
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


def _growth(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.rand(rows, 1, generator=generator)
    noise = torch.randn(rows, generator=generator)
    return x, torch.exp(3 * x[:, 0] + 0.25 * noise) / 5


def _waves(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.rand(rows, 1, generator=generator)
    noise = torch.randn(rows, generator=generator)
    return x, torch.sin(3 * math.pi * x[:, 0]) + 0.25 * noise


DATA_SETS = (
    DataSet("growth", "errors grow with the level: the gradient knows where the noise is", _growth),
    DataSet("waves", "the same noise everywhere: the gradient knows nothing of it", _waves),
)


def network(inputs: int, width: int = 64, dropout: float = 0.1) -> nn.Sequential:
    """Build the regression network of the paper: four Linear layers, ReLU and dropout between.

    >>> [name for name, layer in network(10).named_children() if isinstance(layer, nn.Linear)]
    ['0', '3', '6', '9']
    """
    layers: list[nn.Module] = []
    for size in (inputs, width, width):
        layers += [nn.Linear(size, width), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def train(
    model: nn.Module, x: Tensor, y: Tensor, *, epochs: int, seed: int, progress: Callable[[], None]
) -> None:
    """Fit a network with Adam and the squared error, and leave it in eval mode."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, weight_decay=1e-6, fused=True)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.train()
        for _ in range(epochs):
            for rows in torch.randperm(len(x)).split(64):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
                optimizer.step()
            progress()
    model.eval()


# The paper's split points: the input, the three hidden Linear layers before their ReLU, the output.
_SPLIT_POINTS = ("input", "0", "3", "6", "output")
# How the table calls them, and the features behind the ReLUs, which can be chosen too.
_LAYERS = {
    "input": "0 input",
    "0": "1 Linear",
    "1": "1 ReLU",
    "3": "2 Linear",
    "4": "2 ReLU",
    "6": "3 Linear",
    "7": "3 ReLU",
    "output": "4 output = CP",
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    method: str
    layer: str
    coverage: metrics.Coverage
    length: float
    worst_group: metrics.Coverage
    seconds: float
    band: Interval


@dataclass(frozen=True)
class Result:
    """Everything the demonstration found out about one data set."""

    data: DataSet
    x: Tensor
    y: Tensor
    rows: list[Row]
    choice: Choice
    alpha: float

    def row(self, method: str, layer: str) -> Row:
        """Find the line of a method at a layer, by the beginnings of its label."""
        return next(r for r in self.rows if r.method == method and r.layer.startswith(layer))

    def verdict(self) -> str:
        """Say in one sentence what the table shows."""
        cp, chosen = self.rows[0], self.rows[-1]
        if self.choice.feature == "output":
            best = min(self.rows[1:5], key=lambda row: row.length)
            return (
                f"FFCP at hidden layers is wider than CP (at best {best.length:.2f} against "
                f"{cp.length:.2f}); the automatic choice takes CP."
            )
        saved = 1 - chosen.length / cp.length
        return (
            f"FFCP with the layer chosen automatically is {saved:.0%} shorter than CP and covers "
            f"its worst group {chosen.worst_group:.0%} instead of {cp.worst_group:.0%}."
        )


def run(
    data: DataSet, *, epochs: int, alpha: float, seed: int, progress: Callable[[], None]
) -> Result:
    """Train the network on one data set and try every method on it."""
    generator = torch.Generator().manual_seed(seed)
    x, y = data.draw(TRAIN, generator)
    x_cal, y_cal = data.draw(CALIBRATE, generator)
    x_test, y_test = data.draw(TEST, generator)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = network(x.shape[1])
    train(model, x, y[:, None], epochs=epochs, seed=seed, progress=progress)
    automatic = FFCP(model, selection_alpha=alpha, seed=seed)
    methods: list[tuple[str, str, CP | FFCP]] = [("CP", "-", CP(model))]
    methods += [("FFCP", _LAYERS[name], FFCP(model, name)) for name in _SPLIT_POINTS]
    rows = []
    for method, layer, predictor in [*methods, ("FFCP auto", "", automatic)]:
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FFCPWarning)  # the table and the verdict say it
            band = predictor.calibrate(x_cal, y_cal).predict_interval(x_test, alpha)
        seconds = time.perf_counter() - start
        rows.append(
            Row(
                method,
                layer or _LAYERS[str(automatic.feature)],
                metrics.coverage(band, y_test),
                metrics.mean_length(band),
                metrics.group_coverage(band, y_test).worst,
                seconds,
                band,
            )
        )
    assert automatic.choice is not None
    return Result(data, x_test, y_test, rows, automatic.choice, alpha)


def picture(results: list[Result]) -> Figure:
    """Draw data and bands: a row for each data set, CP on the left, FFCP on the right."""
    layer = "2"  # where FFCP does best on growth; the same on waves, for comparison
    figure = Figure(figsize=(9, 3.1 * len(results) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(results), 2, sharex=True, sharey="row", squeeze=False)
    for line, result in zip(axes, results, strict=True):
        _draw(line[0], result, result.row("CP", "-"), "CP", "#7a7a7a")
        _draw(line[1], result, result.row("FFCP", layer), f"FFCP, split point {layer}", "#0072b2")
        line[0].set_ylabel(f"y  ({result.data.name})")
    for axis in axes[-1]:
        axis.set_xlabel("x")
    handles, labels = axes[0][1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False,
                  markerscale=2)  # fmt: skip
    return figure


def _draw(axis: Axes, result: Result, row: Row, title: str, tint: str) -> None:
    order = result.x[:, 0].argsort()
    x, y = result.x[order, 0].numpy(), result.y[order].numpy()
    lower, upper, centre = (part[order].numpy() for part in row.band)
    inside = (lower <= y) & (y <= upper)
    few = slice(None, None, 10)  # a tenth of the points says enough
    level = f"{1 - result.alpha:.0%} band"
    axis.fill_between(x, lower, upper, color=tint, alpha=0.25, linewidth=0, label=level)
    axis.plot(x, centre, color=tint, linewidth=1.8, zorder=3, label="prediction")
    for hit, colour, size, label in (
        (True, "#666666", 6, "covered"),
        (False, "#d55e00", 9, "missed"),
    ):
        shown = inside[few] == hit
        axis.scatter(x[few][shown], y[few][shown], s=size, c=colour, linewidths=0, label=label)
    axis.set_title(
        f"{title}:  mean length {row.length:.2f},  coverage {row.coverage:.1%}",
        fontsize=10, loc="left",
    )  # fmt: skip
    axis.margins(x=0.01)
    axis.spines[["top", "right"]].set_visible(False)


def tabulate(result: Result) -> list[list[str]]:
    """Format the lines of the table."""
    return [
        [
            row.method,
            row.layer,
            f"{row.coverage:.1%}",
            f"{row.length:.3f}",
            f"{row.worst_group:.1%}",
            f"{row.seconds:.3f}",
        ]
        for row in result.rows
    ]


COLUMNS = ("method", "layer", "coverage", "mean length", "worst group", "seconds")
