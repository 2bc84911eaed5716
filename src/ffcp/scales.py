"""Scales: what a residual is divided by, and how gradient norms are computed."""

from ffcp.network.jacobian import Sketch, Smooth
from ffcp.regression.scales import Constant, FunctionScale, GradientNorm

__all__ = ["Constant", "FunctionScale", "GradientNorm", "Sketch", "Smooth"]
