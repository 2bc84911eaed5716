"""Prediction sets of RAPS and FFRAPS on pretrained networks, as in the paper's Table 3.

Logits, and the gradient norms at the penultimate feature, are computed once for each network.
The images are then split at random, many times, into calibration and test halves; three tenths of
the calibration half tune kreg, lam, delta and the temperature, as in the published code.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp import FFRAPS, RAPS, metrics
from ffcp_paper.data import result_cache
from ffcp_paper.experiments import logits as stored
from ffcp_paper.ffcp_internals import Replay, Replayed, SetPredictor, run_with_norms
from ffcp_paper.networks import pretrained
from ffcp_paper.training.digits import train_digits

_VERSION = 1  # of what a split computes; a change makes stored results stale
METHODS = ("RAPS", "FFRAPS, softmax", "FFRAPS, feature")
DIGITS = "digits"


@dataclass(frozen=True)
class Outputs:
    """Outputs of a network on images: logits, gradient norms (n,) at its feature, and labels."""

    title: str
    logits: Tensor
    norms: Tensor
    labels: Tensor

    @property
    def top1(self) -> float:
        """Share of images whose label is the most probable one."""
        return pretrained.topk_accuracy(self.logits, self.labels, 1) / 100

    @property
    def top5(self) -> float:
        """Share of images whose label is among the five most probable ones."""
        return pretrained.topk_accuracy(self.logits, self.labels, 5) / 100


@dataclass(frozen=True)
class Result:
    """How one method did on the test half of one split."""

    method: str
    coverage: float
    size: float
    violation: float
    delta: float


def outputs(name: str, progress: stored.Progress | None = None) -> Outputs:
    """Return the outputs of a network on all its images, from the cache if they are there."""
    if name == DIGITS:
        return _digits()
    network = stored.named(name)
    computed = stored.compute(network, progress)
    result = Outputs(network.title, computed.logits, computed.norms, computed.labels)
    _check_accuracy(result, network.expected)
    return result


def _digits() -> Outputs:
    model, data = train_digits()
    x, y = torch.cat([data.x_cal, data.x_test]), torch.cat([data.y_cal, data.y_test])
    logits, norms = run_with_norms(model, x, "feature", 0)
    return Outputs("small network on scikit-learn's digits", logits, norms, y)


def _check_accuracy(result: Outputs, expected: pretrained.Accuracy) -> None:
    """Raise if a network is not as accurate as expected, since it was not loaded correctly."""
    few = slice(0, expected.rows)
    top1 = pretrained.topk_accuracy(result.logits[few], result.labels[few], 1)
    if abs(top1 - expected.top1) > 0.5:
        raise RuntimeError(
            f"{result.title} has a top-1 accuracy of {top1:.2f} % on the first {expected.rows} "
            f"images, expected {expected.top1} %: its weights were not loaded correctly"
        )


def run(
    name: str, splits: int, alpha: float, result: Outputs, progress: Callable[[], None]
) -> list[list[Result]]:
    """Compare the methods on several random splits; each result is cached when it is done."""
    results = []
    for seed in range(splits):
        results.append(_cached_split(name, seed, alpha, result))
        progress()
    return results


def _cached_split(name: str, seed: int, alpha: float, outcome: Outputs) -> list[Result]:
    key = {"version": _VERSION, "network": name, "split": seed, "alpha": alpha}
    for part in (outcome.logits, outcome.norms, outcome.labels):
        key[f"outputs {len(key)}"] = hashlib.sha256(part.numpy().tobytes()).hexdigest()
    saved = result_cache.record(
        "labels", key, lambda: [asdict(result) for result in _split(outcome, seed, alpha)]
    )
    return [Result(**result) for result in saved]


def _split(result: Outputs, seed: int, alpha: float) -> Iterator[Result]:
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(result.labels)))
    calibrate, test = order.chunk(2)
    for method, predictor in zip(METHODS, _predictors(alpha, seed), strict=True):
        predictor.calibrate(
            (result.logits[calibrate], result.norms[calibrate]), result.labels[calibrate]
        )
        label_sets = predictor.predict_set((result.logits[test], result.norms[test]), alpha)
        truth = result.labels[test]
        yield Result(
            method,
            float(label_sets.coverage(truth)),
            metrics.mean_set_size(label_sets),
            float(metrics.size_stratified_violation(label_sets, truth, alpha)),
            float(getattr(predictor, "delta", 0.0) or 0.0),
        )


def _predictors(alpha: float, seed: int) -> Iterator[SetPredictor]:
    model, tuned = Replay(), {"tune": "size", "tune_fraction": 0.3, "tune_alpha": alpha}
    settings: dict[str, Any] = {"temperature": "fit", "seed": seed, **tuned}
    yield RAPS(model, **settings)
    yield FFRAPS(model, **settings)
    yield Replayed(model, **settings)


COLUMNS = ("method", "coverage", "size", "against RAPS", "violation", "delta")


def tabulate(results: list[list[Result]]) -> list[list[str]]:
    """Return one line per method: mean and standard deviation over splits."""
    plain = [r.size for r in next(zip(*results, strict=True))]
    lines = []
    for same in zip(*results, strict=True):
        differences = [r.size - size for r, size in zip(same, plain, strict=True)]
        lines.append(
            [
                same[0].method,
                _with_spread([r.coverage for r in same], "{:.3f}"),
                _with_spread([r.size for r in same], "{:.2f}"),
                "" if same[0].method == "RAPS" else _with_spread(differences, "{:+.2f}", "{:.2f}"),
                _with_spread([r.violation for r in same], "{:.2f}"),
                f"{statistics.median(r.delta for r in same):g}",
            ]
        )
    return lines


def _with_spread(values: list[float], form: str, spread: str | None = None) -> str:
    shown = form.format(statistics.mean(values))
    if len(values) < 2:
        return shown
    return f"{shown} ± {(spread or form).format(statistics.stdev(values))}"
