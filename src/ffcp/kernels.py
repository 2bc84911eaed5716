"""Kernels of localized calibrations, and the localizer, which defines their distances."""

from ffcp.conformal.kernels import Box, Gaussian, Kernel, Laplace, Nearest
from ffcp.conformal.local import Localizer

__all__ = ["Box", "Gaussian", "Kernel", "Laplace", "Localizer", "Nearest"]
