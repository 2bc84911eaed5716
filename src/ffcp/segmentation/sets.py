"""Prediction sets of pixels, and checks of label maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ffcp.network import arrays


@dataclass(frozen=True, eq=False, repr=False)
class PixelSet:
    """A prediction set of labels for each pixel.

    Parameters
    ----------
    mask : Tensor
        Shape (n, classes, height, width): whether the label is in the pixel's set.
    prediction : Tensor
        Shape (n, height, width): the most likely label, which is in every set.

    Examples
    --------
    >>> mask = torch.tensor([[[[True, True]], [[False, True]], [[False, False]]]])
    >>> sets = PixelSet(mask, torch.tensor([[[0, 1]]]))
    >>> sets
    PixelSet(1 image of 1 x 2 pixels, 3 classes, mean size 1.5)
    >>> sets.size
    tensor([[[1, 2]]])
    >>> sets.coverage(torch.tensor([[[0, 2]]]))
    tensor([0.5000], dtype=torch.float64)
    """

    mask: Tensor
    prediction: Tensor

    def __len__(self) -> int:
        return len(self.mask)

    def __repr__(self) -> str:
        n, classes, height, width = self.mask.shape
        shape = f"{n} image{'s' * (n != 1)} of {height} x {width} pixels, {classes} classes"
        return f"PixelSet({shape}, mean size {float(self.mean_size.mean()):.4g})"

    @property
    def size(self) -> Tensor:
        """The number of labels in the set of each pixel, shape (n, height, width)."""
        return self.mask.sum(dim=1)

    @property
    def certain(self) -> Tensor:
        """Whether the set of a pixel has only one label, shape (n, height, width)."""
        return self.size == 1

    @property
    def mean_size(self) -> Tensor:
        """The mean number of labels per pixel of each image, shape (n,)."""
        return self.size.double().mean(dim=(1, 2))

    def coverage(self, labels: Any, ignore: int | None = None) -> Tensor:
        """Return the share of each image's labelled pixels whose label is in the set.

        Parameters
        ----------
        labels : array-like
            Label maps, (n, height, width).
        ignore : int, default=None
            A label whose pixels do not count.
        """
        return pixel_coverage(self.mask, labels, ignore)


def pixel_coverage(mask: Tensor, labels: Any, ignore: int | None = None) -> Tensor:
    """Return the share of each image's labelled pixels whose label is in the set.

    Parameters
    ----------
    mask : Tensor
        Prediction sets, (n, classes, height, width).
    labels : array-like
        Label maps, (n, height, width).
    ignore : int, default=None
        The label that marks unlabelled pixels.

    Returns
    -------
    Tensor
        Shape (n,), float64; NaN for images without a labelled pixel.

    Examples
    --------
    >>> mask = torch.tensor([[[[True, True, True]], [[False, True, False]]]])
    >>> pixel_coverage(mask, torch.tensor([[[0, 1, 255]]]), ignore=255)
    tensor([1.], dtype=torch.float64)
    """
    if mask.dim() != 4:
        raise ValueError(
            f"'mask' must have shape (n, classes, height, width), got {tuple(mask.shape)}"
        )
    maps = label_maps(arrays.target_tensor(labels).to(mask.device), mask, ignore)
    inside = mask.gather(1, maps.labels[:, None])[:, 0] & maps.known
    return inside.sum(dim=(1, 2)).double() / maps.known.sum(dim=(1, 2))


class Maps(NamedTuple):
    """Label maps, with 0 for unlabelled pixels, and a mask of the labelled ones."""

    labels: Tensor
    known: Tensor


def label_maps(y: Tensor, output: Tensor, ignore: int | None, first_row: int = 0) -> Maps:
    """Return label maps, checked against the model's output, or a mask, of the same images."""
    n, classes, height, width = output.shape
    if y.shape != (n, height, width):
        raise ValueError(
            f"labels 'y' have shape {tuple(y.shape)}, expected {(n, height, width)}: use y[:, 0] "
            "to remove a channel, or y.argmax(dim=1) for one-hot maps"
        )
    return known_labels(y, classes, ignore, first_row)


def known_labels(y: Tensor, classes: int, ignore: int | None, first_row: int = 0) -> Maps:
    """Return label maps, checked to hold class numbers or the ignored label."""
    if y.is_floating_point() or y.dtype == torch.bool:
        raise TypeError(f"labels 'y' must be integers, got {y.dtype}: convert them with y.long()")
    y = y.long()
    known = torch.ones_like(y, dtype=torch.bool) if ignore is None else y != ignore
    outside = known & ((y < 0) | (y >= classes))
    if bool(outside.any()):
        image = int(outside.nonzero()[0, 0])
        labels = y[image][outside[image]].unique()[:5].tolist()
        other = f" or {ignore}"
        if ignore is None:
            other = "; pass ignore= if it marks unlabelled pixels"
        raise ValueError(
            f"image {first_row + image} (counted from 0) has labels {labels}: expected 0 to "
            f"{classes - 1}{other}"
        )
    return Maps(y.where(known, 0), known)


def check_maps(output: Any) -> None:
    """Raise unless outputs are maps of several classes."""
    expected = "PixelSets needs a tensor of shape (n, classes, height, width)"
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the model returned a {type(output).__name__}: {expected}; select it by output="
        )
    if output.dim() != 4 or output.shape[1] < 2:
        raise ValueError(
            f"the model's output has shape {tuple(output.shape)}: {expected}; write x[None] for a "
            "single image, and turn one logit z into two by torch.cat([torch.zeros_like(z), z], 1)"
        )
