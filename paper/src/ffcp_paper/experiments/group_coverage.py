"""Worst-group coverage of CP and FFCP, plain and localized, on the paper's data sets.

The paper's Table 4 claims that FFLCP covers the worst third of y better than LCP. For each data
set and seed a network is trained by the paper's protocol, and CP, LCP, and FFCP and FFLCP at the
five split points are calibrated on the same rows. The bandwidth comes from the training rows.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from torch import nn

from ffcp import CP, FFCP, FFLCP, LCP, FFCPWarning, metrics
from ffcp.kernels import Localizer
from ffcp_paper.data import datasets, result_cache
from ffcp_paper.data.datasets import Split
from ffcp_paper.ffcp_internals import RegressionPredictor
from ffcp_paper.networks.regression import SPLIT_POINTS, mlp
from ffcp_paper.training.regression import train_as_published

_VERSION = 1  # of what a run computes; a change makes stored results stale
NAMES = ("bike", "com", "bio", "star", "blog", "fb1")


@dataclass(frozen=True)
class Settings:
    """What a run depends on, besides data set and seed."""

    kernel: str = "nearest"
    on: str = "prediction"
    guarantee: str = "marginal"
    alpha: float = 0.1
    epochs: int = 1000


@dataclass(frozen=True)
class Result:
    """How one method did on the test rows of one data set and seed."""

    method: str
    layer: str
    coverage: float
    worst_group: float
    mean_length: float
    infinite: float


def run(
    name: str, seed: int, settings: Settings, progress: Callable[[], None] = lambda: None
) -> list[Result]:
    """Train, calibrate and measure all methods on one data set and seed, or use the cache."""
    key = {"version": _VERSION, "data": name, "seed": seed, **asdict(settings)}

    def compute() -> list[dict[str, object]]:
        parts = datasets.split(datasets.load(name), seed)
        model = _network(name, seed, settings.epochs, parts, progress)
        return [asdict(result) for result in _measure(model, parts, settings, seed)]

    return [Result(**saved) for saved in result_cache.record("groups", key, compute)]


def _network(
    name: str, seed: int, epochs: int, parts: Split, progress: Callable[[], None]
) -> nn.Module:
    return result_cache.network(
        {"data": name, "seed": seed, "epochs": epochs, "network": "mlp"},
        lambda: mlp(parts.x_train.shape[1]),
        lambda: train_as_published(
            parts.x_train, parts.y_train, seed=seed, epochs=epochs, progress=progress
        ),
    )


def _measure(model: nn.Module, parts: Split, settings: Settings, seed: int) -> Iterator[Result]:
    for method, layer, predictor in _methods(model, settings, seed):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FFCPWarning)  # infinite bands are a column
            if isinstance(predictor, (LCP, FFLCP)):
                predictor.fit_localizer(parts.x_train, parts.y_train, planned=len(parts.y_cal))
            predictor.calibrate(parts.x_cal, parts.y_cal)
            band = predictor.predict_interval(parts.x_test, settings.alpha)
        yield Result(
            method,
            layer,
            float(metrics.coverage(band, parts.y_test)),
            float(metrics.group_coverage(band, parts.y_test).worst),
            metrics.mean_length(band),
            float(band.upper.isinf().double().mean()),
        )


def _methods(
    model: nn.Module, settings: Settings, seed: int
) -> Iterator[tuple[str, str, RegressionPredictor]]:
    localizer = Localizer(settings.kernel, settings.on)
    yield "CP", "", CP(model)
    for number, feature in enumerate(SPLIT_POINTS):
        yield "FFCP", str(number), FFCP(model, feature)
    yield "LCP", "", LCP(model, localizer, guarantee=settings.guarantee, seed=seed)
    for number, feature in enumerate(SPLIT_POINTS):
        yield (
            "FFLCP",
            str(number),
            FFLCP(model, feature, localizer, guarantee=settings.guarantee, seed=seed),
        )


COLUMNS = ("method", "split", "coverage", "worst group", "mean length", "infinite")


def tabulate(results: list[list[Result]]) -> list[list[str]]:
    """Return one line per method: mean and standard deviation over seeds."""
    lines = []
    for same in zip(*results, strict=True):
        infinite = statistics.mean(r.infinite for r in same)
        lines.append(
            [
                same[0].method,
                same[0].layer,
                _percent([r.coverage for r in same]),
                _percent([r.worst_group for r in same]),
                _number([r.mean_length for r in same]),
                f"{infinite:.2%}" if infinite else "",
            ]
        )
    return lines


def verdict(results: list[list[Result]]) -> str:
    """Return a sentence on whether localization raised the worst group's coverage."""

    def mean(method: str, layer: str, what: str) -> float:
        result = [
            getattr(r, what) for rs in results for r in rs if (r.method, r.layer) == (method, layer)
        ]
        return float(statistics.mean(result))

    layers = [str(number) for number in range(len(SPLIT_POINTS) - 1)]
    best = max(layers, key=lambda layer: mean("FFLCP", layer, "worst_group"))
    ours, lcp, cp = (
        mean(method, layer, "worst_group")
        for method, layer in (("FFLCP", best), ("LCP", ""), ("CP", ""))
    )
    better = "above" if ours > lcp else "not above"
    return (
        f"Worst group: FFLCP at best {ours:.1%} (split {best}, best on these rows), {better} LCP "
        f"{lcp:.1%}; "
        f"LCP is {'above' if lcp > cp else 'not above'} CP {cp:.1%}."
    )


def _percent(values: list[float]) -> str:
    return f"{statistics.mean(values):.1%}" + _spread([100 * v for v in values], "{:.1f}")


def _number(values: list[float]) -> str:
    return f"{statistics.mean(values):.3g}" + _spread(values, "{:.2g}")


def _spread(values: list[float], form: str) -> str:
    if len(values) < 2 or not all(math.isfinite(v) for v in values):
        return ""
    return " ± " + form.format(statistics.stdev(values))
