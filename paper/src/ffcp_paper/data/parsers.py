"""Parsers of the data files: features and target, as the paper's code reads them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import pandas as pd


def _csv(stream: Any, **options: Any) -> pd.DataFrame:
    import pandas as pd  # imported only when a file is read

    return pd.read_csv(stream, **options)


def bio(stream: BinaryIO) -> tuple[pd.DataFrame, pd.Series]:
    """Read the protein data."""
    frame = _csv(stream)
    return frame.drop(columns="RMSD"), frame["RMSD"]


def star(stream: BinaryIO) -> tuple[pd.DataFrame, pd.Series]:
    """Read the STAR experiment."""
    frame = _csv(stream).dropna()
    scores = [f"{subject}{grade}" for subject in ("read", "math") for grade in "k123"]
    target = frame[scores].sum(axis=1)
    # The published slices keep the unnamed column of row numbers and lose lunchk.
    frame = frame.drop(columns=[*scores, "lunchk"]).rename(columns={"Unnamed: 0": "id"})
    for name in frame.select_dtypes(exclude="number"):
        frame[name] = frame[name].astype("category").cat.codes
    return frame, target


def bike(stream: BinaryIO) -> tuple[pd.DataFrame, pd.Series]:
    """Read the bike rentals."""
    frame = _csv(stream, parse_dates=["datetime"])
    target, when = frame["count"], frame["datetime"].dt
    frame = frame.drop(columns=["count", "casual", "registered", "datetime"])
    for name in ("season", "weather"):
        for kind in sorted(frame[name].unique()):
            frame[f"{name}_{kind}"] = frame[name] == kind
    frame = frame.drop(columns=["season", "weather"])
    return frame.assign(
        hour=when.hour, day=when.day_of_week, month=when.month, year=when.year
    ), target


def com(stream: BinaryIO, attributes: BinaryIO) -> tuple[pd.DataFrame, pd.Series]:
    """Read the communities."""
    names = attributes.read().decode().split()[1:]  # one word a line, the first is a heading
    frame = _csv(stream, header=None, names=names, na_values="?")
    frame = frame.drop(columns=["state", "county", "community", "communityname", "fold"])
    frame["OtherPerCap"] = frame["OtherPerCap"].fillna(frame["OtherPerCap"].mean())
    frame = frame.dropna(axis=1)
    return frame.drop(columns="ViolentCrimesPerPop"), frame["ViolentCrimesPerPop"]


def blog(stream: BinaryIO) -> tuple[pd.DataFrame, pd.Series]:
    """Read the blog feedback."""
    frame = _csv(stream, header=None)
    return frame.iloc[:, :-1], frame.iloc[:, -1]


def facebook(stream: BinaryIO) -> tuple[pd.DataFrame, pd.Series]:
    """Read the Facebook comments."""
    # The papers' loader takes the first line for a header and loses it.
    frame = _csv(stream, header=None, skiprows=1)
    return frame.iloc[:, :-1], frame.iloc[:, -1]


def table(
    stream: BinaryIO,
    target: str,
    drop: tuple[str, ...] = (),
    codes: tuple[str, ...] = (),
    day: str | None = None,
    when: str | None = None,
) -> tuple[pd.DataFrame, pd.Series]:
    """Read a CSV file with a header; words and ``codes`` are one-hot encoded.

    A missing number becomes the median of its column, a ``day`` the number of days since the
    first. ``when`` is the time of a series, which becomes hour, weekday, month and year; of rows
    with the same time the first is taken.
    """
    import pandas as pd

    frame = _csv(stream, keep_default_na=False, na_values=[""])
    frame = frame.drop(columns=list(drop)).astype(dict.fromkeys(codes, str))
    if day is not None:
        days = pd.to_datetime(frame[day])
        frame[day] = (days - days.min()).dt.days
    if when is not None:
        frame[when] = pd.to_datetime(frame[when])
        frame = frame.drop_duplicates(when).sort_values(when, ignore_index=True)
        time = frame.pop(when).dt
        frame = frame.assign(
            hour=time.hour + time.minute / 60, day=time.day_of_week, month=time.month,
            year=time.year,
        )  # fmt: skip
    frame = frame.fillna(frame.median(numeric_only=True))
    return pd.get_dummies(frame.drop(columns=target)), frame[target]


# -- the Medical Expenditure Panel Survey ------------------------------------------------------

# Codes that the CQR paper's features tell apart; -1 means that the question does not apply.
_YES_NO = (-1, 1, 2)
_MEPS_CODES: dict[str, tuple[int, ...]] = {
    "REGION": (1, 2, 3, 4),
    "SEX": (1, 2),
    "MARRY": tuple(range(1, 11)),
    "FTSTU": (-1, 1, 2, 3),
    "ACTDTY": (1, 2, 3, 4),
    "HONRDC": (1, 2, 3, 4),
    "RTHLTH": (-1, 1, 2, 3, 4, 5),
    "MNHLTH": (-1, 1, 2, 3, 4, 5),
    **dict.fromkeys(
        ("HIBPDX", "CHDDX", "ANGIDX", "MIDX", "OHRTDX", "STRKDX", "EMPHDX", "CHBRON", "CHOLDX",
         "CANCERDX", "DIABDX", "JTPAIN", "ARTHDX"),
        _YES_NO,
    ),
    "ARTHTYPE": (-1, 1, 2, 3),
    "ASTHDX": (1, 2),
    **dict.fromkeys(
        ("ADHDADDX", "PREGNT", "WLKLIM", "ACTLIM", "SOCLIM", "COGLIM", "DFHEAR42", "DFSEE42",
         "ADSMOK42"),
        _YES_NO,
    ),
    "PHQ242": (-1, 0, 1, 2, 3, 4, 5, 6),
    "EMPST": (-1, 1, 2, 3, 4),
    "POVCAT": (1, 2, 3, 4, 5),
    "INSCOV": (1, 2, 3),
}  # fmt: skip
_MEPS_NUMBERS = ("AGE", "PCS42", "MCS42", "K6SUM42")
_MEPS_FILTERS = ("PANEL", "HISPANX", "RACEV2X", "EDUCYR", "HIDEG")  # needed, but no features
_MEPS_VISITS = ("OBTOTV", "OPTOTV", "ERTOT", "IPNGTD", "HHTOTD")
# Names that the survey file marks with the interview round 53; some of them carry an X as well.
_MEPS_ROUND = {
    **{
        name: f"{name}53"
        for name in (
            "ACTDTY", "HONRDC", "RTHLTH", "MNHLTH", "CHBRON", "JTPAIN", "PREGNT", "WLKLIM",
            "ACTLIM", "SOCLIM", "COGLIM", "EMPST", "REGION",
        )
    },
    **{name: f"{name}53X" for name in ("FTSTU", "MARRY", "AGE")},
}  # fmt: skip
_MEPS_TARGET = "UTILIZATION_reg"


def meps(stream: BinaryIO, panel: int, year: int) -> tuple[pd.DataFrame, pd.Series]:
    """Read a panel as the CQR paper does: visits to care in a year, from the person's answers.

    Takes the survey's SAS transport file, the csv made of it, or the paper's own extract.
    """
    import pandas as pd

    weight = f"PERWT{year}F"
    features = [*_MEPS_NUMBERS, weight]
    codes = {f"{name}={code}": (name, code) for name in _MEPS_CODES for code in _MEPS_CODES[name]}
    if _is_extract(stream):
        frame = _columns(stream, [*features, *codes, "RACE", _MEPS_TARGET])
        return frame.drop(columns=_MEPS_TARGET), frame[_MEPS_TARGET]
    raw = _meps_names(year)
    frame = _columns(stream, list(raw)).rename(columns=raw)
    frame = frame[_meps_rows(frame, panel)].dropna(subset=[*features, "SEX"])
    if frame.empty:
        raise ValueError(f"it holds no usable row of panel {panel}")
    chosen = {
        **{name: frame[name] for name in features},
        **{label: frame[name] == code for label, (name, code) in codes.items()},
        # The Agency counts Hispanics of every race apart: 1 is white and not Hispanic.
        "RACE": (frame["RACEV2X"] == 1) & (frame["HISPANX"] == 2),
    }
    return pd.DataFrame(chosen), frame[list(_MEPS_VISITS)].sum(axis=1)


def _meps_names(year: int) -> dict[str, str]:
    """Return the columns to read, mapped to the names that they have here."""
    yearly = {name: f"{name}{year}" for name in ("POVCAT", "INSCOV", *_MEPS_VISITS)}
    special = {**_MEPS_ROUND, **yearly}
    names = (*_MEPS_FILTERS, *_MEPS_NUMBERS, *_MEPS_CODES, *_MEPS_VISITS, f"PERWT{year}F")
    return {special.get(name, name): name for name in names}


def _meps_rows(frame: pd.DataFrame, panel: int) -> pd.Series:
    """Return a mask of a panel's rows with known answers; refusals are coded below -1."""
    return (
        (frame["PANEL"] == panel)
        & (frame[["REGION", "AGE", "MARRY", "ASTHDX"]] >= 0).all(axis=1)
        & (frame[[*_MEPS_CODES, "EDUCYR", "HIDEG"]] >= -1).all(axis=1)
        & (frame[list(_MEPS_VISITS)] >= 0).all(axis=1)
    )


