"""The code in README runs, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.conftest import normal
from tests.core import few_epochs

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 120


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_blocks_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    few_epochs(monkeypatch)
    x, y = normal(900, 3, seed=0), normal(900, 1, seed=1)
    names = {
        "model": nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)),
        "x_train": x[:300], "y_train": y[:300], "x_cal": x[300:700], "y_cal": y[300:700],
        "x": x[700:], "y": y[700:],
        "X": x.double().numpy(), "Y": np.asarray(y[:, 0].double()),
    }  # fmt: skip
    exec(compile(BLOCKS[number], f"README block {number}", "exec"), names)
    assert torch.is_grad_enabled()
