"""Kernels: the weight of a calibration row at some distance from the new one.

A kernel returns the logarithm of a weight in [0, 1] for squared distances in bandwidths.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.description import Described


class Kernel(Described):
    """The weight of rows at a distance; the base of all kernels.

    Your own kernel has a name and :meth:`log_weight`; with :meth:`steps` it can also be used with
    the guarantee ``"random"``.

    Attributes
    ----------
    name : str
        Its name in settings and messages.
    is_sharp : bool
        Whether weights are 1 up to the bandwidth and 0 beyond.
    is_by_rank : bool
        Whether weights depend on the rank: 1 for as many neighbours as the bandwidth.
    is_density : bool
        Whether :meth:`steps` can be drawn.

    Examples
    --------
    >>> class Triangle(Kernel):
    ...     name = "triangle"
    ...
    ...     def log_weight(self, squared):
    ...         return (1 - squared.sqrt()).clamp_min(0).log()
    >>> Triangle().log_weight(torch.tensor([0.0, 0.25, 4.0])).exp()
    tensor([1.0000, 0.5000, 0.0000])
    """

    name: str
    is_sharp = False
    is_by_rank = False
    is_density = False

    def log_weight(self, squared: Tensor) -> Tensor:
        """Logarithm of the weight at squared distances; it may overwrite them.

        Parameters
        ----------
        squared : Tensor
            Squared distances in units of the bandwidth.
        """
        raise TypeError(f"the kernel {self.name!r} is not a function of the distance")

    def steps(self, random: np.random.Generator, rows: int, dimensions: int) -> Tensor:
        """Draw steps (rows, dimensions) from the kernel as a density, in units of the bandwidth.

        Parameters
        ----------
        random : numpy.random.Generator
            The source of random numbers.
        rows : int
            Number of rows.
        dimensions : int
            Number of columns of the embedding.
        """
        raise TypeError(f"the kernel {self.name!r} is not a density to draw from")


class Gaussian(Kernel):
    """The weight exp(-d^2 / 2h^2) at distance d, h the bandwidth.

    The bandwidth is :class:`ffcp.kernels.Localizer`'s; the kernel itself takes nothing.

    Attributes
    ----------
    name : str
        ``"gaussian"``, by which a localizer knows it too.
    is_density : bool
        ``True``: it also serves the guarantee ``"random"``.

    Examples
    --------
    >>> Gaussian().log_weight(torch.tensor([0.0, 4.0]))
    tensor([-0., -2.])
    """

    name = "gaussian"
    is_density = True

    def log_weight(self, squared: Tensor) -> Tensor:
        """Logarithm of the weight at squared distances; overwrites them."""
        return squared.mul_(-0.5)

    def steps(self, random: np.random.Generator, rows: int, dimensions: int) -> Tensor:
        """Draw normal numbers."""
        return torch.from_numpy(random.standard_normal((rows, dimensions)))


class Laplace(Kernel):
    """The weight exp(-d / h) at distance d, h the bandwidth.

    The bandwidth is :class:`ffcp.kernels.Localizer`'s; the kernel itself takes nothing.

    Attributes
    ----------
    name : str
        ``"laplace"``, by which a localizer knows it too.
    is_density : bool
        ``True``: it also serves the guarantee ``"random"``.

    Examples
    --------
    >>> Laplace().log_weight(torch.tensor([0.0, 4.0]))
    tensor([-0., -2.])
    """

    name = "laplace"
    is_density = True

    def log_weight(self, squared: Tensor) -> Tensor:
        """Logarithm of the weight at squared distances; overwrites them."""
        return squared.sqrt_().neg_()

    def steps(self, random: np.random.Generator, rows: int, dimensions: int) -> Tensor:
        """Draw directions, and lengths from the gamma distribution."""
        direction = _directions(random, rows, dimensions)
        return direction * torch.from_numpy(random.gamma(dimensions, 1.0, (rows, 1)))


class Box(Kernel):
    """The weight 1 up to the bandwidth and 0 beyond it.

    The bandwidth is :class:`ffcp.kernels.Localizer`'s; the kernel itself takes nothing.

    Attributes
    ----------
    name : str
        ``"box"``, by which a localizer knows it too.
    is_sharp : bool
        ``True``: weights are 0 or 1.
    is_density : bool
        ``True``: it also serves the guarantee ``"random"``.

    Examples
    --------
    >>> Box().log_weight(torch.tensor([1.0, 4.0]))
    tensor([0., -inf])
    """

    name = "box"
    is_sharp = is_density = True

    def log_weight(self, squared: Tensor) -> Tensor:
        """Logarithm of the weight at squared distances."""
        return torch.where(squared <= 1, 0.0, -math.inf).to(squared.dtype)

    def steps(self, random: np.random.Generator, rows: int, dimensions: int) -> Tensor:
        """Draw points uniformly in the unit ball."""
        direction = _directions(random, rows, dimensions)
        return direction * torch.from_numpy(random.random((rows, 1)) ** (1 / dimensions))


class Nearest(Kernel):
    """The weight 1 for the nearest calibration rows; the bandwidth is their number.

    The bandwidth is :class:`ffcp.kernels.Localizer`'s; the kernel itself takes nothing.

    Attributes
    ----------
    name : str
        ``"nearest"``, by which a localizer knows it too.
    is_by_rank : bool
        ``True``: only the rank of the distance matters.

    Examples
    --------
    >>> Nearest().is_by_rank
    True
    """

    name = "nearest"
    is_by_rank = True


def _directions(random: np.random.Generator, rows: int, dimensions: int) -> Tensor:
    """Draw points on the unit sphere."""
    normal = random.standard_normal((rows, dimensions))
    return torch.from_numpy(normal / np.linalg.norm(normal, axis=1, keepdims=True))


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel for kernel in (Gaussian(), Laplace(), Box(), Nearest())
}


def as_kernel(kernel: Any) -> Kernel:
    """Return a kernel by its name; a kernel as it is.

    >>> as_kernel("box").name
    'box'
    """
    if isinstance(kernel, str):
        if kernel not in KERNELS:
            raise ValueError(f"unknown kernel {kernel!r}: choose one of {', '.join(KERNELS)}")
        return KERNELS[kernel]
    if isinstance(kernel, Kernel):
        return kernel
    raise TypeError(
        f"a kernel is one of {', '.join(KERNELS)}, or an ffcp.kernels.Kernel; got {kernel!r}"
    )
