"""Convolutional networks whose layers match published weights.

Every builder returns an ``nn.Sequential`` of two parts, ``feature`` and ``head``, so that the
penultimate feature has the same name in all of them and the head can be used alone.
"""

from __future__ import annotations

import io
import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from ffcp_paper.data.images import arrays

Arrays = Mapping[str, npt.NDArray[Any]]


def classifier(feature: nn.Module, head: nn.Module) -> nn.Sequential:
    """Join the two parts of a network; in eval mode, since it will not be trained.

    >>> [name for name, _ in classifier(nn.Flatten(), nn.Linear(4, 2)).named_children()]
    ['feature', 'head']
    """
    return nn.Sequential(OrderedDict(feature=feature, head=head)).eval()


def head_of(weight: Tensor, bias: Tensor) -> nn.Module:
    """Build a head from its weights: linear, or SqueezeNet's if the weight is a 1x1 kernel.

    >>> head_of(torch.ones(3, 2), torch.zeros(3))
    Linear(in_features=2, out_features=3, bias=True)
    """
    if weight.dim() == 4:
        return PooledHead(weight, bias)
    classes, width = weight.shape
    head = nn.Linear(width, classes)
    head.load_state_dict({"weight": weight, "bias": bias})
    return head.eval()


def state_dict(content: bytes) -> dict[str, Tensor]:
    """Read a PyTorch checkpoint without unpickling anything but tensors."""
    state: dict[str, Tensor] = torch.load(io.BytesIO(content), weights_only=True)
    return state


# --- TensorFlow's padding ---------------------------------------------------------------------


