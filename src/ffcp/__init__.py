"""Fast Feature Conformal Prediction: bands with a guarantee for any trained PyTorch network."""

__version__ = "0.1.0"

from ffcp.errors import FFCPWarning

__all__ = ["FFCPWarning"]
