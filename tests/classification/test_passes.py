"""What label sets do with the model: one pass per row, and copies that go on alike."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import ffcp
from tests.classification.material import METHODS, TUNED, X, Y, network, seeded
from tests.core import config
from tests.rows import counted_rows

GROUPS = ["a", "b"] * 150


def margin(seen: ffcp.BatchOutput) -> Tensor:
    return seen.output.amax(dim=1, keepdim=True) - seen.output


def side(x: Tensor) -> list[bool]:
    return (x[:, 0] > 0).tolist()


def near(guarantee: str = "marginal") -> ffcp.calibrations.Local:
    return ffcp.calibrations.Local(
        ffcp.kernels.Localizer("gaussian", on="3", bandwidth=9.0), guarantee=guarantee
    )


PIECES = {
    "own score": seeded(ffcp.SetPredictor, score=margin),
    "own score by groups": seeded(
        ffcp.SetPredictor, score=margin, calibration=ffcp.calibrations.Mondrian(by=side)
    ),
    "own score by label": seeded(
        ffcp.SetPredictor, score=margin, calibration=ffcp.calibrations.ByLabel()
    ),
    "own score, local": seeded(ffcp.SetPredictor, score=margin, calibration=near()),
    "APS, random local": seeded(
        ffcp.SetPredictor, score=ffcp.scores.APS(), calibration=near("random")
    ),
    "by class": seeded(ffcp.RAPS, class_conditional=True),
}
ALL = {**METHODS, **TUNED, **PIECES}


# -- passes ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("batch_size", [None, 64])
def test_every_row_goes_through_the_model_once(name: str, batch_size: int | None) -> None:
    model = network()
    predictor = ALL[name](model, batch_size=batch_size)
    checks = []  # whether the model treats rows separately, on a few of them
    for rows in (150, 300):
        with counted_rows(model) as count:
            predictor.calibrate(X[:rows], Y[:rows])
        checks.append(count.rows - rows)
    assert checks[0] == checks[1] <= 5 * 8
    with counted_rows(model) as count:
        sets = predictor.predict_set(X[:100])
    assert count.rows == 100
    with counted_rows(model) as count:
        assert len(sets.labels) == len(sets.labels) == 100  # asked for twice
    assert count.rows == 100
    with counted_rows(model) as count:
        predictor.calibrate(X[:50], Y[:50], update=True)
    assert count.rows == 50 + checks[0]


# -- copies ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_copy_predicts_the_same(name: str, grouped: bool) -> None:
    predictor, groups = ALL[name](network()), {}
    if grouped and "by groups" not in name:
        groups = {"groups": GROUPS}
    predictor.calibrate(X, Y, **groups)
    expected = predictor.predict_set(X, **groups, first_row=0)
    copies = [copy.deepcopy(predictor), pickle.loads(pickle.dumps(predictor))]
    for other in copies:
        assert torch.equal(other.predict_set(X, **groups, first_row=0).mask, expected.mask)
        assert config(other) == config(predictor)
        # A copy goes on by itself.
        other.calibrate(X[:50], Y[:50], update=True, **{k: v[:50] for k, v in groups.items()})
    assert torch.equal(predictor.predict_set(X, **groups, first_row=0).mask, expected.mask)
    predictor.calibrate(X[:50], Y[:50], update=True, **{k: v[:50] for k, v in groups.items()})
    for other in copies:
        assert torch.equal(other.calibration.scores, predictor.calibration.scores)


def test_a_deep_copy_has_a_model_of_its_own() -> None:
    predictor = ffcp.RAPS(network()).calibrate(X, Y)
    other = copy.deepcopy(predictor)
    nn.init.zeros_(other.model[6].weight)
    assert predictor.model[6].weight.any()


# -- merging -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("name", ALL)
def test_merging_a_predictor_without_calibration(name: str) -> None:
    empty, other = ALL[name](network(), seed=1), ALL[name](network(), seed=2)
    with pytest.raises(ValueError, match="calibrate"):
        empty.merge(other)
    empty.calibrate(X, Y)
    points = len(empty.calibration)
    with pytest.raises(ValueError, match="calibrate"):
        empty.merge(other)
    assert len(empty.calibration) == points
    with pytest.raises(ValueError, match="itself"):
        empty.merge(empty)
