"""What holds for all tests and doctests."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Make our own warnings errors.

    Here and not in pyproject.toml, which would import ffcp before its lines are measured.
    """
    config.addinivalue_line("filterwarnings", "error::ffcp.FFCPWarning")
