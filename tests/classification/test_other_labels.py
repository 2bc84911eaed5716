"""Labels that the model does not know: they score infinity, and sets can hold another label."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ffcp
from tests.classification.material import METHODS, TUNED, K, X, Y, network
from tests.core import set_aside

ALL = {**METHODS, **TUNED}


def some_unknown(share: float) -> torch.Tensor:
    """The labels of the material, of which a share is none that the model knows."""
    unknown = torch.rand(len(Y), generator=torch.Generator().manual_seed(1)) < share
    return Y.masked_fill(unknown, K)


def sets_of(name: str, share: float, alpha: float) -> ffcp.LabelSet:
    predictor = ALL[name](network(), other_labels=True).calibrate(
        X[:250], some_unknown(share)[:250]
    )
    return predictor.predict_set(X[250:], alpha)


@pytest.mark.parametrize("name", ALL)
def test_rows_of_unknown_labels_raise_the_threshold(name: str) -> None:
    few, many = sets_of(name, 0.0, 0.1), sets_of(name, 0.08, 0.1)
    assert few.mask.shape == (50, K + 1)
    assert not few.mask[:, K].any()
    assert not many.mask[:, K].any()
    assert many.sizes.double().mean() > few.sizes.double().mean()


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("name", ALL)
def test_where_more_are_unknown_than_alpha_allows_every_set_holds_everything(name: str) -> None:
    assert sets_of(name, 0.2, 0.1).mask.all()


@pytest.mark.parametrize("name", METHODS)
def test_a_threshold_counts_unknown_rows_as_infinite(name: str) -> None:
    predictor = METHODS[name](network(), other_labels=True).calibrate(X, some_unknown(0.05))
    unknown = int((some_unknown(0.05) == K).sum())
    assert int(predictor.calibration.scores.isinf().sum()) == unknown > 5
    known = METHODS[name](network()).calibrate(X, Y).calibration.scores
    rest = predictor.calibration.scores[:-unknown]
    assert torch.isin(rest, known).all()


def test_candidates_are_compared_at_the_level_that_unknown_labels_leave() -> None:
    y, split = some_unknown(0.05), set_aside(300)
    predictor = ffcp.SetPredictor(network(), "auto", other_labels=True, seed=0).calibrate(X, y)
    with torch.no_grad():
        p = network().eval()(X[split]).softmax(dim=1)
    y, known = y[split], y[split] < K
    assert 0 < int((~known).sum()) < 6
    scores = (1 - p.gather(1, y.clamp(max=K - 1)[:, None])[:, 0]).masked_fill(~known, torch.inf)
    inside = 1 - p <= scores.sort().values[math.ceil(0.9 * len(y)) - 1]
    sizes = inside.sum(dim=1).clamp(min=1)[known].double()  # no set is empty
    assert predictor.choice.trials["LAC, temperature 1"] == pytest.approx(float(sizes.mean()))


def test_an_unknown_label_is_covered_by_a_set_that_holds_another_label() -> None:
    held = torch.tensor([[True, False, False], [True, True, True]])
    sets = ffcp.LabelSet(held, names=["cat", "dog"], other_labels=True)
    assert float(sets.coverage(["owl", "eel"])) == 0.5
    assert float(sets.coverage([2, 2])) == 0.5
    assert sets.labels == [["cat"], ["cat", "dog", "another label"]]
    assert "2 classes" in repr(sets)


def test_names_that_the_model_does_not_know_are_other_labels() -> None:
    names = list("abcdef")
    words = [*names, "owl"]
    y = [words[label] for label in some_unknown(0.05)]
    named = ffcp.LAC(network(), names=names, other_labels=True).calibrate(X, y)
    numbered = ffcp.LAC(network(), other_labels=True).calibrate(X, some_unknown(0.05))
    assert torch.equal(named.calibration.scores, numbered.calibration.scores)
    assert named.score(X, y).isinf().sum() == sum(word == "owl" for word in y)
    with pytest.raises(ValueError, match="None"):
        named.calibrate(X[:2], np.array(["a", None], dtype=object))
    with pytest.raises(ValueError, match="another label"):
        ffcp.LAC(network(), names=["a", "another label"], other_labels=True)


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_of_a_loader_another_label_comes_last_as_well() -> None:
    predictor = ffcp.LAC(network(), other_labels=True).calibrate(X[:5], Y[:5])
    whole, parts = predictor.predict_set(X[:6]), predictor.predict_set(iter([X[:3], X[3:6]]))
    assert [row.tolist() for row in whole.labels] == [row.tolist() for row in parts.labels]
    assert all(row[-1] == K and len(row) == K + 1 for row in whole.labels)


def test_without_them_an_unknown_label_is_refused() -> None:
    with pytest.raises(ValueError, match=f"{K}"):
        ffcp.LAC(network()).calibrate(X, some_unknown(0.1))
    with pytest.raises(ValueError, match=r"\b7\b"):
        ffcp.LAC(network(), other_labels=True).calibrate(X, Y.masked_fill(Y == 0, 7))


@pytest.mark.parametrize(
    "given",
    [
        {"class_conditional": True},
        {"calibration": ffcp.calibrations.Mondrian(ffcp.calibrations.ByLabel())},
        {"calibration": ffcp.calibrations.LabelShift([1.0] * K)},
    ],
)
def test_thresholds_by_label_do_not_go_with_them(given: Any) -> None:
    with pytest.raises(ValueError, match="other_labels"):
        ffcp.LAC(network(), other_labels=True, **given)


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_a_group_of_unknown_labels_has_sets_of_everything() -> None:
    groups = np.array(["old", "new"])[(torch.arange(300) % 2).numpy()]
    y = Y.masked_fill(torch.from_numpy(groups == "new"), K)
    predictor = ffcp.RAPS(network(), other_labels=True, seed=0).calibrate(X, y, groups=groups)
    mask = predictor.predict_set(X, groups=groups).mask
    assert mask[1::2].all()
    assert not mask[::2, K].any()


@pytest.mark.parametrize(
    "calibration",
    [
        lambda: ffcp.calibrations.Local(ffcp.kernels.Localizer("nearest")),
        lambda: ffcp.calibrations.Local(ffcp.kernels.Localizer("gaussian", on="input")),
        lambda: ffcp.calibrations.Weighted(lambda x: x[:, 0].exp()),
    ],
)
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_near_and_weighted_rows_of_unknown_labels_count(calibration: Any) -> None:
    y = Y.masked_fill(X[:, 0] > 1.5, K)
    made = ffcp.LAC(network(), other_labels=True, calibration=calibration())
    mask = made.calibrate(X, y).predict_set(X, alpha=0.3).mask
    assert mask.shape == (300, K + 1)
    assert not mask[:, K].all()


@pytest.mark.parametrize("name", ["LAC", "RAPS", "RAPS by size"])
def test_they_are_saved_loaded_merged_and_compressed(name: str, tmp_path: Path) -> None:
    model, y = network(), some_unknown(0.05)
    one = ALL[name](model, other_labels=True).calibrate(X, y)
    one.save(tmp_path / "one.ffcp")
    again = ffcp.load(tmp_path / "one.ffcp", model)
    assert again.other_labels
    same = {"alpha": 0.1, "first_row": 0}
    assert torch.equal(one.predict_set(X, **same).mask, again.predict_set(X, **same).mask)
    with pytest.raises(ValueError, match="other_labels"):
        ffcp.LAC(model).calibrate(X, Y).merge(ffcp.LAC(model, other_labels=True).calibrate(X, y))
    summed = ALL[name](model, other_labels=True).calibrate(X, y, rank_error=0.01)
    assert (
        summed.predict_set(X, **same).mask | ~one.predict_set(X, **same).mask
    ).float().mean() > 0.9


def test_a_monitor_counts_them() -> None:
    predictor = ffcp.LAC(network(), other_labels=True).calibrate(X, some_unknown(0.05))
    monitor = ffcp.Monitor(predictor, seed=0).update(X[:50], Y[:50])
    before = monitor.coverage()[None][0]
    monitor.update(X[:50], torch.full((50,), K))
    assert monitor.coverage()[None][0] == before / 2


def test_a_score_of_ones_own_need_not_know_of_them() -> None:
    gap = ffcp.scores.FunctionScore(
        lambda seen: seen.output.amax(1, True) - seen.output, name="gap"
    )
    predictor = ffcp.SetPredictor(nn.Identity(), gap, other_labels=True)
    logits = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    predictor.calibrate(logits, torch.arange(100) % 10 // 3)
    assert int(predictor.calibration.scores.isinf().sum()) == 10
