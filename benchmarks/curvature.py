"""Interval quality of a second-order scale: ``python -m benchmarks.curvature [DATA ...]``.

CP, FFCP and the curvature scale at the same layers, on the paper's networks of seeds 100 to 104 and
on networks with a smooth activation and input noise.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

import ffcp
from benchmarks.timing import show, table
from benchmarks.trained import networks
from ffcp_paper.data.datasets import Split
from ffcp_paper.experiments.curvature import Curvature

DATA = ("com", "bike", "star", "synthetic", "bio", "fb1")
LAYERS, STEPS, ALPHA = ("input", "0", "3"), (0.3, 1.0, 3.0), 0.1


def noisy_sine(seed: int) -> tuple[nn.Sequential, Split]:
    """Return a smooth network trained on y = sin(3 x) with noisy inputs, and its split."""
    torch.manual_seed(seed)
    x = 4 * torch.rand(6000, 1) - 2
    y = torch.sin(3 * (x + 0.15 * torch.randn_like(x)))[:, 0]
    model = nn.Sequential(
        nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(600):
        optimizer.zero_grad()
        (model(x[:2000])[:, 0] - y[:2000]).square().mean().backward()
        optimizer.step()
    return model.eval(), Split(x[:2000], y[:2000], x[2000:4000], y[2000:4000], x[4000:], y[4000:])


def measure(model: nn.Sequential, parts: Split, scale: object) -> tuple[float, float, float]:
    """Return mean length, interval score and coverage on the test rows."""
    predictor = ffcp.IntervalPredictor(model, scale=scale).calibrate(parts.x_cal, parts.y_cal)
    interval = predictor.predict_interval(parts.x_test, alpha=ALPHA)
    y = parts.y_test
    return (
        ffcp.metrics.mean_length(interval),
        ffcp.metrics.interval_score(interval, y, ALPHA),
        float(ffcp.metrics.coverage(interval, y)),
    )


def _gradient_norm(layer: str, model: nn.Sequential) -> object:
    return ffcp.scales.GradientNorm(layer)


def scales(layers: Iterable[str]) -> dict[str, Callable[[nn.Sequential], object]]:
    result: dict[str, Callable[[nn.Sequential], object]] = {"CP": lambda _: ffcp.scales.Constant()}
    for layer in layers:
        result[f"FFCP at {layer}"] = partial(_gradient_norm, layer)
        for step in STEPS:
            result[f"curvature at {layer}, step {step:g}"] = partial(
                Curvature, feature=layer, step=step
            )
    return result


def compare(data: str) -> None:
    trained = (
        [noisy_sine(seed) for seed in range(100, 105)] if data == "sine" else list(networks(data))
    )
    layers = ("input", "0") if data == "sine" else LAYERS
    report = table(
        f"{data}, seeds 100 to 104", "scale", "mean length", "interval score", "coverage"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        for name, scale in scales(layers).items():
            rows = [
                measure(m, parts, scale(m)) for m, parts in trained if isinstance(m, nn.Sequential)
            ]
            result = Tensor(rows).mean(dim=0)
            length, score, covered = result.tolist()
            report.add_row(name, f"{length:.4g}", f"{score:.4g}", f"{covered:.1%}")
    show(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    everything = ("sine", *DATA)
    parser.add_argument("names", nargs="*", metavar="DATA", help=f"of {', '.join(everything)}")
    for name in parser.parse_args().names or everything:
        compare(name)


if __name__ == "__main__":
    main()
