"""Bands for regression: bases, slacks, families of nested bands, and the methods made of them."""
