"""CP and FFCP against hand-written passes: ``make bench`` or ``python -m benchmarks.core``.

The bare passes do nothing but run the network, at the batch size that suits them best of
three tried; no check, no norm, no band. Ratios come from one interleaved run.
"""

from __future__ import annotations

import multiprocessing
import resource
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import ffcp
from benchmarks.timing import best_of, show, table, verdict
from ffcp.paper.networks import SPLIT_POINTS, mlp

ROWS, COLUMNS = 100_000, 100
SIZES = (4096, 8192, 16384)


def bare_forward(model: nn.Module, x: Tensor, size: int) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(batch) for batch in x.split(size)])


def bare_backward(model: nn.Sequential, x: Tensor, size: int, taps: tuple[int, ...]) -> Tensor:
    """Forward and backward at the input and behind the tapped layers, parameters frozen."""
    outputs = []
    for batch in x.split(size):
        value = batch.detach().requires_grad_()
        tapped = [value]
        for index, layer in enumerate(model):
            value = layer(value)
            if index in taps:
                tapped.append(value)
        torch.autograd.grad(value.sum(), tapped)
        outputs.append(value.detach())
    return torch.cat(outputs)


def fastest(times: dict[str, float], prefix: str) -> float:
    return min(seconds for name, seconds in times.items() if name.startswith(prefix))


def regression_network(rounds: int = 40) -> None:
    torch.manual_seed(0)
    model = mlp(COLUMNS).eval().requires_grad_(False)
    x, y = torch.randn(ROWS, COLUMNS), torch.randn(ROWS)
    few = (x[:2000], y[:2000])
    cp = ffcp.CP(model).calibrate(*few)
    one = ffcp.FFCP(model, SPLIT_POINTS[2]).calibrate(*few)
    contestants: dict[str, Callable[[], object]] = {
        "CP predict": lambda: cp.predict_interval(x),
        "CP calibrate": lambda: ffcp.CP(model).calibrate(x, y),
        "FFCP predict": lambda: one.predict_interval(x),
        "FFCP five": lambda: ffcp.gradient_norms(model, x, SPLIT_POINTS),
        "FFCP auto": lambda: ffcp.FFCP(model, SPLIT_POINTS).calibrate(x, y),
    }
    for size in SIZES:
        contestants[f"forward {size}"] = lambda size=size: bare_forward(model, x, size)  # type: ignore[misc]
        contestants[f"backward {size}"] = lambda size=size: bare_backward(model, x, size, (0, 3, 6))  # type: ignore[misc]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        times = best_of(contestants, rounds)
    forward, backward = fastest(times, "forward"), fastest(times, "backward")
    made = table(
        f"The paper's network, {ROWS:,} rows x {COLUMNS} columns",
        "what", "ms", "against", "ms", "ratio", "limit", "",
    )  # fmt: skip
    for what, ours, against, reference, limit in (
        ("CP, predict", times["CP predict"], "bare forward", forward, 1.10),
        ("CP, calibrate", times["CP calibrate"], "bare forward", forward, 1.10),
        ("FFCP, five split points", times["FFCP five"], "bare fwd+bwd", backward, 1.15),
        ("FFCP, auto calibrate", times["FFCP auto"], "bare fwd+bwd", backward, 1.15),
        ("FFCP, five split points", times["FFCP five"], "CP", times["CP predict"], 3.0),
        ("FFCP, one hidden layer", times["FFCP predict"], "CP", times["CP predict"], 2.3),
    ):
        ratio = ours / reference
        made.add_row(
            what, f"{ours * 1e3:.1f}", against, f"{reference * 1e3:.1f}", f"{ratio:.2f}",
            f"{limit:.2f}", verdict(ratio, limit),
        )  # fmt: skip
    show(made)


class Residual(nn.Module):
    """Two 3x3 convolutions around a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(x + self.branch(x))


def residual_network(rounds: int = 7) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        *(Residual(32) for _ in range(6)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1),
    ).eval()  # fmt: skip
    x, y = torch.randn(256, 3, 32, 32), torch.randn(256)
    cp = ffcp.CP(model, batch_size=64).calibrate(x, y)
    late = ffcp.FFCP(model, "9", batch_size=64).calibrate(x, y)
    block = ffcp.FFCP(model, "6", batch_size=64).calibrate(x, y)
    times = best_of(
        {
            "CP": lambda: cp.predict_interval(x),
            "FFCP": lambda: late.predict_interval(x),
            "block": lambda: block.predict_interval(x),
            "forward": lambda: bare_forward(model, x, 64),
        },
        rounds,
    )
    made = table("Residual network, 256 images", "what", "ms", "against CP", "limit", "")
    for what, name, limit in (
        ("CP", "CP", None),
        ("FFCP, cut before the last two layers", "FFCP", 1.2),
        ("FFCP, cut after the last block", "block", 1.2),
    ):
        ratio = times[name] / times["CP"]
        made.add_row(
            what, f"{times[name] * 1e3:.1f}", f"{ratio:.2f}", f"{limit:.2f}" if limit else "",
            verdict(ratio, limit) if limit else "",
        )  # fmt: skip
    show(made)


def stream(rows: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(rows // size):
        yield torch.randn(size, COLUMNS), torch.randn(size)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _streamed(feature: str, rows: int, size: int, answer: multiprocessing.Queue[float]) -> None:
    """In a process of its own: its peak memory is that of this job."""
    warnings.simplefilter("ignore", ffcp.FFCPWarning)
    model = mlp(COLUMNS)
    ffcp.FFCP(model, feature).calibrate(stream(8 * size, size))
    before = _peak()
    predictor = ffcp.FFCP(model, feature).calibrate(stream(rows, size))
    grown = _peak() - before
    assert len(predictor.calibration) > rows // 2
    answer.put(grown)


def memory(rows: int = 2_000_000, size: int = 8_000) -> None:
    made = table(f"Streaming {rows:,} rows x {COLUMNS} columns", "what", "MB more", "limit", "")
    context = multiprocessing.get_context("spawn")
    for feature in ("3", "auto"):
        answer = context.Queue()
        process = context.Process(target=_streamed, args=(feature, rows, size, answer))
        process.start()
        grown = answer.get()
        process.join()
        made.add_row(f"FFCP({feature!r})", f"{grown:.0f}", "200", verdict(grown, 200))
    show(made)


if __name__ == "__main__":
    regression_network()
    residual_network()
    memory()
