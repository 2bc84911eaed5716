from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _exporting(torch_that_exports: None) -> None:
    """Skip these tests where export refuses to begin."""
