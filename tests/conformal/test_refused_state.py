"""Scores from a file: what no calibration can have kept is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ffcp
from tests.conftest import normal
from tests.core import rewrite

Change = Callable[[dict[str, Tensor], dict[str, Any]], object]


def refuses(predictor: Any, change: Change, path: Path) -> None:
    predictor.save(path)
    rewrite(path, lambda tensors, described: None)
    assert len(ffcp.load(path, predictor.model).calibration)  # as it is, it can be loaded
    rewrite(path, change)
    with pytest.raises(ffcp.CalibrationFileError, match=path.name):
        ffcp.load(path, predictor.model)


def put(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors, _: tensors.update({name: make(tensors[name])})


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, _: tensors.pop("scores"),
        lambda tensors, _: tensors.update(more=torch.ones(3)),
        put("scores", Tensor.float),
        put("scores", Tensor.flatten),
        put("scores", lambda scores: scores.flip(0)),
        put("scores", lambda scores: scores.expand(-1, 2)),
    ],
    ids=["no scores", "more", "float32", "one dimension", "not sorted", "two outputs"],
)
def test_scores_that_cannot_be(change: Change, tmp_path: Path) -> None:
    predictor = ffcp.CP(nn.Linear(1, 1)).calibrate(normal(9, 1, seed=0), normal(9, seed=1))
    refuses(predictor, change, tmp_path / "calibration")


@pytest.mark.parametrize(
    "change",
    [put("label", lambda y: y[:3]), put("label", lambda y: y + 1)],
    ids=["too few", "no class"],
)
def test_labels_that_cannot_be(change: Change, tmp_path: Path) -> None:
    shift = ffcp.calibrations.LabelShift([1.0, 2.0])
    predictor = ffcp.LAC(nn.Linear(1, 2), calibration=shift)
    predictor.calibrate(normal(4, 1, seed=0), torch.tensor([0, 1, 0, 1]))
    refuses(predictor, change, tmp_path / "calibration")


@pytest.mark.parametrize(
    "scores",
    [[[1.0, 0.5]], [[1.5, 0.5, 0.0]], [[0.5, 1.0, 0.0]]],
    ids=["too few", "above 1", "growing"],
)
def test_losses_that_cannot_be(scores: list[list[float]], tmp_path: Path) -> None:
    predictor = ffcp.RiskControl(nn.Linear(2, 2), grid=[0.0, 0.5, 1.0])
    predictor.calibrate(normal(6, 2, seed=0), torch.ones(6, 2))
    wrong = torch.tensor(scores, dtype=torch.float64)
    refuses(predictor, put("scores", lambda _: wrong), tmp_path / "calibration")


def test_levels_of_losses_ascend() -> None:
    for grid in ([0.0], [0.0, 0.0], [[0.0, 1.0]]):
        with pytest.raises(ValueError, match="ascending"):
            ffcp.RiskControl(nn.Linear(2, 2), grid=grid)


def test_a_family_that_never_stops_losing_is_told() -> None:
    always = ffcp.RiskControl(nn.Linear(2, 2), lambda sets, y: torch.full((len(y),), 0.5))
    always.calibrate(normal(50, 2, seed=0), torch.ones(50, 2))
    with pytest.warns(ffcp.FFCPWarning, match="loss"):
        found = always.predict_set(normal(3, 2, seed=1), 0.1)
    assert found.level.isinf().all()
