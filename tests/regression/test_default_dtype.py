"""With another default type of torch, as users who compute in float64 set it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ffcp
from tests.conftest import normal, small_mlp

MAKERS: dict[str, Callable[[Any], Any]] = {
    "CP": ffcp.CP,
    "FFCP": lambda model: ffcp.FFCP(model, "0"),
    "FFCP smoothed": lambda model: ffcp.FFCP(model, "0", method=ffcp.scales.Smooth(0.1, 2)),
    "LCP": lambda model: ffcp.LCP(model, "nearest", seed=0),
    "Learned": lambda model: ffcp.Learned(model, seed=0),
    "Auto": lambda model: ffcp.Auto(model, seed=0),
}


@pytest.fixture
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def bands(name: str, model: Any, x: Tensor, y: Tensor, path: Path, *, fit: bool = False) -> Tensor:
    predictor = MAKERS[name](model)
    if fit:
        predictor.fit(x[:200], y[:200])
    predictor.calibrate(x[200:], y[200:]).save(path)
    loaded = ffcp.load(path, model).predict_interval(x, first_row=0)
    found = predictor.predict_interval(x, first_row=0)
    assert torch.equal(loaded.upper, found.upper)
    inside = (found.lower[200:] <= y[200:]) & (y[200:] <= found.upper[200:])
    assert inside.double().mean() > 0.85
    upper: Tensor = found.upper
    return upper


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("name", MAKERS)
def test_bands_are_the_same_whatever_the_default_type_is(
    name: str, tmp_path: Path, in_float64: None
) -> None:
    x, y = normal(400, 4, seed=0).float(), normal(400, seed=1).float()
    torch.set_default_dtype(torch.float32)
    model = small_mlp()
    expected = bands(name, model, x, y, tmp_path / "saved")
    torch.set_default_dtype(torch.float64)
    assert torch.equal(bands(name, model, x, y, tmp_path / "saved"), expected)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("fit", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_a_model_in_float64_gets_bands_in_float64(
    name: str, fit: bool, tmp_path: Path, in_float64: None
) -> None:
    if fit and name not in ("Learned", "Auto"):
        return
    model, x, y = small_mlp(), normal(400, 4, seed=0), normal(400, seed=1)
    assert x.dtype == torch.float64
    assert bands(name, model, x, y, tmp_path / "saved", fit=fit).dtype == torch.float64
