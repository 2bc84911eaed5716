"""What people see of intervals: print, notebooks, JSON."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import ffcp

X, Y = torch.randn(120, 3), torch.randn(120)


def test_printing_says_rows_coverage_and_width_in_a_few_lines() -> None:
    interval = ffcp.CP(nn.Linear(3, 1)).calibrate(X, Y).predict_interval(X, alpha=0.2)
    text = repr(interval)
    assert "120 rows" in text
    assert "80 %" in text
    assert f"{float(interval.width.mean()):.4g}" in text
    assert len(text.splitlines()) <= 6
    assert max(map(len, text.splitlines())) <= 80
    assert text in interval._repr_html_()


def test_several_levels_and_outputs_are_printed_too() -> None:
    model, y = nn.Linear(3, 2), torch.randn(120, 2)
    interval = ffcp.CP(model).calibrate(X, y).predict_interval(X, alpha=[0.1, 0.3])
    assert [line.split(",")[0].strip() for line in repr(interval).splitlines()[1:]] == [
        "coverage 90 % (alpha=0.1)",
        "coverage 70 % (alpha=0.3)",
    ]
    assert len(repr(ffcp.CP(model).calibrate(X, y).predict_interval(X)).splitlines()) == 1


@pytest.mark.parametrize("side", ["lower", "upper"])
def test_one_sided_intervals_do_not_look_as_if_something_had_failed(side: str) -> None:
    predictor = ffcp.CP(nn.Linear(3, 1), side=side).calibrate(X, Y)
    assert repr(predictor.predict_interval(X)).splitlines()[0] == (
        f"Interval: 120 rows, coverage 90 % (alpha=0.1), {side} ends only"
    )
    both = repr(predictor.predict_interval(X, alpha=[0.1, 0.2]))
    assert both.splitlines()[2] == f"  coverage 80 % (alpha=0.2), {side} ends only"


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_json_of_infinite_ends_is_valid_and_says_why() -> None:
    predictor = ffcp.CP(nn.Linear(3, 1)).calibrate(X, Y)
    bad = predictor.predict_interval(X[:2], alpha=0.001).to_dict()
    again = json.loads(json.dumps(bad, allow_nan=False))
    assert again["lower"] == [None, None]
    assert "alpha" in again["reason"]
    good = predictor.predict_interval(X[:2], alpha=[0.1, 0.2]).to_dict()
    assert good["reason"] is None
    assert good["alpha"] == [0.1, 0.2]
    assert len(json.loads(json.dumps(good, allow_nan=False))["upper"]) == 2
