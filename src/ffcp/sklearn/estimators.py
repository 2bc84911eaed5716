"""The estimators ``ConformalRegressor`` and ``ConformalClassifier``."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from sklearn import get_config
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, is_classifier, is_regressor
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.utils import Tags, check_random_state, get_tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    check_array,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

import ffcp
from ffcp.conformal.rank import requested_alpha, requested_alphas
from ffcp.extras import needed
from ffcp.network.inputs import check_order
from ffcp.sklearn.rows import Array, as_rows, row_count, take
from ffcp.sklearn.sources import NetworkSource, Source, is_fitted_already, known_classes, source

Self = TypeVar("Self", bound="_Conformal")


_INTERVALS = {
    "auto": ffcp.Auto,
    "learned": ffcp.Learned,
    "cp": ffcp.CP,
    "lcp": ffcp.LCP,
    "ffcp": ffcp.FFCP,
}
_SETS = {
    "auto": partial(ffcp.SetPredictor, score="auto"),
    "raps": ffcp.RAPS,
    "aps": ffcp.APS,
    "lac": ffcp.LAC,
    "ffraps": ffcp.FFRAPS,
}


class _Conformal(BaseEstimator):  # type: ignore[misc]
    """Base class of both estimators: splitting rows, fitting, and containers of results."""

    def __init__(
        self,
        estimator: Any = None,
        *,
        alpha: float | None = None,
        confidence_level: float | None = None,
        method: Any = "auto",
        calibration_size: float = 0.25,
        random_state: Any = None,
    ) -> None:
        self.estimator = estimator
        self.alpha = alpha
        self.confidence_level = confidence_level
        self.method = method
        self.calibration_size = calibration_size
        self.random_state = random_state

    def set_output(self: Self, *, transform: str | None = None) -> Self:
        """Set what ``predict_interval`` and ``predict_set`` return.

        Parameters
        ----------
        transform : str, default=None
            ``"default"`` for arrays, ``"pandas"`` for frames.
        """
        if transform not in (None, "default", "pandas"):
            raise ValueError(f"'transform' must be 'default' or 'pandas', got {transform!r}")
        if transform is not None:
            self._sklearn_output_config = {"transform": transform}
        return self

    def _contained(self, values: Array, columns: list[str], x: Any) -> Any:
        """Return values as an array or a frame, as :meth:`set_output` says."""
        config = getattr(self, "_sklearn_output_config", {})
        if config.get("transform", get_config()["transform_output"]) != "pandas":
            return values
        pandas = needed("pandas", "frames", "transform='pandas'")
        return pandas.DataFrame(values, columns=columns, index=getattr(x, "index", None))

    def _check_before_fit(self, unknown: dict[str, Any]) -> None:
        """Raise for unknown arguments of fit, the other kind of estimator, an impossible level."""
        if isinstance(self.estimator, BaseEstimator):
            name = type(self.estimator).__name__
            if is_regressor(self) and is_classifier(self.estimator):
                raise TypeError(f"{name} is a classifier: use ConformalClassifier")
            if is_classifier(self) and is_regressor(self.estimator):
                raise TypeError(f"{name} is a regressor: use ConformalRegressor")
        if unknown:
            raise TypeError(
                f"fit got unexpected arguments {sorted(unknown)}: to use sample_weight, fit your "
                "estimator and pass FrozenEstimator(estimator)"
            )
        self._level()

    def _parts(self, rows: int) -> tuple[Array, Array]:
        """Return the numbers of the training rows and of the calibration rows."""
        if is_fitted_already(self.estimator):
            return np.arange(0), np.arange(rows)
        share: Any = self.calibration_size
        if not isinstance(share, (int, float, np.floating)) or not 0 < share < 1:
            raise ValueError(
                f"'calibration_size' is the share of rows that calibrate, in (0, 1): got {share!r}"
            )
        if rows < 2:
            raise ValueError(f"n_samples={rows}: expected at least 2, to train and to calibrate")
        order = check_random_state(self.random_state).permutation(rows)
        held = min(rows - 1, max(1, round(rows * float(share))))
        return np.sort(order[held:]), np.sort(order[:held])

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _fit_source(
        self, default: Any, x: Any, y: Array, parts: tuple[Array, Array], classes: Any = None
    ) -> None:
        """Fit the estimator on the training rows; a fitted one is shown the calibration rows."""
        train, calibration = parts
        rows = train if len(train) else calibration
        estimator = default if self.estimator is None else self.estimator
        self.source_: Source = source(estimator, take(x, rows), y[rows], classes, self._seed())

    def _new_predictor(self, methods: dict[str, Any], **settings: Any) -> Any:
        """Return the predictor that ``method`` names or returns."""
        model = self.source_.model
        if callable(self.method):
            return self.method(model)
        if self.method not in methods:
            known = ", ".join(methods)
            raise ValueError(f"'method' must be one of {known} or a function, got {self.method!r}")
        return methods[self.method](model, seed=self._seed(), **settings)

    def _level(self, alpha: Any = None, confidence_level: Any = None, **unknown: Any) -> Any:
        """Return alpha, or a list of them, of this call, or by default of the estimator."""
        default = requested_alpha(self.alpha, self.confidence_level)
        levels, are_many = requested_alphas(alpha, confidence_level, unknown, default=default)
        return levels if are_many else levels[0]

    def _read(self, x: Any, y: Any, *, numeric: bool) -> tuple[Any, Array]:
        """Return X and y, with columns and y checked; the estimator checks X itself."""
        x, y = validate_data(self, as_rows(x), y, skip_check_array=True)
        check_order(x, y)
        target = check_array(
            y, ensure_2d=False, dtype="numeric" if numeric else None, input_name="y", estimator=self
        )
        check_consistent_length(x, target)
        return x, column_or_1d(target, warn=True)

    def _x(self, x: Any) -> Any:
        check_is_fitted(self)
        return validate_data(self, as_rows(x), reset=False, skip_check_array=True)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        if hasattr(self.estimator, "__sklearn_tags__"):
            tags.input_tags = get_tags(self.estimator).input_tags
        return tags


class ConformalRegressor(RegressorMixin, _Conformal):  # type: ignore[misc]
    """A regressor with prediction intervals of guaranteed coverage.

    Parameters
    ----------
    estimator : estimator, nn.Module or callable, default=None
        Any regressor of scikit-learn, a skorch network, or a function from a number of inputs to a
        torch network: it is fitted on a part of the rows, and calibrated on the others. With a
        fitted estimator, ``FrozenEstimator(estimator)`` or a trained ``torch.nn.Module``, all rows
        are used for calibration, and must not be its training rows. By default a random forest.
    alpha : float, default=None
        Allowed share of misses; 0.1, for 90 % coverage, if neither is given. Also an argument of
        predict_interval.
    confidence_level : float, default=None
        Instead of ``alpha``: the required coverage, 1 - alpha.
    method : str or callable, default="auto"
        ``"auto"`` (:class:`ffcp.Auto` selects among the methods that support the estimator),
        ``"learned"``, ``"cp"``, ``"lcp"``, ``"ffcp"`` (networks only), or a function from a network
        to a predictor of :mod:`ffcp`.
    calibration_size : float, default=0.25
        The share of rows used for calibration.
    random_state : int, RandomState or None, default=None
        Seed of the split and of the method.

    Notes
    -----
    :class:`ffcp.Learned` and :class:`ffcp.Auto` learn the errors of a network from its training
    rows and some of the calibration rows; those of other estimators only from some of the
    calibration rows, as a forest, for example, has overfitted its training rows.

    Examples
    --------
    >>> from sklearn.datasets import make_regression
    >>> x, y = make_regression(400, 5, noise=10, random_state=0)
    >>> regressor = ConformalRegressor(random_state=0).fit(x[:300], y[:300])
    >>> regressor.predict_interval(x[300:]).shape
    (100, 2)
    """

    def fit(self, X: Any, y: Any, **unknown: Any) -> ConformalRegressor:
        """Fit the estimator on a part of the rows, and calibrate on the others.

        Parameters
        ----------
        X : array-like or DataFrame
            Rows, of which a part calibrates.
        y : array-like
            Targets.
        """
        self._check_before_fit(unknown)
        x, target = self._read(X, y, numeric=True)
        train, calibration = self._parts(len(target))
        default = RandomForestRegressor(random_state=0)
        self._fit_source(default, x, target, (train, calibration))
        is_network = isinstance(self.source_, NetworkSource)
        if self.method == "ffcp" and not is_network:
            name = type(default if self.estimator is None else self.estimator).__name__
            raise ValueError(
                f"method='ffcp' needs the gradients of a network, {name!r} has none: use 'auto'"
            )
        self.predictor_ = self._new_predictor(_INTERVALS)
        if len(train) and is_network and isinstance(self.predictor_, (ffcp.Auto, ffcp.Learned)):
            self.predictor_.fit(self.source_.inputs(take(x, train)), target[train], disjoint=True)
        self.predictor_.calibrate(self.source_.inputs(take(x, calibration)), target[calibration])
        return self

    def predict(self, X: Any) -> Array:
        """Return the estimator's predictions.

        Parameters
        ----------
        X : array-like or DataFrame
            Rows to predict.
        """
        x = self._x(X)
        return self.source_.outputs(x).reshape(row_count(x))

    def predict_interval(
        self, X: Any, alpha: Any = None, *, confidence_level: Any = None, **unknown: NoReturn
    ) -> Any:
        """Return intervals, shape (n, 2): lower and upper ends.

        For several levels, ``alpha=[0.1, 0.2]``, the :class:`ffcp.Interval` of the predictor.

        Parameters
        ----------
        X : array-like or DataFrame
            Rows to predict.
        alpha : float or sequence of float, default=None
            Miscoverage level; that of the estimator by default.
        confidence_level : float or sequence of float, default=None
            1 - alpha, in place of ``alpha``.
        """
        x, level = self._x(X), self._level(alpha, confidence_level, **unknown)
        interval = self.predictor_.predict_interval(self.source_.inputs(x), level)
        if isinstance(level, list):
            return interval
        ends = [end.double().cpu().numpy().reshape(-1) for end in (interval.lower, interval.upper)]
        return self._contained(np.stack(ends, axis=1), ["lower", "upper"], X)


class ConformalClassifier(ClassifierMixin, _Conformal):  # type: ignore[misc]
    """A classifier with prediction sets of labels of guaranteed coverage.

    The classes are those of the training rows, or of a fitted estimator. A calibration row with
    any other label is covered only by a set that holds everything, so the guarantee holds for all
    new rows, including those with new labels: see ``other_labels`` of :class:`ffcp.SetPredictor`.

    Parameters
    ----------
    estimator : estimator, nn.Module or callable, default=None
        As in :class:`ConformalRegressor`; a classifier with ``predict_proba``, or a network that
        returns logits in the order of the sorted classes. A trained network may name its classes,
        in the order of its outputs, by an attribute ``classes_``.
    alpha, confidence_level : float, default=None
        As in :class:`ConformalRegressor`.
    calibration_size : float, default=0.25
        As in :class:`ConformalRegressor`.
    random_state : int, RandomState or None, default=None
        As in :class:`ConformalRegressor`.
    method : str or callable, default="auto"
        ``"auto"`` selects that of LAC, APS and RAPS with the smallest sets, on rows that are not
        used for calibration (LAC, with a warning, if there are fewer than 20); ``"raps"``,
        ``"aps"``, ``"lac"``, ``"ffraps"``, or a function from a network to a predictor.

    Attributes
    ----------
    classes_ : array
        The classes, in the order of the columns.
    choice_ : ScoreChoice or None
        The selected score and all candidates.

    Examples
    --------
    >>> from sklearn.datasets import load_wine
    >>> x, y = load_wine(return_X_y=True)
    >>> sets = ConformalClassifier(method="lac", random_state=0).fit(x[::2], y[::2])
    >>> sets.predict_set(x[1::2]).shape  # three classes, and another label
    (89, 4)
    """

    def fit(self, X: Any, y: Any, **unknown: Any) -> ConformalClassifier:
        """Fit the estimator on a part of the rows, and calibrate on the others.

        Parameters
        ----------
        X : array-like or DataFrame
            Rows, of which a part calibrates.
        y : array-like
            Labels.
        """
        self._check_before_fit(unknown)
        x, labels = self._read(X, y, numeric=False)
        check_classification_targets(labels)
        train, calibration = self._parts(len(labels))
        # Of training rows only: with calibration rows these and new rows were not exchangeable.
        self.classes_ = (
            known_classes(self.estimator, x, labels)
            if is_fitted_already(self.estimator)
            else np.unique(labels[train])
        )
        if len(self.classes_) < 2:
            raise ValueError(f"expected at least two classes, got only {self.classes_.tolist()}")
        codes = _codes(labels, self.classes_)
        default = RandomForestClassifier(random_state=0)
        self._fit_source(default, x, codes, (train, calibration), self.classes_)
        self.predictor_ = self._new_predictor(_SETS, other_labels=True)
        _check_codes(self.predictor_, codes[calibration], len(self.classes_))
        self.predictor_.calibrate(self.source_.inputs(take(x, calibration)), codes[calibration])
        self.choice_ = getattr(self.predictor_, "choice", None)
        return self

    def predict(self, X: Any) -> Array:
        """Return the most probable class of each row.

        Parameters
        ----------
        X : array-like or DataFrame
            Rows to predict.
        """
        best = self.predict_proba(X).argmax(axis=1)
        labels: Array = self.classes_[best]
        return labels

    def predict_proba(self, X: Any) -> Array:
        """Return the probabilities of all classes, in the order of ``classes_``.

        Parameters
        ----------
        X : array-like or DataFrame
            Rows to predict.
        """
        x = self._x(X)
        return torch.from_numpy(self.source_.outputs(x)).softmax(dim=1).numpy()

    def predict_set(
        self, X: Any, alpha: Any = None, *, confidence_level: Any = None, **unknown: NoReturn
    ) -> Any:
        """Return a mask of the classes in the set of each row, shape (n, K + 1).

        The last column is "another label", one that is not in ``classes_``.

        Parameters
        ----------
        X : array-like or DataFrame
            Rows to predict.
        alpha : float or sequence of float, default=None
            Miscoverage level; that of the estimator by default.
        confidence_level : float or sequence of float, default=None
            1 - alpha, in place of ``alpha``.
        """
        x, level = self._x(X), self._level(alpha, confidence_level, **unknown)
        sets = self.predictor_.predict_set(self.source_.inputs(x), level)
        other = [ffcp.LabelSet.OTHER] if sets.other_labels else []
        return self._contained(sets.mask.cpu().numpy(), [*map(str, self.classes_), *other], X)


def _codes(labels: Array, classes: Array) -> Array:
    """Return the number of each label among the classes; after the last for other labels."""
    numbers = {label: number for number, label in enumerate(classes.tolist())}
    codes = [numbers.get(label, len(numbers)) for label in labels.tolist()]
    return np.array(codes, dtype=np.int64)


def _check_codes(predictor: Any, codes: Array, classes: int) -> None:
    """Raise ValueError if all calibration labels are unknown, or the predictor refuses some."""
    unknown = int((codes == classes).sum())
    if unknown == len(codes):
        raise ValueError(
            "no calibration row has a label in 'classes_': check that the estimator was trained on "
            "the same labels"
        )
    if unknown and not getattr(predictor, "other_labels", False):
        raise ValueError(
            f"{unknown} calibration rows have a label that is not in 'classes_': return a "
            "predictor with other_labels=True from 'method', or leave these rows out"
        )
