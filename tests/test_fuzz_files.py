"""Damaged calibration files are refused in one way, and do no harm."""

from __future__ import annotations

import pytest
from benchmarks import fuzz

SUBJECTS = fuzz.subjects()


@pytest.mark.long
@pytest.mark.parametrize("name", SUBJECTS)
def test_damaged_files_do_no_harm(name: str) -> None:
    counts = fuzz.fuzz(SUBJECTS[name], mutations=500)
    assert {fault: counts[fault] for fault in fuzz.FAULTS} == dict.fromkeys(fuzz.FAULTS, 0)
    assert counts["refused"] > 400
    assert sum(counts.values()) == 500
