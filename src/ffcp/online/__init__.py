"""Streams of data in time: thresholds that adapt to them, and drift detection."""
