"""Segmentation networks: a residual one to be trained, and a pretrained DeepLab.

Both are an ``nn.Sequential`` of two parts, ``feature`` and ``head``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ffcp.paper.convnets import classifier

# --- a residual network, in the paper's form ------------------------------------------------------


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm beside a shortcut; the same size, or half of it.

    >>> ResidualBlock(4, 8, stride=2)(torch.zeros(1, 4, 9, 12)).shape
    torch.Size([1, 8, 5, 6])
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, stride=stride)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv(outputs, outputs, dilation=dilation)
        self.norm2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _normed(inputs, outputs, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        out: Tensor = (y + self.shortcut(x)).relu()
        return out


def _conv(inputs: int, outputs: int, *, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    return nn.Conv2d(
        inputs, outputs, 3, stride=stride, padding=dilation, dilation=dilation, bias=False
    )


def _normed(inputs: int, outputs: int, *, stride: int = 1) -> nn.Sequential:
    """Chain a 1x1 convolution and batch norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
    )


class ResidualEncoder(nn.Module):
    """From an image to a map of half its size, by way of a quarter and an eighth.

    The coarse maps see far: their blocks are dilated. They are enlarged again and added to the
    finer ones. The output comes before a ReLU, so that it has no exact zeros.

    Parameters
    ----------
    width
        Channels at half the size of the image; twice as many at a quarter, four times at an
        eighth.
    dilations
        One block at an eighth of the size for each of them.
    outputs
        Channels of the output.

    Examples
    --------
    >>> ResidualEncoder(4, (1, 2), 6)(torch.zeros(1, 3, 18, 24)).shape
    torch.Size([1, 6, 9, 12])
    """

    def __init__(self, width: int, dilations: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(3, width, stride=2), nn.BatchNorm2d(width), nn.ReLU())
        self.fine = ResidualBlock(width, width)
        self.middle = nn.Sequential(
            ResidualBlock(width, 2 * width, stride=2), ResidualBlock(2 * width, 2 * width)
        )
        self.coarse = nn.Sequential(
            ResidualBlock(2 * width, 4 * width, stride=2),
            *(ResidualBlock(4 * width, 4 * width, dilation=dilation) for dilation in dilations),
        )
        self.to_middle = _normed(4 * width, 2 * width)
        self.join_middle = ResidualBlock(2 * width, 2 * width)
        self.to_fine = _normed(2 * width, width)
        self.join_fine = nn.Sequential(_conv(width, outputs), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Encode images."""
        fine = self.fine(self.stem(x))
        middle = self.middle(fine)
        x = self.join_middle(middle + _enlarged(self.to_middle(self.coarse(middle)), middle))
        out: Tensor = self.join_fine((fine + _enlarged(self.to_fine(x), fine)).relu())
        return out


def _enlarged(x: Tensor, like: Tensor) -> Tensor:
    return functional.interpolate(x, like.shape[2:], mode="bilinear", align_corners=False)


def residual_net(
    classes: int,
    width: int = 24,
    outputs: int = 32,
    hidden: int = 48,
    dilations: Sequence[int] = (1, 2, 4, 8),
    seed: int = 0,
) -> nn.Sequential:
    """Build a network that regresses :func:`ffcp.segmentation.targets`, at half the image's size.

    As in the paper, ``feature`` is a residual encoder and ``head`` are two convolutions. The
    class of a pixel is the one with the smallest output, since log(-log p) falls with p.

    Parameters
    ----------
    classes
        Number of outputs for each pixel.
    width
        Channels of the encoder, before they grow.
    outputs
        Channels of the feature.
    hidden
        Channels between the two convolutions of the head.
    dilations
        Of the blocks at an eighth of the image's size.
    seed
        The first weights depend on it alone.

    Examples
    --------
    >>> model = residual_net(4, width=8, outputs=16, hidden=8)
    >>> x = torch.zeros(2, 3, 64, 96)
    >>> model.feature(x).shape, model(x).shape
    (torch.Size([2, 16, 32, 48]), torch.Size([2, 4, 32, 48]))
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = nn.Sequential(
            OrderedDict[str, nn.Module](
                relu0=nn.ReLU(),
                conv1=nn.Conv2d(outputs, hidden, 3, padding=1),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(hidden, classes, 1),
            )
        )
        return classifier(ResidualEncoder(width, dilations, outputs), head)


def shapes_net(seed: int = 0) -> nn.Sequential:
    """Build the small network for :func:`ffcp.paper.scenes.shapes`.

    >>> sum(p.numel() for p in shapes_net().parameters()) < 200_000
    True
    """
    return residual_net(4, width=12, outputs=16, hidden=32, dilations=(1, 2), seed=seed)


def camvid_net(seed: int = 0) -> nn.Sequential:
    """Build the network for CamVid.

    >>> sum(p.numel() for p in camvid_net().parameters()) < 2_000_000
    True
    """
    return residual_net(11, width=24, outputs=32, hidden=48, dilations=(1, 2, 4, 8), seed=seed)


def predicted_labels(scores: Tensor) -> Tensor:
    """Return the class of every pixel, the one with the smallest of log(-log p).

    >>> predicted_labels(torch.tensor([[[[1.5]], [[-4.6]]]]))
    tensor([[[1]]])
    """
    return scores.argmin(dim=1)
