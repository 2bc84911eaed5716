"""The paper's eleven tabular data sets, read as its code reads them, and ten others.

``load(name)`` parses what the official source gives, checks its checksum, and keeps the arrays in
the cache. Preprocessing that must not look at test rows (scaling) is left to :func:`split`.
The paper's files belong into ``tabular`` of the data directory, the others into ``tabular_more``.
:mod:`ffcp_paper.data.fetch` downloads the files, :mod:`ffcp_paper.data.inventory` lists them.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import io
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from ffcp import FFCPWarning
from ffcp_paper.data import cache_files, parsers
from ffcp_paper.data.files import DataFile, cache_dir
from ffcp_paper.data.images import read

if TYPE_CHECKING:
    import pandas as pd

_VERSION = 2  # of the parsing below; a change makes cached arrays stale

NOT_AVAILABLE = "data not available"  # note of a table's row whose data file is missing


@dataclass(frozen=True)
class Table:
    """Features (n, d) in float32 with their names, and the target (n,)."""

    x: np.ndarray
    y: np.ndarray
    names: tuple[str, ...]


@dataclass(frozen=True)
class DataSet:
    """A data set: its files and its parser.

    Parameters
    ----------
    name
        Its name in the paper's tables.
    about
        What the target is, in a few words.
    files
        What has to be there to read it.
    parse
        Function of the opened files that returns features and target; ``None`` if the rows are
        synthetic.
    rows, columns
        How many samples and features the papers have.
    in_time
        Whether the rows are a time series, to be split in the order of time.
    """

    name: str
    about: str
    files: tuple[DataFile, ...]
    parse: Callable[..., tuple[pd.DataFrame, pd.Series]] | None
    rows: int
    columns: int
    in_time: bool = False

    @property
    def missing(self) -> list[DataFile]:
        """Files that are not there."""
        return [file for file in self.files if file.found is None]

    @property
    def source(self) -> str:
        """Where the data officially comes from."""
        return self.files[0].source if self.files else "synthetic, no file needed"


@dataclass(frozen=True)
class AliasedFile(DataFile):
    """A data file that is accepted under other names and in other formats too.

    Parameters
    ----------
    others
        The other names, relative to the data directory.
    """

    others: tuple[str, ...] = ()

    @property
    def found(self) -> Path | None:
        """Path of the file, under any of its names; ``None`` if there is none."""
        names = (self.path, *self.others)
        places = (DataFile(name, self.source).found for name in names)
        return next((place for place in places if place is not None), None)


def known(name: str) -> DataSet:
    """Return a data set by its name, the paper's or another one.

    >>> known("star").rows, known("airfoil").rows
    (2161, 1503)
    """
    listed = {**DATASETS, **FURTHER}
    if name not in listed:
        raise ValueError(f"unknown data set {name!r}: choose one of {', '.join(listed)}")
    return listed[name]


def load(name: str, seed: int = 0) -> Table:
    """Load a data set by its name, from the cache after the first time.

    Parameters
    ----------
    name
        One of :data:`DATASETS` or :data:`FURTHER`.
    seed
        Of the synthetic data; the others do not depend on it.

    Raises
    ------
    MissingDataError
        If a file is missing; the message says where to get it and where to put it.

    Examples
    --------
    >>> table = load("synthetic", seed=1)
    >>> table.x.shape, table.y.shape, table.names[-1]
    ((10000, 100), (10000,), 'x99')
    """
    data = known(name)
    if data.parse is None:
        return synthetic(seed)
    place = cache_dir() / "datasets" / f"{name}-{_VERSION}-{_checksum(data)}.npz"
    table = _cached(place)
    if table is None:
        table = _parsed(data)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, x=table.x, y=table.y, names=np.array(table.names))
        cache_files.keep(place, buffer.getvalue())
    return table


def synthetic(seed: int = 0, rows: int = 10_000) -> Table:
    """Draw the paper's synthetic data: y = W x + noise.

    X is uniform in [0, 1]^100, W uniform in [0, 1]^100 and one for all rows, the noise N(0, 1).

    >>> table = synthetic(seed=0, rows=5)
    >>> table.x.shape, bool((table.x >= 0).all() and (table.x <= 1).all())
    ((5, 100), True)
    """
    random = np.random.default_rng(seed)
    weights = random.random(100)
    x = random.random((rows, 100))
    y = x @ weights + random.standard_normal(rows)
    names = tuple(f"x{number}" for number in range(100))
    return Table(x.astype(np.float32), y.astype(np.float32), names)


# -- files and the cache -----------------------------------------------------------------------


def _checksum(data: DataSet) -> str:
    """Hash the sources of the table; files with a known checksum are not even opened."""
    sums = [file.checksum() for file in data.files]
    return hashlib.sha256(" ".join(sums).encode()).hexdigest()[:16]


def _cached(place: Path) -> Table | None:
    """Return a cached table; ``None`` if it is absent or damaged."""
    data = cache_files.look_up(place)
    if data is None:
        return None
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as saved:  # archives have checksums
            table = Table(saved["x"], saved["y"], tuple(saved["names"].tolist()))
        if table.x.shape != (len(table.y), len(table.names)):
            raise ValueError("its shapes do not fit")
    except Exception as error:  # any damage is mended by parsing again
        cache_files.warn_damaged(place, error)
        return None
    return table


def _parsed(data: DataSet) -> Table:
    """Read a table from its files."""
    assert data.parse is not None
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(_open(file)) for file in data.files]
        try:
            frame, target = data.parse(*streams)
            table = Table(
                frame.to_numpy(np.float32),
                target.to_numpy(np.float32),
                tuple(map(str, frame.columns)),
            )
        except (ValueError, KeyError, OSError, EOFError, zlib.error, struct.error) as error:
            used = ", ".join(str(file.found) for file in data.files)
            raise ValueError(f"{data.name} cannot be read from {used}: {error}") from error
    _check(data, table)
    return table


def _check(data: DataSet, table: Table) -> None:
    """Raise if a table is not the expected one; warn if its number of rows differs."""
    if table.x.shape[1] != data.columns:
        raise ValueError(
            f"{data.name} has {table.x.shape[1]} features where {data.columns} are expected: "
            f"its file is not the expected one. Get it again from {data.source}"
        )
    if not (np.isfinite(table.x).all() and np.isfinite(table.y).all()):
        raise ValueError(f"{data.name} holds NaN after parsing: its file is not the expected one")
    if len(table.y) != data.rows:
        warnings.warn(
            f"{data.name} has {len(table.y):,} rows, in the papers {data.rows:,}: its file is "
            "another release, and results cannot be compared row by row",
            FFCPWarning,
            stacklevel=4,
        )


def _open(file: DataFile) -> BinaryIO:
    if file.sha256 is not None:
        return io.BytesIO(read(file))
    path = file.require()  # no checksum to compare, and too large to hold in memory
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


# -- the paper's data sets, in its order -------------------------------------------------------


def _file(name: str, source: str, sha256: str) -> DataFile:
    return DataFile(f"tabular/{name}", source, sha256)


def _facebook_file(variant: int, sha256: str) -> DataFile:
    return _file(
        f"Features_Variant_{variant}.csv",
        "Facebook Comment Volume, UCI Machine Learning Repository, id 363",
        sha256,
    )


def _meps_file(name: str, number: str, year: int, panel: int) -> DataFile:
    # The Agency publishes no checksum; what the file must hold is checked on parsing.
    return AliasedFile(
        f"tabular/{name}.ssp",
        f"{number}, {year} Full Year Consolidated Data File, SAS transport format, Medical "
        "Expenditure Panel Survey, https://meps.ahrq.gov",
        others=(f"tabular/{name}.csv", f"tabular/meps_{panel}_reg.csv"),
    )


DATASETS: dict[str, DataSet] = {
    data.name: data
    for data in (
        DataSet("synthetic", "a linear function with normal noise", (), None, 10_000, 100),
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
            parsers.com,
            1_994,
            100,
        ),
        DataSet(
            "fb1",
            "comments on Facebook posts, variant 1",
            (
                _facebook_file(
                    1, "f8a739d1d95318694a7827fe5cc07d7ff5478ef9200a529f7625f8a45838a611"
                ),
            ),
            parsers.facebook,
            40_948,
            53,
        ),
        DataSet(
            "fb2",
            "comments on Facebook posts, variant 2",
            (
                # From the manifest of RAMSIS-Lab/LQDS-CP, which agrees on the other seven files.
                _facebook_file(
                    2, "f202a8462a941c19cde8523cc7bcfb01cade7729e746484cc8f642489b9f9355"
                ),
            ),
            parsers.facebook,
            81_311,
            53,
        ),
        DataSet(
            "meps19",
            "visits to medical care in a year, survey panel 19 in 2015",
            (_meps_file("h181", "HC-181", 2015, 19),),
            functools.partial(parsers.meps, panel=19, year=15),
            15_785,
            139,
        ),
        DataSet(
            "meps20",
            "visits to medical care in a year, survey panel 20 in 2015",
            (_meps_file("h181", "HC-181", 2015, 20),),
            functools.partial(parsers.meps, panel=20, year=15),
            17_541,
            139,
        ),
        DataSet(
            "meps21",
            "visits to medical care in a year, survey panel 21 in 2016",
            (_meps_file("h192", "HC-192", 2016, 21),),
            functools.partial(parsers.meps, panel=21, year=16),
            15_656,
            139,
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
            parsers.star,
            2_161,
            39,
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
            parsers.bio,
            45_730,
            9,
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
            parsers.blog,
            52_397,
            280,
        ),
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
            parsers.bike,
            10_886,
            18,
        ),
    )
}


# -- data sets that the paper does not use -----------------------------------------------------


def _further(
    name: str, about: str, home: str, sha256: str, shape: tuple[int, int], **options: Any
) -> DataSet:
    """Describe a table stored as one CSV file with a header; ``options`` are the parser's."""
    file = DataFile(f"tabular_more/{options.pop('file', name)}.csv", f"{home}, as csv", sha256)
    in_time = bool(options.get("when"))
    parse = functools.partial(parsers.table, **options)
    return DataSet(name, about, (file,), parse, *shape, in_time=in_time)


