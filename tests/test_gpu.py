"""On CUDA or MPS: what the CPU says, but for rounding, and on the device of the model."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ffcp
from tests.conftest import normal, small_mlp

DEVICE = (
    "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else None
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE is None, reason="there is neither CUDA nor MPS"),
]
X, Y, NEW = normal(300, 4, seed=0), normal(300, seed=1), normal(50, 4, seed=2)
LABELS = torch.arange(300) % 3
METHODS: dict[str, Any] = {
    "CP": ffcp.CP,
    "FFCP": lambda model: ffcp.FFCP(model, "0"),
    "LCP": lambda model: ffcp.LCP(model, "nearest", seed=0),
    "Auto": lambda model: ffcp.Auto(model, seed=0),
}


def both(make: Any) -> tuple[Any, Any]:
    """Return a predictor on the accelerator and the same on the CPU, not calibrated."""
    model = small_mlp()
    return make(copy.deepcopy(model).to(DEVICE)), make(model)


def close(there: Tensor, here: Tensor) -> None:
    torch.testing.assert_close(there.cpu(), here, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", METHODS)
def test_calibrating_and_predicting_agree_with_the_cpu(name: str) -> None:
    far, near = (one.calibrate(X, Y) for one in both(METHODS[name]))
    for x in (NEW, NEW.to(DEVICE)):
        interval = far.predict_interval(x, alpha=(0.1, 0.3))
        if name != "Auto":  # may choose another by a hair
            close(interval.lower, near.predict_interval(NEW, alpha=(0.1, 0.3)).lower)
        if DEVICE == "cuda":
            assert interval.lower.device.type == interval.prediction.device.type == DEVICE
    assert far.calibration.scores.device.type == "cpu"
    assert {weight.device.type for weight in far.model.parameters()} == {DEVICE}
    assert float(far.predict_interval(X).contains(Y).float().mean()) >= 0.85


def test_label_sets_agree_with_the_cpu() -> None:
    model = small_mlp(outputs=3)
    far = ffcp.LAC(copy.deepcopy(model).to(DEVICE)).calibrate(X, LABELS)
    near = ffcp.LAC(model).calibrate(X, LABELS)
    assert (far.predict_set(NEW).mask.cpu() == near.predict_set(NEW).mask).float().mean() > 0.99


def test_a_file_goes_from_one_device_to_another(tmp_path: Path) -> None:
    far, near = both(METHODS["FFCP"])
    far.calibrate(X, Y).save(tmp_path / "kept.safetensors")
    again = ffcp.load(tmp_path / "kept.safetensors", far.model)
    assert torch.equal(again.predict_interval(NEW).lower, far.predict_interval(NEW).lower)
    moved = ffcp.load(tmp_path / "kept.safetensors", near.model)
    close(far.predict_interval(NEW).upper, moved.predict_interval(NEW).upper)
    close(far.to("cpu").predict_interval(NEW).upper, moved.predict_interval(NEW).upper)


def test_threads_share_a_predictor() -> None:
    far, _ = both(METHODS["FFCP"])
    expected, found = far.calibrate(X, Y).predict_interval(NEW).lower, []
    threads = [
        threading.Thread(target=lambda: found.append(far.predict_interval(NEW).lower))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    for one in found:
        close(one, expected.cpu())


def test_autocast_is_part_of_what_was_calibrated() -> None:
    far, _ = both(METHODS["FFCP"])
    with torch.autocast(str(DEVICE), torch.bfloat16):
        far.calibrate(X, Y)
        far.predict_interval(NEW)
    with pytest.raises(RuntimeError, match="autocast"):
        far.predict_interval(NEW)


def test_a_loader_of_batches_on_the_cpu_is_taken() -> None:
    rows = torch.utils.data.TensorDataset(X, Y)
    model: nn.Module = small_mlp().to(DEVICE)
    predictor = ffcp.CP(model).calibrate(torch.utils.data.DataLoader(rows, batch_size=64))
    assert len(predictor.calibration) == 300
