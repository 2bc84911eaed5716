"""Exported CP and FFCP compared with the bare model, in onnxruntime: ``make bench``.

All files are made by the same exporter and run on the same rows. The bare model returns only the
prediction; FFCP's file also computes the gradient norm and the interval. Processor time of one
thread.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import nn

import ffcp
from benchmarks.timing import best_of, show, table, verdict
from ffcp_paper.networks.regression import SPLIT_POINTS, mlp

COLUMNS, LIMIT = 100, 3.0


def bare(model: nn.Module, x: torch.Tensor, path: Path) -> None:
    torch.onnx.export(
        model, (x,), path, dynamo=True, verbose=False,
        input_names=["x"], dynamic_shapes=({0: torch.export.Dim("rows")},),
    )  # fmt: skip


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # the caller's
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def exported(rounds: int = 3000) -> None:
    torch.manual_seed(0)
    model = mlp(COLUMNS).eval()
    x, y = torch.randn(2000, COLUMNS), torch.randn(2000)
    report = table(
        "The paper's network in onnxruntime, one thread",
        "rows", "CP, ms", "FFCP, ms", "bare model, ms", "CP / bare", "FFCP / bare", "limit", "",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.onnx" for name in ("bare", "CP", "FFCP")}
        bare(model, x[:100], files["bare"])
        ffcp.CP(model).calibrate(x, y).export(files["CP"], x[:100])
        ffcp.FFCP(model, SPLIT_POINTS[2]).calibrate(x, y).export(files["FFCP"], x[:100])
        sessions = {name: session(path) for name, path in files.items()}
    for rows in (1, 100, 10_000):
        given = {"x": np.random.default_rng(0).standard_normal((rows, COLUMNS), dtype=np.float32)}
        repeat = max(1, 30 // rows)  # short, so that some rounds are not interrupted

        def run(name: str, given: dict[str, np.ndarray] = given, repeat: int = repeat) -> None:
            for _ in range(repeat):
                sessions[name].run(None, given)

        contestants = {name: lambda name=name: run(name) for name in sessions}
        times = best_of(contestants, max(100, rounds // rows), time.thread_time)
        cp, ratio = times["CP"] / times["bare"], times["FFCP"] / times["bare"]
        shown = (f"{times[name] / repeat * 1e3:.3f}" for name in ("CP", "FFCP", "bare"))
        report.add_row(
            f"{rows:,}", *shown, f"{cp:.2f}", f"{ratio:.2f}", f"{LIMIT:.2f}", verdict(ratio, LIMIT)
        )
    show(report)


def main() -> None:
    exported()


if __name__ == "__main__":
    main()
