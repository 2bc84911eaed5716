"""A small segmentation network, images and label maps."""

from __future__ import annotations

from functools import cache

import torch
from scipy import stats
from torch import Tensor, nn

from ffcp.segmentation import PixelSets
from tests.conftest import normal

SIDE, CLASSES = 6, 3
IGNORE = 255


def network() -> nn.Sequential:
    """Not ReLU: where all units are dead, many pixels have the same outputs, and scores tie."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(4, CLASSES, 1)
    )
    with torch.no_grad():
        model[2].weight.mul_(4)
    return model


def scenes(rows: int, seed: int = 0, side: int = SIDE) -> tuple[Tensor, Tensor]:
    """Images of different contrast, and labels that are off for the whole image or hardly at all.

    The pixels of one image share contrast and error, so 36 of them are little more than one.
    """
    generator = torch.Generator().manual_seed(seed)
    contrast = torch.randn(rows, 1, 1, 1, generator=generator).abs().mul(2).exp()
    x = contrast * torch.randn(rows, 1, side, side, generator=generator)
    shift = 3 * contrast * torch.randn(rows, CLASSES, 1, 1, generator=generator)
    with torch.no_grad():
        logits = network()(x)
    return x, (logits + shift + torch.randn(logits.shape, generator=generator)).argmax(dim=1)


X, Y = scenes(60)


def holed(y: Tensor, share: float = 0.3, seed: int = 5) -> Tensor:
    """Label maps without the labels of some pixels."""
    return y.masked_fill(normal(*y.shape, seed=seed) < stats.norm.ppf(share), IGNORE)


@cache
def pool(feature: str = "output") -> Tensor:
    """Counts of pixels in bins, for many images.

    Given the pool, a random draw of N + T of its images is exchangeable, and draws are
    independent: the laws hold exactly for every pool, so it is scored only once.
    """
    x, y = scenes(3000, seed=1)
    return PixelSets(network(), feature).calibrate(x, y).calibration.scores
