"""Label sets by groups: every group covered on its own, a law over many calibration sets."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp import conformal_quantile, conformal_rank
from tests.classification.material import METHODS, K, X, Y, network
from tests.conftest import normal
from tests.core import scores_by_group
from tests.law import ERROR_RATE, draw_hits, p_value

ALPHA, REPEATS = 0.1, 250
KINDS = ("LAC", "APS", "RAPS", "FFRAPS")
QUICK_LAC = ["LAC", *(pytest.param(name, marks=pytest.mark.heavy) for name in KINDS[1:])]
GROUPS = ["north", "south", "east"] * 100
LOGITS = 2 * normal(300, K, seed=3)
IN_TURN = torch.arange(300) // 3 % K  # every class in every group


# -- the law -----------------------------------------------------------------------------------


def cells(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    """Group 0 is easy and group 1 hard: rows in turn, in both of them labels 0 and 1 in turn."""
    group, y = torch.arange(rows) % 2, torch.arange(rows) // 2 % 2
    strength = torch.tensor([4.0, 0.1])[group]
    logits = torch.randn(rows, 2, generator=generator)
    return logits + strength[:, None] * nn.functional.one_hot(y, 2), y


def hits_by(make, n: int, columns: int, *, by_groups: bool = True) -> np.ndarray:
    """Count the covered ones of 10 test points in each cell: a group, or a group and a label."""
    seeds = itertools.count()

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        groups = torch.arange(len(x_cal)) % 2 if by_groups else None
        predictor = make(seed=next(seeds)).calibrate(x_cal, y_cal, groups=groups)
        new = torch.arange(len(x)) % 2 if by_groups else None
        sets = predictor.predict_set(x, ALPHA, groups=new, first_row=0)
        return sets.mask.gather(1, y[:, None]).view(10, columns)

    return draw_hits(cells, covered, n=n * columns, t=10 * columns, repeats=REPEATS)


@cache
def hits_of_groups(name: str, by_groups: bool = True) -> np.ndarray:
    def make(seed: int) -> ffcp.SetPredictor:
        return METHODS[name](nn.Identity(), allow_zero_sets=True, seed=seed)

    return hits_by(make, 20, 2, by_groups=by_groups)


@pytest.mark.heavy
@pytest.mark.parametrize("name", QUICK_LAC)
def test_every_group_follows_the_law_on_its_own(name: str) -> None:
    hits = hits_of_groups(name)
    for group in range(2):
        assert p_value(hits[:, group], 10, 20, conformal_rank(20, ALPHA)) > ERROR_RATE


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK_LAC)
def test_without_groups_the_hard_one_is_covered_too_rarely(name: str) -> None:
    hard = hits_of_groups(name, by_groups=False)[:, 1].mean() / 10
    assert hard < 0.86
    assert hits_of_groups(name)[:, 1].mean() / 10 > hard + 0.03


@pytest.mark.heavy
@pytest.mark.parametrize("name", KINDS)
def test_every_class_of_every_group_follows_the_law(name: str) -> None:
    def make(seed: int) -> ffcp.SetPredictor:
        return METHODS[name](nn.Identity(), allow_zero_sets=True, class_conditional=True, seed=seed)

    hits = hits_by(make, 12, 4)
    for cell in range(4):
        assert p_value(hits[:, cell], 10, 12, conformal_rank(12, ALPHA)) > ERROR_RATE


# -- thresholds --------------------------------------------------------------------------------


def test_each_group_has_its_own_threshold(make) -> None:
    predictor = make(network(), allow_zero_sets=True).calibrate(X, Y, groups=GROUPS)
    plain = make(network()).calibrate(X, Y)
    assert predictor.calibration.groups == {"north": 100, "south": 100, "east": 100}
    assert torch.equal(
        predictor.calibration.scores[:, 0].sort().values, plain.calibration.scores[:, 0]
    )
    sets, scores = (
        predictor.predict_set(X, 0.2, groups=GROUPS, first_row=0),
        predictor.score_all(X, first_row=0),
    )
    ends = dict(
        zip(("north", "south", "east"), predictor.calibration.scores.split(100), strict=True)
    )
    levels = torch.stack([conformal_quantile(ends[g][:, 0], 0.2) for g in GROUPS])
    assert torch.equal(sets.mask, scores <= levels[:, None])
    alone = make(network(), allow_zero_sets=True).calibrate(X, Y, groups=["all"] * 300)
    assert torch.equal(
        alone.predict_set(X, 0.2, groups=["all"] * 300, first_row=0).mask,
        make(network(), allow_zero_sets=True).calibrate(X, Y).predict_set(X, 0.2, first_row=0).mask,
    )


def test_each_class_of_each_group_has_its_own_threshold(make) -> None:
    settings = {"class_conditional": True, "allow_zero_sets": True}
    predictor = make(nn.Sequential(nn.Identity()), **settings)
    predictor.calibrate(LOGITS, IN_TURN, groups=GROUPS)
    sets, scores = (
        predictor.predict_set(LOGITS, 0.2, groups=GROUPS, first_row=0),
        predictor.score_all(LOGITS, first_row=0),
    )
    kept = predictor.calibration
    for row in range(0, 300, 17):
        for label in range(K):
            own = kept.parts[GROUPS[row]]
            level = conformal_quantile(own.scores[own.rows["label"] == label, 0], 0.2)
            assert bool(sets.mask[row, label]) == bool(scores[row, label] <= level)


def test_the_batch_size_changes_nothing(make) -> None:
    model = nn.Sequential(nn.Identity())
    for settings in ({}, {"class_conditional": True}):
        masks = [
            make(model, batch_size=size, **settings)
            .calibrate(LOGITS, IN_TURN, groups=GROUPS)
            .predict_set(LOGITS, 0.5, groups=GROUPS, first_row=0)
            .mask
            for size in (None, 7)
        ]
        assert torch.equal(*masks)


def test_groups_by_a_function_of_the_input(make) -> None:
    def side(x: Tensor) -> list[str]:
        return ["left" if row < 0 else "right" for row in x[:, 0].tolist()]

    by_function = make(network(), batch_size=64).calibrate(X, Y, groups=side)
    by_labels = make(network(), batch_size=64).calibrate(X, Y, groups=side(X))
    expected = by_labels.predict_set(X, groups=side(X), first_row=0).mask
    assert torch.equal(by_function.predict_set(X, groups=side, first_row=0).mask, expected)


def test_tuning_takes_no_heed_of_groups() -> None:
    tuned = ffcp.RAPS(network(), tune="size", seed=0).calibrate(X, Y, groups=GROUPS)
    assert tuned.choice == ffcp.RAPS(network(), tune="size", seed=0).calibrate(X, Y).choice
    assert sum(tuned.calibration.groups.values()) == 240
    assert tuned.predict_set(X, groups=GROUPS, first_row=0).mask.shape == (300, K)


# -- sharing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("conditional", [False, True])
def test_groups_are_merged_updated_saved_and_loaded(make, conditional, tmp_path) -> None:
    model = nn.Sequential(nn.Identity())

    def some(rows: slice, **own: int) -> ffcp.SetPredictor:
        worker = make(model, class_conditional=conditional, **own)
        return worker.calibrate(LOGITS[rows], IN_TURN[rows], groups=GROUPS[rows])

    whole, updated = some(slice(0, 300)), some(slice(0, 90))
    updated.calibrate(LOGITS[90:], IN_TURN[90:], groups=GROUPS[90:], update=True)
    whole.save(tmp_path / "sets.safetensors")
    loaded = ffcp.load(tmp_path / "sets.safetensors", model)
    expected = whole.predict_set(LOGITS, 0.5, groups=GROUPS, first_row=0).mask
    for other in (updated, loaded):
        assert other.calibration.groups == whole.calibration.groups
        found = other.predict_set(LOGITS, 0.5, groups=GROUPS, first_row=0).mask
        assert torch.equal(found, expected)
    workers = [some(slice(0, 90), seed=1), some(slice(90, 300), seed=2)]
    parts = [scores_by_group(worker) for worker in workers]
    merged = make(model, class_conditional=conditional).merge(workers[0]).merge(workers[1])
    assert merged.calibration.groups == whole.calibration.groups
    for group, scores in scores_by_group(merged).items():
        both = torch.cat([part[group] for part in parts])
        assert torch.equal(scores, both.sort(dim=0).values)


def test_points_with_and_without_groups_do_not_mix() -> None:
    grouped, plain = ffcp.LAC(network()).calibrate(X, Y, groups=GROUPS), ffcp.LAC(network())
    plain.calibrate(X, Y)
    with pytest.raises(ValueError, match="Mondrian"):
        grouped.merge(plain)
    with pytest.raises(ValueError, match="Mondrian"):
        plain.merge(grouped)
    with pytest.raises(ValueError, match="groups"):
        plain.calibrate(X, Y, groups=GROUPS, update=True)
    with pytest.raises(ValueError, match="groups"):
        grouped.calibrate(X, Y, update=True)


# -- too little to say, and bad input ----------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 10])
def test_a_small_group_gets_all_labels_and_is_named(make, batch_size: int | None) -> None:
    groups = ["large"] * 292 + ["small"] * 8
    predictor = make(network(), batch_size=batch_size).calibrate(X, Y, groups=groups)
    with pytest.warns(
        ffcp.FFCPWarning,
        match="small",
    ):
        sets = predictor.predict_set(X, groups=groups, first_row=0)
    assert sets.mask[292:].all()
    assert not sets.mask[:292].all()


def test_small_groups_of_all_batches_are_named() -> None:
    groups = ["a"] * 5 + ["large"] * 290 + ["b"] * 5
    predictor = ffcp.LAC(network(), batch_size=20).calibrate(X, Y, groups=groups)
    with pytest.warns(ffcp.FFCPWarning, match="'a'.*'b'"):
        predictor.predict_set(X, groups=groups, first_row=0)


@pytest.mark.parametrize("batch_size", [None, 10])
def test_a_class_that_is_rare_in_one_group_is_counted_and_the_group_named(
    batch_size: int | None,
) -> None:
    y = torch.arange(300) // 2 % K
    groups = ["a", "b"] * 150
    y[1::2][y[1::2] == 2] = 3  # no point of class 2 in group b
    predictor = ffcp.LAC(nn.Identity(), class_conditional=True, batch_size=batch_size)
    predictor.calibrate(LOGITS, y, groups=groups)
    with pytest.warns(ffcp.FFCPWarning, match="'b'"):
        sets = predictor.predict_set(LOGITS, groups=groups, first_row=0)
    assert sets.mask[1::2, 2].all()
    assert not sets.mask[0::2, 2].all()


def test_groups_that_do_not_fit() -> None:
    predictor = ffcp.RAPS(network()).calibrate(X, Y, groups=GROUPS)
    with pytest.raises(ValueError, match="west"):
        predictor.predict_set(X[:2], groups=["north", "west"], first_row=0)
    with pytest.raises(ValueError, match="groups"):
        predictor.predict_set(X, first_row=0)
    with pytest.raises(ValueError, match="groups"):
        predictor.predict_set(X, groups=["north", "south"], first_row=0)
    with pytest.raises(ValueError, match="groups"):
        ffcp.RAPS(network()).calibrate(X, Y).predict_set(X, groups=GROUPS, first_row=0)
