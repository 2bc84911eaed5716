"""Thresholds from scores; nothing here knows networks."""
