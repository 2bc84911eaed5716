"""Fast Feature Conformal Prediction: bands with a guarantee for any trained PyTorch network.

>>> import ffcp, torch
>>> predictor = ffcp.FFCP(torch.nn.Linear(3, 1), feature="input")  # your trained model
>>> predictor = predictor.calibrate(torch.randn(100, 3), torch.randn(100))
>>> band = predictor.predict_interval(torch.randn(5, 3), alpha=0.1)
>>> band.lower.shape
torch.Size([5, 1])
"""

__version__ = "0.1.0"

from ffcp import bounds, metrics, segmentation
from ffcp.bands import Interval
from ffcp.choose import Candidate, Choice
from ffcp.classifiers import APS, FFRAPS, LAC, RAPS
from ffcp.conformal.rank import conformal_quantile, conformal_rank
from ffcp.errors import FFCPWarning
from ffcp.fcp import FCP, FCQR
from ffcp.localize import BandwidthChoice, Localizer
from ffcp.localized import FFLCP, FFLCQR, LCP, LCQR
from ffcp.losses import pinball_loss
from ffcp.network.jacobian import Sketch, Smooth
from ffcp.network.passes import gradient_norms
from ffcp.predictors import CP, CQR, FFCP, FFCQR
from ffcp.sets import LabelSet
from ffcp.tuning import SetCandidate, SetChoice

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
    "BandwidthChoice",
    "Candidate",
    "Choice",
    "FFCPWarning",
    "Interval",
    "LabelSet",
    "Localizer",
    "SetCandidate",
    "SetChoice",
    "Sketch",
    "Smooth",
    "bounds",
    "conformal_quantile",
    "conformal_rank",
    "gradient_norms",
    "metrics",
    "pinball_loss",
    "segmentation",
]
