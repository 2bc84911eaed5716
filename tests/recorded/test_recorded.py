"""Every method gives what it gave when it was recorded.

Floats agree to 1e-10, all else exactly. A case whose result changes on purpose is named with its
reason in ``changed.py`` and compared with ``values_changed/``; see there. New cases are recorded
by ``python -m tests.recorded.record``.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import ffcp
from tests.recorded.cases import CASES, FAMILIES
from tests.recorded.changed import CHANGED
from tests.recorded.recording import VALUES, VALUES_CHANGED, differences, encode, read, run

FIRST, LATER = read(VALUES), read(VALUES_CHANGED)


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_gives_what_was_recorded(name: str) -> None:
    recorded = (LATER if name in CHANGED else FIRST).get(name)
    reason = f" (changed on purpose: {CHANGED[name]})" if name in CHANGED else ""
    assert recorded is not None, f"{name} is not recorded{reason}: see tests/recorded/record.py"
    different = differences(run(name), recorded)
    shown = "\n".join(different[:20])
    assert not different, f"{name}{reason} gives other values than recorded:\n{shown}"


def test_every_recorded_case_is_run() -> None:
    assert set(FIRST) == set(CASES)


def test_changed_cases_have_a_reason_and_differ() -> None:
    assert set(LATER) == set(CHANGED), "values_changed/ and changed.py name different cases"
    for name, reason in CHANGED.items():
        assert name in CASES, f"changed.py names {name}, which is no case"
        assert reason.strip(), f"say in changed.py why {name} changed"
        assert differences(LATER[name], FIRST[name]), f"{name} did not change: {reason}"


def test_every_public_predictor_has_a_case() -> None:
    exported = {name: getattr(ffcp, name) for name in ffcp.__all__}
    exported["PixelSets"] = ffcp.segmentation.PixelSets
    predictors = {
        name
        for name, kind in exported.items()
        if isinstance(kind, type) and issubclass(kind, nn.Module) and hasattr(kind, "calibrate")
    }
    assert len(predictors) >= 15
    # Bands and SetPredictor are what the named methods are made of; RiskControl, CrossConformal and
    # VennAbers are younger than the record: tests/risk holds the first to the conformal quantile
    # and to PixelSets, tests/regression/test_cross.py the second to its definition, and
    # tests/classification/test_venn_abers.py the third to its package. What Learned and Auto
    # give rests on training, which no machine repeats to 1e-10: tests/regression/learned holds
    # them.
    named = predictors - {
        "IntervalPredictor",
        "SetPredictor",
        "RiskControl",
        "CrossConformal",
        "VennAbers",
        "Learned",
        "Auto",
    }
    assert named <= {values.get("method") for values in FIRST.values()}


def test_automatic_choices_stand_in_families_of_their_own() -> None:
    for name, family in FAMILIES.items():
        assert ("_auto" in name) == family.endswith("_auto"), name


@pytest.mark.parametrize(
    ("value", "moved"),
    [
        (torch.tensor([1.0, -2.0], dtype=torch.float64), 1e-8),
        (torch.tensor([[3, 4]]), 1),
        (torch.tensor([True, False]), None),
        (0.25, 1e-8),
        (7, 1),
        ("output", None),
        ([1.5, "a", 2], None),
        (torch.tensor([math.inf], dtype=torch.float64), None),
    ],
)
def test_a_moved_value_is_detected(value: Any, moved: float | None) -> None:
    other = value + moved if moved is not None else _altered(value)
    assert not differences({"v": encode(value)}, {"v": encode(copy.deepcopy(value))})
    assert differences({"v": encode(other)}, {"v": encode(value)})


def _altered(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ~value if value.dtype == torch.bool else -value
    return [*value[:-1], 3] if isinstance(value, list) else f"{value}s"


def test_other_types_shapes_and_names_are_detected() -> None:
    ones = torch.ones(2, 3, dtype=torch.float64)
    for other in (ones.float(), ones.T, ones[:1], 1.0, None):
        assert differences({"v": encode(other)}, {"v": encode(ones)})
    assert differences({"v": 1}, {"v": 1.0})
    assert differences({"v": 1.0}, {"v": 1.0, "w": 2.0})
    assert differences({"v": 1.0, "w": 2.0}, {"v": 1.0})
    assert differences({"v": math.nan}, {"v": 0.0})
    assert not differences({"v": math.nan}, {"v": math.nan})


def test_a_result_that_moves_a_little_fails_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ffcp.CP.predict_interval

    def moved(self: ffcp.CP, *args: Any, **options: Any) -> ffcp.Interval:
        lower, upper, prediction = plain(self, *args, **options)
        return ffcp.Interval(lower, upper + 1e-7, prediction)

    monkeypatch.setattr(ffcp.CP, "predict_interval", moved)
    with pytest.raises(AssertionError, match="cp_arrays"):
        test_gives_what_was_recorded("cp_arrays")
