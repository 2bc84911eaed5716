"""Row norms of large Jacobians compared with bare passes: ``python -m benchmarks.rows``.

The head is that of a small segmentation network, conv3x3-ReLU-conv1x1 with 20 classes at
64 x 128: 163,840 outputs. The baselines only run their passes through the head.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

import ffcp
from benchmarks.timing import Resident, best_of, show, table, verdict
from ffcp import metrics
from ffcp.network.cut import Cut
from ffcp.network.jacobian import Method
from ffcp.network.jacobian.coloured import colours
from ffcp.network.jacobian.dispatch import jacobian_rows
from ffcp.scales import Sketch, Smooth
from ffcp_paper.training.regression import train

CHANNELS, CLASSES, HEIGHT, WIDTH, PROBES = 64, 20, 64, 128, 32
COUNTED = 64  # rows of the exact Jacobian that are timed; all of them would take minutes


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, padding=1),  # the feature
        nn.ReLU(),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, CLASSES, 1),
    ).eval()


def exact_part(model: nn.Module, x: Tensor) -> None:
    """Compute the first rows one by one, as method="exact" does."""
    with Cut(model, ["0"]) as cut:
        tap = cut(x)
        for (gradient,) in islice(jacobian_rows(tap, tap.edges["0"]), COUNTED):
            assert gradient is not None
            gradient.norm()


def bare_backward(head: nn.Module, v: Tensor, passes: int) -> None:
    v = v.detach().requires_grad_()
    output = head(v)
    start = torch.zeros_like(output)
    start[:, 0, ::3, ::3] = 1
    for _ in range(passes):
        torch.autograd.grad(output, v, start, retain_graph=True)


@torch.no_grad()
def bare_forward(head: nn.Module, v: Tensor, passes: int) -> None:
    for _ in range(passes):
        head(v)


def norms(model: nn.Module, x: Tensor, method: Method) -> Callable[[], object]:
    return partial(ffcp.gradient_norms, model, x, ["0"], method=method)


def speed(rows: int, rounds: int = 3) -> None:
    model = network().requires_grad_(False)
    head = model[1:]
    x = torch.randn(rows, 3, HEIGHT, WIDTH)
    v = model[0](x)
    start = time.perf_counter()
    result = colours(model, x, "0")
    probing = time.perf_counter() - start
    assert result is not None
    times = best_of(
        {
            "exact": partial(exact_part, model, x),
            "coloured": norms(model, x, "coloured"),
            "backward": partial(bare_backward, head, v, result.passes),
            "sketch": norms(model, x, Sketch(PROBES)),
            "forward": partial(bare_forward, head, v, PROBES),
        },
        rounds,
    )
    outputs = CLASSES * HEIGHT * WIDTH
    exact = times["exact"] * outputs / COUNTED
    coloured = times["coloured"] / times["backward"]
    sketch = times["sketch"] / times["forward"]
    report = table(
        f"{rows} image(s), {outputs:,} outputs each; the windows took {probing:.1f} s, once",
        "method", "seconds", "passes", "against", "ratio", "limit", "",
    )  # fmt: skip
    report.add_row("exact (extrapolated)", f"{exact:.0f}", f"{outputs:,}", "", "", "", "")
    report.add_row("coloured", f"{times['coloured']:.2f}", f"{result.passes}", "exact",
                 f"1/{exact / times['coloured']:.0f}", "1/100",
                 verdict(times["coloured"] / exact, 1 / 100))  # fmt: skip
    report.add_row("", "", "", "its backward passes", f"{coloured:.2f}", "2", verdict(coloured, 2))
    report.add_row(f"sketch({PROBES})", f"{times['sketch']:.2f}", f"{PROBES}",
                 f"{PROBES} forward passes", f"{sketch:.2f}", "2", verdict(sketch, 2))  # fmt: skip
    show(report)


def memory() -> None:
    model = network()
    report = table("Memory of FFCP on whole maps, beyond data and model", "images", "what", "MB")
    for rows in (8, 32):
        x = torch.randn(rows, 3, HEIGHT, WIDTH)
        y = torch.randn(rows, CLASSES, HEIGHT, WIDTH)
        ways: tuple[Method, ...] = ("coloured", Sketch(4))
        for method in ways:
            predictor = ffcp.FFCP(model, "0", method=method, joint=True, batch_size=2)
            with Resident() as watched:
                predictor.calibrate(x, y)
            report.add_row(str(rows), f"calibrate, {method}", f"{watched.grown:.0f}")
            with Resident() as watched:
                interval = predictor.predict_interval(x, alpha=0.3)
            result = 3 * interval.lower.numel() * 4 / 2**20
            report.add_row("", f"predict, {method}; result {result:.0f} MB", f"{watched.grown:.0f}")
    show(report)


# -- when smoothing shortens intervals -----------------------------------------------------------


def flat_then_steep(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return data with zero slope on the left; on the right, slope and noise grow."""
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(rows, 1, generator=generator) - 2
    noise = torch.randn(rows, generator=generator)
    steep = x[:, 0].clamp_min(0)
    return x, steep.square() + noise * (0.1 + 0.3 * steep)


def growing(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return data whose slope and noise grow everywhere, so that no gradient vanishes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 1, generator=generator)
    noise = torch.randn(rows, generator=generator)
    return x, torch.exp(2 * x[:, 0]) + 0.1 * torch.exp(2 * x[:, 0]) * noise


def narrow(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


def smoothing() -> None:
    report = table(
        "Mean interval length (coverage 90 %) and the share of gradients that vanish",
        "data", "vanish", "CP", "FFCP", *(f"smooth({s:g})" for s in SIGMAS),
    )  # fmt: skip
    for name, draw, width in (
        ("flat, 8 wide", flat_then_steep, 8),
        ("flat, 64 wide", flat_then_steep, 64),
        ("growing, 64 wide", growing, 64),
    ):
        (x, y), (x_cal, y_cal), (x_test, y_test) = (draw(4000, seed) for seed in range(3))
        model = train(narrow(width), x, y[:, None], epochs=60, learning_rate=3e-3)
        _, at = ffcp.gradient_norms(model, x_test, ["2"])
        cells = [name, f"{float((at['2'] < 1e-6).double().mean()):.0%}"]
        methods: list[Method] = ["exact", *(Smooth(sigma, 8) for sigma in SIGMAS)]
        for predictor in (ffcp.CP(model), *(ffcp.FFCP(model, "2", method=m) for m in methods)):
            interval = predictor.calibrate(x_cal, y_cal).predict_interval(x_test)
            assert abs(metrics.coverage(interval, y_test) - 0.9) < 0.03
            cells.append(f"{metrics.mean_length(interval):.3g}")
        report.add_row(*cells)
    show(report)


SIGMAS = (0.1, 0.3, 1.0)


def main() -> None:
    for images in (1, 8):
        speed(images)
    memory()
    smoothing()


if __name__ == "__main__":
    main()
