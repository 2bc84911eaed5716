"""Weighted calibration: quantiles under weights, learned ratios, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ffcp
from ffcp.conformal.density_ratio import learned
from ffcp.conformal.weighted import weighted_quantile
from tests.conftest import normal, small_mlp
from tests.core import few_epochs

ALPHA = 0.1


def exact_quantile(scores: list[float], weights: list[float], own: float, alpha: Any) -> float:
    """Walk up the scores in fractions: no rounding at all."""
    total = sum(map(Fraction, weights)) + Fraction(own)
    reached = Fraction(0)
    for score, weight in sorted(zip(scores, weights, strict=True)):
        reached += Fraction(weight)
        if total and reached >= (1 - Fraction(str(alpha))) * total:
            return score
    return np.inf


@given(
    st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1e6)), min_size=1, max_size=30),
    st.floats(0, 1e6),
    st.sampled_from([0.05, 0.1, 0.25, 0.5]),
)
def test_rounded_weights_never_shrink_a_threshold(
    points: list[tuple[int, float]], own: float, alpha: float
) -> None:
    scores, weights = [float(s) for s, _ in points], [w for _, w in points]
    found = float(weighted_quantile(torch.tensor(scores), torch.tensor(weights), own, alpha))
    assert found >= exact_quantile(scores, weights, own, alpha)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 64)), min_size=1, max_size=30),
    st.integers(0, 64),
    st.sampled_from([0.05, 0.1, 0.25, 0.5]),
)
def test_weights_that_need_no_rounding_give_the_exact_quantile(
    points: list[tuple[int, int]], own: int, alpha: float
) -> None:
    points = [*points, (0, 64)]  # so that all are multiples of 1/64 of the largest
    scores, weights = [float(s) for s, _ in points], [float(w) for _, w in points]
    found = float(weighted_quantile(torch.tensor(scores), torch.tensor(weights), own, alpha))
    assert found == exact_quantile(scores, weights, float(own), alpha)


@pytest.mark.parametrize("weight", [1.0, 0.3, 1e-200, 7e200])
@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.7])
def test_equal_weights_give_the_conformal_quantile(weight: float, alpha: float) -> None:
    for n in (4, 9, 19, 99):
        scores = normal(n, seed=n).double()
        found = weighted_quantile(
            scores, torch.full((n,), weight, dtype=torch.float64), weight, alpha
        )
        assert float(found) == float(ffcp.conformal_quantile(scores, alpha))


def test_a_point_that_weighs_too_much_has_an_infinite_threshold() -> None:
    scores, ones = torch.arange(99.0), torch.ones(99)
    assert weighted_quantile(scores, ones, [1.0, 10.0, 12.0, 1e300], 0.1).isinf().tolist() == [
        False,
        False,
        True,
        True,
    ]


LOCALIZED = {"LCP", "LCQR", "FFLCP", "FFLCQR"}  # which take no density ratio
METHODS = {
    "IntervalPredictor": lambda c: ffcp.IntervalPredictor(small_mlp(1), calibration=c),
    "CP": lambda c: ffcp.CP(small_mlp(1), calibration=c),
    "FFCP": lambda c: ffcp.FFCP(small_mlp(1), "0", calibration=c),
    "FFCP auto": lambda c: ffcp.FFCP(small_mlp(1), calibration=c),
    "CQR": lambda c: ffcp.CQR(small_mlp(1, 2), calibration=c),
    "FFCQR": lambda c: ffcp.FFCQR(small_mlp(1, 2), "3", calibration=c),
    "FCP": lambda c: ffcp.FCP(small_mlp(1), "3", steps=3, calibration=c),
    "FCQR": lambda c: ffcp.FCQR(small_mlp(1, 2), "3", steps=3, calibration=c),
    "Learned": lambda c: ffcp.Learned(small_mlp(1), calibration=c, seed=0),
    "Auto": lambda c: ffcp.Auto(small_mlp(1), calibration=c, seed=0),
}


def test_no_method_is_left_out() -> None:
    public = {name: getattr(ffcp, name) for name in ffcp.__all__}
    intervals = {name for name, one in public.items() if hasattr(one, "predict_distribution")}
    sets = {n for n, one in public.items() if hasattr(one, "score_all")}
    assert {"CP", "FCP", "Auto"} < intervals <= set(METHODS) | LOCALIZED
    assert {"LAC", "FFRAPS"} < sets <= set(SETS)


@pytest.fixture
def _short_lessons(monkeypatch: pytest.MonkeyPatch) -> None:
    few_epochs(monkeypatch)


def tilted(x: Tensor) -> Tensor:
    return x[:, 0].exp()


@pytest.mark.long
@pytest.mark.usefixtures("_short_lessons")
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_numbers_per_row_and_a_function_of_the_input_are_the_same(
    method: str, grouped: bool
) -> None:
    x, y, asked = normal(200, 1, seed=1), normal(200, seed=2), normal(50, 1, seed=3)
    old, new = ({"groups": (x[:, 0] > 0).tolist()}, {"groups": (asked[:, 0] > 0).tolist()})
    old, new = (old, new) if grouped else ({}, {})
    make = METHODS[method]
    by_function = make(ffcp.calibrations.Weighted(tilted)).calibrate(x, y, **old)
    by_number = make(ffcp.calibrations.Weighted("given")).calibrate(
        x, y, weights=tilted(x).numpy(), **old
    )
    one = by_function.predict_interval(asked, ALPHA, **new)
    other = by_number.predict_interval(asked, ALPHA, weights=tilted(asked).tolist(), **new)
    assert all(map(torch.equal, one, other))
    assert len(set(by_function.calibration.scores.shape)) == 2


SETS = {
    "SetPredictor": lambda c: ffcp.SetPredictor(nn.Linear(2, 3), ffcp.scores.LAC(), calibration=c),
    "LAC": lambda c: ffcp.LAC(nn.Linear(2, 3), calibration=c),
    "APS": lambda c: ffcp.APS(nn.Linear(2, 3), calibration=c, seed=1),
    "RAPS": lambda c: ffcp.RAPS(nn.Linear(2, 3), calibration=c, seed=1),
    "FFRAPS": lambda c: ffcp.FFRAPS(nn.Linear(2, 3), calibration=c, seed=1),
}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("method", SETS)
@pytest.mark.parametrize("kind", ["weighted", "label shift"])
def test_equal_weights_change_no_label_set(method: str, kind: str, grouped: bool) -> None:
    x, y, asked = normal(300, 2, seed=1), torch.randint(0, 3, (300,)), normal(50, 2, seed=3)
    plain_calibration = {
        "weighted": lambda: ffcp.calibrations.Weighted(lambda x: torch.full((len(x),), 0.7)),
        "label shift": lambda: ffcp.calibrations.LabelShift([0.7] * 3),
    }
    old, new = ({"groups": (x[:, 0] > 0).tolist()}, {"groups": (asked[:, 0] > 0).tolist()})
    old, new = (old, new) if grouped else ({}, {})
    torch.manual_seed(0)
    plain = SETS[method](None).calibrate(x, y, **old)
    torch.manual_seed(0)
    same = SETS[method](plain_calibration[kind]()).calibrate(x, y, **old)
    expected = plain.predict_set(asked, ALPHA, first_row=0, **new)
    found = same.predict_set(asked, ALPHA, first_row=0, **new)
    assert torch.equal(found.mask, expected.mask)
    assert not bool(expected.mask.all())


def test_missing_targets_leave_their_weight_out() -> None:
    x, y = normal(60, 1, seed=1), normal(60, 2, seed=2)
    y[::3, 1] = torch.nan
    predictor = ffcp.CP(
        small_mlp(1, 2), calibration=ffcp.calibrations.Weighted(tilted), missing=True
    )
    both = predictor.calibrate(x, y).predict_interval(x[:9], 0.2)
    known = ~y[:, 1].isnan()
    alone = ffcp.CP(small_mlp(1, 2), calibration=ffcp.calibrations.Weighted(tilted))
    alone.calibrate(x[known], y[known])
    assert torch.equal(both.upper[:, 1], alone.predict_interval(x[:9], 0.2).upper[:, 1])


def test_calibrations_merge_update_and_come_back_from_a_file(tmp_path: Any) -> None:
    x, y, new = normal(300, 1, seed=1), normal(300, seed=2), 1 + normal(200, 1, seed=3)
    model = small_mlp(1)
    predictor = ffcp.FFCP(model, "0", calibration=ffcp.calibrations.Weighted("learn", on="3"))
    predictor.calibrate(x[:200], y[:200], new=new)
    predictor.calibrate(x[200:], y[200:], update=True)
    predictor.save(tmp_path / "weighted.safetensors")
    loaded = ffcp.load(tmp_path / "weighted.safetensors", model)
    asked = normal(20, 1, seed=4)
    assert torch.equal(
        loaded.predict_interval(asked).upper, predictor.predict_interval(asked).upper
    )
    assert loaded.shift_choice == predictor.shift_choice
    assert loaded.shift_choice.new_rows == 200
    given = ffcp.CP(model, calibration=ffcp.calibrations.Weighted("given"))
    other = ffcp.CP(model, calibration=ffcp.calibrations.Weighted("given"))
    whole = ffcp.CP(model, calibration=ffcp.calibrations.Weighted("given"))
    weights = tilted(x)
    given.calibrate(x[:100], y[:100], weights=weights[:100])
    other.calibrate(x[100:], y[100:], weights=weights[100:])
    whole.calibrate(x, y, weights=weights)
    one, same = (
        p.predict_interval(asked, weights=tilted(asked)) for p in (given.merge(other), whole)
    )
    assert torch.equal(one.upper, same.upper)


def test_a_batch_size_changes_nothing() -> None:
    x, y, new = normal(300, 3, seed=1), normal(300, seed=2), 0.5 + normal(200, 3, seed=3)
    bands = []
    for batch_size in (None, 7):
        predictor = ffcp.CP(
            small_mlp(3), calibration=ffcp.calibrations.Weighted("learn"), batch_size=batch_size
        )
        predictor.calibrate(x, y, new=new)
        bands.append(predictor.predict_interval(x[:40]).upper)
    assert torch.allclose(*bands)  # a model's own sums round by the size of the batch


def test_the_effective_sample_size_is_reported() -> None:
    predictor = ffcp.CP(small_mlp(1), calibration=ffcp.calibrations.Weighted("given"))
    predictor.calibrate(torch.zeros(4, 1), torch.zeros(4), weights=[2.0, 2.0, 0.0, 0.0])
    assert predictor.calibration.effective_size == 2


def test_a_warning_says_that_nothing_resembles_the_new_inputs() -> None:
    x, y = normal(200, 1, seed=1), normal(200, seed=2)
    predictor = ffcp.CP(small_mlp(1), calibration=ffcp.calibrations.Weighted(tilted)).calibrate(
        x, y
    )
    far = torch.tensor([[0.0], [12.0]])
    with pytest.warns(ffcp.FFCPWarning, match="1 of 2"):
        band = predictor.predict_interval(far)
    assert band.upper.isinf().tolist() == [False, True]


def test_what_is_missing_or_too_much_is_refused_with_the_remedy() -> None:
    x, y, model = normal(50, 1, seed=1), normal(50, seed=2), small_mlp(1)
    plain, given_ones = (
        ffcp.CP(model),
        ffcp.CP(model, calibration=ffcp.calibrations.Weighted("given")),
    )
    learns = ffcp.CP(model, calibration=ffcp.calibrations.Weighted("learn"))
    with pytest.raises(ValueError, match="Weighted"):
        plain.calibrate(x, y, weights=y.abs())
    with pytest.raises(ValueError, match="new"):
        plain.calibrate(x, y, new=x)
    with pytest.raises(ValueError, match="weights"):
        given_ones.calibrate(x, y)
    with pytest.raises(ValueError, match=r"\b49\b"):
        given_ones.calibrate(x, y, weights=y.abs()[:49])
    with pytest.raises(ValueError, match=r"\b3\b"):
        given_ones.calibrate(x, y, weights=torch.ones(50).index_fill(0, torch.tensor([3]), -1.0))
    with pytest.raises(ValueError, match="new="):
        learns.calibrate(x, y)
    learns.calibrate(x, y, new=x + 1)
    with pytest.raises(ValueError, match="new"):
        learns.calibrate(x, y, new=x, update=True)
    with pytest.raises(ValueError, match="ratio"):
        ffcp.calibrations.Weighted([1.0, 2.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="class_conditional"):
        ffcp.LAC(
            nn.Linear(1, 3), class_conditional=True, calibration=ffcp.calibrations.LabelShift()
        )
    with pytest.raises(ValueError, match=r"\b2\b"):
        ffcp.LAC(nn.Linear(1, 3), calibration=ffcp.calibrations.LabelShift([1, 2])).calibrate(
            x, torch.arange(50) % 3
        )


def test_the_classifier_agrees_with_scikit_learn() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    old, new = normal(300, 3, seed=1), 0.5 + 1.5 * normal(200, 3, seed=2)
    tilt, choice = learned(old, new, clip=1e6)
    x = torch.cat([old, new]).double().numpy()
    standard = (x - x.mean(0)) / x.std(0)
    label = np.repeat([0, 1], [300, 200])
    oracle = linear_model.LogisticRegression(C=1.0, class_weight="balanced", tol=1e-10)
    oracle.fit(standard, label)
    slope = oracle.coef_[0] / x.std(0)
    assert np.allclose(tilt[1:], slope, atol=1e-5)
    assert np.allclose(tilt[0], oracle.intercept_[0] - slope @ x.mean(0), atol=1e-5)
    from sklearn.metrics import roc_auc_score

    logs = oracle.decision_function(standard)
    assert choice.separation == pytest.approx(roc_auc_score(label, logs), abs=1e-6)


@pytest.mark.parametrize("method", [ffcp.CP, ffcp.LAC])
def test_what_learning_the_ratio_saw_can_be_looked_at(method: Any, tmp_path: Any) -> None:
    model = nn.Linear(2, 1 if method is ffcp.CP else 3)
    x, y = normal(500, 2, seed=1), torch.arange(500) % 3
    predictor = method(model, calibration=ffcp.calibrations.Weighted("learn"), seed=0)
    assert predictor.shift_choice is None
    predictor.calibrate(x, y.float() if method is ffcp.CP else y, new=0.5 + normal(90, 2, seed=2))
    choice = predictor.shift_choice
    assert (choice.rows, choice.new_rows) == (100, 90)
    predictor.save(tmp_path / "kept")
    assert ffcp.load(tmp_path / "kept", model).shift_choice == choice


@pytest.mark.parametrize(
    "calibration", [ffcp.calibrations.LabelShift([1.0] * 9), ffcp.calibrations.ByLabel()]
)
def test_intervals_refuse_calibrations_that_look_at_classes(calibration: Any) -> None:
    for one in (calibration, ffcp.calibrations.Mondrian(calibration)):
        with pytest.raises(ValueError, match="labels"):
            ffcp.CP(small_mlp(), calibration=one)


def test_parts_get_a_number_per_row_as_its_weight() -> None:
    seen = []

    def scale(out: ffcp.BatchOutput) -> Tensor:
        seen.append(out.weights.shape)
        return torch.ones(len(out.output))

    model, x, y = small_mlp(), torch.randn(60, 4), torch.randn(60)
    for weights in (torch.ones(60), torch.ones(60, 1)):
        predictor = ffcp.IntervalPredictor(
            model, scale=scale, calibration=ffcp.calibrations.Weighted("given")
        )
        predictor.calibrate(x, y, weights=weights)
    assert set(seen) == {(60,)}
