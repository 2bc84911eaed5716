"""Damaged calibration files are refused in one way, and do no harm."""

from __future__ import annotations

import pytest
from benchmarks import fuzz

SUBJECTS = fuzz.subjects()
MORE = fuzz.more_subjects()


@pytest.mark.heavy
@pytest.mark.parametrize("name", SUBJECTS)
def test_damaged_files_do_no_harm(name: str) -> None:
    counts = fuzz.fuzz(SUBJECTS[name], mutations=500)
    assert {fault: counts[fault] for fault in fuzz.FAULTS} == dict.fromkeys(fuzz.FAULTS, 0)
    assert counts["refused"] > 400
    assert sum(counts.values()) == 500


@pytest.mark.heavy
@pytest.mark.parametrize("name", MORE)
def test_damaged_files_of_other_calibrations_do_no_harm(name: str) -> None:
    counts = fuzz.fuzz(MORE[name], mutations=200)
    assert {fault: counts[fault] for fault in fuzz.FAULTS} == dict.fromkeys(fuzz.FAULTS, 0)
    assert counts["refused"] > 140
