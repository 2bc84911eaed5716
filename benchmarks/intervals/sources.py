"""Measure what each source of features adds to learned quantiles of the residual.

The learner is that of the prototype (:func:`benchmarks.intervals.opponents.pooled`), so that only
its columns differ: prediction, input, gradient norms at the layers, the last hidden values, the
leverage of these among training rows, the residuals of neighbouring training rows.

    python -m benchmarks.intervals.sources --seeds 100,101 --jobs 2     # tables, and images
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ffcp
from benchmarks.intervals.cases import ALPHA, DATA, IMAGES, Case, has_images
from benchmarks.intervals.comparison import Ratio, ratio
from benchmarks.intervals.opponents import Array, numbers, pooled, predicted
from ffcp import metrics
from ffcp_paper.data import result_cache as runs
from ffcp_paper.experiments.studies import available

_VERSION = 1
_LAYERS = ("input", "0", "3", "6")  # of the paper's network, before each ReLU
_NEIGHBOURS = 25
INPUT, PREDICTION, NORMS = "input", "prediction", "gradient norms"
HIDDEN, LEVERAGE, NEAR = "hidden values", "leverage", "neighbours' residuals"
#: What is added, and beside what.
ADDED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (NORMS, (PREDICTION,)),
    (HIDDEN, (PREDICTION,)),
    (NORMS, (PREDICTION, HIDDEN)),
    (INPUT, (PREDICTION,)),
    (NORMS, (PREDICTION, INPUT)),
    (HIDDEN, (PREDICTION, INPUT)),
    (LEVERAGE, (PREDICTION, INPUT)),
    (NEAR, (PREDICTION, INPUT)),
)
Sources = tuple[str, ...]


def _views(case: Case) -> dict[str, Callable[[Tensor], Array]]:
    """Return a function of inputs for each source of columns."""
    model, parts = case.model, case.parts

    def norms(x: Tensor) -> Array:
        _, found = ffcp.gradient_norms(model, x, features=list(_LAYERS))
        columns = np.column_stack([numbers(found[layer]) for layer in _LAYERS])
        return np.asarray(np.log(np.maximum(columns, 1e-12)))

    def hidden(x: Tensor) -> Array:
        with torch.no_grad():
            return np.asarray(model[:-1](x).double().numpy())

    def leverage(x: Tensor) -> Array:
        own = hidden(parts.x_train)
        inverse = np.linalg.pinv(own.T @ own / len(own) + 1e-6 * np.eye(own.shape[1]))
        new = hidden(x)
        return np.asarray(np.sqrt(np.maximum((new @ inverse * new).sum(axis=1), 0.0)))

    def near(x: Tensor) -> Array:
        from sklearn.neighbors import NearestNeighbors

        sizes = np.abs(numbers(parts.y_train) - predicted(model, parts.x_train))
        search = NearestNeighbors(n_neighbors=_NEIGHBOURS + 1).fit(parts.x_train.numpy())
        distance, rows = search.kneighbors(x.numpy())
        itself = distance[:, :1] == 0  # a training row is not its own neighbour
        rows = np.where(itself, rows[:, 1:], rows[:, :-1])
        return np.asarray(sizes[rows].mean(axis=1))

    return {
        PREDICTION: lambda x: predicted(model, x),
        INPUT: lambda x: np.asarray(x.double().numpy()),
        NORMS: norms,
        HIDDEN: hidden,
        LEVERAGE: leverage,
        NEAR: near,
    }


def score(case: Case, sources: Sources) -> float:
    """Return the interval score of a learner with these columns, or look it up."""

    def find() -> float:
        views = _views(case)

        def columns(x: Tensor) -> Array:
            return np.column_stack([views[name](x) for name in sources])

        lower, upper = pooled(case.model, case.parts, ALPHA, columns)(case.parts.x_test)
        ends = torch.from_numpy(lower), torch.from_numpy(upper)
        return float(metrics.interval_score(ends, case.parts.y_test.double(), ALPHA))

    return float(runs.record("interval_sources", _key(case, sources), find))


def _key(case: Case, sources: Sources) -> dict[str, Any]:
    return {"version": _VERSION, "data": case.data, "seed": case.seed, "sources": sorted(sources)}


def _known(case: Case, sources: Sources) -> float | None:
    found: float | None = runs.known("interval_sources", _key(case, sources))
    return found


def gain(data: Sequence[str], seeds: Sequence[int], added: str, beside: Sources) -> Ratio | None:
    """Return the ratio of interval scores with and without a source, over stored results."""
    groups = []
    for name in data:
        cases = [Case(name, seed) for seed in seeds]
        pairs = [(_known(one, (added, *beside)), _known(one, beside)) for one in cases]
        ratios = [mine / other for mine, other in pairs if mine is not None and other is not None]
        groups += [ratios] if ratios else []
    return ratio(groups) if groups else None


def measured(seeds: Sequence[int]) -> int:
    """Return the number of data sets with stored results."""
    first = ADDED[0][1]
    return sum(any(_known(Case(n, seed), first) is not None for seed in seeds) for n in DATA)


def rows(seeds: Sequence[int]) -> list[tuple[str, ...]]:
    """Return a line for each source: its gain on tables, and on images."""
    lines = []
    for added, beside in ADDED:
        found = [gain(data, seeds, added, beside) for data in (DATA, (IMAGES,))]
        cells = ("" if one is None else str(one) for one in found)
        lines.append((added, " and ".join(beside), *cells))
    return lines


def _work(case: Case) -> str:
    torch.set_num_threads(1)
    wanted = dict.fromkeys(
        tuple(own) for added, beside in ADDED for own in (beside, (added, *beside))
    )
    found = {" + ".join(sources): score(case, sources) for sources in wanted}
    listed = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
    return f"{case.data} {case.seed}: {listed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", required=True, help="separated by commas")
    parser.add_argument("--data", default=",".join((*DATA, IMAGES)), help="separated by commas")
    parser.add_argument("--jobs", default=1, type=int, help="processes at once")
    asked = parser.parse_args()
    seeds = [int(seed) for seed in asked.seeds.split(",")]
    there = [
        name
        for name in asked.data.split(",")
        if (has_images() if name == IMAGES else available(name))
    ]
    cases = [Case(name, seed) for name in there for seed in seeds]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.jobs, mp_context=context) as pool:
        for line in pool.map(_work, cases):
            print(line, flush=True)
    for cells in rows(seeds):
        print(*cells, sep=" | ")


if __name__ == "__main__":
    main()
