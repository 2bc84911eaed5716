"""Fast Feature Conformal Prediction: bands with a guarantee for any trained PyTorch network.

>>> import ffcp, torch
>>> predictor = ffcp.FFCP(torch.nn.Linear(3, 1), feature="input")  # your trained model
>>> predictor = predictor.calibrate(torch.randn(100, 3), torch.randn(100))
>>> band = predictor.predict_interval(torch.randn(5, 3), alpha=0.1)
>>> band.lower.shape
torch.Size([5])
"""

__version__ = "0.2.0"

import importlib
from typing import TYPE_CHECKING, Any

from ffcp import bounds, distributed, metrics, plots, segmentation
from ffcp.classification.choosing import ScoreChoice
from ffcp.classification.methods import APS, FFRAPS, LAC, RAPS
from ffcp.classification.named import Aps, FFRaps, Lac, Raps
from ffcp.classification.predictor import LabelSets
from ffcp.classification.scores import FunctionScore, LabelScore
from ffcp.classification.sets import LabelSet
from ffcp.classification.tuning import SetCandidate, SetChoice
from ffcp.conformal.bandwidths import BandwidthChoice
from ffcp.conformal.bylabel import ByLabel
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.kernels import Box, Gaussian, Kernel, Laplace, Nearest
from ffcp.conformal.labelshift import LabelShift
from ffcp.conformal.local import Local, Localizer
from ffcp.conformal.marginal import Marginal
from ffcp.conformal.mondrian import Mondrian
from ffcp.conformal.rank import conformal_quantile, conformal_rank
from ffcp.conformal.tilts import ShiftChoice
from ffcp.conformal.weighted import Weighted
from ffcp.files import CalibrationFileError
from ffcp.loading import load
from ffcp.network.jacobian import Sketch, Smooth
from ffcp.network.passes import gradient_norms
from ffcp.network.stored import Stored
from ffcp.online.monitor import Monitor
from ffcp.online.stream import Online
from ffcp.pieces import Needs, Seen
from ffcp.regression.auto import Auto
from ffcp.regression.bands import Ends, Interval
from ffcp.regression.bases import Point, Quantiles
from ffcp.regression.composed import Bands
from ffcp.regression.cross import CrossBands
from ffcp.regression.distribution import Distribution
from ffcp.regression.fcp.methods import FCP, FCQR
from ffcp.regression.judging import AutoChoice
from ffcp.regression.layers import Candidate, Choice
from ffcp.regression.learned.methods import Learned
from ffcp.regression.losses import pinball_loss
from ffcp.regression.methods import CP, CQR, FFCP, FFCQR, FFLCP, FFLCQR, LCP, LCQR
from ffcp.regression.slacks import Constant, FunctionOf, GradientNorm
from ffcp.regression.stored import bands_from
from ffcp.risk.predictor import Controlled, RiskControl
from ffcp.warnings import FFCPWarning

__all__ = [
    "APS",
    "CP",
    "CQR",
    "FCP",
    "FCQR",
    "FFCP",
    "FFCQR",
    "FFLCP",
    "FFLCQR",
    "FFRAPS",
    "LAC",
    "LCP",
    "LCQR",
    "RAPS",
    "Aps",
    "Auto",
    "AutoChoice",
    "Bands",
    "BandwidthChoice",
    "Box",
    "ByLabel",
    "Calibration",
    "CalibrationFileError",
    "Candidate",
    "Choice",
    "Constant",
    "Controlled",
    "CrossBands",
    "Distribution",
    "Ends",
    "FFCPWarning",
    "FFRaps",
    "FunctionOf",
    "FunctionScore",
    "Gaussian",
    "GradientNorm",
    "Interval",
    "Kernel",
    "LabelScore",
    "LabelSet",
    "LabelSets",
    "LabelShift",
    "Lac",
    "Laplace",
    "Learned",
    "Local",
    "Localizer",
    "Marginal",
    "Mondrian",
    "Monitor",
    "Nearest",
    "Needs",
    "Online",
    "Point",
    "Quantiles",
    "Raps",
    "RiskControl",
    "ScoreChoice",
    "Seen",
    "SetCandidate",
    "SetChoice",
    "ShiftChoice",
    "Sketch",
    "Smooth",
    "Stored",
    "Weighted",
    "bands_from",
    "bounds",
    "conformal_quantile",
    "conformal_rank",
    "distributed",
    "gradient_norms",
    "load",
    "metrics",
    "pinball_loss",
    "plots",
    "segmentation",
]

# Doors that bring in much: opened when they are first named.
_DOORS = ("export", "ray", "sklearn", "tables")

if not TYPE_CHECKING:  # to mypy, a function of this name would make every attribute a right one

    def __getattr__(name: str) -> Any:
        """Import ``ffcp.ray`` and its like where they are named."""
        if name not in _DOORS:
            raise AttributeError(f"module 'ffcp' has no attribute {name!r}")
        return importlib.import_module(f"ffcp.{name}")
