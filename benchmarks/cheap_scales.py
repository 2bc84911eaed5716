"""FFCP beside scales that cost no more: ``python -m benchmarks.cheap_scales [DATA ...]``.

The paper's networks of seeds 0 to 4, alpha = 0.1. Mean interval score and mean length of every
scale, divided by those of split CP on the same rows. Activations are those of the last hidden
layer; what is learned of them is learned on training rows.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import ffcp
from benchmarks.timing import show, table
from benchmarks.trained import networks

DATA = ("synthetic", "com", "fb1", "star", "bio", "blog", "bike")
ALPHA, SEEDS = 0.1, range(5)


class OfActivations:
    """A scale computed from the activations of a layer by a function."""

    def __init__(self, layer: str, function: Callable[[Tensor], Tensor]) -> None:
        self.layer, self.function = layer, function

    def requires(self) -> ffcp.Requires:
        return ffcp.Requires(values=(self.layer,))

    def __call__(self, out: ffcp.BatchOutput) -> Tensor:
        return self.function(out.values[self.layer])


def scales(model: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, object]:
    """Return the scales to compare: each needs one pass, and FFCP's a backward pass too."""
    linear = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    last = str(int(linear[-2]) + 1)  # the activations behind the last hidden layer
    with torch.no_grad():
        values: Tensor = model[: int(last) + 1](x)
        residuals: Tensor = (model(x).flatten() - y.flatten()).abs()
    centre, spread = values.mean(dim=0), values.std(dim=0) + 1e-6
    columns = torch.cat([(values - centre) / spread, torch.ones(len(x), 1)], dim=1)
    ridge = columns.T @ columns + len(x) * 1e-3 * torch.eye(columns.shape[1])
    weights: Tensor = torch.linalg.solve(ridge, columns.T @ residuals)
    least = 0.1 * residuals.mean()

    def standardised(v: Tensor) -> Tensor:
        return (v - centre) / spread

    def predicted(v: Tensor) -> Tensor:
        return (standardised(v) @ weights[:-1] + weights[-1]).clamp_min(least)

    return {
        "split CP": ffcp.scales.Constant(),
        "FFCP, layer selected": [
            ffcp.scales.Constant(),
            *map(ffcp.scales.GradientNorm, ["input", *linear[:-1]]),
        ],
        "size of the prediction": lambda out: 0.1 + out.output.abs(),
        "norm of activations": OfActivations(last, lambda v: 0.1 + v.norm(dim=1)),
        "distance of activations from their mean": OfActivations(
            last, lambda v: standardised(v).norm(dim=1)
        ),
        "residual by linear regression on activations": OfActivations(last, predicted),
    }


def compare(data: str) -> None:
    found: dict[str, list[list[float]]] = {}
    for model, parts in networks(data, SEEDS):
        assert isinstance(model, nn.Sequential)
        for name, scale in scales(model, parts.x_train, parts.y_train).items():
            predictor = ffcp.IntervalPredictor(model, scale=scale, seed=0)
            predictor.calibrate(parts.x_cal, parts.y_cal)
            interval = predictor.predict_interval(parts.x_test, alpha=ALPHA)
            score = ffcp.metrics.interval_score(interval, parts.y_test, ALPHA)
            covered = float(ffcp.metrics.coverage(interval, parts.y_test))
            length = ffcp.metrics.mean_length(interval)
            found.setdefault(name, []).append([float(score), float(length), covered])
    made = table(f"{data}, seeds 0 to 4", "scale", "score / CP", "length / CP", "coverage")
    plain = Tensor(found["split CP"])
    for name, rows in found.items():
        score, length = (Tensor(rows) / plain)[:, :2].log().mean(dim=0).exp().tolist()
        made.add_row(name, f"{score:.3f}", f"{length:.3f}", f"{Tensor(rows)[:, 2].mean():.1%}")
    show(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="DATA", help=f"of {', '.join(DATA)}")
    for name in parser.parse_args().names or DATA:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ffcp.FFCPWarning)
            compare(name)


if __name__ == "__main__":
    main()
