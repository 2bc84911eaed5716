"""Volume of ellipsoids compared with boxes for several outputs: ``python -m benchmarks.ellipsoid``.

Forecasts of traffic and of electric power over several steps, three zones of power, and two decay
coefficients of a ship's turbine (files in ``FFCP_DATA``). Networks are trained on the first half of
the rows; the rest is split at random, so that calibration and test rows are exchangeable. The box's
scales and the ellipsoid's covariance are learned from the same rows. Volumes are compared by
geometric means.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

import ffcp
from benchmarks.timing import show, table
from ffcp_paper.data.datasets import FURTHER

ALPHA, EPOCHS, WIDTH, LAYER = 0.1, 20, 64, "2"
MOST_ROWS = 20_000
PAST = 24  # lags of a forecast


def read(name: str) -> pd.DataFrame:
    return pd.read_csv(FURTHER[name].files[0].require(), keep_default_na=False, na_values=[""])


def calendar(when: pd.Series) -> np.ndarray:
    """Return the hour of the day and of the week as points of circles."""
    hours = when.dt.hour + when.dt.minute / 60
    turns = np.stack([hours / 24, (24 * when.dt.day_of_week + hours) / 168], axis=1)
    return np.concatenate([np.sin(2 * np.pi * turns), np.cos(2 * np.pi * turns)], axis=1)


def horizons(values: np.ndarray, when: pd.Series, ahead: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the past and the calendar of every moment, and the next values."""
    windows = np.lib.stride_tricks.sliding_window_view(values, PAST + ahead)
    now = calendar(when)[PAST - 1 : PAST - 1 + len(windows)]
    return np.concatenate([windows[:, :PAST], now], axis=1), windows[:, PAST:]


def traffic(ahead: int) -> tuple[np.ndarray, np.ndarray]:
    frame = read("metro_traffic").drop_duplicates("date_time")
    return horizons(frame["traffic_volume"].to_numpy(float), when(frame["date_time"]), ahead)


def power(ahead: int) -> tuple[np.ndarray, np.ndarray]:
    frame = read("tetuan_power")
    values = frame["Zone 1 Power Consumption"].to_numpy(float)
    return horizons(values, when(frame["DateTime"]), ahead)


def when(column: pd.Series) -> pd.Series:
    return pd.to_datetime(column)


def zones() -> tuple[np.ndarray, np.ndarray]:
    frame = read("tetuan_power")
    names = [name for name in frame if str(name).startswith("Zone")]
    weather = frame.drop(columns=["DateTime", *names]).to_numpy(float)
    now = calendar(when(frame["DateTime"]))
    return np.concatenate([weather, now], axis=1), frame[names].to_numpy(float)


def naval() -> tuple[np.ndarray, np.ndarray]:
    frame = read("naval")
    frame = frame.sample(frac=1, random_state=0)  # a grid of settings: no order in time
    targets = frame[["kMc", "kMt"]].to_numpy(float)
    return frame.drop(columns=["kMc", "kMt", "T1", "P1"]).to_numpy(float), targets


CASES = {
    "traffic, 4 hours": lambda: traffic(4),
    "traffic, 12 hours": lambda: traffic(12),
    "power, one hour": lambda: power(6),
    "power, zones": zones,
    "naval": naval,
}


def trained(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = (nn.Linear(x.shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    model = nn.Sequential(*layers, nn.Linear(WIDTH, y.shape[1]))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            (model(x[rows]) - y[rows]).square().mean().backward()
            optimizer.step()
    return model.eval()


def measured(x: Tensor, y: Tensor, seed: int) -> dict[str, list[float]]:
    """Return the coverages of box and ellipsoid and the log ratio of volumes, for CP and FFCP."""
    half = len(x) // 2
    random = torch.Generator().manual_seed(seed)
    train = torch.randperm(half, generator=random)[:MOST_ROWS]
    rest = half + torch.randperm(len(x) - half, generator=random)[: MOST_ROWS // 2]
    calibrate, test = rest.chunk(2)
    x = (x - x[train].mean(dim=0)) / x[train].std(dim=0).clamp_min(1e-9)
    y = (y - y[train].mean(dim=0)) / y[train].std(dim=0)
    x, y = x.float(), y.float()
    model, found = trained(x[train], y[train], seed), {}
    methods: dict[str, Any] = {"CP": ffcp.CP, "FFCP": partial(ffcp.FFCP, feature=LAYER)}
    for name, method in methods.items():
        box, ellipsoid = (
            method(model, joint=joint, seed=seed)
            .calibrate(x[calibrate], y[calibrate])
            .predict_interval(x[test], ALPHA)
            for joint in (True, "ellipsoid")
        )
        ratio = ellipsoid.volume.log() - box.width.double().log().sum(dim=1)
        found[name] = [
            float(ffcp.metrics.coverage(box, y[test], joint=True)),
            float(ffcp.metrics.coverage(ellipsoid, y[test])),
            float(ratio.mean()),
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    columns = ("outputs", "method", "box covers", "ellipsoid covers", "volume / box's")
    shown = table(f"Several outputs at once, alpha = {ALPHA}", "data", *columns)
    for name, read_case in CASES.items():
        x, y = (torch.from_numpy(np.ascontiguousarray(part)) for part in read_case())
        runs = [measured(x, y, seed) for seed in seeds]
        for method in runs[0]:
            box, ellipsoid, ratio = np.mean([run[method] for run in runs], axis=0)
            numbers = f"{box:.1%}", f"{ellipsoid:.1%}", f"{np.exp(ratio):.3f}"
            shown.add_row(name, str(y.shape[1]), method, *numbers)
    show(shown)


if __name__ == "__main__":
    main()
