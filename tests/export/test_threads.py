"""Export beside other threads: torch's exporter keeps state that all of them see."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import ffcp
from tests.conftest import normal


@pytest.fixture
def predictor() -> ffcp.FFCP:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return ffcp.FFCP(model, "0").calibrate(normal(100, 4, seed=1), normal(100, seed=2))


@pytest.mark.long
def test_files_are_written_and_bands_predicted_at_once(
    predictor: ffcp.FFCP, tmp_path: Path
) -> None:
    x = normal(50, 4, seed=3)
    expected = predictor.predict_interval(x)
    with ThreadPoolExecutor(4) as pool:
        files: list[Future[None]] = [
            pool.submit(predictor.export, tmp_path / f"{number}.onnx", x) for number in range(2)
        ]

        def ask() -> int:
            asked = 0
            while not all(file.done() for file in files):
                band = predictor.predict_interval(x)
                assert torch.equal(band.lower, expected.lower)
                asked += 1
            return asked

        asking = [pool.submit(ask) for _ in range(2)]
        for file in files:
            file.result()
        assert min(one.result() for one in asking) > 10
    assert (tmp_path / "0.onnx").read_bytes() == (tmp_path / "1.onnx").read_bytes()
    assert torch.equal(predictor.predict_interval(x).lower, expected.lower)


def test_torch_export_of_a_predictor_is_refused_in_words(predictor: ffcp.FFCP) -> None:
    x = normal(5, 4, seed=3)
    with pytest.raises(RuntimeError, match="FFCP"):
        torch.export.export(predictor, (x,), strict=False)
    assert predictor(x).lower.shape == (5,)