def _uci(number: int) -> str:
    return f"UCI Machine Learning Repository, id {number}"


FURTHER: dict[str, DataSet] = {
    data.name: data
    for data in (
        _further("kin8nm", "distance of a simulated robot arm", "DELVE, OpenML id 189",
                 "e74acfb93744b300a8bca76890a2a4a2f3dedf0ea6a76a7fb353da44ee91c773",
                 (8_192, 8), target="y"),
        _further("power_plant", "output of a power plant", _uci(294),
                 "b03855e0700d68d356f51ef4322bbe20c0da1921adbbe94f7cc77f7692115e1d",
                 (9_568, 4), target="PE"),
        _further("naval", "decay of a ship's compressor, simulated", _uci(316),
                 "f2a2e4d1d899efc99a0eeec0a831dbe9f1c30d49351e7f6780c93daada2899d2",
                 (11_934, 14), target="kMc", drop=("kMt", "T1", "P1")),
        _further("wine", "quality of red wines, 3 to 8", _uci(186),
                 "0a217383ca4f6abe5f4df1bfa741de54979537957374d8a4c0b44960db1be840",
                 (1_599, 11), file="wine_quality_red", target="quality"),
        _further("airfoil", "noise of airfoils", _uci(291),
                 "e4b46bb8eb22ad7155567b8d03327df36233d7fe49e9bc2070ada3ab404c971e",
                 (1_503, 5), target="y"),
        _further("california", "median house values in California", "the census of 1990",
                 "8a3727f4cf54ac1a327f69b1d5b4db54c5834ea81c6e4efc0d163300022a685e",
                 (20_640, 13), file="california_housing", target="median_house_value"),
        _further("king_county", "prices of houses in King County", "Kaggle, House Sales",
                 "01db17aa101a32555ec3310532e9ba152319732f70d62b598e8e4ff7f82895f9",
                 (21_613, 88), file="king_county_houses", target="price", drop=("id",),
                 codes=("zipcode",), day="date"),
        _further("meps_2006", "office-based medical expenditure in 2006",
                 "Medical Expenditure Panel Survey 2006, in the R package assessor",
                 "3bfd22ff18c4b755f46740811d218b91b6dfca956308975c8a31e3bf215885fc",
                 (29_784, 28), file="meps_2006_office_expenditure", target="EXP"),
        _further("metro_traffic", "hourly traffic on an interstate road", _uci(492),
                 "0411ba6c43127a29cefa4d8f39708b9d77979d9dcf895f2d212506fe947b673c",
                 (40_575, 66), target="traffic_volume", when="date_time"),
        _further("tetuan_power", "electric power used in a zone of Tetuan", _uci(849),
                 "c478c80e868a4166a596c094d7d801c202e770b903acd668a99acb1ed6a596f2",
                 (52_416, 9), target="Zone 1 Power Consumption", when="DateTime",
                 drop=("Zone 2 Power Consumption", "Zone 3 Power Consumption")),
    )
}  # fmt: skip


