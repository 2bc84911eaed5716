"""Latency of single-row predictions, as in a service: ``python -m benchmarks.latency``.

Compared with the bare passes of :mod:`benchmarks.core` on the paper's network, and with the bare
model for 1,000 classes. The first call is measured in a fresh process.

``--compiled`` adds what ``torch.compile`` could gain: compiled intervals without checks of weights,
values or threads, beside :mod:`ffcp.network.jacobian.stack`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import ffcp
from benchmarks.core import COLUMNS, bare_backward, bare_forward
from benchmarks.timing import best_of, show, table, verdict
from ffcp.network.jacobian.stack import Stack
from ffcp_paper.networks.regression import SPLIT_POINTS, mlp

_FIRST = """
import time, torch, ffcp
from ffcp_paper.networks.regression import mlp
x, y = torch.randn(500, 100), torch.randn(500)
predictor = ffcp.CP(mlp(100)).calibrate(x, y)
times = [time.perf_counter()]
for _ in range(2):
    predictor.predict_interval(x[:1])
    times.append(time.perf_counter())
print(2 * times[1] - times[0] - times[2])
"""


def one_row(rounds: int = 2000) -> None:
    torch.manual_seed(0)
    model = mlp(COLUMNS).eval().requires_grad_(False)
    x, y, labels = torch.randn(2000, COLUMNS), torch.randn(2000), torch.arange(2000) % 1000
    classifier = nn.Sequential(nn.Linear(COLUMNS, 64), nn.ReLU(), nn.Linear(64, 1000)).eval()
    cp = ffcp.CP(model).calibrate(x, y)
    gradient = ffcp.FFCP(model, SPLIT_POINTS[2]).calibrate(x, y)
    raps = ffcp.RAPS(classifier).calibrate(x, labels)
    row = x[:1]
    times = best_of(
        {
            "CP": lambda: cp.predict_interval(row),
            "FFCP": lambda: gradient.predict_interval(row),
            "RAPS": lambda: raps.predict_set(row),
            "bare forward": lambda: bare_forward(model, row, 1),
            "bare fwd+bwd": lambda: bare_backward(model, row, 1, ()),
            "bare classifier": lambda: bare_forward(classifier, row, 1),
        },
        rounds,
    )
    report = table("One row", "what", "ms", "against", "ms", "ratio or ms more", "limit", "")
    for name, against, limit in (("CP", "bare forward", 4.0), ("FFCP", "bare fwd+bwd", 1.6)):
        ratio = times[name] / times[against]
        report.add_row(
            name, f"{times[name] * 1e3:.3f}", against, f"{times[against] * 1e3:.3f}",
            f"{ratio:.2f}", f"{limit:.2f}", verdict(ratio, limit),
        )  # fmt: skip
    more = (times["RAPS"] - times["bare classifier"]) * 1e3
    report.add_row(
        "RAPS, 1,000 classes", f"{times['RAPS'] * 1e3:.3f}", "bare classifier",
        f"{times['bare classifier'] * 1e3:.3f}", f"{more:.2f} ms", "0.50 ms", verdict(more, 0.5),
    )  # fmt: skip
    first = min(_first() for _ in range(3)) * 1e3
    report.add_row(
        "CP, first call", "", "second", "", f"{first:.1f} ms", "20 ms", verdict(first, 20)
    )
    show(report)


def _first() -> float:
    """Return by how many seconds the first call of a fresh process exceeds the second."""
    done = subprocess.run([sys.executable, "-c", _FIRST], capture_output=True, check=True)
    return float(done.stdout)


def compiled(rounds: int = 2000) -> None:
    torch.manual_seed(0)
    model, row = mlp(COLUMNS).eval().requires_grad_(False), torch.randn(1, COLUMNS)
    cut = int(SPLIT_POINTS[2]) + 1

    def cp(x: Tensor) -> tuple[Tensor, Tensor]:
        value = model(x)
        return value - 0.5, value + 0.5

    def gradient(x: Tensor) -> tuple[Tensor, Tensor]:
        slopes, value = torch.func.grad_and_value(lambda v: model[cut:](v).sum())(model[:cut](x))
        margin = 0.5 * slopes.norm(dim=1).clamp_min(1e-6)
        return value - margin, value + margin

    contestants: dict[str, Callable[[Tensor], object]] = {"bare forward": model}
    seconds: dict[str, float] = {}
    for name, run in (("model", model), ("CP", cp), ("FFCP", gradient)):
        start = time.perf_counter()
        contestants[name] = torch.compile(run)
        with torch.no_grad():
            contestants[name](row)
        seconds[name] = time.perf_counter() - start
    stack = Stack.of(model)
    assert stack is not None
    contestants["by hand, the model"] = lambda x: stack.run(x, [], 2)
    contestants["by hand, and its gradient"] = lambda x: stack.run(x, [SPLIT_POINTS[2]], 2)
    with torch.no_grad():
        times = best_of({n: partial(run, row) for n, run in contestants.items()}, rounds)
    report = table("One row, nothing checked", "what", "ms", "seconds to compile")
    for name, best in times.items():
        report.add_row(name, f"{best * 1e3:.3f}", f"{seconds.get(name, 0):.1f}")
    show(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiled", action="store_true", help="also time torch.compile")
    asked = parser.parse_args()
    one_row()
    if asked.compiled:
        compiled()


if __name__ == "__main__":
    main()
