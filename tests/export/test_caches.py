"""Making a graph leaves nothing behind that later calls would take for numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ffcp
from tests.conftest import normal


@pytest.mark.heavy
def test_calls_behind_an_export_give_what_calls_before_it_did(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    x, y = normal(200, 3, seed=0), normal(200, seed=1)
    bands = ffcp.CP(nn.Linear(3, 1)).calibrate(x, y)
    sets = ffcp.RAPS(nn.Linear(3, 5), seed=0).calibrate(x, torch.arange(200) % 5)
    before = bands.predict_interval(x).lower, sets.predict_set(x, first_row=0).mask
    bands.export(tmp_path / "bands.onnx", x[:9], alphas=(0.1,))
    sets.export(tmp_path / "sets.onnx", x[:9], alphas=(0.1,))
    assert torch.equal(bands.predict_interval(x).lower, before[0])
    assert torch.equal(sets.predict_set(x, first_row=0).mask, before[1])
