"""Row selection from any container of X, and X as a numeric matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.preprocessing import OrdinalEncoder
from sklearn.utils import check_array

Array = np.ndarray[Any, Any]


def as_rows(x: Any) -> Any:
    """Return X unchanged if it supports row selection, else as an array.

    >>> as_rows(["a text", "another"])
    ['a text', 'another']
    """
    if hasattr(x, "tocsr"):
        return x.tocsr()
    if hasattr(x, "collect"):
        kind = type(x).__name__
        raise TypeError(f"expected rows, got a {kind!r}, which has not read them: give X.collect()")
    if hasattr(x, "columns"):
        names = list(x.columns)
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"X has several columns named {twice!r}: give each its own name")
        return x
    if isinstance(x, list) and x and isinstance(x[0], str):
        return x
    matrix = np.asarray(x)
    if matrix.dtype.kind in "biuf" and matrix.ndim != 2:
        return check_array(matrix)  # raises with advice on reshaping
    return matrix


def row_count(x: Any) -> int:
    """Return the number of rows of a frame, an array, a sparse matrix or a list."""
    return int(x.shape[0]) if hasattr(x, "shape") else len(x)


def take(x: Any, rows: Array) -> Any:
    """Return some rows, in the same type of container.

    >>> take(["a", "b", "c"], np.array([0, 2]))
    ['a', 'c']
    """
    if hasattr(x, "iloc"):
        return x.iloc[rows]
    return [x[row] for row in rows] if isinstance(x, list) else x[rows]


class NumericColumns:
    """X as a numeric matrix, from which a method can learn the errors of an estimator.

    Numbers and dates are kept, missing values become 0, and one column counts the missing values
    of a row. Strings are numbered; those that do not occur in the training rows are -1.

    Parameters
    ----------
    x : array-like
        X of the training rows; or of the calibration rows, without ``words``: the numbers of
        strings must not depend on calibration rows.
    words : bool, default=True
        Whether columns of strings are used.

    Examples
    --------
    >>> columns = NumericColumns(np.array([["b", 1.0], ["a", 2.0]], dtype=object))
    >>> columns(np.array([["a", None], ["c", 3.0]], dtype=object))
    array([[ 0.,  1.,  0.],
           [ 3.,  0., -1.]])
    """

    def __init__(self, x: Any, words: bool = True) -> None:
        self._numbers: list[int] = []
        self._words: dict[int, OrdinalEncoder] = {}
        for i, column in _columns(x).items():
            if _is_numeric(column):
                self._numbers.append(i)
            elif words:
                encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
                self._words[i] = encoder.fit(_as_words(column))

    def __call__(self, x: Any) -> Array:
        """Return the numeric matrix of some rows."""
        columns = _columns(x)
        numbers = np.empty((row_count(x), len(self._numbers)))
        for i, column in enumerate(self._numbers):
            numbers[:, i] = _as_numbers(columns[column])
        words = [encoder.transform(_as_words(columns[i])) for i, encoder in self._words.items()]
        missing = ~np.isfinite(numbers)
        filled = np.where(missing, 0.0, numbers)
        return np.column_stack([filled, missing.sum(axis=1), *words])


def _columns(x: Any) -> dict[int, Array]:
    """Return the columns of a frame or matrix by position; none for texts or sparse rows."""
    if hasattr(x, "tocsr"):
        return {}
    if hasattr(x, "columns"):
        return {i: np.asarray(x[name]) for i, name in enumerate(x.columns)}
    matrix = np.asarray(x)
    return dict(enumerate(matrix.T)) if matrix.ndim == 2 else {}


def _is_numeric(column: Array) -> bool:
    """Whether all values that are not missing are numbers or dates."""
    missing = np.array([_is_missing(value) for value in column.tolist()], dtype=bool)
    return not np.isnan(_as_numbers(column[~missing])).any()


def _is_missing(value: Any) -> bool:
    """Whether a cell is None, NaN or pandas.NA, or holds an array, which is neither true nor false.

    >>> _is_missing(None), _is_missing(float("nan")), _is_missing("a word")
    (True, True, False)
    """
    try:
        return value is None or bool(value != value)
    except (TypeError, ValueError):
        return True


def _as_numbers(column: Array) -> Array:
    """Return a column in float64, dates in seconds, NaN for values that are not numbers."""
    if column.dtype.kind in "mM":
        values = column.astype(f"{column.dtype.kind}8[s]")
        return np.where(np.isnat(values), np.nan, values.astype(np.float64))
    try:
        return column.astype(np.float64)
    except (TypeError, ValueError):
        numbers = [
            float(value) if isinstance(value, (int, float)) else np.nan for value in column.tolist()
        ]
        return np.array(numbers, dtype=np.float64)


def _as_words(column: Array) -> Array:
    return np.array([[str(value)] for value in column.tolist()], dtype=object)
