"""The demonstration: two embedded data sets, a small network, CP and FFCP side by side.

On ``growth`` errors grow with the level, as counts, prices and visits do; a steeper network is
a less certain one, and FFCP gives shorter intervals. On ``waves`` the noise is the same everywhere,
the slope says nothing about it, FFCP is wider than CP, and the automatic choice takes CP.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window system, no global state
from matplotlib.figure import Figure
from torch import Tensor, nn

from ffcp import CP, FFCP, FFCPWarning, Interval, metrics

COLUMNS = ("method", "layer", "coverage", "mean length", "worst group", "seconds")
TRAIN, CALIBRATE, TEST = 2000, 4000, 10_000
# What the table calls the paper's split points, and the features behind the ReLUs, which can be
# chosen too.
_LAYERS = {
    "input": "0 input",
    "0": "1 Linear",
    "3": "2 Linear",
    "6": "3 Linear",
    "output": "4 output = CP",
    "1": "1 ReLU",
    "4": "2 ReLU",
    "7": "3 ReLU",
}


@dataclass(frozen=True)
class DataSet:
    """An embedded data set, drawn from a formula."""

    name: str
    about: str
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


def _inputs(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs (n, 1), and noise (n,)."""
    x = torch.rand(rows, 1, generator=generator)
    return x, 0.25 * torch.randn(rows, generator=generator)


def _growth(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, noise = _inputs(rows, generator)
    return x, torch.exp(3 * x[:, 0] + noise) / 5


def _waves(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, noise = _inputs(rows, generator)
    return x, torch.sin(3 * math.pi * x[:, 0]) + noise


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

    def cells(self) -> list[str]:
        """Return the line as words."""
        shares = f"{self.coverage:.1%}", f"{self.length:.3f}", f"{self.worst_group:.1%}"
        return [self.method, self.layer, *shares, f"{self.seconds:.3f}"]


@dataclass(frozen=True)
class DemoResult:
    """Everything the demonstration found out about one data set."""

    data: DataSet
    x: Tensor
    y: Tensor
    rows: list[Row]

    def verdict(self) -> str:
        """Return in one sentence what the table shows."""
        cp, chosen = self.rows[0], self.rows[-1]
        if chosen.layer == _LAYERS["output"]:
            best = min(row.length for row in self.rows[1:5])
            sizes = f"at best {best:.2f} against {cp.length:.2f}"
            return f"FFCP is wider than CP ({sizes}); the automatic choice takes CP."
        gain = f"is {1 - chosen.length / cp.length:.0%} shorter than CP"
        groups = f"covers its worst group {chosen.worst_group:.0%} instead of {cp.worst_group:.0%}"
        return f"FFCP with the layer chosen automatically {gain} and {groups}."


def run(
    data: DataSet, *, epochs: int, alpha: float, seed: int, progress: Callable[[], None]
) -> DemoResult:
    """Train the network on one data set and try every method on it."""
    generator = torch.Generator().manual_seed(seed)
    (x, y), calibration, (x_test, y_test) = (
        data.draw(rows, generator) for rows in (TRAIN, CALIBRATE, TEST)
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = network(x.shape[1])
    train(model, x, y[:, None], epochs=epochs, seed=seed, progress=progress)
    automatic = FFCP(model, selection_alpha=alpha, seed=seed)
    at_layers = [("FFCP", FFCP(model, name)) for name in list(_LAYERS)[:5]]
    rows = []
    for method, predictor in [("CP", CP(model)), *at_layers, ("FFCP auto", automatic)]:
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FFCPWarning)  # the table and the verdict say it
            band = predictor.calibrate(*calibration).predict_interval(x_test, alpha)
        seconds = time.perf_counter() - start
        layer = "-" if method == "CP" else _LAYERS[str(predictor.feature)]
        share, length = metrics.coverage(band, y_test), metrics.mean_length(band)
        worst = metrics.group_coverage(band, y_test).worst
        rows.append(Row(method, layer, share, length, worst, seconds, band))
    return DemoResult(data, x_test, y_test, rows)


def picture(results: list[DemoResult]) -> Figure:
    """Draw data and intervals: a row for each data set, CP on the left, FFCP on the right."""
    figure = Figure(figsize=(9, 3.1 * len(results) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(results), 2, sharex=True, sharey="row", squeeze=False)
    for line, result in zip(axes, results, strict=True):
        # Layer 2 is where FFCP does best on growth; the same on waves, for comparison.
        for axis, row in zip(line, (result.rows[0], result.rows[3]), strict=True):
            name = f"y  ({result.data.name})"
            row.band.plot(result.x[:, 0], result.y, ax=axis, xlabel="x", ylabel=name)
            title = row.method if row.layer == "-" else f"{row.method}, layer {row.layer}"
            found = f"mean length {row.length:.2f},  coverage {row.coverage:.1%}"
            axis.set_title(f"{title}:  {found}", fontsize=9, loc="left")
            axis.get_legend().remove()
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    return figure
