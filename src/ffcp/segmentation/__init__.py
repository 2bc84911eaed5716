"""Segmentation: label maps as targets for bands, and label sets for every pixel.

A segmentation network says, for every pixel and class, how well the class fits. Two ways lead
to conformal prediction. The paper's: the label map is turned into numbers (:func:`targets`), one
per pixel and class, and CP, FCP or FFCP put a band around each. What a user mostly wants: for
every pixel the set of labels that are still possible.
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
