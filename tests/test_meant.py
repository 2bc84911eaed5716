"""Errors that know what people meant: each names the way to what was wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ffcp

X, Y = torch.randn(120, 4), torch.randn(120)


def test_a_wrong_number_of_columns_is_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    with pytest.raises(ValueError, match=r"^x has 3 columns, the model takes 4"):
        ffcp.CP(model).calibrate(X[:, :3], Y)
    predictor = ffcp.CP(model).calibrate(X, Y)
    with pytest.raises(ValueError, match="x has 5 columns, the model takes 4"):
        predictor.predict_interval(torch.randn(9, 5))


@pytest.mark.parametrize("metric", ["coverage", "interval_score", "group_coverage"])
def test_swapped_arguments_of_a_metric_are_told(metric: str) -> None:
    interval = ffcp.CP(nn.Linear(4, 1)).calibrate(X, Y).predict_interval(X)
    for given in (interval, (interval.lower, interval.upper)):
        with pytest.raises(TypeError, match="swapped"):
            getattr(ffcp.metrics, metric)(Y, given)


def test_words_that_are_no_numbers_are_sent_where_they_are_taken() -> None:
    with pytest.raises(TypeError, match=r"ffcp\.tables"):
        ffcp.CP(nn.Linear(2, 1)).calibrate(np.array([[1, "x"]] * 9, dtype=object), Y[:9])
    with pytest.raises(TypeError, match=r"names="):
        ffcp.CP(nn.Linear(4, 1)).calibrate(X, ["a"] * 120)


def test_an_estimator_of_scikit_learn_is_sent_to_its_estimators() -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    with pytest.raises(TypeError, match=r"ConformalRegressor.*Stored"):
        ffcp.CP(linear.LinearRegression())


def test_words_in_a_frame_are_sent_to_tables() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": np.ones(9), "kind": ["x"] * 9})
    with pytest.raises(TypeError, match=r"'kind'.*ffcp\.tables"):
        ffcp.CP(nn.Linear(2, 1)).calibrate(frame, torch.zeros(9))


def test_three_quantiles_are_told_how_to_be_used() -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"Quantiles\(lower=0, upper=2, median=1\)"):
        ffcp.CQR(model).calibrate(X, Y)
    base = ffcp.scores.Quantiles(lower=0, upper=2, median=1)
    interval = ffcp.IntervalPredictor(model, base=base).calibrate(X, Y).predict_interval(X)
    assert interval.prediction.shape == Y.shape


def test_labels_to_ignore_are_spoken_of_once() -> None:
    maps = torch.full((2, 3, 3), 255)
    with pytest.raises(ValueError, match="ignore=") as error:
        ffcp.segmentation.PixelSets(nn.Conv2d(1, 2, 1)).calibrate(torch.zeros(2, 1, 3, 3), maps)
    assert str(error.value).count("ignore") == 1


def test_a_stream_that_must_be_infinite_warns_once() -> None:
    predictor = ffcp.CP(nn.Linear(4, 1)).calibrate(X[:50], Y[:50])
    with pytest.warns(ffcp.FFCPWarning, match="999") as seen:
        ffcp.Online(predictor, "aci", alpha=0.001).predict_interval(X[:1])
    assert len(seen) == 1


def _frame() -> tuple[Any, Any]:
    pandas = pytest.importorskip("pandas")
    columns = ["a", "b", "c", "d"]
    return pandas.DataFrame(X.numpy(), columns=columns), pandas.Series(Y.numpy())


def test_targets_in_another_order_of_rows_are_refused() -> None:
    frame, target = _frame()
    with pytest.raises(ValueError, match=r"y has the rows of x in another order.*y\.loc\[x\.index"):
        ffcp.CP(nn.Linear(4, 1)).calibrate(frame, target.sample(frac=1, random_state=0))


@pytest.mark.parametrize("labels", [range(5, 125), [0] * 120])
def test_targets_with_labels_of_their_own_are_taken_in_order(labels: Any) -> None:
    frame, target = _frame()
    model = nn.Linear(4, 1)
    there = ffcp.CP(model).calibrate(frame, target.set_axis(labels)).predict_interval(X)
    assert there.lower.equal(ffcp.CP(model).calibrate(X, Y).predict_interval(X).lower)


@pytest.mark.parametrize("layer", [nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 1))])
def test_a_dict_is_no_input_of_a_model_of_one_tensor(layer: nn.Module) -> None:
    loader = [{"features": X, "labels": Y}]
    with pytest.raises(TypeError, match=r"takes no dict .*'features'.*batch\['features'\]"):
        ffcp.CP(layer).calibrate(iter(loader))


def test_a_dict_without_labels_is_told_how_to_become_pairs() -> None:
    match = r"calibrate\(\(batch\['image'\], batch\['mask'\]\) for batch in loader\)"
    with pytest.raises(TypeError, match=match):
        ffcp.CP(nn.Linear(4, 1)).calibrate(iter([{"image": X, "mask": Y}]))


def test_a_sparse_matrix_is_asked_for_as_an_array() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(TypeError, match=r"sparse matrix: give x\.toarray\(\)"):
        ffcp.CP(nn.Linear(4, 1)).calibrate(sparse.csr_matrix(X.numpy()), Y)


def test_labels_in_a_column_are_told_how_to_become_a_vector() -> None:
    with pytest.raises(ValueError, match=r"y\[:, 0\]\.long\(\)"):  # of one logit often floats
        ffcp.LAC(nn.Linear(4, 1)).calibrate(X, torch.zeros(120, 1))


def test_an_iterable_dataset_that_yields_rows_is_told_of_a_loader() -> None:
    class Rows(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return zip(X, Y, strict=True)

    with pytest.raises(ValueError, match=r"DataLoader\(data, batch_size=256\)"):
        ffcp.CP(nn.Linear(4, 1)).calibrate(Rows())
    assert len(
        ffcp.CP(nn.Linear(4, 1)).calibrate(torch.utils.data.DataLoader(Rows(), 256)).calibration
    )


def test_a_vector_in_place_of_intervals_is_told_what_is_expected() -> None:
    with pytest.raises(TypeError, match=r"expected intervals first, then 'y', got a vector"):
        ffcp.metrics.coverage(Y - 1, Y)


def test_load_with_swapped_arguments_is_told() -> None:
    with pytest.raises(TypeError, match=r"load\(path, model\)"):
        ffcp.load(nn.Linear(4, 1), "calibration.safetensors")  # type: ignore[arg-type]


def test_a_regressor_is_no_classifier_of_scikit_learn() -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    from sklearn.pipeline import make_pipeline

    from ffcp.sklearn import ConformalClassifier, ConformalRegressor

    numbers = np.arange(120) % 2
    with pytest.raises(TypeError, match="Pipeline is a classifier: use ConformalClassifier"):
        ConformalRegressor(make_pipeline(linear.LogisticRegression())).fit(X.numpy(), numbers)
    with pytest.raises(TypeError, match="Ridge is a regressor: use ConformalRegressor"):
        ConformalClassifier(linear.Ridge()).fit(X.numpy(), numbers)


def test_names_of_readme_are_sent_to_their_module() -> None:
    with pytest.raises(AttributeError, match=r"'Weighted': use ffcp\.calibrations\.Weighted"):
        _ = ffcp.Weighted  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"'PixelSets': use ffcp\.segmentation\.PixelSets"):
        _ = ffcp.PixelSets  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"no attribute 'Atuo'$"):
        _ = ffcp.Atuo  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["alpha", "groups", "pac"])
def test_what_is_given_later_is_sent_there(name: str) -> None:
    with pytest.raises(TypeError, match=f"CP takes no argument '{name}': give it to .*predict_int"):
        ffcp.CP(nn.Linear(4, 1), **{name: 0.1})  # type: ignore[arg-type]


def test_sets_are_sent_to_their_own_metric() -> None:
    labels = torch.arange(120) % 3
    sets = ffcp.LAC(nn.Linear(4, 3)).calibrate(X, labels).predict_set(X)
    for given in ((sets, labels), (labels, sets)):
        with pytest.raises(TypeError, match=r"ffcp\.metrics\.set_coverage"):
            ffcp.metrics.coverage(*given)  # type: ignore[arg-type]
    frame, target = _frame()  # a Series has a mask too, which is none of labels
    interval = ffcp.CP(nn.Linear(4, 1)).calibrate(frame, target).predict_interval(frame)
    assert ffcp.metrics.coverage(interval, target) > 0.8


def test_a_class_in_place_of_a_model_and_a_folder_in_place_of_a_file_are_told(
    tmp_path: Path,
) -> None:
    with pytest.raises(TypeError, match="'Linear' is a class, pass a trained instance of it"):
        ffcp.CP(nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(IsADirectoryError, match=r"ffcp\.tables\.load"):
        ffcp.load(tmp_path, nn.Linear(4, 1))
