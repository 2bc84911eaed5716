"""Faults of a predictor in a multithreaded service, counted: ``python -m benchmarks.threads``.

Every number shown must be 0. Eight threads use one predictor while other threads run, train or
recalibrate it; random numbers of other threads; files with a flipped bit; scores of another
network; predictions one row at a time.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ffcp
from benchmarks.timing import show, table, verdict

THREADS, CALLS = 8, 200
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(200, 6, generator=GENERATOR), torch.randn(200, generator=GENERATOR)
NEW = torch.randn(16, 6, generator=GENERATOR)


def network(seed: int = 0, outputs: int = 1) -> nn.Sequential:
    """Return a network in train mode, whose dropout would change intervals."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, outputs)
    ).train()


def together(*jobs: Callable[[], None]) -> list[str]:
    """Run each job in a thread; return the errors."""
    raised: list[str] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # every error counts
            raised.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def ends(predictor: ffcp.IntervalPredictor) -> Tensor:
    interval = predictor.predict_interval(NEW, 0.1)
    return torch.stack([interval.lower, interval.upper])


def asking(
    predictor: ffcp.IntervalPredictor, expected: list[Tensor]
) -> tuple[list[Callable[[], None]], list[int]]:
    """Return the jobs of eight threads, and a list that counts wrong intervals."""
    wrong: list[int] = []

    def ask() -> None:
        for _ in range(CALLS):
            interval = ends(predictor)
            if not any(torch.equal(interval, known) for known in expected):
                wrong.append(1)

    return [ask] * THREADS, wrong


def repeated(
    job: Callable[[], Any], errors: list[str], times: int = THREADS * CALLS
) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            try:
                job()
            except Exception as error:  # every error counts
                errors.append(str(error))

    return run


