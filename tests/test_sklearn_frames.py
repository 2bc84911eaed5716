"""Frames with words, categories, dates and missing values reach the user's pipeline as they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pandas")
pytest.importorskip("sklearn")
import pandas as pd
from scipy import sparse, stats
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    OneHotEncoder,
    OrdinalEncoder,
    StandardScaler,
    TargetEncoder,
)
from torch import nn

from ffcp import Interval
from ffcp.sklearn import ConformalClassifier, ConformalRegressor
from ffcp.sklearn.rows import NumericColumns

WORDS = make_column_selector(dtype_include=["object", "string", "category"])
NUMBERS = make_column_selector(dtype_include="number")
ALPHA = 0.1


def real(name: str, rows: int = 1200, **options: Any) -> Any:
    """Return some rows of a real table, or skip where it is not in the data folder."""
    folder = Path(os.environ.get("FFCP_DATA", "data"))
    places = [
        base / f"{name}.csv.gz"
        for base in (folder, folder / "tabular_more", folder.parent / "tabular_more")
    ]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        pytest.skip(f"{name}.csv.gz is not in the folder that FFCP_DATA names")
    return pd.read_csv(found, **options).sample(rows, random_state=0).reset_index(drop=True)


def california() -> tuple[Any, Any]:
    table = real("california_housing")
    return table.drop(columns="median_house_value"), table["median_house_value"] / 1e5


def king_county() -> tuple[Any, Any]:
    table = real("king_county_houses", parse_dates=["date"]).drop(columns="id")
    return table.drop(columns="price"), table["price"] / 1e5


def traffic() -> tuple[Any, Any]:
    table = real("metro_traffic", keep_default_na=False, parse_dates=["date_time"])
    return table.drop(columns="traffic_volume"), table["traffic_volume"] / 1e3


def adult() -> tuple[Any, Any]:
    table = real("adult")
    return table.drop(columns="income"), table["income"]


def prepared(encoder: Any, *, scale: bool = False) -> Any:
    """Return a transformer of words by an encoder, and of numbers by filling what is missing."""
    numbers = make_pipeline(SimpleImputer(), *([StandardScaler()] if scale else []))
    words = make_pipeline(SimpleImputer(strategy="most_frequent"), encoder)
    return make_column_transformer((words, WORDS), (numbers, NUMBERS))


def one_hot() -> Any:
    return prepared(OneHotEncoder(handle_unknown="ignore", sparse_output=False), scale=True)


def dates_as_days(x: Any) -> Any:
    dates = x.select_dtypes("datetime")
    return x.assign(**{name: x[name].dt.day_of_year for name in dates})


def with_categories(x: Any) -> Any:
    return x.astype({name: "category" for name in WORDS(x)})


def frozen(estimator: Any, x: Any, y: Any) -> Any:
    return FrozenEstimator(estimator.fit(x[:400], y[:400]))


REGRESSIONS = {
    "columns, ridge": (california, lambda x, y: make_pipeline(one_hot(), Ridge())),
    "dates, forest": (
        king_county,
        lambda x, y: make_pipeline(
            FunctionTransformer(dates_as_days),
            RandomForestRegressor(20, min_samples_leaf=5, random_state=0),
        ),
    ),
    "categories and missing values, boosting": (
        lambda: (with_categories(california()[0]), california()[1]),
        lambda x, y: HistGradientBoostingRegressor(categorical_features="from_dtype", max_iter=40),
    ),
    "frozen": (
        california,
        lambda x, y: frozen(make_pipeline(one_hot(), LinearRegression()), x, y),
    ),
    "target encoder": (
        traffic,
        lambda x, y: make_pipeline(
            FunctionTransformer(dates_as_days), prepared(TargetEncoder(cv=3)), LinearRegression()
        ),
    ),
}
CLASSIFICATIONS = {
    "columns, logistic": lambda x, y: make_pipeline(one_hot(), LogisticRegression(max_iter=500)),
    "categories and missing values, boosting": lambda x, y: make_pipeline(
        FunctionTransformer(with_categories),
        HistGradientBoostingClassifier(categorical_features="from_dtype", max_iter=40),
    ),
    "frozen forest": lambda x, y: frozen(
        make_pipeline(
            prepared(OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)),
            RandomForestClassifier(20, min_samples_leaf=5, random_state=0),
        ),
        x,
        y,
    ),
}


def fewest_hits(rows: int, calibration: int) -> float:
    """Return the share of covered rows that a sound predictor falls below once in 10,000 times."""
    rank = int(np.ceil((calibration + 1) * (1 - ALPHA)))
    law = stats.betabinom(rows, rank, calibration + 1 - rank)
    return float(law.ppf(1e-4) / rows)


@pytest.mark.heavy
@pytest.mark.parametrize("name", REGRESSIONS)
def test_intervals_of_a_pipeline_on_a_real_frame_cover(name: str) -> None:
    data, make = REGRESSIONS[name]
    x, y = data()
    first = 400 if name == "frozen" else 0  # the rows before trained it
    intervals = ConformalRegressor(make(x, y), calibration_size=0.5, random_state=0)
    intervals.fit(x[first:900], y[first:900])
    new, ends = y[900:].to_numpy(), intervals.predict_interval(x[900:])
    hits = (ends[:, 0] <= new) & (new <= ends[:, 1])
    assert hits.mean() >= fewest_hits(len(new), len(intervals.predictor_.calibration))
    assert len(np.unique(ends[:, 0])) > 100
    alone = np.vstack([intervals.predict_interval(x[row : row + 1]) for row in range(900, 910)])
    assert alone == pytest.approx(ends[:10], rel=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize("name", CLASSIFICATIONS)
def test_sets_of_a_pipeline_on_a_real_frame_cover(name: str) -> None:
    x, y = adult()
    first = 400 if name == "frozen forest" else 0
    sets = ConformalClassifier(CLASSIFICATIONS[name](x, y), calibration_size=0.5, random_state=0)
    sets.fit(x[first:900], y[first:900])
    mask = sets.set_output(transform="pandas").predict_set(x[900:])
    hits = np.array([mask[label].iloc[row] for row, label in enumerate(y[900:])])
    assert hits.mean() >= fewest_hits(len(hits), len(sets.predictor_.calibration))
    assert mask.sum(axis=1).nunique() > 1
    alone = pd.concat([sets.predict_set(x[row : row + 1]) for row in range(900, 910)])
    assert (alone == mask[:10]).all(axis=None)


@pytest.mark.heavy
def test_the_last_step_of_a_pipeline_is_asked_for_intervals() -> None:
    x, y = california()
    intervals = ConformalRegressor(HistGradientBoostingRegressor(max_iter=40), random_state=0)
    pipeline = make_pipeline(one_hot(), intervals).fit(x[:900], y[:900])
    ends = pipeline[-1].predict_interval(pipeline[:-1].transform(x[900:]))
    hits = (ends[:, 0] <= y[900:]) & (y[900:] <= ends[:, 1])
    assert hits.mean() >= fewest_hits(len(hits), len(intervals.predictor_.calibration))


# -- made tables, which are always there -------------------------------------------------------


def mixed(rows: int = 600) -> tuple[Any, Any]:
    """A frame with words, a category, a date and missing values; noise follows the word."""
    draw = np.random.default_rng(0)
    word = draw.choice(["calm", "wild"], rows)
    number = draw.standard_normal(rows)
    y = number + np.where(word == "wild", 2.0, 0.1) * draw.standard_normal(rows)
    number[draw.random(rows) < 0.1] = np.nan
    frame = pd.DataFrame(
        {
            "number": number,
            "word": np.where(draw.random(rows) < 0.05, None, word),
            "kind": pd.Categorical(draw.choice(list("abc"), rows)),
            "day": pd.Timestamp("2024-01-01") + pd.to_timedelta(draw.integers(0, 99, rows), "D"),
        }
    )
    return frame, y


def test_the_estimator_is_given_the_frame_itself() -> None:
    seen = []

    class Watching(LinearRegression):
        def fit(self, X: Any, y: Any) -> Any:
            seen.append(X)
            return super().fit(X[["number"]].fillna(0), y)

        def predict(self, X: Any) -> Any:
            seen.append(X)
            return super().predict(X[["number"]].fillna(0))

    x, y = mixed()
    intervals = ConformalRegressor(Watching(), method="cp", random_state=0).fit(x[:500], y[:500])
    intervals.predict_interval(x[500:])
    assert [list(part.dtypes) for part in seen] == [list(x.dtypes)] * 3
    assert seen[-1] is not None
    assert list(seen[-1].index) == list(range(500, 600))


def test_errors_are_learned_from_words_of_training_rows() -> None:
    x, y = mixed(3000)
    model = make_pipeline(make_column_transformer((SimpleImputer(), ["number"])), Ridge())
    intervals = ConformalRegressor(model, calibration_size=0.6, random_state=0)
    ends = intervals.fit(x[:2500], y[:2500]).predict_interval(x[2500:])
    width = ends[:, 1] - ends[:, 0]
    word = x["word"][2500:].to_numpy()
    assert width[word == "wild"].mean() > 3 * width[word == "calm"].mean()


def test_numbers_of_words_never_come_from_rows_that_calibrate() -> None:
    x, y = mixed()
    model = make_pipeline(make_column_transformer((SimpleImputer(), ["number"])), Ridge())
    fitted = FrozenEstimator(model.fit(x[:200], y[:200]))
    intervals = ConformalRegressor(fitted, random_state=0).fit(x[200:], y[200:])
    # The prediction, number and day, and how many of these are missing.
    assert intervals.source_.inputs(x[:5]).shape == (5, 4)


def test_a_column_of_numbers_may_hold_a_word_later() -> None:
    columns = NumericColumns(pd.DataFrame({"a": [1.0, np.nan], "b": ["x", "y"]}))
    new = pd.DataFrame({"a": ["oops", None], "b": ["z", "x"]})
    assert columns(new).tolist() == [[0, 1, -1], [0, 1, 0]]


def test_texts_and_sparse_rows_are_taken() -> None:
    texts = [f"{'good fine' if row % 2 else 'bad awful'} word{row % 7}" for row in range(200)]
    y = np.arange(200) % 2
    model = make_pipeline(TfidfVectorizer(), LogisticRegression())
    sets = ConformalClassifier(model, method="lac", random_state=0).fit(texts, y)
    assert sets.predict_set(texts[:2])[:, :2].tolist() == [[True, False], [False, True]]
    rows = sparse.random_array((300, 20), density=0.2, rng=np.random.default_rng(0))
    target = rows.sum(axis=1)
    intervals = ConformalRegressor(Ridge(), random_state=0).fit(rows, target)
    assert intervals.predict_interval(rows).shape == (300, 2)


@pytest.mark.parametrize("method", ["auto", "cp", "lcp", "learned"])
def test_nullable_columns_and_cells_of_any_kind_are_taken(method: str) -> None:
    x, y = mixed(300)
    draw = np.random.default_rng(1)
    x = x.assign(
        whole=pd.array(draw.choice(np.array([1, 2, None]), 300), dtype="Int64"),
        flag=pd.array(draw.choice(np.array([True, False, None]), 300), dtype="boolean"),
        nothing=None,
        never=pd.NaT,
        vector=[draw.standard_normal(2) for _ in range(300)],
    ).set_axis([0] * 300)  # and an index with duplicates
    model = make_pipeline(make_column_transformer((SimpleImputer(), ["number"])), Ridge())
    intervals = ConformalRegressor(model, method=method, random_state=0).fit(x, y)
    ends = intervals.set_output(transform="pandas").predict_interval(x)
    assert list(ends.index) == [0] * 300
    assert np.mean((ends["lower"] <= y) & (y <= ends["upper"])) > 0.85


def test_missing_values_of_nullable_columns_are_counted() -> None:
    frame = pd.DataFrame({"a": pd.array([True, None], dtype="boolean"), "b": [2.0, 3.0]})
    assert NumericColumns(frame)(frame).tolist() == [[1, 2, 0], [0, 3, 1]]


def test_tables_without_rows_or_with_two_columns_of_a_name_are_refused_in_words() -> None:
    class LazyFrame:
        columns = ("a",)

        def collect(self) -> Any:
            return pd.DataFrame({"a": [1.0]})

    intervals = ConformalRegressor(Ridge())
    with pytest.raises(TypeError, match=r"'LazyFrame'.*X\.collect\(\)"):
        intervals.fit(LazyFrame(), [1.0])
    twice = pd.DataFrame(np.ones((9, 3)), columns=["a", "b", "b"])
    with pytest.raises(ValueError, match="several columns named 'b': give each its own name"):
        intervals.fit(twice, np.arange(9))


def test_targets_in_another_order_than_the_frame_are_refused() -> None:
    x, y = mixed(60)
    with pytest.raises(ValueError, match=r"y has the rows of x in another order"):
        ConformalRegressor(Ridge()).fit(x[["number"]], pd.Series(y).sample(frac=1, random_state=0))


def test_a_size_in_words_and_a_transformer_are_told_what_is_expected() -> None:
    x, y = np.ones((9, 2)), np.arange(9)
    with pytest.raises(ValueError, match=r"share of rows that calibrate.*got '0.2'"):
        ConformalRegressor(Ridge(), calibration_size="0.2").fit(x, y)  # type: ignore[arg-type]
    for without in (StandardScaler(), make_pipeline(StandardScaler())):
        with pytest.raises(TypeError, match="has no predict: expected a regressor"):
            ConformalRegressor(without).fit(x, y)


def test_several_levels_come_as_the_core_returns_them() -> None:
    x, y = mixed()
    model = make_pipeline(make_column_transformer((SimpleImputer(), ["number"])), Ridge())
    intervals = ConformalRegressor(model, random_state=0).fit(x, y)
    several = intervals.predict_interval(x[:7], alpha=[0.1, 0.2])
    assert isinstance(several, Interval)
    assert several.lower.shape == (2, 7)
    one = intervals.predict_interval(x[:7], alpha=0.2)
    assert several.upper[1].numpy() == pytest.approx(one[:, 1])


def test_words_for_a_network_are_refused_by_the_name_of_the_column() -> None:
    x, y = mixed()
    with pytest.raises(TypeError, match="'word'"):
        ConformalRegressor(nn.Linear(4, 1), method="cp").fit(x, y)
