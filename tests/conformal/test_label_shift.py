"""Label shift: ratios of class shares, given or learned from new inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ffcp
from tests.conftest import normal, small_mlp


@pytest.mark.parametrize("ratio", [[1.0], [1.0, -1.0], [0.0, 0.0], [1.0, torch.inf]])
def test_ratios_that_are_none_are_refused(ratio: list[float]) -> None:
    with pytest.raises(ValueError, match="class"):
        ffcp.calibrations.LabelShift(ratio)
    with pytest.raises(ValueError, match="learn"):
        ffcp.calibrations.LabelShift("guess")


def test_learned_shares_come_back_from_a_file(tmp_path: Path) -> None:
    model, x = small_mlp(outputs=3), normal(600, 4, seed=1)
    y = model(x).argmax(dim=1)
    predictor = ffcp.LAC(model, calibration=ffcp.calibrations.LabelShift(), seed=0)
    predictor.calibrate(x, y, new=normal(300, 4, seed=2) + 0.5)
    predictor.save(tmp_path / "shares")
    again = ffcp.load(tmp_path / "shares", model)
    assert list(again.calibration.learned) == list(predictor.calibration.learned)
    assert len(again.calibration.learned) == 3
    asked = normal(20, 4, seed=3)
    assert again.predict_set(asked).mask.equal(predictor.predict_set(asked).mask)


def test_a_class_that_outweighs_all_points_has_infinite_sets() -> None:
    model, y = nn.Linear(2, 2), torch.arange(40) % 2
    predictor = ffcp.LAC(model, calibration=ffcp.calibrations.LabelShift([1e-6, 1e6])).calibrate(
        normal(40, 2, seed=1), torch.zeros_like(y)
    )
    with pytest.warns(ffcp.FFCPWarning, match="classes"):
        found = predictor.predict_set(normal(5, 2, seed=2))
    assert bool(found.mask[:, 1].all())
