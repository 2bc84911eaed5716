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


@pytest.mark.parametrize(
    "change",
    [
        put("scores", lambda scores: scores[:, :2]),
        put("scores", lambda scores: scores.nan_to_num(0.0) + 1.0),
        put("scores", lambda scores: scores.nan_to_num(0.0) * 0.5 + 0.1),
    ],
    ids=["too few", "above 1", "not 0 and 1"],
)
def test_tested_losses_that_cannot_be(change: Change, tmp_path: Path) -> None:
    predictor = ffcp.RiskControl(
        nn.Identity(), "wrong_answers", sets="answers", grid=[0.0, 0.5, 0.8], pac=0.9,
        correction="bonferroni",
    )  # fmt: skip
    predictor.calibrate(normal(60, 2, seed=0), torch.arange(60) % 2)
    refuses(predictor, change, tmp_path / "calibration")


@pytest.mark.parametrize(
    "totals",
    [
        {"counts": torch.ones(1, 3)},
        {"counts": torch.full((1, 3), -1)},
        {"counts": torch.full((1, 3), 2**40)},
        {"sums": torch.full((1, 3), -1)},
        {"sums": torch.full((1, 3), 2**60)},
        {"sums": torch.zeros(1, 2, dtype=torch.int64)},
    ],
)
def test_losses_that_cannot_order(totals: dict[str, Tensor]) -> None:
    predictor = ffcp.RiskControl(
        nn.Identity(), "wrong_answers", sets="answers", grid=[0.0, 0.5, 0.8], pac=0.9
    )
    predictor.calibrate(normal(60, 2, seed=0), torch.arange(60) % 2)
    score = predictor.calibrated().score
    assert score.with_state(score.state()).state().keys() == {"counts", "sums"}
    with pytest.raises(ValueError, match="grid"):
        score.with_state({**score.state(), **totals})


@pytest.mark.parametrize(
    "change",
    [
        put("label", lambda y: y + 1),
        put("label", lambda y: y.int()),
        put("label", lambda y: y[:, None]),
        put("scores", lambda scores: scores.expand(-1, 2)),
        put("scores", lambda scores: scores / 0.0),
        lambda tensors, _: tensors.pop("label"),
    ],
    ids=["no class", "int32", "two dimensions", "two columns", "infinite", "no labels"],
)
def test_rows_of_venn_abers_that_cannot_be(change: Change, tmp_path: Path) -> None:
    predictor = ffcp.VennAbers(nn.Linear(1, 2))
    predictor.calibrate(normal(6, 1, seed=0), torch.tensor([0, 1, 0, 1, 1, 0]))
    refuses(predictor, change, tmp_path / "calibration")


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
