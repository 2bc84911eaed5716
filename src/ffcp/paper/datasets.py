"""The paper's tabular data sets, read as its code reads them.

``load(name)`` parses what the official source gives, checks its checksum, and keeps the arrays in
the cache. Preprocessing that must not look at test rows (scaling) is left to :func:`split`.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ffcp import files
from ffcp.paper.data import DataFile, cache_dir

if TYPE_CHECKING:
    import pandas as pd

_VERSION = 1  # of the parsing below; a change makes cached arrays stale


@dataclass(frozen=True)
class Table:
    """Features (n, d) in float32 with their names, and the target (n,)."""

    x: np.ndarray
    y: np.ndarray
    names: tuple[str, ...]


@dataclass(frozen=True)
class DataSet:
    """A data set: what it is made of and how it is read."""

    name: str
    about: str
    files: tuple[DataFile, ...]
    parse: Callable[..., tuple[pd.DataFrame, pd.Series]]

    @property
    def missing(self) -> list[DataFile]:
        """Files that are not there."""
        return [file for file in self.files if file.found is None]


def load(name: str) -> Table:
    """Read a data set by its name in the paper; the first time from its files, then the cache.

    Raises
    ------
    MissingDataError
        If a file is not there; the message says where it comes from and where to put it.
    """
    if name not in DATA_SETS:
        raise ValueError(f"unknown data set {name!r}: choose one of {', '.join(DATA_SETS)}")
    data = DATA_SETS[name]
    place = cache_dir() / "tables" / f"{name}-{_VERSION}-{_checksum(data)}.npz"
    if place.is_file():
        with np.load(place, allow_pickle=False) as saved:
            return Table(saved["x"], saved["y"], tuple(saved["names"].tolist()))
    frame, target = data.parse(*(_text(file) for file in data.files))
    table = Table(
        frame.to_numpy(np.float32), target.to_numpy(np.float32), tuple(map(str, frame.columns))
    )
    if not (np.isfinite(table.x).all() and np.isfinite(table.y).all()):
        raise ValueError(f"{name} holds NaN after parsing: its file is not the expected one")
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x=table.x, y=table.y, names=np.array(table.names))
    files.put(place, buffer.getvalue())
    return table


def _checksum(data: DataSet) -> str:
    return "-".join((file.sha256 or "any")[:8] for file in data.files)


def _text(file: DataFile) -> io.StringIO:
    path = file.require()
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    return io.StringIO(file.verify(content).decode("utf-8"))


# -- one parser for each -----------------------------------------------------------------------


def _csv(text: Any, **options: Any) -> pd.DataFrame:
    import pandas as pd  # only who reads a file waits for the import

    return pd.read_csv(text, **options)


def _bio(text: Any) -> tuple[pd.DataFrame, pd.Series]:
    frame = _csv(text)
    return frame.drop(columns="RMSD"), frame["RMSD"]


def _star(text: Any) -> tuple[pd.DataFrame, pd.Series]:
    frame = _csv(text).dropna()
    scores = [f"{subject}{grade}" for subject in ("read", "math") for grade in "k123"]
    target = frame[scores].sum(axis=1)
    # The published slices keep the unnamed column of row numbers and lose lunchk.
    frame = frame.drop(columns=[*scores, "lunchk"]).rename(columns={"Unnamed: 0": "id"})
    for name in frame.select_dtypes(exclude="number"):
        frame[name] = frame[name].astype("category").cat.codes
    return frame, target


def _bike(text: Any) -> tuple[pd.DataFrame, pd.Series]:
    frame = _csv(text, parse_dates=["datetime"])
    target, when = frame["count"], frame["datetime"].dt
    frame = frame.drop(columns=["count", "casual", "registered", "datetime"])
    for name in ("season", "weather"):
        for kind in sorted(frame[name].unique()):
            frame[f"{name}_{kind}"] = frame[name] == kind
    frame = frame.drop(columns=["season", "weather"])
    return frame.assign(
        hour=when.hour, day=when.day_of_week, month=when.month, year=when.year
    ), target


def _com(text: Any, attributes: Any) -> tuple[pd.DataFrame, pd.Series]:
    names = [name.strip() for name in attributes.read().splitlines()[1:] if name.strip()]
    frame = _csv(text, header=None, names=names, na_values="?")
    frame = frame.drop(columns=["state", "county", "community", "communityname", "fold"])
    frame["OtherPerCap"] = frame["OtherPerCap"].fillna(frame["OtherPerCap"].mean())
    frame = frame.dropna(axis=1)
    return frame.drop(columns="ViolentCrimesPerPop"), frame["ViolentCrimesPerPop"]


def _blog(text: Any) -> tuple[pd.DataFrame, pd.Series]:
    frame = _csv(text, header=None)
    return frame.iloc[:, :-1], frame.iloc[:, -1]


def _facebook(text: Any) -> tuple[pd.DataFrame, pd.Series]:
    # The papers' loader takes the first line for a header and loses it.
    frame = _csv(text, header=None, skiprows=1)
    return frame.iloc[:, :-1], frame.iloc[:, -1]


def _file(name: str, source: str, sha256: str) -> DataFile:
    return DataFile(f"tabular/{name}", source, sha256)


DATA_SETS = {
    data.name: data
    for data in (
        DataSet(
            "bike",
            "hourly bike rentals in Washington, D.C.",
            (
                _file(
                    "bike_train.csv",
                    "train.csv of Kaggle's competition Bike Sharing Demand",
                    "0cf70c35eeb6405a40cc9e124854e2da901fa88fe7374a75d141e7401bf4c857",
                ),
            ),
            _bike,
        ),
        DataSet(
            "com",
            "violent crimes per head in US communities",
            (
                _file(
                    "communities.data",
                    "Communities and Crime, UCI Machine Learning Repository, id 183",
                    "09e0b5c07eae24c1efab19b2edee05e160e7f5743b6f31e31eec3d73624da2ea",
                ),
                _file(
                    "communities_attributes.csv",
                    "the CQR repository (yromano/cqr, folder datasets)",
                    "7910375e27b6544045bd620efe7724afd9c90f53e711c78df7c16c3adfddcc9b",
                ),
            ),
            _com,
        ),
        DataSet(
            "bio",
            "physicochemical properties of protein structures",
            (
                _file(
                    "CASP.csv",
                    "Physicochemical Properties of Protein Tertiary Structure, UCI Machine "
                    "Learning Repository, id 265",
                    "4277cfcb4e91a181746cbc654f001b57951c9e6a80f4f795fdb5c807e0848f40",
                ),
            ),
            _bio,
        ),
        DataSet(
            "star",
            "Tennessee's student/teacher achievement ratio experiment",
            (
                _file(
                    "STAR.csv",
                    "the data set STAR of the R package AER",
                    "0c5dbe6e9a6d9875da4a88d588eca36068eccb77343b327d0c69cf2d8adb44eb",
                ),
            ),
            _star,
        ),
        DataSet(
            "blog",
            "comments on blog posts in the next 24 hours",
            (
                _file(
                    "blogData_train.csv",
                    "BlogFeedback, UCI Machine Learning Repository, id 304",
                    "f3cc953ea9913361be6d3bae2c393eef73eab57b1cb8e5bf8a22f1e5eb5dd05f",
                ),
            ),
            _blog,
        ),
        DataSet(
            "fb1",
            "comments on Facebook posts, variant 1",
            (
                _file(
                    "Features_Variant_1.csv",
                    "Facebook Comment Volume, UCI Machine Learning Repository, id 363",
                    "f8a739d1d95318694a7827fe5cc07d7ff5478ef9200a529f7625f8a45838a611",
                ),
            ),
            _facebook,
        ),
    )
}


# -- the paper's division of the rows ----------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Training, calibration and test rows of one seed, scaled by the training rows alone."""

    x_train: Tensor
    y_train: Tensor
    x_cal: Tensor
    y_cal: Tensor
    x_test: Tensor
    y_test: Tensor


def split(table: Table, seed: int) -> Split:
    """Divide as the paper does: 20 % test, the rest halved into training and calibration.

    Features are standardised by the training rows, targets divided by the mean absolute target
    of the training rows.

    >>> table = Table(np.random.rand(100, 3), np.random.rand(100), ("a", "b", "c"))
    >>> parts = split(table, seed=0)
    >>> len(parts.x_train), len(parts.x_cal), len(parts.x_test)
    (40, 40, 20)
    """
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler

    rows, test = train_test_split(np.arange(len(table.y)), test_size=0.2, random_state=seed)
    train, calibrate = np.array_split(np.random.default_rng(seed).permutation(rows), 2)
    scaler = StandardScaler().fit(table.x[train])
    unit = float(np.abs(table.y[train]).mean()) or 1.0
    parts: list[Tensor] = []
    for part in (train, calibrate, test):
        parts.append(torch.from_numpy(scaler.transform(table.x[part]).astype(np.float32)))
        parts.append(torch.from_numpy((table.y[part] / unit).astype(np.float32)))
    return Split(*parts)