# -- the paper's split of the rows -------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Training, calibration and test rows of one seed, scaled by the training rows alone."""

    x_train: Tensor
    y_train: Tensor
    x_cal: Tensor
    y_cal: Tensor
    x_test: Tensor
    y_test: Tensor


def split(table: Table, seed: int, in_time: bool = False) -> Split:
    """Split as the paper does: 20 % test, the rest halved into training and calibration.

    With ``in_time`` training comes before calibration, and calibration before test. Features are
    standardised by the training rows, and targets divided by their mean absolute value there.

    >>> table = Table(np.random.rand(100, 3), np.random.rand(100), ("a", "b", "c"))
    >>> parts = split(table, seed=0)
    >>> len(parts.x_train), len(parts.x_cal), len(parts.x_test)
    (40, 40, 20)
    """
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler

    rows = np.arange(len(table.y))
    if in_time:
        train, calibrate, test = np.split(rows, [int(0.4 * len(rows)), int(0.8 * len(rows))])
        np.random.default_rng(seed).shuffle(train)  # the first of them pick the number of epochs
    else:
        rows, test = train_test_split(rows, test_size=0.2, random_state=seed)
        train, calibrate = np.array_split(np.random.default_rng(seed).permutation(rows), 2)
    scaler = StandardScaler().fit(table.x[train])
    unit = float(np.abs(table.y[train]).mean()) or 1.0
    parts: list[Tensor] = []
    for part in (train, calibrate, test):
        parts.append(torch.from_numpy(scaler.transform(table.x[part]).astype(np.float32)))
        parts.append(torch.from_numpy((table.y[part] / unit).astype(np.float32)))
    return Split(*parts)
