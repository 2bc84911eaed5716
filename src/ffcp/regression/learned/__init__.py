"""Bands that learn from what the network computes anyway: quantiles of its residual."""
