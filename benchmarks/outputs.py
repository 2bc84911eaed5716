"""Cost of gradient norms with many outputs: ``python -m benchmarks.outputs``.

The network is 672 -> 128 -> 128 -> 672, as in a forecast of a week in half-hour steps.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

import ffcp
from benchmarks.timing import best_of, show, table, verdict

ROWS, OUTPUTS, WIDTH = 500, 672, 128


def many_outputs(rounds: int = 5) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(OUTPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
        nn.Linear(WIDTH, OUTPUTS),
    ).eval()  # fmt: skip
    x, y = torch.randn(ROWS, OUTPUTS), torch.randn(ROWS, OUTPUTS)
    cp = ffcp.CP(model).calibrate(x, y)
    first = ffcp.FFCP(model, "0").calibrate(x, y)
    sketch = ffcp.FFCP(model, "0", method=ffcp.scales.Sketch()).calibrate(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        times = best_of(
            {
                "CP": lambda: cp.predict_interval(x),
                "FFCP at the first layer": lambda: first.predict_interval(x),
                "the same, by a sketch of 32": lambda: sketch.predict_interval(x),
                "FFCP at the first layer, calibrate": lambda: ffcp.FFCP(model, "0").calibrate(x, y),
                "FFCP auto, calibrate": lambda: ffcp.FFCP(model).calibrate(x, y),
            },
            rounds,
        )
    one = times["FFCP at the first layer, calibrate"]
    report = table(
        f"{OUTPUTS} -> {WIDTH} -> {WIDTH} -> {OUTPUTS}, {ROWS} rows",
        "what", "ms", "against", "ratio", "limit", "",
    )  # fmt: skip
    for name, against, seconds, limit in (
        ("CP", "", 0.0, 0.0),
        ("FFCP at the first layer", "CP", times["CP"], 25.0),
        ("the same, by a sketch of 32", "CP", times["CP"], 0.0),
        ("FFCP at the first layer, calibrate", "", 0.0, 0.0),
        ("FFCP auto, calibrate", "one layer", one, 6.0),
    ):
        ratio = times[name] / seconds if seconds else 0.0
        last = (f"{limit:.2f}", verdict(ratio, limit)) if limit else ()
        shown = f"{ratio:.2f}" if ratio else ""
        report.add_row(name, f"{times[name] * 1e3:.1f}", against, shown, *last)
    show(report)


def main() -> None:
    many_outputs()


if __name__ == "__main__":
    main()
