"""Benchmarks of speed, memory and interval quality; README.md lists them."""
