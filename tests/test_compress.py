"""Compressed calibrations: bands as valid as before, wider by no more than their rank error."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ffcp
from ffcp import Monitor, Online, conformal_rank
from tests import law
from tests.conftest import normal, small_mlp
from tests.core import config, scores_by_group, summary, threshold

ALPHAS = (0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.9)
X, Y = normal(3000, 4, seed=0), normal(3000, seed=1)
TWO = normal(3000, 2, seed=2)
TIED = (Y * 2).round()
GROUPS = ["a", "b", "b"] * 1000


def must_bound(rounded: Tensor, scores: Tensor, error: float, alpha: float) -> None:
    """Compare thresholds (m,) with the ranks that they are allowed to have among all scores."""
    for number, found in enumerate(rounded.tolist()):
        column = scores[:, number]
        column = column[~column.isnan()].sort().values
        n = len(column)
        k = conformal_rank(n, alpha)
        if k > n:
            assert found == math.inf
            continue
        last = min(n, k + math.floor(error * n + 1e-9))
        assert column[k - 1] <= found <= column[last - 1]


CASES: dict[str, tuple[Callable[[], Any], Tensor]] = {
    "CP": (lambda: ffcp.CP(small_mlp()), Y),
    "ties": (lambda: ffcp.CP(small_mlp()), TIED),
    "FFCP": (lambda: ffcp.FFCP(small_mlp(), "0"), Y),
    "CQR": (lambda: ffcp.CQR(small_mlp(outputs=2)), Y),  # scores below zero
    "lower": (lambda: ffcp.CP(small_mlp(), side="lower"), Y),
    "upper": (lambda: ffcp.CP(small_mlp(), side="upper"), Y),
    "each": (lambda: ffcp.CP(small_mlp(outputs=2), side="each"), TWO),
    "two outputs": (lambda: ffcp.FFCP(small_mlp(outputs=2), "0"), TWO),
    "jointly": (lambda: ffcp.CP(small_mlp(outputs=2), joint=True, output_scales=None), TWO),
    "bonferroni": (lambda: ffcp.CP(small_mlp(outputs=2), joint="bonferroni"), TWO),
}


@pytest.mark.parametrize("error", [0.001, 0.02, 0.3])
@pytest.mark.parametrize("name", CASES)
def test_thresholds_are_rounded_up_by_no_more_than_the_rank_error(name: str, error: float) -> None:
    make, y = CASES[name]
    predictor = make().calibrate(X, y)
    scores, wide = predictor.calibration.scores, predictor.predict_interval(X[:5], 0.1)
    predictor.compress(error)
    assert len(predictor.calibration.scores) <= min(math.ceil(1 / error), 3000)
    assert predictor.calibration.rank_error <= error
    assert len(predictor.calibration) == 3000
    for alpha in ALPHAS:
        must_bound(threshold(predictor.calibration, alpha), scores, error, alpha)
    band = predictor.predict_interval(X[:5], 0.1)
    assert (band.lower <= wide.lower).all()
    assert (band.upper >= wide.upper).all()


def test_a_small_rank_error_keeps_every_score_and_every_band() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y)
    before = predictor.predict_interval(X, ALPHAS)
    after = predictor.compress(1e-4).predict_interval(X, ALPHAS)
    assert predictor.calibration.rank_error == 0
    assert torch.equal(before.lower, after.lower)
    assert torch.equal(before.upper, after.upper)


def test_infinite_scores_and_those_that_are_missing_are_counted_as_before() -> None:
    targets = TWO.clone()
    targets[::3, 1] = math.nan
    predictor = ffcp.CP(small_mlp(outputs=2), missing=True).calibrate(X, targets)
    scores = predictor.calibration.scores
    predictor.compress(0.01)
    for alpha in ALPHAS:
        must_bound(threshold(predictor.calibration, alpha), scores, 0.01, alpha)
    some = torch.cat([Y.abs(), torch.full((300,), math.inf)])[:, None].double()
    wild = summary(some, 0.01)
    for alpha in ALPHAS:
        must_bound(threshold(wild, alpha), some, 0.01, alpha)


@pytest.mark.long
def test_about_eighty_kilobytes_are_written_for_a_million_scores(tmp_path: Path) -> None:
    many = ffcp.CP(ffcp.Stored()).calibrate(torch.zeros(10**6), torch.rand(10**6)).compress()
    many.save(tmp_path / "few")
    assert (tmp_path / "few").stat().st_size < 82_000


def test_groups_have_summaries_of_their_own() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y, groups=GROUPS)
    whole = scores_by_group(predictor)
    predictor.compress(0.02)
    assert predictor.calibration.groups == {"a": 1000, "b": 2000}
    assert len(predictor.calibration.scores) <= 2 * 50
    for label, scores in whole.items():
        for alpha in ALPHAS:
            (rounded,) = threshold(predictor.calibration, alpha, {"group": [label]})
            must_bound(rounded, scores, 0.02, alpha)
    band = predictor.predict_interval(X[:3], 0.1, groups=["a", "b", "b"])
    assert band.lower.isfinite().all()


@pytest.mark.parametrize(
    "calibration",
    [
        ffcp.calibrations.Weighted("given"),
        ffcp.calibrations.Local(),
        ffcp.calibrations.Mondrian(ffcp.calibrations.Weighted("given")),
    ],
)
def test_calibrations_that_look_at_single_rows_refuse(calibration: Any) -> None:
    groups = GROUPS if isinstance(calibration, ffcp.calibrations.Mondrian) else None
    weights = None if isinstance(calibration, ffcp.calibrations.Local) else Y.exp()
    predictor = ffcp.CP(small_mlp(), calibration=calibration)
    with pytest.raises(ValueError, match="compressed"):
        predictor.calibrate(X, Y, weights=weights, groups=groups, rank_error=0.02)
    predictor.calibrate(X, Y, weights=weights, groups=groups)
    with pytest.raises(ValueError, match="compressed"):
        predictor.compress(0.02)
    assert len(predictor.calibration)


# -- merging ---------------------------------------------------------------------------------------


def test_errors_add_up_when_summaries_are_merged() -> None:
    parts = [
        ffcp.CP(small_mlp()).calibrate(x, y)
        for x, y in zip(X.split(500), Y.split(500), strict=True)
    ]
    scores = torch.cat([part.calibration.scores for part in parts])
    for part in parts[:4]:
        part.compress(0.02)  # the others stay whole
    ranks = [round(part.calibration.rank_error * 500) for part in parts[:4]]
    merged = parts[4].merge(parts[0]).merge(parts[5])
    for part in parts[1:4]:
        merged.merge(part)
    assert len(merged.calibration) == 3000
    assert merged.calibration.rank_error * 3000 == pytest.approx(sum(ranks))
    for alpha in ALPHAS:
        must_bound(threshold(merged.calibration, alpha), scores, sum(ranks) / 3000, alpha)


@pytest.mark.long
def test_a_thousand_summaries_merge_into_a_small_one() -> None:
    merged, all_scores = ffcp.CP(ffcp.Stored()), []
    for number in range(1000):
        y = normal(200, seed=number).double()
        part = ffcp.CP(merged.model).calibrate(torch.zeros_like(y), y).compress(0.05)
        merged.merge(part)
        all_scores.append(y.abs()[:, None])
    assert len(merged.calibration) == 200_000
    assert merged.calibration.rank_error < 0.07
    merged.compress(0.1)
    assert len(merged.calibration.scores) < 40
    error = merged.calibration.rank_error
    for alpha in ALPHAS:
        must_bound(threshold(merged.calibration, alpha), torch.cat(all_scores), error, alpha)


def test_what_is_here_already_cannot_be_merged_again(tmp_path: Path) -> None:
    one = ffcp.CP(small_mlp()).calibrate(X, Y).compress(0.01)
    one.save(tmp_path / "one")
    with pytest.raises(ValueError, match="already"):
        one.merge(ffcp.load(tmp_path / "one", one.model))


def test_groups_merge_whether_compressed_or_not() -> None:
    one = ffcp.CP(small_mlp()).calibrate(X[:1500], Y[:1500], groups=GROUPS[:1500])
    other = ffcp.CP(one.model).calibrate(X[1500:], Y[1500:], groups=["b", "c"] * 750)
    whole = copy.deepcopy(one).merge(other)
    merged = one.merge(other.compress(0.02))
    assert merged.calibration.groups == whole.calibration.groups
    assert merged.calibration.rank_error <= 0.02
    for label, scores in scores_by_group(whole).items():
        for alpha in ALPHAS:
            (rounded,) = threshold(merged.calibration, alpha, {"group": [label]})
            must_bound(rounded, scores, 0.02, alpha)


# -- on the way ------------------------------------------------------------------------------------


def test_a_calibration_may_compress_on_the_way() -> None:
    rows = 400_000  # more than are kept until they are summarised
    y = normal(rows, seed=3)
    batches = [(torch.zeros_like(part), part) for part in y.split(50_000)]
    whole = ffcp.CP(ffcp.Stored()).calibrate(iter(batches))
    few = ffcp.CP(whole.model).calibrate(iter(batches), rank_error=0.1)
    assert len(few.calibration.scores) < 40
    assert len(few.calibration) == rows
    assert few.calibration.rank_error <= 0.1
    for alpha in ALPHAS:
        must_bound(threshold(few.calibration, alpha), whole.calibration.scores, 0.1, alpha)


def test_a_compressed_calibration_takes_more_points() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X[:2000], Y[:2000]).compress(0.02)
    scores = ffcp.CP(predictor.model).calibrate(X, Y).calibration.scores
    predictor.calibrate(X[2000:2500], Y[2000:2500], update=True)
    predictor.calibrate(X[2500:], Y[2500:], update=True, rank_error=0.03)
    assert len(predictor.calibration) == 3000
    for alpha in ALPHAS:
        error = predictor.calibration.rank_error
        must_bound(threshold(predictor.calibration, alpha), scores, error, alpha)


def far_from_zero(seen: ffcp.BatchOutput) -> Tensor:
    return 0.1 + seen.x[:, 0].abs()


@pytest.mark.long
def test_what_is_chosen_on_the_way_is_that_of_a_whole_calibration() -> None:
    y = X[:, 0].abs() * Y
    scales = [ffcp.scales.Constant(), far_from_zero]
    for make in (
        lambda m: ffcp.IntervalPredictor(m, scale=scales),
        lambda m: ffcp.Learned(m, seed=0),
    ):
        whole, few = make(small_mlp()), make(small_mlp())
        whole.calibrate(X, y)
        few.calibrate(X, y, rank_error=0.02)
        mine, theirs = config(whole), config(few)
        assert mine == theirs
        for alpha in ALPHAS:
            must_bound(threshold(few.calibration, alpha), whole.calibration.scores, 0.02, alpha)


def test_calibrating_again_keeps_all_scores() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y).compress(0.1).calibrate(X, Y)
    assert len(predictor.calibration.scores) == 3000


# -- elsewhere -------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", ["file", "state", "pickle", "copy"])
def test_summaries_come_back_as_they_were(kind: str, tmp_path: Path) -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [
        (ffcp.CP(small_mlp(outputs=2)).calibrate(X, TWO), {}),
        (ffcp.CP(small_mlp()).calibrate(X, Y, groups=GROUPS), {"groups": GROUPS}),
    ]
    if kind == "file":  # what was chosen comes from there, too
        cases.append((ffcp.Auto(small_mlp(), seed=0).calibrate(X[:1000], Y[:1000]), {}))
    for predictor, more in cases:
        predictor.compress(0.01)
        if kind == "file":
            predictor.save(tmp_path / "few")
            back = ffcp.load(tmp_path / "few", predictor.model)
        elif kind == "state":
            back = copy.deepcopy(predictor).calibrate(
                X[:500], TWO[:500] if predictor.calibration.scores.shape[1] == 2 else Y[:500],
                **{name: values[:500] for name, values in more.items()},
            )  # fmt: skip
            back.load_state_dict(predictor.state_dict())
        else:
            back = (
                pickle.loads(pickle.dumps(predictor))
                if kind == "pickle"
                else copy.deepcopy(predictor)
            )
        old, new = (p.predict_interval(X, (0.05, 0.3), **more) for p in (predictor, back))
        assert torch.equal(old.lower, new.lower)
        assert torch.equal(old.upper, new.upper)
        assert back.calibration.rank_error == predictor.calibration.rank_error > 0


def test_one_row_has_the_band_it_has_among_others() -> None:
    predictor = ffcp.FFCP(small_mlp(), "0").calibrate(X, Y).compress(0.01)
    whole = predictor.predict_interval(X[:20], 0.1)
    for number in range(20):
        one = predictor.predict_interval(X[number : number + 1], 0.1)
        torch.testing.assert_close(one.lower[0], whole.lower[number])
        torch.testing.assert_close(one.upper[0], whole.upper[number])


def test_label_sets_grow_by_no_more_than_the_rank_error() -> None:
    labels = torch.arange(3000) % 3
    predictor = ffcp.RAPS(small_mlp(outputs=3), seed=1, kreg=1, lam=0.1, temperature=1.0)
    predictor.calibrate(X, labels)
    scores, before = predictor.calibration.scores, predictor.predict_set(X, 0.1, first_row=0).mask
    predictor.compress(0.02)
    for alpha in ALPHAS:
        must_bound(threshold(predictor.calibration, alpha), scores, 0.02, alpha)
    after = predictor.predict_set(X, 0.1, first_row=0).mask
    assert (after | ~before).all()


def test_bands_of_a_given_confidence_are_no_narrower() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y)
    before = predictor.predict_interval(X[:9], 0.1, pac=0.95)
    after = predictor.compress(0.02).predict_interval(X[:9], 0.1, pac=0.95)
    assert (after.lower < before.lower).all()
    assert (after.upper > before.upper).all()


# -- what cannot be had ----------------------------------------------------------------------------


class OneMore(ffcp.calibrations.Marginal):
    def quantile(self, alpha: Any, metadata: Any = None, random: Any = None) -> Tensor:
        return self.scores[-1]


REFUSED: dict[str, tuple[Callable[[], Any], Tensor]] = {
    "Local": (lambda: ffcp.LCP(small_mlp(), "nearest"), Y),
    "OneMore": (lambda: ffcp.CP(small_mlp(), calibration=OneMore()), Y),
    "ByLabel": (
        lambda: ffcp.LAC(small_mlp(outputs=3), calibration=ffcp.calibrations.ByLabel()),
        torch.arange(3000) % 3,
    ),
    "LabelShift": (
        lambda: ffcp.LAC(
            small_mlp(outputs=3), calibration=ffcp.calibrations.LabelShift([1.0, 2.0, 1.0])
        ),
        torch.arange(3000) % 3,
    ),
    "Losses": (lambda: ffcp.RiskControl(small_mlp(outputs=3)), torch.rand(3000, 3) < 0.5),
}


@pytest.mark.parametrize("name", REFUSED)
def test_thresholds_of_more_than_the_order_of_scores_cannot_be_compressed(name: str) -> None:
    make, y = REFUSED[name]
    predictor = make().calibrate(X[:300], y[:300])
    with pytest.raises(ValueError, match=name):
        predictor.compress()
    assert len(predictor.calibration.scores) == len(predictor.calibration)
    with pytest.raises(ValueError, match=name):
        make().calibrate(X[:300], y[:300], rank_error=0.1)


def test_what_needs_every_score_says_so() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y).compress(0.01)
    for refused in (
        lambda: predictor.predict_distribution(X),
        lambda: Online(predictor),
        lambda: Monitor(predictor),
        lambda: predictor.compress(0.001),
        lambda: predictor.compress(0),
        lambda: ffcp.CP(small_mlp()).calibrate(X, Y).compress(1.5),
    ):
        with pytest.raises(ValueError, match=r"compress|summary|rank_error"):
            refused()
    with pytest.raises(RuntimeError, match="calibrate"):
        ffcp.CP(small_mlp()).compress()


def test_a_band_is_infinite_where_points_are_too_few_and_says_why() -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X[:15], Y[:15]).compress(0.1)
    with pytest.warns(ffcp.FFCPWarning, match=r"\b15\b"):
        assert predictor.predict_interval(X, 0.05).upper.isinf().all()


# -- the law ---------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("is_merged", [False, True])
def test_coverage_is_that_of_the_rank_or_more_and_no_more_than_the_error_allows(
    is_merged: bool,
) -> None:
    n, t, alpha, error = 200, 20, Fraction(1, 10), 0.03
    model, wide = ffcp.Stored(), 0

    def sample(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(rows), torch.randn(rows, generator=generator)

    def covered(x: Tensor, y: Tensor, new: Tensor, truth: Tensor) -> Tensor:
        nonlocal wide
        parts = [slice(0, 90), slice(90, n)] if is_merged else [slice(n)]
        some = [ffcp.CP(model).calibrate(x[rows], y[rows]).compress(error) for rows in parts]
        predictor = some[0].merge(some[1]) if is_merged else some[0]
        wide = max(wide, round(predictor.calibration.rank_error * n))
        return predictor.predict_interval(new, alpha).contains(truth)

    hits = law.draw_hits(sample, covered, n=n, t=t, repeats=800)
    k = conformal_rank(n, alpha)
    assert law.upper_p_value(hits, t, n, k) > law.ERROR_RATE
    assert wide <= 6
    # Rounded up by 6 ranks at most: it does not cover more often than that rank would.
    assert law.upper_p_value(t - np.asarray(hits), t, n, n + 1 - (k + wide)) > law.ERROR_RATE


def test_a_summary_whose_groups_have_one_row_each_is_loaded_again(tmp_path: Path) -> None:
    predictor = ffcp.CP(small_mlp()).calibrate(X[:2], Y[:2], groups=["a", "b"]).compress(0.01)
    predictor.save(tmp_path / "few")
    loaded = ffcp.CP(predictor.model).load(tmp_path / "few")
    assert torch.equal(loaded.calibration.scores, predictor.calibration.scores)
