"""Cells of a column as numbers, dates or words, whatever they came as; and which are missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from pandas.api import types

# What stands for a value that is not known, in any spelling of its letters.
MISSING = frozenset(
    ["", "na", "n/a", "#n/a", "#na", "<na>", "nan", "-nan", "null", "none", "nat", "?", "#null!"]
)
ISO = "ISO8601"
_QUOTED = 40  # characters of a cell in a message
# Where commas are decimal signs: whole groups of three between points, 1.234.567,8, and no other.
_GROUPED = r"\s*[+-]?\d{1,3}(?:\.\d{3})+(?:,\d*)?\s*"
_DATE = r"\d{4}|\d\D+\d+\D+\d"  # in every date, whatever its form: a year, or three numbers
_TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p")
# Tried one after the other; the first that reads every cell is taken.
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
    """Whether a column is of a numeric type; booleans are words."""
    return bool(types.is_numeric_dtype(series) and not _is_other(series))


def _is_other(series: pd.Series) -> bool:
    """Whether a column holds neither text nor numbers, but dates, truth values or the like."""
    if types.is_object_dtype(series):
        return bool(types.infer_dtype(series, skipna=True) == "boolean")
    return is_date(series) or types.is_bool_dtype(series) or types.is_complex_dtype(series)


def is_date(series: pd.Series) -> bool:
    """Whether a column is of a type of dates."""
    return bool(types.is_datetime64_any_dtype(series))


def words(series: pd.Series) -> np.ndarray[Any, Any]:
    """Return the cells as words without blanks around them, ``""`` where one is missing.

    >>> words(pd.Series([" red", None, 3.0, "NA", True])).tolist()
    ['red', '', '3', '', 'True']
    """
    if is_date(series):
        series = series.dt.strftime("%Y-%m-%dT%H:%M:%S")
    if isinstance(series.dtype, pd.StringDtype):  # text, whose words often repeat
        codes, levels = pd.factorize(series)
        found: np.ndarray[Any, Any] = np.array([*map(_word, levels), ""], dtype=object)[codes]
        return found  # of code -1, a missing cell, the last
    return np.array([_word(cell) for cell in series.astype(object)], dtype=object)


def _word(cell: Any) -> str:
    if isinstance(cell, str):
        text = cell.strip()
        return "" if text.lower() in MISSING else text
    if isinstance(cell, (int, float, np.number)) and not isinstance(cell, bool):
        return spelled(cell)
    return "" if cell is None or cell is pd.NA or cell is pd.NaT else _word(str(cell))


def spelled(value: Any) -> str:
    """Spell a number as a table would: 3 for 3.0, and large whole numbers with all digits."""
    if value is None or value is pd.NA or value != value:
        return ""
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    return str(int(value)) if abs(value) < 2**53 and value == int(value) else repr(float(value))


def quoted(cell: Any) -> str:
    """Quote a cell in a message, a long one by its beginning.

    >>> quoted("red"), quoted("x" * 5000)
    ("'red'", "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'... (5,000 characters)")
    """
    text = str(cell)
    if len(text) <= _QUOTED:
        return repr(text)
    return f"{text[:_QUOTED]!r}... ({len(text):,} characters)"


def listed(names: list[str]) -> str:
    """Quote the first names in a message."""
    return ", ".join(map(quoted, names[:10])) + (" and others" if len(names) > 10 else "")


def numbers(series: pd.Series, decimal: str = ".") -> tuple[np.ndarray[Any, Any], ...]:
    """Read cells as numbers: values (NaN where there is none), which are missing, which are bad.

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
        missing[missing] = words(series[missing]) == ""  # only these are looked at one by one
    bad = ~missing & ~np.isfinite(values)
    return np.where(np.isfinite(values), values, np.nan), missing, bad


def read_once(frame: pd.DataFrame, but: str | None = None) -> pd.DataFrame:
    """Return the table with text that is numbers in every row as numbers, save one column.

    A fit looks at a column several times, and reading text takes longest.

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
    """Write decimal commas as points; what has points elsewhere, a date perhaps, is no number.

    >>> _with_points(pd.Series(["1,5", "1.234,5", "01.02.2020", "1.5"])).tolist()
    ['1.5', '1234.5', '', '']
    """
    pointed = text.str.contains(".", regex=False, na=False)
    grouped = text.str.fullmatch(_GROUPED, na=False)
    plain = text.where(~pointed | grouped, "")
    return plain.str.replace(".", "", regex=False).str.replace(",", ".", regex=False)


def dates(series: pd.Series, form: str = ISO) -> tuple[np.ndarray[Any, Any], ...]:
    """Read cells as dates, as seconds since 1970 (NaN where there is none); missing; bad.

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
    # Not by nanoseconds, which end in 2262: "9999-12-31" is a date, too.
    micros = read.dt.tz_localize(None).to_numpy().astype("datetime64[us]")
    seconds = np.where(np.isnat(micros), np.nan, micros.astype(np.int64) / 1e6)
    return seconds, missing, bad


def date_format(series: pd.Series) -> str | None:
    """Return the form in which all cells are dates; ``None`` if there is none."""
    if is_date(series):
        return ISO
    text = pd.Series(words(series), dtype=object)
    text = text[text != ""]
    some = text.iloc[:: max(1, len(text) // 200)]
    for form in FORMATS if some.str.contains(_DATE).any() else ():
        if not dates(some, form)[2].any() and not dates(text, form)[2].any():
            return form
    return None
