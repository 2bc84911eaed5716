"""Run time of FCP compared with FFCP and CP: ``python -m benchmarks.fcp``.

Times cover calibration scores and test intervals. FCP is optimised too, so that the difference is
that of the methods.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import ffcp
from benchmarks.timing import Resident, best_of, show, table, verdict
from ffcp.network.heads import head
from ffcp.regression.fcp import inversion
from ffcp.regression.fcp.feature_ball import STEP_COUNTS, FeatureBallScore
from ffcp.regression.regression_predictor import RegressionPredictor
from ffcp_paper.networks.regression import SPLIT_POINTS, mlp

COLUMNS, CALIBRATE, TEST = 100, 20_000, 10_000
MANY = 1_000_000  # rows whose memory is watched
FEATURE = SPLIT_POINTS[2]


def data(outputs: int) -> tuple[nn.Sequential, Tensor, Tensor, Tensor]:
    """Return an untrained network, since weights do not affect run times, and random rows."""
    torch.manual_seed(0)
    model = mlp(COLUMNS, outputs).eval()
    x, x_test = torch.randn(CALIBRATE, COLUMNS), torch.randn(TEST, COLUMNS)
    return model, x, model(x).detach().mean(dim=1) + 0.05 * torch.randn(CALIBRATE), x_test


def one_step(rounds: int = 25) -> None:
    """Compare one inversion step with a bare forward and backward pass through the head."""
    model, x, y, _ = data(1)
    rest = head(model, FEATURE).requires_grad_(False)
    v = torch.nn.Sequential(*list(model)[:4])(x[:8192]).detach()
    y = y[:8192]
    steps = 20

    def bare() -> None:
        moving = v.clone().requires_grad_()
        for _ in range(steps):
            torch.autograd.grad(rest(moving).sum(), moving)

    def ours() -> None:
        inversion.descend(lambda u: rest(u)[:, 0], v, y, [steps], lr=0.01)

    times = best_of({"bare": bare, "ours": ours}, rounds)
    ratio = times["ours"] / times["bare"]
    report = table("One inversion step, 8,192 rows", "what", "ms", "ratio", "limit", "")
    report.add_row("bare forward+backward", f"{times['bare'] / steps * 1e3:.2f}")
    report.add_row(
        "descent step", f"{times['ours'] / steps * 1e3:.2f}", f"{ratio:.2f}", "1.30",
        verdict(ratio, 1.3),
    )  # fmt: skip
    show(report)


def search(rounds: int = 3) -> None:
    """Time the search over step counts: one trajectory for all, against one for each."""
    model, x, y, _ = data(1)
    rest = head(model, FEATURE).requires_grad_(False)
    v = torch.nn.Sequential(*list(model)[:4])(x[:4000]).detach()
    y = y[:4000]

    def run(counts: tuple[int, ...]) -> None:
        inversion.descend(lambda u: rest(u)[:, 0], v, y, counts, lr=0.01)

    def start_over() -> None:
        for count in STEP_COUNTS:
            run((count,))

    times = best_of(
        {
            "one": lambda: run(STEP_COUNTS),
            "each": start_over,
        },
        rounds,
    )
    report = table("Trying 12 numbers of steps, 4,000 rows", "what", "ms")
    report.add_row("one trajectory", f"{times['one'] * 1e3:.0f}")
    report.add_row("starting over for each", f"{times['each'] * 1e3:.0f}")
    show(report)


class _Clock:
    """Adds up the seconds spent inside a function of a class, while it is entered."""

    def __init__(self, owner: type, inner: Callable[..., Any]) -> None:
        self.seconds = 0.0

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = inner(*args)
            self.seconds += time.perf_counter() - start
            return result

        self._patch = mock.patch.object(owner, inner.__name__, timed)

    def __enter__(self) -> _Clock:
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()


def shares_of(run: Callable[[], object]) -> tuple[str, str]:
    """Return the shares of inversion and of bounds in the time of FCP."""
    # Attributes instead of strings, so that mypy notices a rename. The class is patched, not an
    # object, since the search for the number of steps creates new objects.
    with (
        _Clock(FeatureBallScore, FeatureBallScore._distance) as inversions,
        _Clock(FeatureBallScore, FeatureBallScore._ball_bounds) as bounds,
    ):
        start = time.perf_counter()
        run()
        total = time.perf_counter() - start
    return f"{inversions.seconds / total:.0%}", f"{bounds.seconds / total:.0%}"


def side_by_side(
    title: str,
    outputs: int,
    methods: dict[str, Callable[[nn.Module], RegressionPredictor]],
    rounds: int,
) -> None:
    """Print seconds, ratios, and the shares of inversion and bounds in FCP."""
    model, x, y, x_test = data(outputs)

    def whole(make: Callable[[nn.Module], RegressionPredictor]) -> Callable[[], object]:
        return lambda: make(model).calibrate(x, y).predict_interval(x_test)

    times = best_of({name: whole(make) for name, make in methods.items()}, rounds)
    first, fast = list(methods)[:2]
    report = table(
        f"{title}: {CALIBRATE:,} calibration and {TEST:,} test rows, cut at layer 2",
        "method", "ms", f"/ {first}", f"/ {fast}", "inversion", "bounds",
    )  # fmt: skip
    for name, make in methods.items():
        shares: tuple[str, ...] = ()
        if isinstance(make(model), ffcp.FCP):
            shares = shares_of(whole(make))
        report.add_row(
            name, f"{times[name] * 1e3:.1f}", f"{times[name] / times[first]:.1f}",
            f"{times[name] / times[fast]:.1f}", *shares,
        )  # fmt: skip
    show(report)


POINT: dict[str, Callable[[nn.Module], RegressionPredictor]] = {
    "CP": ffcp.CP,
    "FFCP": lambda m: ffcp.FFCP(m, FEATURE),
    "FCP, 20 steps": lambda m: ffcp.FCP(m, FEATURE, steps=20),
    "FCP, 80 steps": lambda m: ffcp.FCP(m, FEATURE, steps=80),
    "FCP, steps searched": lambda m: ffcp.FCP(m, FEATURE),
    "FCP, exact": lambda m: ffcp.FCP(m, FEATURE, invert="exact"),
    "FCP, exact, CROWN": lambda m: ffcp.FCP(m, FEATURE, invert="exact", bound="crown"),
}
QUANTILES: dict[str, Callable[[nn.Module], RegressionPredictor]] = {
    "CQR": ffcp.CQR,
    "FFCQR": lambda m: ffcp.FFCQR(m, FEATURE),
    "FCQR, 20 steps": lambda m: ffcp.FCQR(m, FEATURE, steps=20),
    "FCQR, 80 steps": lambda m: ffcp.FCQR(m, FEATURE, steps=80),
    "FCQR, steps searched": lambda m: ffcp.FCQR(m, FEATURE),
    "FCQR, exact": lambda m: ffcp.FCQR(m, FEATURE, invert="exact"),
    "FCQR, exact, CROWN": lambda m: ffcp.FCQR(m, FEATURE, invert="exact", bound="crown"),
}


def _million(bound: str, answer: multiprocessing.Queue[float]) -> None:
    """Intervals of many rows; memory beyond the input and the result."""
    warnings.simplefilter("ignore", ffcp.FFCPWarning)
    torch.manual_seed(0)
    model, x = mlp(10), torch.randn(MANY, 10)
    predictor = ffcp.FCP(model, FEATURE, steps=2, bound=bound)
    predictor.calibrate(x[:500], torch.randn(500)).predict_interval(x[:20_000])
    with Resident() as resident:
        interval = predictor.predict_interval(x)
    result = sum(part.numel() * part.element_size() for part in interval) / 2**20
    answer.put(resident.grown - result)


def memory() -> None:
    """Measure memory, which must not grow with the number of test rows."""
    report = table(f"FCP intervals of {MANY:,} rows", "bound", "MB beyond the result")
    context = multiprocessing.get_context("spawn")
    for bound in ("ibp", "crown"):
        answer = context.Queue()
        process = context.Process(target=_million, args=(bound, answer))
        process.start()
        report.add_row(bound, f"{answer.get():.0f}")
        process.join()
    show(report)


def main() -> None:
    warnings.simplefilter("ignore", ffcp.FFCPWarning)
    one_step()
    search()
    side_by_side("Point predictions", 1, POINT, 3)
    side_by_side("Quantiles", 2, QUANTILES, 3)
    memory()


if __name__ == "__main__":
    main()
