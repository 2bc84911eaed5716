"""Classes that users extend are narrow: at most 14 names, inherited ones included."""

from __future__ import annotations

import pytest

import ffcp


@pytest.mark.parametrize(
    "base",
    [
        ffcp.calibrations.Calibration,
        ffcp.scores.IntervalScore,
        ffcp.scores.LabelScore,
        ffcp.kernels.Kernel,
    ],
)
def test_a_base_to_extend_has_at_most_fourteen_names(base: type) -> None:
    names = [name for name in dir(base) if not name.startswith("_")]
    fields = set(getattr(base, "__dataclass_fields__", {}))
    assert len({*names, *fields}) <= 14
