"""Stacked training compared with training one by one: ``python -m benchmarks.stacked``.

Five seeds of a data set, then five seeds at five pairs of quantile levels, 25 networks.

Rows are random, of the size of the paper's data sets. Both ways are run with one and with two
threads, which needs two free cores: on a busy machine, two threads take many times as long as one.
The resulting weights are compared.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.timing import best_of, show, table
from ffcp_paper.networks.regression import mlp
from ffcp_paper.training.regression import train, train_quantiles
from ffcp_paper.training.stacked import train_stacked

SEEDS = range(5)
# rows and columns for training, and how many epochs to take
SIZES = {"bio": (18_292, 9, 1), "com": (798, 100, 10), "bike": (4_354, 18, 2)}
DROPOUT = (0.1, 0.0)
LEVELS = ((0.1, 0.9), (0.2, 0.8), (0.3, 0.7), (0.4, 0.6), (0.49, 0.51))
THREADS = (1, 2)

Data = list[tuple[Tensor, Tensor]]


def build(inputs: int, dropout: float) -> list[nn.Module]:
    models: list[nn.Module] = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        models.append(mlp(inputs, dropout=dropout))
    return models


def data(rows: int, inputs: int) -> Data:
    torch.manual_seed(0)
    xs = [torch.randn(rows, inputs) for _ in SEEDS]
    return [(x, x[:, 0] + torch.randn(rows)) for x in xs]


def one_by_one(parts: Data, epochs: int, dropout: float) -> list[nn.Module]:
    models = build(parts[0][0].shape[1], dropout)
    for seed, (model, (x, y)) in enumerate(zip(models, parts, strict=True)):
        train(model, x, y[:, None], epochs=epochs, seed=seed)
    return models


def at_once(parts: Data, epochs: int, dropout: float) -> list[nn.Module]:
    models = build(parts[0][0].shape[1], dropout)
    xs, ys = zip(*parts, strict=True)
    return train_stacked(models, xs, ys, epochs=epochs, seeds=list(SEEDS))


def difference(ours: list[nn.Module], theirs: list[nn.Module]) -> float:
    """Return the largest difference between two weights."""
    weights = zip(
        (w for model in ours for w in model.parameters()),
        (w for model in theirs for w in model.parameters()),
        strict=True,
    )
    return max(float((one - other).detach().abs().max()) for one, other in weights)


def with_threads(threads: int, work: Callable[[], list[nn.Module]]) -> list[nn.Module]:
    torch.set_num_threads(threads)
    return work()


def compare(names: list[str], rounds: int) -> None:
    report = table(
        "Microseconds per step of all five networks, with 1 and 2 threads",
        "data", "dropout", "single 1", "single 2", "stacked 1", "stacked 2", "of best", "ratio 1",
        "differ by",
    )  # fmt: skip
    for name, dropout in itertools.product(names, DROPOUT):
        rows, inputs, epochs = SIZES[name]
        parts, steps = data(rows, inputs), epochs * -(-rows // 64)
        works = {
            how.__name__: partial(how, parts, epochs, dropout) for how in (one_by_one, at_once)
        }
        times = best_of(
            {
                f"{how} {threads}": partial(with_threads, threads, work)
                for how, work in works.items()
                for threads in THREADS
            },
            rounds,
        )
        single, stacked = (
            [times[f"{how} {threads}"] / steps * 1e6 for threads in THREADS] for how in works
        )
        ours, theirs = (with_threads(1, work) for work in works.values())
        report.add_row(
            name,
            f"{dropout:g}",
            *(f"{time:.0f}" for time in (*single, *stacked)),
            f"{min(single) / min(stacked):.1f}",
            f"{single[0] / stacked[0]:.1f}",
            f"{difference(ours, theirs):.1g}",
        )
    show(report)


def quantiles(parts: Data, epochs: int, at_a_time: int) -> None:
    """Train for all seeds and levels, 1, 5 or 25 networks at a time."""
    wanted = [(levels, seed) for levels in LEVELS for seed in SEEDS]
    for start in range(0, len(wanted), at_a_time):
        levels, seeds = zip(*wanted[start : start + at_a_time], strict=True)
        if at_a_time == 1:
            x, y = parts[seeds[0]]
            train_quantiles(x, y, levels[0], epochs=epochs, seed=seeds[0])
            continue
        models = [mlp(parts[0][0].shape[1], outputs=2) for _ in seeds]
        xs, ys = zip(*(parts[seed] for seed in seeds), strict=True)
        train_stacked(models, xs, ys, epochs=epochs, seeds=seeds, levels=list(levels))


def compare_levels(names: list[str], rounds: int) -> None:
    report = table(
        "Microseconds per step of 25 networks: five seeds at five pairs of levels",
        "data", "single", "5 stacked", "25 stacked", "ratio of 5", "ratio of 25",
    )  # fmt: skip
    torch.set_num_threads(max(THREADS))
    for name in names:
        rows, inputs, epochs = SIZES[name]
        parts, steps = data(rows, inputs), epochs * -(-rows // 64)
        times = best_of(
            {str(count): partial(quantiles, parts, epochs, count) for count in (1, 5, 25)}, rounds
        )
        single, five, every = (seconds / steps * 1e6 for seconds in times.values())
        report.add_row(
            name,
            *(f"{time:.0f}" for time in (single, five, every)),
            f"{single / five:.1f}",
            f"{single / every:.1f}",
        )
    show(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="data set", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    compare(given.names or list(SIZES), given.rounds)
    compare_levels(given.names or list(SIZES), given.rounds)


if __name__ == "__main__":
    main()
