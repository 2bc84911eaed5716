from __future__ import annotations

import pytest

from tests.classification.material import METHODS


@pytest.fixture(params=METHODS)
def make(request: pytest.FixtureRequest):
    return METHODS[request.param]
