"""Prediction sets for every pixel: CamVid and a DeepLab (goes with docs/segmentation.md).

Needs the images and weights of `ffcp-paper segment deeplab`; the error says where they are from.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ffcp import segmentation
from ffcp_paper.data import label_maps
from ffcp_paper.data.images import read
from ffcp_paper.networks import segmentation_nets

ALPHA, CALIBRATE = 0.1, 70


def batches(some: label_maps.LabelledImages) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of images, as the network takes them, and their label maps."""
    for pixels, labels in zip(some.pixels.split(4), some.labels.split(4), strict=True):
        yield segmentation_nets.deeplab_inputs(pixels), labels


def main() -> None:
    road = label_maps.camvid(360, 480, splits=("val",))["val"]
    # Frames of one film are alike: a random division, or they would not be exchangeable.
    cal, test = (road.take(rows) for rows in label_maps.split(len(road), CALIBRATE, seed=0))
    model = segmentation_nets.deeplab(read(segmentation_nets.DEEPLAB_FILE), scores=False).eval()

    predictor = segmentation.PixelSets(model, ignore=road.ignore)
    predictor.calibrate(batches(cal))
    shares, sizes, right = [], [], []
    for x, labels in batches(test):
        found = predictor.predict_set(x, ALPHA, share=0.9)
        shares.append(found.coverage(labels, road.ignore))
        sizes.append(found.size.double())
        known = labels != road.ignore
        right.append((found.prediction == labels)[known].double())
    share, size = torch.cat(shares), torch.cat(sizes)

    print(f"{torch.cat(right).mean():.1%} of the pixels have the right first label")
    print(f"promised: for at least {1 - ALPHA:.0%} of images, 90 % of the pixels are covered")
    print(f"seen:     {(share >= 0.9).double().mean():.0%} of {len(share)} images")
    print(
        f"sets hold {size.mean():.2f} labels on average; one in {(size == 1).double().mean():.0%}"
    )
    for name, places in {"sky": 0, "road": 3, "pole": 2, "pedestrian": 9}.items():
        print(f"  where the label is {name:10}  {size[test.labels == places].mean():.2f} labels")


if __name__ == "__main__":
    main()
