"""Localized thresholds: time, memory and coverage: ``python -m benchmarks.localized``.

The baseline computes all squared distances in blocks, at the best of three block sizes, and
discards them: no kernel, no sort, no quantile.
"""

from __future__ import annotations

import itertools
import multiprocessing
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import ffcp
from benchmarks.timing import Resident, best_of, show, table, verdict
from ffcp.calibrations import Local
from ffcp.conformal.local import LEVEL_ROWS
from ffcp.conformal.random_numbers import Draws
from ffcp.kernels import Localizer

POINTS, ROWS, WIDTH = 20_000, 20_000, 64
MANY_POINTS = 1_000_000
DRAWS = 300
SIZES = (128, 256, 512)


def bare_distances(points: Tensor, x: Tensor, size: int) -> None:
    squares = points.square().sum(dim=1, keepdim=True)
    for part in x.split(size):
        torch.addmm(part.square().sum(dim=1), points, part.T, alpha=-2).add_(squares)


def points(count: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.rand(count, 1), torch.randn(count, width)


def local(data: tuple[Tensor, Tensor], kernel: str, bandwidth: float, guarantee: str) -> Local:
    calibration = Local(Localizer(kernel, bandwidth=bandwidth), guarantee)
    return calibration.fit(data[0], {"embedding": data[1]})


def asked(x: Tensor) -> dict[str, Tensor]:
    return {"embedding": x, "row": torch.arange(len(x))}


def speed(rounds: int = 3) -> None:
    torch.manual_seed(0)
    data, x = points(POINTS, WIDTH), torch.randn(ROWS, WIDTH)
    sizes = best_of({str(size): partial(bare_distances, data[1], x, size) for size in SIZES}, 2)
    size = int(min(sizes, key=lambda name: sizes[name]))

    def thresholds(kernel: str, bandwidth: float, guarantee: str) -> Callable[[], object]:
        near, random = local(data, kernel, bandwidth, guarantee), Draws(0, 3)
        # What is computed once after calibration, like the level, is timed separately below.
        near.quantile(0.1, asked(x[:1]), random)
        return lambda: near.quantile(0.1, asked(x), random)

    def level() -> object:
        return local(data, "gaussian", 8.0, "level").quantile(0.1, {"embedding": x[:1]})

    times = best_of(
        {
            "bare": lambda: bare_distances(data[1], x, size),
            "bare, float64": lambda: bare_distances(data[1].double(), x.double(), size),
            "gaussian, none": thresholds("gaussian", 8.0, "none"),
            "gaussian, level": thresholds("gaussian", 8.0, "level"),
            "gaussian, random": thresholds("gaussian", 8.0, "random"),
            "laplace, none": thresholds("laplace", 8.0, "none"),
            "box, none": thresholds("box", 11.0, "none"),
            "nearest, none": thresholds("nearest", 500, "none"),
            f"the level, once, by {LEVEL_ROWS:,} points": level,
        },
        rounds,
    )
    report = table(
        f"{POINTS:,} calibration x {ROWS:,} test points, {WIDTH} dimensions",
        "what", "seconds", "against bare", "limit", "",
    )  # fmt: skip
    for name, seconds in times.items():
        # Neighbours are found in float64, and need a selection beside the distances.
        bare, limit = ("bare, float64", 8.0) if "nearest" in name else ("bare", 4.0)
        ratio = seconds / times[bare]
        last = () if name.startswith("bare") else (f"{limit:.2f}", verdict(ratio, limit))
        report.add_row(name, f"{seconds:.2f}", f"{ratio:.2f}", *last)
    show(report)


def low_dimension(rounds: int = 3) -> None:
    torch.manual_seed(0)
    data, x = points(POINTS, 1), torch.randn(ROWS, 1)
    nearest, gaussian = local(data, "nearest", 500, "none"), local(data, "gaussian", 0.1, "none")
    times = best_of(
        {
            "bare": lambda: bare_distances(data[1], x, 256),
            "nearest": lambda: nearest.quantile(0.1, {"embedding": x}),
            "gaussian": lambda: gaussian.quantile(0.1, {"embedding": x}),
        },
        rounds,
    )
    report = table(
        "The same in 1 dimension, as on the prediction", "what", "seconds", "against bare"
    )
    for name, seconds in times.items():
        report.add_row(name, f"{seconds:.2f}", f"{seconds / times['bare']:.2f}")
    show(report)


def _memory(
    count: int, rows: int, kernel: str, answer: multiprocessing.Queue[tuple[float, float]]
) -> None:
    """Measure in a separate process, so that other jobs' memory is not counted."""
    data, x = points(count, WIDTH), torch.randn(rows, WIDTH)
    near = local(data, kernel, 500 if kernel == "nearest" else 8.0, "none")
    bare = best_of({"bare": lambda: bare_distances(data[1], x, 64)}, 1)["bare"]
    with Resident() as resident:
        times = best_of({"ours": lambda: near.quantile(0.1, {"embedding": x})}, 1)
    answer.put((resident.grown, times["ours"] / bare))


def memory() -> None:
    report = table(
        "Memory above the data",
        "kernel", "calibration", "test", "MB more", "limit", "", "time / bare",
    )  # fmt: skip
    context = multiprocessing.get_context("spawn")
    sizes = ((POINTS, ROWS), (MANY_POINTS, 256))
    for kernel, (count, rows) in itertools.product(("gaussian", "nearest"), sizes):
        answer = context.Queue()
        process = context.Process(target=_memory, args=(count, rows, kernel, answer))
        process.start()
        grown, ratio = answer.get()
        process.join()
        last = ("500", verdict(grown, 500)) if count == POINTS else ("", "")
        report.add_row(kernel, f"{count:,}", f"{rows:,}", f"{grown:.0f}", *last, f"{ratio:.2f}")
    show(report)


def guarantees(points: int = 100, tests: int = 20) -> None:
    """Compare coverage and length of the three guarantees on the same data."""
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    report = table(
        f"{DRAWS} draws of {points} calibration and {tests} test points, alpha = 0.1",
        "kernel", "guarantee", "coverage", "infinite", "median length",
    )  # fmt: skip
    for kernel, bandwidth in (
        ("gaussian", 1.0), ("gaussian", 2.0), ("laplace", 1.0), ("box", 2.0), ("nearest", 40),
    ):  # fmt: skip
        for guarantee in ("none", "level", "random"):
            if (kernel, guarantee) == ("nearest", "random"):
                continue
            localizer = ffcp.kernels.Localizer(kernel, "input", bandwidth)
            covered, infinite, length = _draws(model, localizer, guarantee, points, tests)
            report.add_row(
                f"{kernel} {bandwidth:g}", guarantee, f"{covered:.1%}", f"{infinite:.1%}",
                f"{length:.2f}",
            )  # fmt: skip
    show(report)


def _draws(
    model: nn.Module, localizer: ffcp.kernels.Localizer, guarantee: str, n: int, t: int
) -> tuple[float, float, float]:
    generator = torch.Generator().manual_seed(0)
    inside, lengths = [], []
    for seed in range(DRAWS):
        x = torch.randn(n + t, 4, generator=generator)
        noise = torch.randn(n + t, generator=generator)
        y = x[:, 0] + noise * (0.2 + x[:, 1].abs())  # grows outward, where points are rare
        predictor = ffcp.LCP(model, localizer, guarantee=guarantee, seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ffcp.FFCPWarning)
            interval = predictor.calibrate(x[:n], y[:n]).predict_interval(x[n:])
        inside.append(interval.contains(y[n:]))
        lengths.append(interval.upper - interval.lower)
    length = torch.cat(lengths)
    return (
        float(torch.cat(inside).double().mean()),
        float(length.isinf().double().mean()),
        float(length.median()),
    )


def main() -> None:
    speed()
    low_dimension()
    memory()
    guarantees()


if __name__ == "__main__":
    main()
