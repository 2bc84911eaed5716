"""The benchmark of probabilities: what it measures, in small, and without its data."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from benchmarks import probabilities
from benchmarks.probabilities import Data, calibration_error, is_top_right, log_loss, measured


def test_calibrating_mends_a_network_that_is_too_sure() -> None:
    torch.manual_seed(0)
    x = torch.randn(3000, 3)
    y = torch.distributions.Categorical(logits=x).sample()
    for data in (Data(4 * x, y), is_top_right(Data(4 * x, y))):
        found = measured(data, splits=2)
        for name in ("temperature", "VennAbers"):
            assert found[name][0] < 0.8 * found["softmax"][0]
            assert found[name][1] < 0.3 * found["softmax"][1]


def test_measures_are_what_they_are_called() -> None:
    probabilities = torch.tensor([[0.75, 0.25]]).repeat(40, 1).double()
    labels = (torch.arange(40) % 4 == 0).long()
    loss = -(0.75 * torch.tensor(0.75).log() + 0.25 * torch.tensor(0.25).log())
    assert log_loss(probabilities, labels) == pytest.approx(float(loss), abs=1e-6)
    # In bins of two rows, accuracy is 1, or 1/2.
    assert calibration_error(probabilities, labels) == pytest.approx(0.25)


def test_networks_that_are_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FFCP_DATA", str(tmp_path))
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path))
    monkeypatch.setattr(probabilities, "ROWS", 500)
    monkeypatch.setattr(sys, "argv", ["probabilities", "--networks", "cifar10_resnet20"])
    probabilities.main()
    assert "cifar10_resnet20" in capsys.readouterr().out
