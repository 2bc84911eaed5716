"""Points from elsewhere, as a file may hold them: what cannot have been kept is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.risk import Losses
from tests.conftest import normal, small_mlp

Points = dict[str, Tensor]


def refuses(calibration: Calibration, damage: Callable[[Points], object], message: str) -> None:
    points = {name: values.clone() for name, values in calibration.points().items()}
    calibration.check(points)  # as it is, it may be kept
    damage(points)
    with pytest.raises(ValueError, match=message):
        calibration.check(points)


def put(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Points], object]:
    return lambda points: points.update({name: make(points[name])})


def set_at(name: str, place: tuple[int, ...], value: float) -> Callable[[Points], object]:
    return lambda points: points[name].__setitem__(place, value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda points: points.pop("scores"), "it holds signs where scores, signs are kept"),
        (
            lambda points: points.update(more=torch.ones(3)),
            "it holds more, scores, signs where",
        ),
        (put("scores", Tensor.float), "scores is of torch.float32, not torch.float64"),
        (put("scores", Tensor.flatten), r"scores have the shape \(9,\)"),
    ],
)
def test_scores_that_cannot_be(damage: Callable[[Points], object], message: str) -> None:
    calibration = ffcp.calibrations.Marginal()
    calibration.add(torch.arange(9.0)[:, None])
    refuses(calibration, damage, message)


def test_notes_that_are_not_one_for_each_score() -> None:
    calibration = ffcp.calibrations.LabelShift([1.0, 2.0])
    calibration.add(torch.arange(4.0)[:, None], {"label": torch.tensor([0, 1, 0, 1])})
    refuses(calibration, put("label", lambda y: y[:3]), r"label has the shape \(3,\) beside 4")
    refuses(calibration, put("label", lambda y: y + 1), "not the numbers of classes")


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([[1.0, 0.5]], "not numbers from 0 to 1 for each level"),
        ([[1.5, 0.5, 0.0]], "not numbers from 0 to 1 for each level"),
        ([[0.5, 1.0, 0.0]], "losses grow with the level"),
    ],
)
def test_losses_that_cannot_be(scores: list[list[float]], message: str) -> None:
    losses = Losses([0.0, 0.5, 1.0])
    losses.add(torch.tensor([[1.0, 0.5, 0.0]]))
    wrong = torch.tensor(scores, dtype=torch.float64)
    refuses(losses, put("scores", lambda _: wrong), message)


def test_levels_of_losses_ascend() -> None:
    for grid in ([0.0], [0.0, 0.0], [[0.0, 1.0]]):
        with pytest.raises(ValueError, match="at least two numbers in ascending order"):
            Losses(grid)


def test_a_family_that_never_stops_losing_is_told() -> None:
    losses = Losses([0.0, 1.0])
    losses.add(torch.full((50, 2), 0.5))
    assert losses.threshold(0.1).isinf().all()
    assert "the mean loss is 0.5 of the largest" in losses.why_infinite(0.1, {})


# -- shares of classes -----------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [[1.0], [1.0, -1.0], [0.0, 0.0], [1.0, torch.inf]])
def test_ratios_that_are_none_are_refused(ratio: list[float]) -> None:
    with pytest.raises(ValueError, match="a number of at least 0 for each class, not all 0"):
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
    assert again.calibration.ratio == predictor.calibration.ratio
    assert len(again.calibration.ratio) == 3
    asked = normal(20, 4, seed=3)
    assert again.predict_set(asked).mask.equal(predictor.predict_set(asked).mask)


def test_a_class_that_outweighs_all_points_has_infinite_sets() -> None:
    model, y = nn.Linear(2, 2), torch.arange(40) % 2
    predictor = ffcp.LAC(model, calibration=ffcp.calibrations.LabelShift([1e-6, 1e6])).calibrate(
        normal(40, 2, seed=1), torch.zeros_like(y)
    )
    with pytest.warns(ffcp.FFCPWarning, match="points of these classes"):
        found = predictor.predict_set(normal(5, 2, seed=2))
    assert bool(found.mask[:, 1].all())