def same_padding(size: int, kernel: int, stride: int, dilation: int = 1) -> tuple[int, int]:
    """Return TensorFlow's "SAME" padding before and after, so that ceil(size / stride) come out.

    Unlike PyTorch's it depends on the size, and the odd pixel goes to the end.

    >>> same_padding(224, 3, 2), same_padding(15, 3, 2), same_padding(7, 1, 2)
    ((0, 1), (1, 1), (0, 0))
    >>> same_padding(33, 3, 1, dilation=2)
    (2, 2)
    """
    outputs = -(-size // stride)
    reach = (kernel - 1) * dilation + 1
    total = max((outputs - 1) * stride + reach - size, 0)
    return total // 2, total - total // 2


class SameConv2d(nn.Conv2d):
    """A convolution with TensorFlow's "SAME" padding.

    >>> SameConv2d(1, 1, 3, stride=2)(torch.zeros(1, 1, 8, 7)).shape
    torch.Size([1, 1, 4, 4])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Pad and convolve."""
        (top, bottom), (left, right) = (
            same_padding(size, kernel, stride, dilation)
            for size, kernel, stride, dilation in zip(
                x.shape[2:], self.kernel_size, self.stride, self.dilation, strict=True
            )
        )
        padding = (top, left)
        if top != bottom or left != right:  # the convolution itself pads both sides alike
            x, padding = functional.pad(x, (left, right, top, bottom)), (0, 0)
        return functional.conv2d(
            x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups
        )


# --- MobileNet: a stored plan of operations and 8-bit weights -----------------------------------


def dequantise(stored: Arrays, layer: int) -> tuple[Tensor, Tensor]:
    """Return weight s * (w - z) and bias of a layer as float32.

    >>> stored = {"00.w": np.uint8([[[[7]]]]), "00.s": np.float32(0.5), "00.z": np.int32(9),
    ...           "00.b": np.float32([2])}
    >>> dequantise(stored, 0)
    (tensor([[[[-1.]]]]), tensor([2.]))
    """
    codes, scale, zero, bias = (stored[f"{layer:02d}.{part}"] for part in "wszb")
    # In float32: the codes are unsigned, and w - z would wrap around.
    weight = (codes.astype(np.float32) - np.float32(zero)) * np.float32(scale)
    return torch.from_numpy(weight), torch.from_numpy(np.array(bias, dtype=np.float32))


class PlannedFeature(nn.Module):
    """Run a plan of operations, each on outputs of earlier ones.

    Known are conv, dw (a convolution of each channel alone), add, gap (global average), tile and
    concat.
    """

    def __init__(self, plan: list[dict[str, Any]], stored: Arrays) -> None:
        super().__init__()
        last = len(plan) - 1
        self.steps = nn.ModuleList(
            # What comes after an average inside the network wants a map, even of one pixel.
            GlobalAverage(keepdim=step < last)
            if operation["op"] == "gap"
            else _step(operation, stored)
            for step, operation in enumerate(plan)
        )
        self._sources = [_sources(operation) for operation in plan]
        # After its last use an output is dropped; only shortcuts live for more than one step.
        self._last_use = {s: step for step, sources in enumerate(self._sources) for s in sources}

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last operation."""
        outputs = {-1: x}
        for step, (module, sources) in enumerate(zip(self.steps, self._sources, strict=True)):
            x = module(*(outputs[source] for source in sources))
            for source in set(sources):
                if self._last_use[source] == step:
                    del outputs[source]
            outputs[step] = x
        return x


class Add(nn.Module):
    """The sum of two tensors, as a module that has a name."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Add."""
        return left + right


class Concat(nn.Module):
    """Several maps as one with all their channels, as a module that has a name."""

    def forward(self, *maps: Tensor) -> Tensor:
        """Concatenate."""
        return torch.cat(maps, dim=1)


class Tile(nn.Module):
    """A map of one pixel, repeated.

    >>> Tile((2, 3))(torch.ones(1, 4, 1, 1)).shape
    torch.Size([1, 4, 2, 3])
    """

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Repeat."""
        return x.expand(-1, -1, *self.size)


class GlobalAverage(nn.Module):
    """The mean over all positions of a map: [n, c, h, w] to [n, c], or to a map of one pixel.

    >>> GlobalAverage()(torch.ones(2, 3, 4, 4)).shape
    torch.Size([2, 3])
    >>> GlobalAverage(keepdim=True)(torch.ones(2, 3, 4, 4)).shape
    torch.Size([2, 3, 1, 1])
    """

    def __init__(self, keepdim: bool = False) -> None:
        super().__init__()
        self.keepdim = keepdim

    def forward(self, x: Tensor) -> Tensor:
        """Average."""
        return x.mean(dim=(2, 3), keepdim=self.keepdim)


_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu6": nn.ReLU6, "relu": nn.ReLU, "none": nn.Identity,
}  # fmt: skip


def _unknown(kind: str, known: str) -> ValueError:
    return ValueError(f"the plan has an operation {kind!r}; known are {known}")


def _sources(operation: dict[str, Any]) -> tuple[int, ...]:
    source = operation["src"]
    return tuple(source) if isinstance(source, list) else (source,)


def _step(operation: dict[str, Any], stored: Arrays) -> nn.Module:
    kind = operation["op"]
    if kind == "add":
        return Add()
    if kind == "concat":
        return Concat()
    if kind == "tile":
        height, width = operation["hw"]
        return Tile((height, width))
    if kind not in ("conv", "dw"):
        raise _unknown(kind, "conv, dw, add, gap, tile and concat")
    if operation.get("pad", "same") != "same":
        raise ValueError(f"the plan pads by {operation['pad']!r}; known is only 'same'")
    weight, bias = dequantise(stored, operation["layer"])
    outputs, inputs, height, width = weight.shape
    groups = outputs if kind == "dw" else 1
    convolution = SameConv2d(
        inputs * groups, outputs, (height, width), stride=operation["stride"],
        dilation=operation.get("dilation", 1), groups=groups,
    )  # fmt: skip
    convolution.load_state_dict({"weight": weight, "bias": bias})
    # The plan's `range` is where the 8-bit original clips. For relu6 it says 0..6 once more.
    # Elsewhere it is not applied: inside it changes no accuracy, and at the output it would take
    # the gradient away from the largest logits (and make ties of them).
    activation = _ACTIVATIONS[operation["act"]]()
    return nn.Sequential(OrderedDict(conv=convolution, act=activation))


def mobilenet(content: bytes) -> nn.Sequential:
    """Build a MobileNet from its file; output 0, the background class, is dropped."""
    stored = arrays(content)
    plan = json.loads(str(stored["plan"]))
    for operation in plan:
        if operation["op"] not in ("conv", "dw", "add", "gap"):
            raise _unknown(operation["op"], "conv, dw, add and gap")
    last = plan[-1]
    if last["op"] != "conv" or plan[-2]["op"] != "gap" or _sources(last) != (len(plan) - 2,):
        raise ValueError("the plan does not end in a global average and a linear head")
    weight, bias = dequantise(stored, last["layer"])
    head = head_of(weight[1:, :, 0, 0], bias[1:])
    return classifier(PlannedFeature(plan[:-1], stored), head)


# --- SqueezeNet 1.0 -----------------------------------------------------------------------------


class Fire(nn.Module):
    """Squeeze to few channels, expand by 1x1 and 3x3 kernels side by side."""

    def __init__(self, inputs: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.expand1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Squeeze and expand."""
        x = self.squeeze(x).relu()
        return torch.cat([self.expand1(x), self.expand3(x)], dim=1).relu()


class PooledHead(nn.Module):
    """SqueezeNet's head: a 1x1 convolution with a border of zeros, ReLU, mean over positions.

    Because of the ReLU, the mean cannot be taken first: the feature is a whole map.

    >>> PooledHead(torch.ones(5, 2, 1, 1), torch.zeros(5))(torch.ones(1, 2, 3, 3)).shape
    torch.Size([1, 5])
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        classes, channels, height, width = weight.shape
        self.conv = nn.Conv2d(channels, classes, (height, width), padding=1)
        self.conv.load_state_dict({"weight": weight, "bias": bias})
        self.act = nn.ReLU()
        self.pool = GlobalAverage()

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.pool(self.act(self.conv(x)))
        return logits


_FIRES = {2: (96, 16, 64), 3: (128, 16, 64), 4: (128, 32, 128), 5: (256, 32, 128),
          6: (256, 48, 192), 7: (384, 48, 192), 8: (384, 64, 256), 9: (512, 64, 256)}  # fmt: skip
_FIRE_PARTS = {"conv1x1_1": "squeeze", "conv1x1_2": "expand1", "conv3x3_2": "expand3"}


def squeezenet(content: bytes) -> nn.Sequential:
    """Build SqueezeNet 1.0 from its file."""
    stored = arrays(content)
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(3, 96, 7, stride=2)),
        ("relu1", nn.ReLU()),
        ("pool1", nn.MaxPool2d(3, stride=2, ceil_mode=True)),
    ]
    for number, shape in _FIRES.items():
        layers.append((f"fire{number}", Fire(*shape)))
        if number in (4, 8):
            layers.append((f"pool{number}", nn.MaxPool2d(3, stride=2, ceil_mode=True)))
    feature = nn.Sequential(OrderedDict(layers))
    state = {_squeezenet_name(name): torch.from_numpy(value) for name, value in stored.items()}
    head = head_of(state.pop("conv_final.weight"), state.pop("conv_final.bias"))
    feature.load_state_dict(state)
    return classifier(feature, head)


def _squeezenet_name(stored: str) -> str:
    *path, kind = stored.split(".")
    return ".".join([*(_FIRE_PARTS.get(part, part) for part in path),
                     {"w": "weight", "b": "bias"}[kind]])  # fmt: skip


# --- ResNets for CIFAR-10 -----------------------------------------------------------------------


class BasicBlock(nn.Module):
    """Two 3x3 convolutions; the shortcut skips every other pixel and adds empty channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve twice and add the shortcut."""
        inputs, outputs = self.conv1.in_channels, self.conv1.out_channels
        stride, extra = self.conv1.stride[0], outputs - inputs
        shortcut = x[:, :, ::stride, ::stride]
        if extra:
            # Half of the empty channels before, half after, as the weights were trained.
            shortcut = functional.pad(shortcut, (0, 0, 0, 0, extra // 2, extra - extra // 2))
        x = self.bn1(self.conv1(x)).relu()
        y: Tensor = self.bn2(self.conv2(x)) + shortcut
        return y.relu()


def cifar_resnet(content: bytes) -> nn.Sequential:
    """Build a ResNet for CIFAR-10 from its state dict, which also tells the depth."""
    state = state_dict(content)
    numbers = [re.match(r"layer1\.(\d+)\.", name) for name in state]
    blocks = 1 + max(int(number[1]) for number in numbers if number)
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(3, 16, 3, padding=1, bias=False)),
        ("bn1", nn.BatchNorm2d(16)),
        ("relu1", nn.ReLU()),
    ]
    inputs = 16
    for number, outputs in enumerate((16, 32, 64), 1):
        group = []
        for block in range(blocks):
            stride = 2 if number > 1 and block == 0 else 1
            group.append(BasicBlock(inputs, outputs, stride))
            inputs = outputs
        layers.append((f"layer{number}", nn.Sequential(*group)))
    feature = nn.Sequential(OrderedDict([*layers, ("pool", GlobalAverage())]))
    head = head_of(state.pop("linear.weight"), state.pop("linear.bias"))
    load_weights(feature, state)
    return classifier(feature, head)


def load_weights(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load weights; the count of batches that batch norm keeps may be missing from old files."""
    wanted = {name: value.shape for name, value in module.state_dict().items()}
    given = {name: value.shape for name, value in state.items()}
    for name in sorted({*wanted, *given}):
        if wanted.get(name) != given.get(name) and not name.endswith("num_batches_tracked"):
            raise ValueError(
                f"the weights do not fit the network: {name} has shape {_shape(given.get(name))} "
                f"in the file and {_shape(wanted.get(name))} in the network"
            )
    module.load_state_dict(state, strict=False)


def _shape(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(tuple(shape))


# --- a small network to be trained ---------------------------------------------------------------


def digits_network(seed: int = 0) -> nn.Sequential:
    """Build a small convolutional network for the digits: 32 features, a linear head.

    >>> model = digits_network()
    >>> [name for name, _ in model.feature.named_children()]
    ['conv1', 'relu1', 'conv2', 'relu2', 'pool', 'flatten', 'dense', 'relu3']
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        feature = nn.Sequential(
            OrderedDict[str, nn.Module](
                conv1=nn.Conv2d(1, 16, 3, padding=1),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(16, 16, 3, padding=1),
                relu2=nn.ReLU(),
                pool=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                dense=nn.Linear(16 * 4 * 4, 32),
                relu3=nn.ReLU(),
            )
        )
        return classifier(feature, nn.Linear(32, 10))