_XPORT = b"HEADER RECORD*******"  # how SAS transport files begin


def _is_extract(stream: BinaryIO) -> bool:
    start = stream.read(1 << 16)
    stream.seek(0)
    return not start.startswith(_XPORT) and _MEPS_TARGET.encode() in start


def _columns(stream: BinaryIO, names: list[str]) -> pd.DataFrame:
    """Read some of the many columns of a SAS transport file or a csv."""
    import pandas as pd

    start = stream.read(len(_XPORT))
    stream.seek(0)
    if start != _XPORT:
        _require(names, _csv(stream, nrows=0).columns)
        stream.seek(0)
        return _csv(stream, usecols=names)[names]
    parts = []
    # By parts: the whole file has nearly two thousand columns.
    with pd.read_sas(stream, format="xport", encoding="latin-1", chunksize=5000) as chunks:
        for part in chunks:
            _require(names, part.columns)
            parts.append(part[names])
    frame = pd.concat(parts, ignore_index=True)
    # pandas reads some zeros of this format as 5.4e-79 (its issue 50670).
    return frame.mask(frame.abs() < 1e-70, 0.0)


def _require(names: list[str], there: Iterable[str]) -> None:
    absent = sorted(set(names) - set(there))
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise ValueError(f"it has no column {', '.join(absent[:3])}{more}")
