"""Auto beside its candidates, an opponent and other libraries: ``python -m benchmarks.bands``."""
