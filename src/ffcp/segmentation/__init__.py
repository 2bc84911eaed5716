"""Segmentation: label maps as regression targets, and prediction sets for every pixel.

The output of a segmentation network is a number for every pixel and class. There are two ways to
conformal prediction. The paper's: the label map is turned into numbers (:func:`targets`), one per
pixel and class, and CP, FCP or FFCP return an interval for each. What most users want is a
prediction set of labels for every pixel (:class:`PixelSets`).
"""

from ffcp.segmentation.pixel_sets import PixelSets
from ffcp.segmentation.sets import PixelSet, pixel_coverage
from ffcp.segmentation.targets import SMALLEST, DoubleLog, double_log, targets

__all__ = [
    "SMALLEST",
    "DoubleLog",
    "PixelSet",
    "PixelSets",
    "double_log",
    "pixel_coverage",
    "targets",
]
