"""Conformal prediction for trained PyTorch networks, with Fast Feature Conformal Prediction.

>>> import ffcp, torch
>>> predictor = ffcp.FFCP(torch.nn.Linear(3, 1), feature="input")  # your trained model
>>> predictor = predictor.calibrate(torch.randn(100, 3), torch.randn(100))
>>> interval = predictor.predict_interval(torch.randn(5, 3), alpha=0.1)
>>> interval.lower.shape
torch.Size([5])
"""

__version__ = "0.3.0"

import importlib
from typing import TYPE_CHECKING, Any

from ffcp import (
    bounds,
    calibrations,
    kernels,
    metrics,
    plots,
    scales,
    scores,
    segmentation,
)
from ffcp.batch import BatchOutput, Requires
from ffcp.classification.set_methods import APS, FFRAPS, LAC, RAPS
from ffcp.classification.set_predictor import SetPredictor
from ffcp.classification.sets import LabelSet
from ffcp.classification.venn_abers import VennAbers
from ffcp.conformal.rank import conformal_quantile, conformal_rank
from ffcp.false_discoveries import conformal_selection
from ffcp.files import CalibrationFileError
from ffcp.loading import load
from ffcp.network.forward import gradient_norms
from ffcp.network.stored import Stored
from ffcp.online.monitor import Monitor
from ffcp.online.online import Online
from ffcp.regression.auto import Auto
from ffcp.regression.cross_conformal import CrossConformal
from ffcp.regression.fcp.predictors import FCP, FCQR
from ffcp.regression.interval_predictor import IntervalPredictor
from ffcp.regression.intervals import Interval
from ffcp.regression.intervals_from_predictions import intervals_from
from ffcp.regression.learned.learned_predictor import Learned
from ffcp.regression.losses import pinball_loss
from ffcp.regression.methods import CP, CQR, FFCP, FFCQR, FFLCP, FFLCQR, LCP, LCQR
from ffcp.risk.risk_control import RiskControl
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
    "Auto",
    "BatchOutput",
    "CalibrationFileError",
    "CrossConformal",
    "FFCPWarning",
    "Interval",
    "IntervalPredictor",
    "LabelSet",
    "Learned",
    "Monitor",
    "Online",
    "Requires",
    "RiskControl",
    "SetPredictor",
    "Stored",
    "VennAbers",
    "bounds",
    "calibrations",
    "conformal_quantile",
    "conformal_rank",
    "conformal_selection",
    "gradient_norms",
    "intervals_from",
    "kernels",
    "load",
    "metrics",
    "pinball_loss",
    "plots",
    "scales",
    "scores",
    "segmentation",
]

# Optional subpackages, imported lazily.
_OPTIONAL = ("distributed", "export", "ray", "sklearn", "tables")

if not TYPE_CHECKING:  # to mypy, a function of this name would make every attribute a right one

    def __getattr__(name: str) -> Any:
        """Import optional subpackages, such as ``ffcp.ray``, when they are first used."""
        if name not in _OPTIONAL:
            parts = (calibrations, kernels, metrics, scales, scores, segmentation)
            there = [part.__name__ for part in parts if name in part.__all__]
            meant = f": use {there[0]}.{name}" if there else ""
            raise AttributeError(f"module 'ffcp' has no attribute {name!r}{meant}")
        return importlib.import_module(f"ffcp.{name}")
