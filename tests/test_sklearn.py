"""The estimators for scikit-learn: its own checks, its tools, and what they refuse."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("sklearn")
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris, make_classification, make_regression
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression, LogisticRegression, RidgeClassifier
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import ffcp
from ffcp.regression.learned import network
from ffcp.regression.learned.learned_score import LearnedScore
from ffcp.sklearn import ConformalClassifier, ConformalRegressor

X, Y = make_regression(600, 5, noise=10, random_state=0)
XC, YC = make_classification(600, 6, n_informative=4, n_classes=3, random_state=0, class_sep=0.7)
NAMES = np.array(["ant", "bee", "cat"])[YC]


@pytest.mark.heavy
@pytest.mark.parametrize(
    "estimator",
    [
        ConformalRegressor(RandomForestRegressor(5, random_state=0), random_state=0),
        ConformalClassifier(RandomForestClassifier(5, random_state=0), random_state=0),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_all_checks_of_scikit_learn_pass(estimator: Any) -> None:
    results = check_estimator(estimator, on_fail=None)
    failed = [r["check_name"] for r in results if r["status"] not in ("passed", "skipped")]
    assert len(results) > 40
    assert failed == []


def test_bands_cover_rows_that_were_not_seen() -> None:
    bands = ConformalRegressor(LinearRegression(), random_state=0).fit(X[:400], Y[:400])
    ends = bands.predict_interval(X[400:])
    share = ((ends[:, 0] <= Y[400:]) & (Y[400:] <= ends[:, 1])).mean()
    assert share > 0.74  # 200 rows, 80 calibrate: below once in a thousand
    wider = bands.predict_interval(X[400:], alpha=0.05)
    assert (wider[:, 0] <= ends[:, 0]).all()


def test_sets_cover_and_keep_the_names() -> None:
    sets = ConformalClassifier(LogisticRegression(), random_state=0).fit(XC[:400], NAMES[:400])
    mask = sets.set_output(transform="pandas").predict_set(XC[400:])
    assert list(mask.columns) == ["ant", "bee", "cat", "another label"]
    hits = [mask[name].iloc[row] for row, name in enumerate(NAMES[400:])]
    assert np.mean(hits) > 0.74  # as above, 100 calibrate
    assert set(sets.predict(XC[:9])) <= set(NAMES)


def test_pipelines_clones_and_searches_work() -> None:
    bands = ConformalRegressor(LinearRegression(), alpha=0.2, random_state=0)
    piped = make_pipeline(StandardScaler(), bands)
    assert cross_val_score(piped, X, Y, cv=3).mean() > 0.9
    search = GridSearchCV(piped, {"conformalregressor__method": ["cp", "lcp"]}, cv=2).fit(X, Y)
    assert search.best_estimator_[-1].predict_interval(X[:3]).shape == (3, 2)
    assert clone(piped)[-1].get_params()["alpha"] == 0.2


def test_frames_come_back_with_their_index_and_feature_names_are_checked() -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(X, columns=list("abcde"), index=range(100, 700))
    bands = ConformalRegressor(LinearRegression(), random_state=0).fit(frame, Y)
    found = bands.set_output(transform="pandas").predict_interval(frame[:4])
    assert list(found.columns) == ["lower", "upper"]
    assert list(found.index) == [100, 101, 102, 103]
    with pytest.raises(ValueError, match="feature"):
        bands.predict_interval(frame[list("edcba")])


def test_sample_weights_are_refused_clearly() -> None:
    with pytest.raises(TypeError, match="sample_weight"):
        ConformalRegressor().fit(X, Y, sample_weight=np.ones(len(Y)))


def test_ffcp_says_why_a_forest_cannot_have_it() -> None:
    with pytest.raises(ValueError, match="RandomForestRegressor"):
        ConformalRegressor(RandomForestRegressor(3), method="ffcp").fit(X, Y)


@pytest.mark.heavy
@pytest.mark.parametrize("method", ["learned", "auto"])
def test_where_a_forest_errs_is_learned_from_its_input(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_EPOCHS", 40)
    draw = np.random.default_rng(0)
    x = draw.uniform(size=(2400, 2))
    y = 5 * x[:, 0] + np.where(x[:, 1] > 0.5, 2.0, 0.1) * draw.standard_normal(2400)
    forest = RandomForestRegressor(10, min_samples_leaf=20, random_state=0)
    bands = ConformalRegressor(forest, method=method, calibration_size=0.5, random_state=0)
    bands.fit(x[:2000], y[:2000])
    assert isinstance(bands.predictor_.calibrated().score, LearnedScore)
    ends, new = bands.predict_interval(x[2000:]), y[2000:]
    assert ((ends[:, 0] <= new) & (new <= ends[:, 1])).mean() > 0.84
    width, loud = ends[:, 1] - ends[:, 0], x[2000:, 1] > 0.5
    assert width[loud].mean() > 2 * width[~loud].mean()


@pytest.mark.long
def test_auto_offers_a_forest_what_needs_no_gradients() -> None:
    bands = ConformalRegressor(LinearRegression(), calibration_size=0.5, random_state=0).fit(X, Y)
    names = set(bands.predictor_.choice.trials)
    assert {"CP", "learned from calibration rows, by networks"} <= names
    assert not any(name.startswith("FFCP") for name in names)


def test_rows_that_trained_a_forest_teach_nothing() -> None:
    forest = RandomForestRegressor(3, random_state=0)
    bands = ConformalRegressor(forest, method="learned", random_state=0).fit(X[:400], Y[:400])
    assert bands.predictor_.learned_from == "calibration rows"


def test_a_classifier_without_probabilities_is_refused() -> None:
    with pytest.raises(TypeError, match="predict_proba"):
        ConformalClassifier(RidgeClassifier()).fit(XC, YC)


def test_what_is_fitted_already_keeps_its_weights_and_all_rows_calibrate() -> None:
    fitted = LinearRegression().fit(X[:200], Y[:200])
    before = fitted.coef_.copy()
    bands = ConformalRegressor(FrozenEstimator(fitted), method="cp").fit(X[200:], Y[200:])
    assert len(bands.predictor_.calibration) == 400
    assert (fitted.coef_ == before).all()
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    own = ConformalRegressor(model, method="cp").fit(X, Y)
    assert len(own.predictor_.calibration) == 600
    assert own.predict(X[:3]) == pytest.approx(
        model(torch.from_numpy(X[:3]).float())[:, 0].tolist(), rel=1e-5
    )


@pytest.mark.heavy
def test_a_function_that_makes_a_network_is_trained() -> None:
    def make(inputs: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, 1))

    y = (Y - Y.mean()) / Y.std()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that CP was taken
        bands = ConformalRegressor(make, method="ffcp", random_state=0).fit(X, y)
    assert bands.score(X, y) > 0.8
    assert bands.predict_interval(X[:4]).shape == (4, 2)


def test_a_skorch_network_is_taken_as_a_network() -> None:
    skorch = pytest.importorskip("skorch")
    net = skorch.NeuralNetRegressor(
        nn.Linear,
        module__in_features=5,
        module__out_features=1,
        max_epochs=2,
        verbose=0,
        train_split=None,
    )
    bands = ConformalRegressor(net, method="cp", random_state=0).fit(X, Y)
    assert isinstance(bands.source_.model, nn.Module)
    assert bands.predict_interval(X[:4]).shape == (4, 2)


@pytest.mark.parametrize("absent", ["setosa", "versicolor", "virginica"])
def test_a_fitted_classifier_keeps_classes_that_no_calibration_row_has(absent: str) -> None:
    x, codes = load_iris(return_X_y=True)
    y = np.array(["setosa", "versicolor", "virginica"])[codes]
    inner = LogisticRegression(max_iter=1000).fit(x[::2], y[::2])
    some = y[1::2] != absent
    sets = ConformalClassifier(FrozenEstimator(inner), method="lac").fit(
        x[1::2][some], y[1::2][some]
    )
    assert sets.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    assert sets.predict(x).tolist() == inner.predict(x).tolist()


# -- labels that no training row had -----------------------------------------------------------


def with_names_of_their_own(share: float, rows: int = 800) -> Any:
    """Rows of three classes, but for a share of them whose label no other row has."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((rows, 2))
    y = np.array([f"h{one}" for one in (x[:, 0] > 0).astype(int) + (x[:, 1] > 0)], dtype=object)
    alone = draw.random(rows) < share
    y[alone] = [f"t{number}" for number in range(alone.sum())]
    return x, y.astype(str)


