"""Scores of bands, quantiles and distributions; levels and missing targets."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import ffcp
from ffcp import metrics
from tests.conftest import normal, small_mlp

X, Y = normal(300, 4, seed=0), normal(300, seed=1)
NAN = math.nan


def test_several_levels_give_a_list() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X[:200], Y[:200])
    alphas = (0.5, 0.1)
    many = predictor.predict_interval(X[200:], alphas)
    ones = [predictor.predict_interval(X[200:], alpha) for alpha in alphas]
    y = Y[200:]
    assert metrics.coverage(many, y) == [metrics.coverage(one, y) for one in ones]
    scores = metrics.interval_score(many, y)
    assert scores == [metrics.interval_score(one, y, alpha=one.alpha) for one in ones]
    assert scores == [metrics.interval_score(one, y) for one in ones]  # the band knows its level
    assert metrics.interval_score(many, y[:, None]) == scores


def test_levels_that_do_not_fit_are_refused() -> None:
    band = ffcp.CP(small_mlp()).calibrate(X, Y).predict_interval(X, (0.5, 0.1))
    with pytest.raises(ValueError, match="alpha"):
        metrics.interval_score(band, Y, alpha=0.1)
    with pytest.raises(ValueError, match="quantiles"):
        metrics.pinball_loss(band.upper, Y, (0.9,))


def test_the_interval_score_is_two_pinball_losses() -> None:
    band = ffcp.CP(small_mlp()).calibrate(X, Y).predict_interval(X, 0.1)
    below = metrics.pinball_loss(band.lower, Y, 0.05)
    above = metrics.pinball_loss(band.upper, Y, 0.95)
    assert metrics.interval_score(band, Y) == pytest.approx((below + above) * 20)


def test_pinball_agrees_with_the_loss_that_trains() -> None:
    quantiles = normal(2, 300, seed=4)
    ours = metrics.pinball_loss(quantiles, Y, (0.2, 0.9))
    theirs = ffcp.pinball_loss(quantiles.T, Y, (0.2, 0.9))
    assert np.mean(ours) == pytest.approx(float(theirs), rel=1e-5)


def test_missing_targets_do_not_count() -> None:
    lower, upper = torch.zeros(4, 2), torch.ones(4, 2)
    y = torch.tensor([[0.5, NAN], [2.0, 0.5], [NAN, NAN], [0.5, 0.5]])
    with pytest.raises(ValueError, match="missing=True"):
        metrics.coverage((lower, upper), y)
    each = metrics.coverage((lower, upper), y, missing=True)
    assert (float(each), each.rows) == (pytest.approx(2.5 / 3), 3)
    for joint, share, rows in (("known", 2 / 3, 3), (True, 1 / 2, 2), (0.5, 1, 2)):
        found = metrics.coverage((lower, upper), y, joint=joint, missing=True)
        assert (float(found), found.rows) == (pytest.approx(share), rows)
    for measure in (metrics.coverage, metrics.group_coverage):  # no row is complete
        with pytest.raises(ValueError, match="known"):
            measure((lower[:1], upper[:1]), y[:1], joint=True, missing=True)
    known = y[~y.isnan()]
    flat = torch.zeros(5), torch.ones(5)
    for missing, plain in (
        (
            metrics.interval_score((lower, upper), y, 0.1, missing=True),
            metrics.interval_score(flat, known, 0.1),
        ),
        (
            metrics.pinball_loss(upper, y, 0.9, missing=True),
            metrics.pinball_loss(flat[1], known, 0.9),
        ),
    ):
        assert missing == pytest.approx(plain)
    with pytest.raises(ValueError, match="known"):
        metrics.coverage((lower, upper), y * NAN, missing=True)


def test_groups_strata_and_slabs_leave_out_rows_without_a_target() -> None:
    band = (
        ffcp.IntervalPredictor(small_mlp(), scale=lambda seen: 1 + seen.x[:, 0].abs())
        .calibrate(X, Y)
        .predict_interval(X)
    )
    y, labels = Y.clone(), np.arange(300) % 3
    y[::7] = NAN
    keep = ~y.isnan()
    rest = (band.lower[keep], band.upper[keep])
    found = metrics.group_coverage(band, y, labels, missing=True)
    assert found == metrics.group_coverage(rest, y[keep], labels[keep.numpy()])
    assert metrics.group_coverage(band, y, missing=True) == metrics.group_coverage(rest, y[keep])
    strata = metrics.size_stratified_coverage(band, y, missing=True)
    assert sum(share.rows for share in strata.groups.values()) == int(keep.sum())
    slab = metrics.worst_slab_coverage(band, y, X, missing=True)
    assert slab == metrics.worst_slab_coverage(rest, y[keep], X[keep])


def test_crps_of_a_distribution() -> None:
    found = ffcp.CP(small_mlp()).calibrate(X, Y).predict_distribution(X)
    assert metrics.crps(found, Y) == pytest.approx(float(found.crps(Y).mean()))
    y = Y.clone()
    y[::2] = NAN
    assert metrics.crps(found, y, missing=True) == pytest.approx(float(found.crps(Y)[1::2].mean()))
