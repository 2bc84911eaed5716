"""CP and FFCP compared with bare passes of the network: ``python -m benchmarks.core``.

Bare passes only run the network, at the best of three batch sizes: no checks, no norms, no
intervals. Ratios come from one interleaved run.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

import ffcp
from benchmarks.timing import Resident, best_of, show, table, verdict
from ffcp.network.cut import Cut
from ffcp.network.inputs import RowBuffer, batches
from ffcp_paper.networks.regression import SPLIT_POINTS, mlp

ROWS, COLUMNS = 100_000, 100
SIZES = (4096, 8192, 16384)
IMAGES = 256
STREAMED, BATCH = 2_000_000, 8_000


def bare_forward(model: nn.Module, x: Tensor, size: int) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(batch) for batch in x.split(size)])


def bare_backward(
    model: nn.Sequential, x: Tensor, size: int, taps: tuple[int, ...], norms: bool = False
) -> Tensor:
    """Run forward and backward to the input and the tapped layers, parameters frozen."""
    outputs = []
    for batch in x.split(size):
        value = batch.detach().requires_grad_()
        tapped = [value]
        for index, layer in enumerate(model):
            value = layer(value)
            if index in taps:
                tapped.append(value)
        gradients = torch.autograd.grad(value.sum(), tapped)
        if norms:
            [torch.linalg.vector_norm(gradient, dim=1) for gradient in gradients]
        outputs.append(value.detach())
    return torch.cat(outputs)


def loop(model: nn.Module, x: Tensor) -> None:
    """Run the library's loop over batches, without checks and intervals."""
    buffer = RowBuffer(len(x))
    with Cut(model) as cut:
        for batch in batches(x):
            buffer.add({"prediction": cut(batch).prediction})


def best_size(bare: Callable[[int], object]) -> int:
    """Return the best batch size of a bare pass, measured in a separate run.

    In the comparison it then has as many rounds as the others.
    """
    times = best_of({str(size): partial(bare, size) for size in SIZES}, 15)
    return int(min(times, key=lambda size: times[size]))


def regression_network(rounds: int = 100) -> None:
    torch.manual_seed(0)
    model = mlp(COLUMNS).eval().requires_grad_(False)
    x, y = torch.randn(ROWS, COLUMNS), torch.randn(ROWS)
    few = (x[:2000], y[:2000])
    cp = ffcp.CP(model).calibrate(*few)
    one = ffcp.FFCP(model, SPLIT_POINTS[2]).calibrate(*few)
    forward_size = best_size(lambda size: bare_forward(model, x, size))
    backward_size = best_size(lambda size: bare_backward(model, x, size, (0, 3, 6)))
    prediction = cp.predict_interval(x).prediction
    stored = ffcp.CP(ffcp.Stored()).calibrate(prediction, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        times = best_of(
            {
                "CP": lambda: cp.predict_interval(x),
                "CP calibrate": lambda: ffcp.CP(model).calibrate(x, y),
                "one": lambda: one.predict_interval(x),
                "five": lambda: ffcp.gradient_norms(model, x, SPLIT_POINTS),
                "auto": lambda: ffcp.FFCP(model, SPLIT_POINTS).calibrate(x, y),
                "look for NaN in x": lambda: x.sum(),
                "cut and batches": lambda: loop(model, x),
                "intervals from predictions": lambda: stored.predict_interval(prediction),
                "bare forward": lambda: bare_forward(model, x, forward_size),
                "bare fwd+bwd": lambda: bare_backward(model, x, backward_size, (0, 3, 6)),
                "with norms": lambda: bare_backward(model, x, backward_size, (0, 3, 6), True),
            },
            rounds,
        )
    report = table(
        f"The paper's network, {ROWS:,} rows x {COLUMNS} columns",
        "what", "ms", "against", "ms", "ratio", "limit", "",
    )  # fmt: skip
    for what, name, against, limit in (
        ("CP", "CP", "bare forward", 1.15),
        ("FFCP, five split points", "five", "bare fwd+bwd", 1.10),
        ("  the same", "five", "with norms", None),
        ("FFCP, five split points", "five", "CP", 3.0),
        ("FFCP, one hidden layer", "one", "CP", 2.3),
        ("CP, calibrate", "CP calibrate", "bare forward", 1.4),
        ("FFCP auto, calibrate", "auto", "bare fwd+bwd", 1.15),
    ):
        ratio = times[name] / times[against]
        report.add_row(
            what, f"{times[name] * 1e3:.1f}", against, f"{times[against] * 1e3:.1f}",
            f"{ratio:.2f}", *((f"{limit:.2f}", verdict(ratio, limit)) if limit else ()),
        )  # fmt: skip
    show(report)
    times["norms of the gradients"] = times["with norms"] - times["bare fwd+bwd"]
    times["cut and batches"] -= times["bare forward"]
    report = table("Work that bare passes do not do", "what", "ms", "of bare forward", "of fwd+bwd")
    for name in (
        "look for NaN in x",
        "cut and batches",
        "intervals from predictions",
        "norms of the gradients",
    ):
        shares = (times[name] / times[bare] for bare in ("bare forward", "bare fwd+bwd"))
        report.add_row(name, f"{times[name] * 1e3:.2f}", *(f"{share:.1%}" for share in shares))
    show(report)


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
    x, y = torch.randn(IMAGES, 3, 32, 32), torch.randn(IMAGES)
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
    report = table(f"Residual network, {IMAGES} images", "what", "ms", "against CP", "limit", "")
    for what, name, limit in (
        ("CP", "CP", None),
        ("FFCP, cut before the last two layers", "FFCP", 1.2),
        ("FFCP, cut after the last block", "block", 1.2),
    ):
        ratio = times[name] / times["CP"]
        last = (f"{limit:.2f}", verdict(ratio, limit)) if limit else ()
        report.add_row(what, f"{times[name] * 1e3:.1f}", f"{ratio:.2f}", *last)
    show(report)


def stream(rows: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(rows // size):
        yield torch.randn(size, COLUMNS), torch.randn(size)


def _streamed(feature: str, rows: int, size: int, answer: multiprocessing.Queue[float]) -> None:
    """Measure in a separate process, so that other jobs' memory is not counted."""
    warnings.simplefilter("ignore", ffcp.FFCPWarning)
    model = mlp(COLUMNS)
    ffcp.FFCP(model, feature).calibrate(stream(8 * size, size))
    with Resident() as resident:
        predictor = ffcp.FFCP(model, feature).calibrate(stream(rows, size))
    assert len(predictor.calibration) > rows // 2
    answer.put(resident.grown)


def memory() -> None:
    report = table(f"Streaming {STREAMED:,} rows", "what", "MB more", "limit", "")
    context = multiprocessing.get_context("spawn")
    for feature in ("3", "auto"):
        answer = context.Queue()
        process = context.Process(target=_streamed, args=(feature, STREAMED, BATCH, answer))
        process.start()
        grown = answer.get()
        process.join()
        report.add_row(f"FFCP({feature!r})", f"{grown:.0f}", "200", verdict(grown, 200))
    show(report)


def main() -> None:
    regression_network()
    residual_network()
    memory()


if __name__ == "__main__":
    main()
