"""Training five seeds at once against one by one: ``python -m benchmarks.stacked``.

The rows are random numbers of the size of the paper's data sets; the time of a step does not
depend on what they say. A line trains all five networks for the given epochs, with one thread and
then with two, and compares the weights that come out.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.timing import best_of, show, table
from ffcp.paper.networks import mlp
from ffcp.paper.stacked import train_stacked
from ffcp.paper.training import train

SEEDS = range(5)
SIZES = {"bio": (18_292, 9, 1), "com": (798, 100, 20), "bike": (4_354, 18, 4)}
DROPOUT = (0.1, 0.0)

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
    """Find the largest difference between two weights."""
    weights = zip(
        (w for model in ours for w in model.parameters()),
        (w for model in theirs for w in model.parameters()),
        strict=True,
    )
    return max(float((one - other).detach().abs().max()) for one, other in weights)


def compare(threads: int, rounds: int) -> None:
    torch.set_num_threads(threads)
    made = table(
        f"Five networks, {threads} thread{'s' * (threads > 1)}: microseconds per step of all five",
        "data set", "dropout", "one by one", "stacked", "ratio", "difference of weights",
    )  # fmt: skip
    for name, (rows, inputs, epochs) in SIZES.items():
        parts, steps = data(rows, inputs), epochs * -(-rows // 64)
        for dropout in DROPOUT:
            single = partial(one_by_one, parts, epochs, dropout)
            stacked = partial(at_once, parts, epochs, dropout)
            times = best_of({"single": single, "stacked": stacked}, rounds)
            made.add_row(
                name,
                f"{dropout:g}",
                f"{times['single'] / steps * 1e6:.0f}",
                f"{times['stacked'] / steps * 1e6:.0f}",
                f"{times['single'] / times['stacked']:.1f}",
                f"{difference(stacked(), single()):.1g}",
            )
    show(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    for threads in given.threads:
        compare(threads, given.rounds)


if __name__ == "__main__":
    main()
