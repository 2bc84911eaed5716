"""Auto beside its candidates and other libraries: ``python -m benchmarks.intervals``."""
