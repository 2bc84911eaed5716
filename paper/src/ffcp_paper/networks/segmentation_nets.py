"""Segmentation networks: a residual network to train, and a pretrained DeepLab.

Both are an ``nn.Sequential`` of two parts, ``feature`` and ``head``.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ffcp.segmentation import SMALLEST, DoubleLog
from ffcp_paper.data.files import DataFile
from ffcp_paper.data.images import arrays
from ffcp_paper.networks.convnets import PlannedFeature, classifier, dequantise

DEEPLAB_FILE = DataFile(
    "vision/deeplab_mnet_edgetpu_cityscapes_513_u8.npz",
    "https://github.com/google-coral/test_data (commit 104342d), its TFLite file as arrays",
    "23533d59ea2a48577dc014d376cf9ff458803659bc663e69cf93ebc2a4a480ab",
)
#: The CamVid class of each of the 19 Cityscapes train ids.
CITYSCAPES_TO_CAMVID = (3, 4, 1, 1, 7, 2, 6, 6, 5, 5, 0, 9, 10, 8, 8, 8, 8, 10, 10)

_DEEPLAB_SIZE = 513

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
    """Build a network whose outputs are as :func:`ffcp.segmentation.targets`, at half size.

    As in the paper, ``feature`` is a residual encoder and ``head`` are two convolutions; what
    comes behind them has no weights and turns their logits into log(-log p). The class of a
    pixel is the one with the smallest output, since log(-log p) falls with p.

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
                scores=DoubleLog(SMALLEST),
            )
        )
        return classifier(ResidualEncoder(width, dilations, outputs), head)


def shapes_net(seed: int = 0) -> nn.Sequential:
    """Build the small network for :func:`ffcp_paper.data.label_maps.shapes`.

    >>> sum(p.numel() for p in shapes_net().parameters()) < 200_000
    True
    """
    return residual_net(4, width=12, outputs=16, hidden=32, dilations=(1, 2), seed=seed)


def camvid_net(seed: int = 0) -> nn.Sequential:
    """Build the network for CamVid.

    Pixels of rare classes, like poles and signs, count more in its training
    (:data:`ffcp_paper.training.segmentation_training.RECIPES`).

    >>> sum(p.numel() for p in camvid_net().parameters()) < 2_000_000
    True
    """
    return residual_net(11, width=24, outputs=32, hidden=48, dilations=(1, 2, 4, 8), seed=seed)


# --- DeepLab ------------------------------------------------------------------------------------


class MergeClasses(nn.Module):
    """Merge classes into fewer: the logit of a group is the log of its members' summed weights.

    The softmax over the groups is then the sum of the members' softmax.

    Parameters
    ----------
    groups
        The group of every class; each of 0, 1, ... up to the largest must occur.

    Examples
    --------
    >>> logits = torch.tensor([0.5, 0.2, 0.3]).log().view(1, 3, 1, 1)
    >>> MergeClasses([0, 1, 0])(logits).exp().flatten()
    tensor([0.8000, 0.2000])
    """

    def __init__(self, groups: Sequence[int]) -> None:
        super().__init__()
        count = max(groups) + 1
        if sorted(set(groups)) != list(range(count)):
            raise ValueError(f"groups must be numbered 0 to {count - 1} without gaps, got {groups}")
        self.members = [
            [number for number, group in enumerate(groups) if group == wanted]
            for wanted in range(count)
        ]

    def forward(self, logits: Tensor) -> Tensor:
        """Merge the classes of (n, classes, height, width)."""
        return torch.cat(
            [logits[:, members].logsumexp(dim=1, keepdim=True) for members in self.members], dim=1
        )

    def bounds(self, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """Bound the merged logits, which grow with every logit."""
        return self(lower), self(upper)


def deeplab(
    content: bytes, size: tuple[int, int] = (90, 120), *, scores: bool = True
) -> nn.Sequential:
    """Build DeepLab on MobileNet-EdgeTPU from its file, for the classes of CamVid.

    It was trained on Cityscapes, other roads with finer classes, which are merged. ``feature`` is
    a map of 128 x 33 x 33; ``head`` a 1x1 convolution, a bilinear resize and what follows
    from its logits.

    Parameters
    ----------
    content
        The file :data:`DEEPLAB_FILE`.
    size
        Height and width of the output.
    scores
        Whether the output is log(-log p), as what :func:`ffcp.segmentation.targets` makes of
        label maps; otherwise logits.

    Returns
    -------
    nn.Sequential
        From images, prepared by :func:`deeplab_inputs`, to (n, 11, height, width).
    """
    stored = arrays(content)
    plan = json.loads(str(stored["plan"]))
    kinds = [operation["op"] for operation in plan[-2:]]
    if kinds != ["conv", "resize"] or plan[-2]["src"] != len(plan) - 3:
        raise ValueError("the plan does not end in a convolution and a resize")
    weight, bias = dequantise(stored, plan[-2]["layer"])
    conv = nn.Conv2d(weight.shape[1], weight.shape[0], 1)
    conv.load_state_dict({"weight": weight, "bias": bias})
    head: dict[str, nn.Module] = {
        "conv": conv,
        "resize": nn.Upsample(size=size, mode="bilinear", align_corners=True),
        "merge": MergeClasses(CITYSCAPES_TO_CAMVID),
    }
    if scores:
        head["scores"] = DoubleLog(SMALLEST)
    return classifier(PlannedFeature(plan[:-2], stored), nn.Sequential(OrderedDict(head)))


def deeplab_inputs(pixels: Tensor) -> Tensor:
    """Turn pixels (n, 3, height, width) into inputs of DeepLab, squeezed to 513 x 513.

    >>> deeplab_inputs(torch.full((1, 3, 360, 480), 192, dtype=torch.uint8)).shape
    torch.Size([1, 3, 513, 513])
    """
    size = (_DEEPLAB_SIZE, _DEEPLAB_SIZE)
    x = functional.interpolate(
        pixels.float(), size, mode="bilinear", align_corners=False, antialias=True
    )
    return (x - 128) / 128


def without_scores(model: nn.Sequential) -> nn.Sequential:
    """Return a network with shared weights that ends with the logits, before log(-log p).

    >>> model = residual_net(4, width=4, outputs=4, hidden=4, dilations=(1,))
    >>> x = torch.randn(1, 3, 16, 16)
    >>> bool(model(x).equal(model.head[-1](without_scores(model)(x))))
    True
    """
    head = model[-1]
    if not isinstance(head, nn.Sequential) or not isinstance(head[-1], DoubleLog):
        raise ValueError("the network must be a feature and a head that ends in DoubleLog")
    return nn.Sequential(model[:-1], head[:-1])


def predicted_labels(scores: Tensor) -> Tensor:
    """Return the class of every pixel, the one with the smallest of log(-log p).

    >>> predicted_labels(torch.tensor([[[[1.5]], [[-4.6]]]]))
    tensor([[[1]]])
    """
    return scores.argmin(dim=1)
