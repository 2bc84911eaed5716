"""Prediction sets of labels for classifiers: label scores, their tuning, and the methods."""
