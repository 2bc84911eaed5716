"""Conversion of the cells of a column to numbers, dates or strings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from pandas.api import types

# Cells that mean a missing value, in lower case.
MISSING = frozenset(
    ["", "na", "n/a", "#n/a", "#na", "<na>", "nan", "-nan", "null", "none", "nat", "?", "#null!"]
)
ISO = "ISO8601"
_QUOTED = 40  # characters of a cell in a message
# With decimal commas, points may only separate groups of three digits: 1.234.567,8.
_GROUPED = r"\s*[+-]?\d{1,3}(?:\.\d{3})+(?:,\d*)?\s*"
# A number with a currency, a percent sign or separators of thousands: €1,234.5, -5 %, 1'000.
_DECORATED = r"[-+]?[€$£¥]?\s?[-+]?\d{1,3}(?:[,.' ]?\d{3})*(?:[.,]\d+)?\s?[%€$£¥]?"
_DATE = r"\d{4}|\d\D+\d+\D+\d"  # every date has a year, or three numbers
_TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p")
# Tried in this order; the first that reads every cell is used.
FORMATS = (
    ISO,
    *(
        day + time
        for day in ("%Y/%m/%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y", "%m-%d-%Y")
        for time in _TIMES
    ),
    *("%d.%m.%y", "%m/%d/%y", "%d/%m/%y", "%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y"),
)


def is_number(series: pd.Series) -> bool:
    """Whether a column is of a numeric type; booleans are not."""
    return bool(types.is_numeric_dtype(series) and not _is_other(series))


def _is_other(series: pd.Series) -> bool:
    """Whether a column holds neither text nor numbers, but dates, booleans or complex numbers."""
    if types.is_object_dtype(series):
        return bool(types.infer_dtype(series, skipna=True) == "boolean")
    return is_date(series) or types.is_bool_dtype(series) or types.is_complex_dtype(series)


def is_date(series: pd.Series) -> bool:
    """Whether a column is of a datetime type."""
    return bool(types.is_datetime64_any_dtype(series))


def words(series: pd.Series) -> np.ndarray[Any, Any]:
    """Return the cells as stripped strings, ``""`` if missing.

    >>> words(pd.Series([" red", None, 3.0, "NA", True])).tolist()
    ['red', '', '3', '', 'True']
    """
    if is_date(series):
        series = series.dt.strftime("%Y-%m-%dT%H:%M:%S")
    if isinstance(series.dtype, pd.StringDtype):  # text often repeats: convert each word once
        codes, levels = pd.factorize(series)
        level_words = np.array([*map(_word, levels), ""], dtype=object)
        cell_words: np.ndarray[Any, Any] = level_words[codes]  # the code of missing cells is -1
        return cell_words
    return np.array([_word(cell) for cell in series.astype(object)], dtype=object)


def decorated_number(cell_words: np.ndarray[Any, Any]) -> str | None:
    """Return a cell to quote if nearly all hold numbers with signs or separators of thousands.

    >>> decorated_number(np.array(["€950", "€1,050"], dtype=object))
    '€950'
    >>> decorated_number(np.array(["red", "5 %"], dtype=object))
    """
    sample = pd.Series(cell_words[:1000], dtype=object)
    return str(sample.iloc[0]) if sample.str.fullmatch(_DECORATED).mean() > 0.95 else None


def _word(cell: Any) -> str:
    if isinstance(cell, str):
        text = cell.strip()
        return "" if text.lower() in MISSING else text
    if isinstance(cell, (int, float, np.number)) and not isinstance(cell, bool):
        return spelled(cell)
    return "" if cell is None or cell is pd.NA or cell is pd.NaT else _word(str(cell))


def spelled(value: Any) -> str:
    """Return a number as text: 3 for 3.0, and large integers with all digits."""
    if value is None or value is pd.NA or value != value:
        return ""
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    return str(int(value)) if abs(value) < 2**53 and value == int(value) else repr(float(value))


def quoted(cell: Any) -> str:
    """Return a cell in quotes for a message, shortened if it is long.

    >>> quoted("red"), quoted("x" * 5000)
    ("'red'", "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'... (5,000 characters)")
    """
    text = str(cell)
    if len(text) <= _QUOTED:
        return repr(text)
    return f"{text[:_QUOTED]!r}... ({len(text):,} characters)"


def listed(names: list[str]) -> str:
    """Return the first names in quotes for a message."""
    return ", ".join(map(quoted, names[:10])) + (" and others" if len(names) > 10 else "")


def numbers(series: pd.Series, decimal: str = ".") -> tuple[np.ndarray[Any, Any], ...]:
    """Return cells as numbers (NaN if there is none), which are missing, and which are bad.

    >>> values, missing, bad = numbers(pd.Series(["1.5", "", "many", "inf"]))
    >>> values.tolist()
    [1.5, nan, nan, nan]
    >>> missing.tolist(), bad.tolist()
    ([False, True, False, False], [False, False, True, True])
    """
    if is_number(series):
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
        missing = np.isnan(values)
    elif _is_other(series):
        return np.full(len(series), np.nan), series.isna().to_numpy(), series.notna().to_numpy()
    else:
        text = series.astype(object)
        text = _with_points(text) if decimal == "," else text
        values = pd.to_numeric(text, errors="coerce").to_numpy(np.float64, na_value=np.nan)
        missing = np.isnan(values)
        missing[missing] = words(series[missing]) == ""  # only these are checked one by one
    bad = ~missing & ~np.isfinite(values)
    return np.where(np.isfinite(values), values, np.nan), missing, bad


def read_once(frame: pd.DataFrame, but: str | None = None) -> pd.DataFrame:
    """Return the table with all-numeric text columns converted, except one column.

    A fit reads a column several times, and converting text is slow.

    >>> read_once(pd.DataFrame({"a": ["1", "2.5"], "b": ["007", "1"], "c": ["3", ""]}), "b").dtypes
    a    float64
    b        str
    c        str
    dtype: object
    """
    read = frame.copy(deep=False)
    for name in read.columns[read.columns != but]:
        values, missing, bad = numbers(frame[name], frame.attrs.get("decimal", "."))
        if not is_number(frame[name]) and not (missing | bad).any():
            read[name] = values
    return read


def _with_points(text: pd.Series) -> pd.Series:
    """Return text with decimal commas as points; ``""`` for cells with other points, as dates.

    >>> _with_points(pd.Series(["1,5", "1.234,5", "01.02.2020", "1.5"])).tolist()
    ['1.5', '1234.5', '', '']
    """
    pointed = text.str.contains(".", regex=False, na=False)
    grouped = text.str.fullmatch(_GROUPED, na=False)
    plain = text.where(~pointed | grouped, "")
    return plain.str.replace(".", "", regex=False).str.replace(",", ".", regex=False)


def dates(series: pd.Series, form: str = ISO) -> tuple[np.ndarray[Any, Any], ...]:
    """Return cells as seconds since 1970 (NaN if there is none), which are missing, which bad.

    >>> seconds, missing, bad = dates(pd.Series(["1970-01-02", "NA", "soon"]))
    >>> seconds.tolist()
    [86400.0, nan, nan]
    >>> missing.tolist(), bad.tolist()
    ([False, True, False], [False, False, True])
    """
    if is_date(series):
        read = pd.to_datetime(series, utc=True)
        missing = read.isna().to_numpy()
    else:
        text = pd.Series(words(series), dtype=object)
        missing = (text == "").to_numpy()
        read = pd.to_datetime(text.where(~missing, None), format=form, errors="coerce", utc=True)
    bad = ~missing & read.isna().to_numpy()
    # In microseconds: nanoseconds end in 2262, and "9999-12-31" is a valid date.
    micros = read.dt.tz_localize(None).to_numpy().astype("datetime64[us]")
    seconds = np.where(np.isnat(micros), np.nan, micros.astype(np.int64) / 1e6)
    return seconds, missing, bad


def date_format(series: pd.Series) -> str | None:
    """Return the format in which all cells are dates; ``None`` if there is none."""
    if is_date(series):
        return ISO
    text = pd.Series(words(series), dtype=object)
    text = text[text != ""]
    sample = text.iloc[:: max(1, len(text) // 200)]
    if not sample.str.contains(_DATE).any():
        return None
    for form in FORMATS:
        if not dates(sample, form)[2].any() and not dates(text, form)[2].any():
            return form
    return None
