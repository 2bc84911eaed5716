"""EfficientNet-lite, with layers that match published weights."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from torch import Tensor, nn

from ffcp_paper.networks.convnets import (
    GlobalAverage,
    SameConv2d,
    classifier,
    head_of,
    load_weights,
    state_dict,
)

# (blocks, kernel, stride, expansion, channels) of every stage, before scaling
_STAGES = ((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80),
           (3, 5, 1, 6, 112), (4, 5, 2, 6, 192), (1, 3, 1, 6, 320))  # fmt: skip
_STEM, _HEAD = 32, 1280  # the lite variants do not scale them
_EPSILON = 1e-3  # of batch norm, TensorFlow's


class InvertedBlock(nn.Module):
    """Expand, convolve each channel alone, project; with a shortcut where shapes allow it."""

    def __init__(
        self, inputs: int, outputs: int, *, kernel: int, stride: int, expansion: int
    ) -> None:
        super().__init__()
        width = inputs * expansion
        self.expand = _normed(inputs, width, 1) if expansion > 1 else nn.Identity()
        self.depthwise = _normed(width, width, kernel, stride=stride, groups=width)
        self.project = _normed(width, outputs, 1, activation=False)
        self._shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        y: Tensor = self.project(self.depthwise(self.expand(x)))
        return x + y if self._shortcut else y


def _normed(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1,
    activation: bool = True,
) -> nn.Sequential:  # fmt: skip
    """Chain convolution, batch norm and, if asked, ReLU6."""
    layers: dict[str, nn.Module] = {
        "conv": SameConv2d(inputs, outputs, kernel, stride=stride, groups=groups, bias=False),
        "norm": nn.BatchNorm2d(outputs, eps=_EPSILON),
    }
    if activation:
        layers["act"] = nn.ReLU6()
    return nn.Sequential(OrderedDict(layers))


def scaled_channels(channels: int, width: float) -> int:
    """Scale a number of channels to a multiple of 8, losing at most a tenth by rounding.

    >>> [scaled_channels(channels, 1.1) for channels in (16, 24, 40, 80, 112, 192, 320)]
    [16, 24, 48, 88, 120, 208, 352]
    """
    wanted = channels * width
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * wanted else rounded


def efficientnet_blocks(width: float, depth: float) -> list[InvertedBlock]:
    """List the blocks; neither the first nor the last stage gets deeper.

    >>> len(efficientnet_blocks(1.0, 1.0)), len(efficientnet_blocks(1.1, 1.2))
    (16, 21)
    """
    blocks, inputs = [], _STEM
    for number, (repeats, kernel, stride, expansion, channels) in enumerate(_STAGES):
        outputs = scaled_channels(channels, width)
        ends = number in (0, len(_STAGES) - 1)
        for repeat in range(repeats if ends else int(np.ceil(repeats * depth))):
            blocks.append(
                InvertedBlock(
                    inputs, outputs, kernel=kernel, stride=1 if repeat else stride,
                    expansion=expansion,
                )
            )  # fmt: skip
            inputs = outputs
    return blocks


def efficientnet_lite(content: bytes, width: float, depth: float) -> nn.Sequential:
    """Build an EfficientNet-lite from its state dict and its two multipliers."""
    state = {_efficientnet_name(name): value for name, value in state_dict(content).items()}
    blocks = efficientnet_blocks(width, depth)
    channels = blocks[-1].project[0].out_channels
    assert isinstance(channels, int)
    feature = nn.Sequential(
        OrderedDict[str, nn.Module](
            stem=_normed(3, _STEM, 3, stride=2),
            blocks=nn.Sequential(*blocks),
            top=_normed(channels, _HEAD, 1),
            pool=GlobalAverage(),
        )
    )
    head = head_of(state.pop("_fc.weight"), state.pop("_fc.bias"))
    load_weights(feature, state)
    return classifier(feature, head)


_EFFICIENTNET_PARTS = {
    "_conv_stem": "stem.conv", "_bn0": "stem.norm", "_conv_head": "top.conv", "_bn1": "top.norm",
}  # fmt: skip
_EFFICIENTNET_BLOCK_PARTS = {
    "_expand_conv": "expand.conv", "_bn0": "expand.norm", "_depthwise_conv": "depthwise.conv",
    "_bn1": "depthwise.norm", "_project_conv": "project.conv", "_bn2": "project.norm",
}  # fmt: skip


def _efficientnet_name(stored: str) -> str:
    """Translate a name of the checkpoint.

    >>> _efficientnet_name("_blocks.3._bn2.running_var")
    'blocks.3.project.norm.running_var'
    """
    parts = stored.split(".")
    if parts[0] == "_blocks":
        _, number, part, kind = parts
        return f"blocks.{number}.{_EFFICIENTNET_BLOCK_PARTS[part]}.{kind}"
    part, kind = parts
    return f"{_EFFICIENTNET_PARTS.get(part, part)}.{kind}"
