"""The label score is chosen on rows that do not calibrate, or plainly said not to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ffcp
from ffcp.classification.rules import Cumulative, Threshold
from tests.classification.material import K, X, Y, labels_for, network
from tests.conftest import normal
from tests.core import config, only_label_score

MANY = normal(2000, 4, seed=3)


def auto(model: nn.Module, **more) -> ffcp.SetPredictor:
    return ffcp.SetPredictor(model, "auto", **{"seed": 0, **more})


def test_the_smallest_sets_are_taken_and_the_choice_is_shown() -> None:
    # How sure the logits are differs from row to row and means nothing: ranks tell more than LAC.
    draw = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(1500, 8, generator=draw)
    y = logits.softmax(dim=1).multinomial(1, generator=draw)[:, 0]
    logits = logits * (3 * torch.rand(1500, 1, generator=draw)).exp()
    predictor = auto(nn.Identity()).calibrate(logits, y)
    choice = predictor.choice
    assert (choice.rows, len(predictor.calibration)) == (300, 1200)
    assert choice.score.startswith("RAPS")
    assert choice.trials[choice.score] == min(choice.trials.values())
    assert str(choice).startswith("RAPS: as APS, with a penalty on large sets, chosen by mean size")
    (marked,) = (line for line in str(choice).splitlines() if line.startswith("> RAPS"))
    assert marked.endswith(f"{choice.trials[choice.score]:.4g}")


def test_where_rows_tell_no_difference_plain_lac_is_taken() -> None:
    choice = auto(network()).calibrate(X, Y).choice
    assert choice.score == "LAC, temperature 1"
    assert choice.trials[choice.score] > min(choice.trials.values())
    assert {name.partition(",")[0] for name in choice.trials} == {"LAC", "APS", "RAPS"}


KINDS = [
    (Threshold(0.5), lambda: ffcp.scores.LAC(0.5)),
    (Cumulative(0.5), lambda: ffcp.scores.APS(0.5)),
    (Cumulative(2.0, lam=0.1, kreg=2), lambda: ffcp.scores.RAPS(0.1, 2, temperature=2.0)),
]


@pytest.mark.parametrize("share", [0.0, 0.05])
@pytest.mark.parametrize(("rule", "score"), KINDS)
def test_whatever_is_taken_scores_as_it_does_by_itself(
    rule: Any, score: Any, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rows of a loader: those that come after the choice must be scored as those that waited.
    only_label_score(monkeypatch, rule, most_rows=30)
    model = network()
    y = labels_for(MANY, model)
    y = y.masked_fill(torch.rand(len(y), generator=torch.Generator().manual_seed(0)) < share, K)
    made = auto(model, other_labels=True).calibrate(
        list(zip(MANY.split(100), y.split(100), strict=True))
    )
    alone = ffcp.SetPredictor(model, score(), other_labels=True, seed=0).calibrate(MANY, y)
    assert len(made.calibration) == 1970
    # Every row draws the number of its place, so the scores are among those of all rows.
    assert torch.isin(made.calibration.scores, alone.calibration.scores).all()


@pytest.mark.parametrize("rows", [5, 90])
def test_few_rows_all_calibrate_and_it_is_said(rows: int) -> None:
    predictor = auto(network())
    with pytest.warns(ffcp.FFCPWarning, match="LAC"):
        predictor.calibrate(X[:rows], Y[:rows])
    assert len(predictor.calibration) == rows
    assert predictor.choice is not None
    assert predictor.choice.rows == 0
    assert "LAC" in str(predictor.choice)
    plain = ffcp.LAC(network()).calibrate(X[:rows], Y[:rows])
    assert torch.equal(predictor.calibration.scores, plain.calibration.scores)


def test_a_chosen_score_is_saved_loaded_and_updated(tmp_path: Path) -> None:
    model = network()
    predictor = auto(model, other_labels=True).calibrate(X, Y)
    predictor.save(tmp_path / "auto.ffcp")
    again = ffcp.load(tmp_path / "auto.ffcp", model)
    assert again.choice == predictor.choice
    assert config(again) == config(predictor)
    one, two = (each.predict_set(X, 0.1, first_row=0).mask for each in (predictor, again))
    assert torch.equal(one, two)
    again.calibrate(X[:50], Y[:50], update=True)
    assert len(again.calibration) == 290


def test_sure_and_spread_rows_are_told_from_rows_that_are_all_alike() -> None:
    # One label is far ahead in every row: APS and RAPS must not take more than it.
    logits = normal(600, 10, seed=5) + 6 * nn.functional.one_hot(torch.arange(600) % 10, 10)
    predictor = ffcp.SetPredictor(nn.Identity(), "auto", seed=0)
    predictor.calibrate(logits, torch.arange(600) % 10)
    assert predictor.predict_set(logits).sizes.double().mean() == 1.0
