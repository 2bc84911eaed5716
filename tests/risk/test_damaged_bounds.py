"""Bounds of losses that a damaged file names are refused before they take the place of others."""

from __future__ import annotations

from typing import Any

import pytest

from ffcp.risk.losses import LossScore, any_missed, sigmoid_sets


@pytest.mark.parametrize("bounds", [True, (True,), (0.0,), (1.0, 1.0), (), ("1",), None])
def test_bounds_that_are_no_positive_numbers_are_refused(bounds: Any) -> None:
    with pytest.raises(ValueError, match="bound"):
        LossScore((any_missed,), sigmoid_sets, (0.0, 0.5), bounds)
