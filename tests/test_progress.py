"""The progress bar: drawn on a terminal alone, and not needed."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ffcp
from ffcp import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def steps() -> None:
    with progress.progress(3, "learning") as step:
        for _ in range(3):
            step()


def test_a_bar_is_drawn_on_a_terminal_and_never_into_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    for stream, is_shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        steps()
        assert ("learning" in stream.getvalue()) == is_shown


def test_calibrating_counts_rows_and_exporting_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("tqdm")
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    x, y = torch.randn(300, 2), torch.randn(300)
    loader = DataLoader(TensorDataset(x, y), batch_size=100)
    predictor = ffcp.CP(torch.nn.Linear(2, 1))
    for given in ((x, y), (loader,), (iter(loader),)):
        monkeypatch.setattr(sys, "stderr", stream := Terminal())
        predictor.calibrate(*given)
        total = "/300" if len(given) == 2 or given[0] is loader else " rows"
        assert "calibrating" in stream.getvalue()
        assert total in stream.getvalue()
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    predictor.export(tmp_path / "band.onnx", x)
    assert "exporting" in stream.getvalue()
    assert "/4" in stream.getvalue()


def test_no_bar_is_drawn_inside_that_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    with progress.hidden():
        steps()
    assert stream.getvalue() == ""


def test_short_work_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    steps()
    assert stream.getvalue() == ""


def test_without_tqdm_the_work_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    steps()
    assert stream.getvalue() == ""
