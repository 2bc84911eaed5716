"""Choice of the class weights in the training of CamVid's network.

Trains the network with the settings of ``training.segmentation_training.RECIPES`` on five sixths of
the training images, once for every balance, and tests on the rest: whole blocks of neighbouring
frames, since frames next to each other are nearly the same. Calibration and test images are not
read.

    python -m benchmarks.rare_classes --balances 0.25 0.5 0.75 1
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch

from benchmarks.timing import show, table
from ffcp_paper.data import label_maps
from ffcp_paper.networks import segmentation_nets
from ffcp_paper.training import segmentation_training

BLOCK, BLOCKS = 20, 6  # frames of a block; one of so many blocks is held out
RARE = ("pole", "sign", "pedestrian", "bicyclist")


def main() -> None:
    """Print a line for every balance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--balances", type=float, nargs="+", default=[0.25, 0.5, 0.75, 1.0])
    parser.add_argument(
        "--epochs", type=int, default=segmentation_training.RECIPES["camvid"].epochs
    )
    parser.add_argument("--jobs", type=int, default=2, help="parallel trainings of one thread")
    asked = parser.parse_args()
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(partial(held_out, epochs=asked.epochs), asked.balances))
    report = table("CamVid, images held out", "balance", "pixels right", "mean IoU", *RARE)
    for balance, (right, iou, shares) in zip(asked.balances, found, strict=True):
        report.add_row(
            f"{balance:g}", f"{right:.1%}", f"{iou:.3f}", *(f"{shares[name]:.0%}" for name in RARE)
        )
    show(report)


def held_out(balance: float, epochs: int) -> tuple[float, float, dict[str, float]]:
    """Train with one balance; return pixel accuracy, mean IoU and recall on held-out images."""
    torch.set_num_threads(1)
    recipe = segmentation_training.RECIPES["camvid"]
    data = recipe.data(0)
    is_out = torch.arange(len(data)) // BLOCK % BLOCKS == BLOCKS - 1
    training, out = (data.take(mask.nonzero()[:, 0]) for mask in (~is_out, is_out))
    model = segmentation_training.fit(
        recipe.build(0), training, epochs=epochs, batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate, weight_decay=recipe.weight_decay, balance=balance,
        augment=recipe.augment, progress=lambda line: print(f"{balance:g}: {line}", flush=True),
    )  # fmt: skip
    with torch.inference_mode():
        labels = [
            segmentation_nets.predicted_labels(model(label_maps.normalised(x)))
            for x in out.pixels.split(8)
        ]
    counts = label_maps.confusion(torch.cat(labels), out.labels, out.classes, out.ignore)
    right, iou = label_maps.pixel_accuracy(counts), label_maps.mean_iou(counts)
    print(f"{balance:g}: {right:.1%} of pixels right, mean IoU {iou:.3f}", flush=True)
    return (
        right,
        iou,
        dict(zip(out.class_names, label_maps.class_recall(counts), strict=True)),
    )


if __name__ == "__main__":
    main()
