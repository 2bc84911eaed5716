"""Bands for regression: bases, scales, families of nested bands, and the methods made of them."""
