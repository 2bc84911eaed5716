"""Prediction intervals between learned quantiles of the residual."""
