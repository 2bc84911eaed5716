"""Venn-Abers compared with temperature scaling, on the logits of pretrained networks.

Random splits into calibration and test halves. Measured are the log loss of the class probabilities
and the calibration error of the top class (20 bins of equal size, mean distance between probability
and accuracy); both also for the binary question whether the top class is right. Images are in
``FFCP_DATA``; networks whose files are missing are listed and skipped.

    python -m benchmarks.probabilities --networks cifar10_resnet20 resnet152
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import ffcp
from benchmarks.timing import show, table
from ffcp.classification.tuning import fit_temperature
from ffcp_paper.experiments import logits as computed
from ffcp_paper.networks.pretrained import NETWORKS

BINS, ROWS = 20, 100_000
CHOSEN = ["cifar10_resnet20", "cifar10_resnet56", "resnet152", "mobilenet_v1_025"]
Calibrate = Callable[[Tensor, Tensor, Tensor], Tensor]


class Data(NamedTuple):
    logits: Tensor
    labels: Tensor


def as_they_are(logits: Tensor, labels: Tensor, new: Tensor) -> Tensor:
    return new.double().softmax(dim=1)


def temperature(logits: Tensor, labels: Tensor, new: Tensor) -> Tensor:
    return (new.double() / fit_temperature(logits, labels)).softmax(dim=1)


def venn_abers(logits: Tensor, labels: Tensor, new: Tensor) -> Tensor:
    return ffcp.VennAbers(nn.Identity()).calibrate(logits, labels).predict_proba(new)


METHODS: dict[str, Calibrate] = {
    "softmax": as_they_are,
    "temperature": temperature,
    "VennAbers": venn_abers,
}


def log_loss(probabilities: Tensor, labels: Tensor) -> float:
    of_label = probabilities.gather(1, labels[:, None])[:, 0]
    return float(-of_label.clamp_min(1e-12).log().mean())


def calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """Return the mean distance of the top probability from the accuracy, in bins of equal size."""
    top, guess = probabilities.max(dim=1)
    order, right = top.argsort(stable=True), (guess == labels).double()
    parts = [(right[rows].mean() - top[rows].mean()).abs() * len(rows) for rows in
             order.tensor_split(BINS)]  # fmt: skip
    return float(torch.stack(parts).sum() / len(labels))


def is_top_right(data: Data) -> Data:
    """Return the binary problem whether the top class is right, with its log odds."""
    logits = data.logits.double()
    top, guess = logits.max(dim=1)
    others = logits.scatter(1, guess[:, None], -torch.inf).logsumexp(dim=1)
    odds = top - others
    return Data(torch.stack([torch.zeros_like(odds), odds], dim=1), (guess == data.labels).long())


def measured(data: Data, splits: int) -> dict[str, list[float]]:
    """Return the mean log loss and calibration error of each method over random splits."""
    found: dict[str, list[list[float]]] = {name: [] for name in METHODS}
    for seed in range(splits):
        order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(seed))
        old, new = order.tensor_split(2)
        for name, calibrate in METHODS.items():
            predicted = calibrate(data.logits[old], data.labels[old], data.logits[new])
            labels = data.labels[new]
            found[name].append([log_loss(predicted, labels), calibration_error(predicted, labels)])
    return {name: torch.tensor(rows).mean(dim=0).tolist() for name, rows in found.items()}


def time_of(rows: int) -> tuple[float, float]:
    """Return the seconds that calibrating and predicting take, for two classes."""
    x = torch.randn(rows, generator=torch.Generator().manual_seed(0))
    y = (torch.rand(rows, generator=torch.Generator().manual_seed(1)) < x.sigmoid()).long()
    start = time.perf_counter()
    venn = ffcp.VennAbers(nn.Identity()).calibrate(x, y)
    venn.predict_proba(x[:1])
    middle = time.perf_counter()
    venn.predict_proba(x)
    return middle - start, time.perf_counter() - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=CHOSEN, choices=list(NETWORKS))
    parser.add_argument("--splits", type=int, default=20)
    asked = parser.parse_args()
    columns = [f"{name}, {what}" for name in METHODS for what in ("log loss", "error")]
    classes = table("Probabilities of all classes", "network", *columns)
    top = table("Is the most likely class right?", "network", *columns)
    for name in asked.networks:
        missing = computed.missing(NETWORKS[name])
        if missing:
            print(f"{name}: skipped, {len(missing)} files are missing in FFCP_DATA")
            continue
        result = computed.compute(name)
        data = Data(result.logits, result.labels)
        title = f"{NETWORKS[name].title}, {data.logits.shape[1]} classes, {len(data.labels)} rows"
        for report, part in ((classes, data), (top, is_top_right(data))):
            found = measured(part, asked.splits)
            report.add_row(title, *(f"{one:.4f}" for pair in found.values() for one in pair))
    show(classes)
    show(top)
    fit, predict = time_of(ROWS)
    print(f"VennAbers, two classes: {ROWS:,} rows calibrate in {fit:.2f} s, {ROWS:,} are predicted "
          f"in {predict:.2f} s")  # fmt: skip


if __name__ == "__main__":
    main()