def test_labels_come_from_training_rows_alone() -> None:
    x, y = with_names_of_their_own(0.05)
    sets = ConformalClassifier(LogisticRegression(), random_state=0, method="lac").fit(x, y)
    train, held = sets._parts(len(x))
    assert set(sets.classes_) == set(y[train])
    unknown = ~np.isin(y[held], y[train])
    assert int(sets.predictor_.calibration.scores.isinf().sum()) == unknown.sum() > 3
    mask = sets.predict_set(x)
    assert mask.shape == (len(x), len(sets.classes_) + 1)
    assert not mask[:, -1].any()


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_where_too_many_labels_are_new_sets_hold_all_and_another() -> None:
    x, y = with_names_of_their_own(0.3)
    sets = ConformalClassifier(LogisticRegression(), random_state=0, method="lac").fit(x, y)
    frame = sets.set_output(transform="pandas").predict_set(x[:5])
    assert frame.columns[-1] == "another label"
    assert frame.all(axis=None)


def test_a_fitted_classifier_scores_labels_that_it_does_not_know_with_infinity() -> None:
    x, y = with_names_of_their_own(0.0)
    some = y[:400] != "h2"
    inner = LogisticRegression().fit(x[:400][some], y[:400][some])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that every set holds all labels
        sets = ConformalClassifier(FrozenEstimator(inner), method="lac").fit(x[400:], y[400:])
        assert sets.predict_set(x[:9]).all()
    assert sets.classes_.tolist() == ["h0", "h1"]
    assert int(sets.predictor_.calibration.scores.isinf().sum()) == (y[400:] == "h2").sum()
    with pytest.raises(ValueError, match="classes_"):
        ConformalClassifier(FrozenEstimator(inner), method="lac").fit(x[400:], np.arange(400) % 2)