def steps(model: nn.Sequential, count: int) -> list[float]:
    """Train and return the losses, which show any interference."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-3), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        noise = torch.randn(X.shape, generator=generator)
        model[2].eval()  # dropout draws from the random numbers of all threads
        loss = (model(X + 0.01 * noise)[:, 0] - Y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def counted() -> dict[str, int]:
    """Return the number of faults in each case."""
    faults: dict[str, int] = {}
    for name, predictor in {
        "FFCP at a layer": ffcp.FFCP(network(), "0"),
        "CP, model left in train mode": ffcp.CP(network()),
    }.items():
        predictor.calibrate(X, Y)
        jobs, wrong = asking(predictor, [ends(predictor)])
        faults[f"8 threads, {name}: calls that raise"] = len(together(*jobs))
        faults[f"8 threads, {name}: wrong intervals"] = len(wrong)

    model, errors = network(), list[str]()
    predictor = ffcp.FFCP(model, "0").calibrate(X, Y)
    jobs, wrong = asking(predictor, [ends(predictor)])
    together(*jobs, repeated(lambda: model(NEW), errors))
    faults["model(x) in another thread meanwhile: calls that raise"] = len(errors)
    faults["model(x) in another thread meanwhile: wrong intervals"] = len(wrong)

    both = [(X, Y), (X, 3 * Y)]
    predictor = ffcp.FFCP(network(), "0")
    known = [ends(predictor.calibrate(*data)) for data in both]
    jobs, wrong = asking(predictor, known)
    turns = itertools.cycle(both)
    raised = together(*jobs, repeated(lambda: predictor.calibrate(*next(turns)), errors, CALLS))
    faults["calibrated anew meanwhile: calls that raise"] = len(raised) + len(errors)
    faults["calibrated anew meanwhile: intervals of neither calibration"] = len(wrong)

    model = network()
    alone = steps(copy.deepcopy(model), 300)
    predictor = ffcp.FFCP(model, "0").calibrate(X, Y)
    before, losses, odd = ends(predictor), list[float](), list[str]()

    def ask() -> None:
        for _ in range(CALLS):
            try:
                if not torch.equal(ends(predictor), before):
                    odd.append("another interval")
            except RuntimeError as error:
                if "changed since the calibration" not in str(error):
                    odd.append(str(error))

    raised = together(*[ask] * 4, lambda: losses.extend(steps(model, 300)))
    faults["training in another thread: steps that raise"] = len(raised)
    faults["training in another thread: losses that differ"] = sum(map(float.__ne__, losses, alone))
    faults["training in another thread: intervals of weights in between, other errors"] = len(odd)

    sets = ffcp.APS(network(outputs=5).eval(), seed=0).calibrate(X, torch.arange(200) % 5)
    numbers: list[float] = []

    def draw() -> None:
        for _ in range(5000):
            numbers.append(float(torch.rand((), dtype=torch.float64)))

    together(draw, *[repeated(lambda: sets.predict_set(NEW), [], CALLS)] * 4)
    faults["random numbers of another thread: repeated of 5,000"] = 5000 - len(set(numbers))

    predictor, other = (ffcp.CP(network(seed)) for seed in (0, 1))
    predictor.calibrate(X, Y)
    other.calibrate(X, 100 + Y)
    faults["merge with another network's scores: accepted"] = accepted(
        lambda: predictor.merge(other)
    )
    faults["one flipped bit in the scores: loaded"] = flipped_bits(predictor)
    return {**faults, **one_row_at_a_time()}


def accepted(job: Callable[[], Any]) -> int:
    try:
        job()
    except ValueError:
        return 0
    return 1


def flipped_bits(predictor: ffcp.IntervalPredictor) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calibration.safetensors"
        predictor.save(path)
        data = path.read_bytes()
        start, loaded = data.find(predictor.calibration.scores.numpy().tobytes()), 0
        assert start > 0
        random = np.random.default_rng(0)
        for _ in range(500):
            damaged = bytearray(data)
            damaged[start + random.integers(8 * 200)] ^= 1 << int(random.integers(8))
            path.write_bytes(damaged)
            loaded += accepted(lambda: predictor.load(path))
        return loaded


def one_row_at_a_time() -> dict[str, int]:
    """Return the number of seeds out of 20 with coverage below 0.85 at level 0.9."""
    x = 2 * torch.randn(1400, 5, generator=GENERATOR)
    y = torch.multinomial(x.softmax(dim=1), 1, generator=GENERATOR)[:, 0]
    t = torch.randn(1400, generator=GENERATOR)
    first = nn.Linear(5, 1, bias=False)
    nn.init.zeros_(first.weight)
    near = ffcp.kernels.Localizer("gaussian", on="input", bandwidth=3.0)
    low = {"APS": 0, "RAPS": 0, "LCP random": 0}
    for seed in range(20):
        sets = {
            "APS": ffcp.APS(nn.Identity(), seed=seed, allow_zero_sets=True),
            "RAPS": ffcp.RAPS(nn.Identity(), seed=seed, allow_zero_sets=True),
        }
        for name, predictor in sets.items():
            predictor.calibrate(x[:1000], y[:1000])
            hits = [
                bool(predictor.predict_set(x[i : i + 1]).mask[0, y[i]]) for i in range(1000, 1400)
            ]
            low[name] += float(np.mean(hits)) < 0.85
        local = ffcp.LCP(first, near, guarantee="random", seed=seed).calibrate(x[:1000], t[:1000])
        inside = []
        for i in range(1000, 1400):
            interval = local.predict_interval(x[i : i + 1])
            inside.append(bool(interval.lower[0] <= t[i] <= interval.upper[0]))
        low["LCP random"] += float(np.mean(inside)) < 0.85
    return {f"{name}, one row per call: seeds of 20 below 0.85": n for name, n in low.items()}


if __name__ == "__main__":
    warnings.simplefilter("ignore", ffcp.FFCPWarning)
    torch.set_num_threads(1)
    report = table(f"{THREADS} threads, {CALLS} calls each", "case", "faults", "")
    for what, number in counted().items():
        report.add_row(what, str(number), verdict(number, 0))
    show(report)
