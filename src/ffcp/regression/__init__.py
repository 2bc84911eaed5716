"""Prediction intervals for regression: bases, scales, scores and predictors."""
