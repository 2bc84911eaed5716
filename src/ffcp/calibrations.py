"""Calibrations: how calibration scores become a threshold for a new row."""

from ffcp.conformal.by_label import ByLabel
from ffcp.conformal.calibration import Calibration, Marginal
from ffcp.conformal.conditional import Conditional
from ffcp.conformal.label_shift import LabelShift
from ffcp.conformal.local import Local
from ffcp.conformal.mondrian import Mondrian
from ffcp.conformal.weighted import Weighted

__all__ = [
    "ByLabel",
    "Calibration",
    "Conditional",
    "LabelShift",
    "Local",
    "Marginal",
    "Mondrian",
    "Weighted",
]
