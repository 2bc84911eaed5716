"""The known range of the target: bands are cut to it, and nothing they cover is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ffcp
from tests.conftest import normal, small_mlp

X, Y = normal(200, 4, seed=0), normal(200, seed=1).abs()


@pytest.mark.parametrize("support", [(0, None), (None, 5), (0.0, 5.0), [0, None]])
def test_bands_are_cut_and_cover_the_same_targets(support: Any) -> None:
    plain = ffcp.CP(small_mlp()).calibrate(X, Y).predict_interval(X, (0.1, 0.5))
    cut = ffcp.CP(small_mlp(), support=support).calibrate(X, Y).predict_interval(X, (0.1, 0.5))
    low = -torch.inf if support[0] is None else support[0]
    high = torch.inf if support[1] is None else support[1]
    assert torch.equal(cut.lower, plain.lower.clamp(low, high))
    assert torch.equal(cut.upper, plain.upper.clamp(low, high))
    assert torch.equal(cut.prediction, plain.prediction)
    assert torch.equal(plain.contains(Y), cut.contains(Y))


def test_a_band_outside_becomes_the_nearest_point() -> None:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1)
        model.bias.zero_()
    x = torch.linspace(-9, 9, 100)[:, None]
    predictor = ffcp.CP(model, support=(-9, 0)).calibrate(x[:40], x[:40])
    band = predictor.predict_interval(x[-5:])
    assert (band.lower == 0).all()
    assert (band.upper == 0).all()
    assert (band.prediction > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_target_on_the_end_of_the_support_is_not_cut_off(dtype: torch.dtype) -> None:
    model = nn.Linear(1, 1).to(dtype)
    x, y = torch.zeros(30, 1, dtype=dtype), torch.full((30,), 0.1, dtype=torch.float64)
    for ends in ((0.1, None), (None, 0.1), (-0.1, 0.1), (0.1, 0.3)):
        predictor = ffcp.CP(model, support=ends).calibrate(x, y)
        band = predictor.predict_interval(x, 0.5)
        assert (band.lower.double() <= y).all()
        assert (band.upper.double() >= y).all()


@pytest.mark.parametrize("call", ["calibrate", "score"])
def test_a_target_outside_is_refused_by_its_row(call: str) -> None:
    predictor = ffcp.CP(small_mlp(), support=(0, None), batch_size=7)
    y = Y.clone()
    y[23] = -0.5
    with pytest.raises(ValueError, match=r"\b23\b"):
        getattr(predictor, call)(X, y)


def test_a_missing_target_is_not_outside() -> None:
    y = Y.clone()
    y[3] = torch.nan
    assert len(ffcp.CP(small_mlp(), support=(0, None), missing=True).calibrate(X, y).calibration)


@pytest.mark.parametrize("support", [(1, 0), (0,), "a", 3, (0, 0), (float("nan"), 1), (None, "b")])
def test_what_is_no_support_is_refused(support: Any) -> None:
    with pytest.raises(ValueError, match="support"):
        ffcp.CP(small_mlp(), support=support)


def test_supports_are_saved_and_not_mixed(tmp_path: Path) -> None:
    model = small_mlp()
    predictor = ffcp.CP(model, support=(0, None)).calibrate(X, Y)
    predictor.save(tmp_path / "c.safetensors")
    assert ffcp.load(tmp_path / "c.safetensors", model).support == (0, torch.inf)
    with pytest.raises(ffcp.CalibrationFileError, match="support"):
        ffcp.CP(model).load(tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match="support"):
        ffcp.CP(model, support=(-1, None)).calibrate(X[:50], Y[:50]).merge(predictor)