def test_outputs_of_a_network_keep_their_places_where_a_class_is_absent() -> None:
    # Three outputs, and calibration rows of the classes 0 and 2 alone.
    model = nn.Linear(2, 3)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-9.0, 0.0], [0.0, 0.0], [9.0, 0.0]]))
        model.bias.copy_(torch.tensor([0.0, -99.0, 0.0]))
    x, _ = with_names_of_their_own(0.0, 200)
    y = np.where(x[:, 0] > 0, 2, 0)
    sets = ConformalClassifier(model, method="lac").fit(x, y)
    assert sets.classes_.tolist() == [0, 1, 2]
    assert sets.predict(x).tolist() == y.tolist()
    with pytest.raises(ValueError, match="classes_"):
        ConformalClassifier(model, method="lac").fit(x, np.array(["a", "b"])[y // 2])
    model.classes_ = np.array(["a", "b", "c"])
    named = ConformalClassifier(model, method="lac").fit(x, np.array(["a", "b", "c"])[y])
    assert named.predict(x[:9]).tolist() == np.array(["a", "b", "c"])[y[:9]].tolist()


def test_a_network_for_more_classes_than_training_rows_show_gives_those_that_they_show() -> None:
    x, y = with_names_of_their_own(0.05, 400)
    outputs = len(np.unique(y))
    make = lambda inputs: nn.Linear(inputs, outputs)  # noqa: E731
    sets = ConformalClassifier(make, method="lac", random_state=0).fit(x, y)
    assert len(sets.classes_) < outputs
    assert sets.predict_set(x[:3]).shape == (3, len(sets.classes_) + 1)
    assert sets.predict_proba(x[:3]).shape == (3, len(sets.classes_))
    with pytest.raises(ValueError, match="outputs"):
        ConformalClassifier(lambda inputs: nn.Linear(inputs, 2), method="lac", random_state=0).fit(
            x, y
        )


# -- the label score is chosen -----------------------------------------------------------------


@pytest.mark.long
def test_sure_forests_have_sets_of_one_label() -> None:
    # RAPS alone has sets of 1.67 labels here, of which all rows are covered.
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order], y[order]
    forest = RandomForestClassifier(50, random_state=0)
    sets = ConformalClassifier(forest, random_state=0).fit(x[:1200], y[:1200])
    mask = sets.predict_set(x[1200:])
    assert mask.sum(axis=1).mean() < 1.05
    assert mask[np.arange(597), y[1200:]].mean() > 0.9
    assert sets.choice_.rows == 60
    assert "LAC, temperature 1" in sets.choice_.trials


def test_too_few_rows_to_choose_are_said() -> None:
    sets = ConformalClassifier(LogisticRegression(), random_state=0)
    with pytest.warns(ffcp.FFCPWarning, match="LAC"):
        sets.fit(XC[:200], YC[:200])
    assert sets.choice_.rows == 0
    assert len(sets.predictor_.calibration) == 50
