"""Official sources of the paper's data files, and their download.

:func:`fetch` downloads the files of one data set into the data directory. A file is renamed into
place only when it is complete and its checksum is right; a file whose checksum is unknown is
refused unless the caller accepts unverified files.
"""

from __future__ import annotations

from pathlib import Path

from ffcp_paper.data import datasets
from ffcp_paper.data.download import FetchError, Origin, Progress, fetch_file
from ffcp_paper.data.files import DataFile
from ffcp_paper.data.images import read

_UCI = "https://archive.ics.uci.edu/static/public"
_CQR = "https://raw.githubusercontent.com/yromano/cqr/master/datasets"
_MEPS = "https://meps.ahrq.gov/mepsweb/data_files/pufs"
_FACEBOOK = f"{_UCI}/363/facebook+comment+volume+dataset.zip"
_MEPS_TERMS = "https://meps.ahrq.gov/data_stats/data_use.jsp"

ORIGINS: dict[str, Origin] = {
    "tabular/communities.data": Origin(f"{_UCI}/183/communities+and+crime.zip", "communities.data"),
    "tabular/communities_attributes.csv": Origin(f"{_CQR}/communities_attributes.csv"),
    "tabular/Features_Variant_1.csv": Origin(_FACEBOOK, "Dataset/Training/Features_Variant_1.csv"),
    "tabular/Features_Variant_2.csv": Origin(_FACEBOOK, "Dataset/Training/Features_Variant_2.csv"),
    "tabular/h181.ssp": Origin(f"{_MEPS}/h181ssp.zip", "h181.ssp", _MEPS_TERMS),
    "tabular/h192.ssp": Origin(f"{_MEPS}/h192ssp.zip", "h192.ssp", _MEPS_TERMS),
    # The package AER holds the data in R's own format; this is the csv that the papers read.
    "tabular/STAR.csv": Origin(f"{_CQR}/STAR.csv"),
    "tabular/CASP.csv": Origin(
        f"{_UCI}/265/physicochemical+properties+of+protein+tertiary+structure.zip", "CASP.csv"
    ),
    "tabular/blogData_train.csv": Origin(f"{_UCI}/304/blogfeedback.zip", "blogData_train.csv"),
}
BY_HAND: dict[str, str] = {
    "tabular/bike_train.csv": (
        "Kaggle asks for an account: download train.csv from "
        "https://www.kaggle.com/c/bike-sharing-demand/data, name it bike_train.csv"
    )
}


def fetch(
    name: str, progress: Progress = lambda done, total: None, *, unverified: bool = False
) -> list[Path]:
    """Download the files of a data set that are missing or damaged; return all paths.

    Parameters
    ----------
    name
        A data set of :data:`ffcp_paper.data.datasets.DATASETS`.
    progress
        Called as bytes arrive, for each file from its beginning.
    unverified
        Accept files whose checksum is unknown; otherwise they are an error.

    Raises
    ------
    FetchError
        If a file could not be downloaded; the message, one line, says what to do.

    Examples
    --------
    >>> fetch("synthetic")  # has no files
    []
    """
    return [_ensure(file, progress, unverified) for file in datasets.known(name).files]


def terms(name: str) -> str | None:
    """Return the address of the terms of use that a data set's user must accept, if any.

    >>> terms("meps19")
    'https://meps.ahrq.gov/data_stats/data_use.jsp'
    """
    origins = (ORIGINS.get(file.path) for file in datasets.known(name).files)
    return next((origin.terms for origin in origins if origin and origin.terms), None)


def fetchable(name: str) -> bool:
    """Whether all files of a data set can be downloaded without an account.

    >>> fetchable("fb2"), fetchable("bike")
    (True, False)
    """
    return all(file.path in ORIGINS for file in datasets.known(name).files)


def verifiable(name: str) -> bool:
    """Whether the checksums of all files of a data set are known.

    >>> verifiable("bio"), verifiable("meps19")
    (True, False)
    """
    return all(file.sha256 is not None for file in datasets.known(name).files)


def by_hand(file: DataFile) -> str:
    """Return one line that explains how to get a file by hand.

    >>> by_hand(datasets.known("bike").files[0])
    'Kaggle asks for an account: ... name it bike_train.csv and put it into ...tabular'
    """
    if file.path in BY_HAND:
        return f"{BY_HAND[file.path]} and put it into {file.place.parent}"
    return f"put {file.place.name} ({file.source}) into {file.place.parent}"


def _ensure(file: DataFile, progress: Progress, unverified: bool) -> Path:
    result = file.found
    if result is not None and _is_intact(file):
        return result
    if file.path not in ORIGINS:
        raise FetchError(by_hand(file))
    return fetch_file(file, ORIGINS[file.path], progress, unverified=unverified)


def _is_intact(file: DataFile) -> bool:
    if file.sha256 is None:
        return True  # no checksum to compare
    try:
        read(file)
    except ValueError:
        return False
    return True
