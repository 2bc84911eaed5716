"""Nonconformity scores to build with: base intervals for regression, label scores for classes."""

from ffcp.classification import named_scores
from ffcp.classification.scores import FunctionScore, LabelScore
from ffcp.regression.intervals import Ends, Point, Quantiles
from ffcp.regression.scaled_score import IntervalScore

LAC, APS = named_scores.LACScore, named_scores.APSScore
RAPS, FFRAPS = named_scores.RAPSScore, named_scores.FFRAPSScore

__all__ = [
    "APS",
    "FFRAPS",
    "LAC",
    "RAPS",
    "Ends",
    "FunctionScore",
    "IntervalScore",
    "LabelScore",
    "Point",
    "Quantiles",
]
