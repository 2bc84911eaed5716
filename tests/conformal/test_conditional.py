"""Conditional calibration: exact thresholds, what features can be, and what is refused."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

import ffcp
from ffcp.calibrations import Conditional, Marginal, Mondrian
from ffcp.conformal.quantile_regression import Design, QuantileRegression
from tests.conftest import small_mlp

ALPHA = 0.1
CLOSE = 1e-9


def by_linear_programme(
    features: np.ndarray, scores: np.ndarray, new: np.ndarray, level: float, dual: float
) -> float:
    """Solve the dual linear programme just below the tie, where its slope is the threshold."""
    rows = np.column_stack([np.ones(len(scores)), features])
    row = np.append(1.0, new)
    bounds = [(level - 1, level)] * len(scores)
    found = linprog(-scores, A_eq=rows.T, b_eq=-(dual - 1e-5) * row, bounds=bounds, method="highs")
    if found.status == 2:  # infeasible: no score is large enough
        return np.inf
    assert found.status == 0
    return float(-found.eqlin.marginals @ row)


def numbers(random: np.random.Generator, n: int) -> np.ndarray:
    return random.standard_normal((n, 3))


def overlapping(random: np.random.Generator, n: int) -> np.ndarray:
    return (random.random((n, 4)) < [0.5, 0.3, 0.7, 0.1]).astype(float)


def partition(random: np.random.Generator, n: int) -> np.ndarray:
    return np.eye(3)[random.integers(0, 3, n)]  # with the constant, collinear


def collinear(random: np.random.Generator, n: int) -> np.ndarray:
    both = np.column_stack([overlapping(random, n), random.standard_normal(n)])
    return np.column_stack([both, both.sum(axis=1), 1e4 * both[:, 4] + 7, np.zeros(n)])


def whole_numbers(random: np.random.Generator, n: int) -> np.ndarray:
    return random.integers(0, 3, (n, 3)).astype(float)


@pytest.mark.parametrize("draw", [numbers, overlapping, partition, collinear, whole_numbers])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("randomized", [False, True])
def test_thresholds_are_those_of_a_linear_programme(
    draw: Any, ties: bool, randomized: bool
) -> None:
    for seed in range(12):
        random = np.random.default_rng([seed, ties, randomized])
        n, level = int(random.integers(2, 150)), (0.9, 0.8, 0.5, 0.95)[seed % 4]
        features = draw(random, n)
        scores = np.abs(random.standard_normal(n)) * (1 + features[:, 0] ** 2)
        scores = scores.round(1) if ties else scores
        new = np.concatenate([features[:4], draw(random, 4), 1.5 * features[:1]])
        duals = level - random.random(len(new)) if randomized else np.full(len(new), level)
        regression = QuantileRegression(Design(features), scores, level)
        found = regression.thresholds(new, duals)
        for row, dual, threshold in zip(new, duals, found, strict=True):
            expected = by_linear_programme(features, scores, row, level, dual)
            assert threshold == pytest.approx(expected, rel=CLOSE, abs=CLOSE * (1 + scores.max()))


@pytest.mark.parametrize("n", [1, 8, 9, 19, 100])
@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.7])
def test_a_constant_alone_gives_the_conformal_rank(n: int, alpha: float) -> None:
    scores, none = torch.randn(n, 2).double(), torch.empty(n, 0).double()
    found = Conditional(lambda x: x[:, :0]).fit(scores, {"features": none})
    thresholds = found.quantile(alpha, {"features": none[:1]})[0]
    torch.testing.assert_close(
        thresholds, Marginal().fit(scores).quantile(alpha), rtol=CLOSE, atol=0
    )


def test_groups_that_do_not_overlap_have_the_thresholds_of_mondrian() -> None:
    random = np.random.default_rng(0)
    for n in (9, 40, 117, 300):
        group = random.integers(0, 4, n)
        scores = torch.from_numpy(random.standard_normal((n, 1)).round(1))
        features = {"features": torch.eye(4).double()[group]}
        found = Conditional(lambda x: x).fit(scores, features).quantile(ALPHA, features)
        labels = {"group": group.tolist()}
        expected = Mondrian().fit(scores, labels).quantile(ALPHA, labels)
        torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)
        assert bool((found >= expected).all())  # rounded up: ties at the threshold are covered


def test_thresholds_are_those_of_mapie() -> None:
    pytest.importorskip("cvxpy")
    peer = pytest.importorskip("mapie.conditional_conformal_prediction")
    random = np.random.default_rng(0)
    for draw in (numbers, overlapping):
        features, new = draw(random, 300), draw(random, 60)
        scores = random.exponential(size=300) * (1 + features[:, 0] ** 2)
        theirs = peer.ConditionalSplitConformalRegressor(
            lambda x: np.column_stack([np.ones(len(x)), x]), Zero(), 1 - ALPHA
        ).conformalize(features, scores)
        expected = theirs.predict_interval(new)[1][:, 1, 0]
        regression = QuantileRegression(Design(features), scores, 1 - ALPHA)
        found = regression.thresholds(new, np.full(60, 1 - ALPHA))
        assert found == pytest.approx(expected, rel=1e-8, abs=1e-8)


class Zero:
    """A fitted scikit-learn regressor that predicts 0."""

    n_features_in_ = 4
    _estimator_type = "regressor"

    def fit(self, x: Any, y: Any) -> Zero:
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.zeros(len(x))

    def __sklearn_is_fitted__(self) -> bool:
        return True


def test_equal_scores_do_not_stop_the_walk() -> None:
    random = np.random.default_rng(0)
    for value in (0.0, 1.0, 1e9):
        features = overlapping(random, 200)
        regression = QuantileRegression(Design(features), np.full(200, value), 0.9)
        found = regression.thresholds(features[:50], np.full(50, 0.9))
        assert found == pytest.approx(np.full(50, value), rel=CLOSE)


def test_units_of_features_and_scores_do_not_matter() -> None:
    random = np.random.default_rng(0)
    features, scores = numbers(random, 200), random.exponential(size=200)
    plain = QuantileRegression(Design(features), scores, 0.9)
    unlike = QuantileRegression(Design(features * [1e-6, 1, 1e6] + 1), 1e-5 * scores, 0.9)
    new = numbers(random, 40)
    expected = plain.thresholds(new, np.full(40, 0.9))
    found = unlike.thresholds(new * [1e-6, 1, 1e6] + 1, np.full(40, 0.9))
    assert 1e5 * found == pytest.approx(expected, rel=1e-6)


# -- through predictors ---------------------------------------------------------------------


def rows(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 3, generator=generator)
    return x, (0.1 + x[:, 0]) * torch.randn(n, generator=generator)


def halves(x: Any) -> Any:
    return x > 0.5


def test_one_row_at_a_time_has_the_interval_that_it_has_among_others() -> None:
    x, y = rows(400)
    predictor = ffcp.CP(small_mlp(3), calibration=Conditional(halves)).calibrate(x[:300], y[:300])
    whole = predictor.predict_interval(x[300:], ALPHA)
    alone = [predictor.predict_interval(x[i : i + 1], ALPHA).upper for i in range(300, 400)]
    torch.testing.assert_close(torch.cat(alone), whole.upper)


def test_levels_are_solved_once_and_outside_of_what_is_saved() -> None:
    x, y = rows(400)
    predictor = ffcp.CP(small_mlp(3), calibration=Conditional(halves)).calibrate(x[:300], y[:300])
    before = predictor.state()
    first = predictor.predict_interval(x[300:], [0.1, 0.2])
    solved = dict(predictor.calibration._regressions)
    again = predictor.predict_interval(x[300:], [0.1, 0.2])
    assert len(solved) == 2
    assert predictor.calibration._regressions == solved
    assert torch.equal(first.upper, again.upper)
    assert predictor.state().keys() == before.keys()
    assert "_regressions" not in copy.deepcopy(predictor.calibration).__dict__


def test_threads_that_ask_first_at_once_get_the_same() -> None:
    x, y = rows(2000)
    predictor = ffcp.CP(small_mlp(3), calibration=Conditional(halves)).calibrate(x[:900], y[:900])
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(lambda _: predictor.predict_interval(x[900:], ALPHA).upper, range(16))
        )
    assert all(torch.equal(found[0], one) for one in found)


@pytest.mark.parametrize("on", [halves, "0", "prediction", "input"])
@pytest.mark.parametrize("randomized", [False, True])
def test_saved_and_loaded(on: Any, randomized: bool, tmp_path: Path) -> None:
    x, y = rows(700)
    model = small_mlp(3)
    predictor = ffcp.FFCP(model, "0", calibration=Conditional(on, randomized), seed=1)
    predictor.calibrate(x[:500], y[:500])
    predictor.save(tmp_path / "file")
    again = ffcp.FFCP(model, "0", calibration=Conditional(on, randomized), seed=1)
    again.load(tmp_path / "file")
    found, expected = (
        one.predict_interval(x[500:], ALPHA, first_row=0) for one in (again, predictor)
    )
    assert torch.equal(found.upper, expected.upper)
    if isinstance(on, str):  # nothing of the user's is missing
        loaded = ffcp.load(tmp_path / "file", model)
        assert torch.equal(
            loaded.predict_interval(x[500:], ALPHA, first_row=0).upper, expected.upper
        )


@pytest.mark.parametrize("on", ["0", "input"])  # of more numbers than directions, and of as many
def test_directions_of_a_layer_are_saved_with_groups(on: str, tmp_path: Path) -> None:
    x, y = rows(1100)
    model, groups = small_mlp(3), ["a", "b"] * 550
    predictor = ffcp.CP(model, calibration=Conditional(on), seed=1)
    predictor.calibrate(x[:1000], y[:1000], groups=groups[:1000])
    expected = predictor.predict_interval(x[1000:], ALPHA, groups=groups[1000:]).upper
    predictor.save(tmp_path / "file")
    loaded = ffcp.load(tmp_path / "file", model)
    found = loaded.predict_interval(x[1000:], ALPHA, groups=groups[1000:]).upper
    assert torch.equal(found, expected)
    predictor.settled().save(tmp_path / "settled")
    worker = ffcp.CP(model, calibration=Mondrian(Conditional(on))).load(tmp_path / "settled")
    assert worker.calibration.inner.directions.equal(predictor.calibration.inner.directions)


def test_merged_rows_calibrate_as_if_they_had_come_together() -> None:
    x, y = rows(900)
    model = small_mlp(3)
    parts = [ffcp.CP(model, calibration=Conditional(halves)) for _ in range(3)]
    parts[0].calibrate(x[:300], y[:300]).merge(parts[1].calibrate(x[300:600], y[300:600]))
    parts[2].calibrate(x[:600], y[:600])
    merged, whole = (one.predict_interval(x[600:], ALPHA).upper for one in parts[::2])
    torch.testing.assert_close(merged, whole)


def test_directions_that_were_found_apart_do_not_merge() -> None:
    x, y = rows(900)
    model = small_mlp(3)
    one, other = (ffcp.CP(model, calibration=Conditional("1")) for _ in range(2))
    one.calibrate(x[:400], y[:400])
    with pytest.raises(ValueError, match="settled"):
        one.merge(other.calibrate(x[400:], y[400:]))
    one.merge(one.settled().calibrate(x[400:], y[400:]))
    assert len(one.calibration) == 320 + 500


def test_compressing_is_refused() -> None:
    x, y = rows(300)
    predictor = ffcp.CP(small_mlp(3), calibration=Conditional(halves)).calibrate(x, y)
    with pytest.raises(ValueError, match="Conditional cannot be compressed"):
        predictor.compress()


def test_columns_of_a_frame_are_found_by_their_names() -> None:
    x, y = rows(600)
    frame = pd.DataFrame(x.numpy(), columns=["a", "b", "c"])
    model = small_mlp(3)
    named = ffcp.CP(model, calibration=Conditional(["c", "a"])).calibrate(frame[:400], y[:400])
    placed = ffcp.CP(model, calibration=Conditional(lambda x: x[:, [2, 0]]))
    expected = placed.calibrate(x[:400], y[:400]).predict_interval(x[400:], ALPHA)
    found = named.predict_interval(frame[400:][["b", "c", "a"]], ALPHA)
    torch.testing.assert_close(found.upper, expected.upper)
    with pytest.raises(ValueError, match="no columns"):
        ffcp.CP(model, calibration=Conditional(["d"])).calibrate(frame, y)
    with pytest.raises(ValueError, match="needs frames"):
        ffcp.CP(model, calibration=Conditional(["a"])).calibrate(x, y)


def test_directions_of_a_layer_come_from_rows_that_do_not_calibrate() -> None:
    x, y = rows(1200)
    set_aside = ffcp.CP(small_mlp(3), calibration=Conditional("1")).calibrate(x, y)
    assert len(set_aside.calibration) == 960
    fitted = ffcp.CP(small_mlp(3), calibration=Conditional("1")).fit(x[:200], y[:200])
    fitted.calibrate(x[200:], y[200:])
    assert len(fitted.calibration) == 1000
    found = fitted.calibration.directions
    again = ffcp.CP(small_mlp(3), calibration=Conditional("1")).fit(x[:200], y[:200])
    again.calibrate(x[400:], 2 * y[400:])  # other rows calibrate: the directions stay
    assert torch.equal(again.calibration.directions, found)
    assert found.shape[1] == 200 // 50


def test_at_most_sixteen_directions() -> None:
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 1))
    x, y = rows(2000)
    predictor = ffcp.CP(model, calibration=Conditional("1")).calibrate(20 * x, y)
    assert predictor.calibration.directions.shape == (40, 16)


def test_a_group_of_which_no_row_calibrated_has_an_infinite_interval() -> None:
    x, y = rows(300)
    predictor = ffcp.CP(small_mlp(3), calibration=Conditional(lambda x: x > 1)).calibrate(x, y)
    with pytest.warns(ffcp.FFCPWarning, match="1 of 2 intervals are infinite: too few of 300"):
        found = predictor.predict_interval(torch.tensor([[0.5, 0.5, 0.5], [2.0, 0.5, 0.5]]), ALPHA)
    assert found.upper.isinf().tolist() == [False, True]


def test_rows_whose_target_is_missing_do_not_calibrate_that_output() -> None:
    x, y = rows(400)
    both = torch.stack([y, 2 * y], dim=1)
    both[:100, 1] = torch.nan
    model = nn.Linear(3, 2)
    predictor = ffcp.CP(model, calibration=Conditional(halves), missing=True)
    found = predictor.calibrate(x[:300], both[:300]).predict_interval(x[300:], ALPHA)
    known = ffcp.CP(model, calibration=Conditional(halves))
    expected = known.calibrate(x[100:300], both[100:300]).predict_interval(x[300:], ALPHA)
    torch.testing.assert_close(found.upper[:, 1], expected.upper[:, 1])


def test_prediction_sets_take_it_too() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1500, 3, generator=generator)
    y = torch.where(x[:, 0] > 0.5, torch.randint(0, 4, (1500,), generator=generator), 0)
    model = nn.Linear(3, 4)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([3.0, 2.0, 1.0, 0.0]))
    predictor = ffcp.SetPredictor(model, ffcp.scores.LAC(), Conditional(lambda x: x[:, :1] > 0.5))
    found = predictor.calibrate(x[:1000], y[:1000]).predict_set(x[1000:], ALPHA)
    hard = x[1000:, 0] > 0.5
    assert found.sizes[~hard].double().mean() == 1
    assert found.sizes[hard].double().mean() == 4


@pytest.mark.parametrize("on", [3, [], None, [1.5]])
def test_what_are_no_features_is_refused(on: Any) -> None:
    with pytest.raises(TypeError, match="'on' must be a function"):
        Conditional(on)


def test_features_and_scores_that_cannot_be_are_refused() -> None:
    scores, features = torch.ones(4, 1), torch.ones(4, 2).double()
    fitted = Conditional(halves).fit(scores, {"features": features})
    with pytest.raises(ValueError, match="calibrated with 2 features, got 3"):
        fitted.quantile(ALPHA, {"features": torch.ones(1, 3).double()})
    with pytest.raises(ValueError, match="score of row 2 is infinite"):
        Conditional(halves).fit(torch.tensor([[1], [1], [torch.inf]]), {"features": features[:3]})
    with pytest.raises(ValueError, match="finite float64"):
        Conditional(halves).fit(scores, {"features": features.float()})
    x, y = rows(100)
    not_finite = ffcp.CP(small_mlp(3), calibration=Conditional(lambda x: 1 / (x - x)))
    with pytest.raises(ValueError, match="row 0 is not finite"):
        not_finite.calibrate(x, y)
    with pytest.raises(ValueError, match="same values in all rows"):
        ffcp.CP(small_mlp(3), calibration=Conditional("1")).calibrate(torch.ones(100, 3), y)


def test_a_file_with_other_directions_than_the_layer_has_is_refused() -> None:
    found = torch.ones(4, 2).double()
    for on, directions in (
        (halves, found),
        ("1", found.float()),
        ("1", found / 0),
        ("1", found[0]),
    ):
        with pytest.raises(ValueError, match="directions"):
            Conditional(on).with_state({"directions": directions})
