"""Downloads of the paper's data files from their official homes.

:func:`fetch` brings the files of one data set into the data directory. What has come is kept next
to its place as ``NAME.part``, so that a download that was stopped goes on where it was. A file
gets its own name only when it is complete and its checksum is right. Of an archive, only the file
that is wanted is unpacked.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import os
import stat
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, cast

import ffcp
from ffcp_paper import datasets
from ffcp_paper.data import DataFile
from ffcp_paper.images import read

Progress = Callable[[int, int | None], None]
"""Function of the bytes that have come and of all bytes, ``None`` if the server does not say."""

TIMEOUT = 30.0  # seconds without a byte
TRIES = 3  # connections for a file, if each of them breaks
LIMIT = 2 << 30  # bytes: four times the largest file; what claims more is not what we want
_BLOCK = 1 << 16


class FetchError(RuntimeError):
    """A file could not be downloaded; the message, one line, says why and what to do."""


class WrongFileError(FetchError):
    """What came is not the file that is wanted; nothing of it was kept."""


@dataclass(frozen=True)
class Origin:
    """Where a data file is downloaded from.

    Parameters
    ----------
    url
        Address of the file or of the archive that holds it.
    member
        Name of the file inside the zip archive; ``None`` if the address is that of the file.
    terms
        Where to read the terms that its user accepts, if it has any of its own.
    """

    url: str
    member: str | None = None
    terms: str | None = None

    @property
    def host(self) -> str:
        """Name of the server."""
        return urllib.parse.urlsplit(self.url).netloc

    @property
    def name(self) -> str:
        """Name of what is downloaded."""
        return PurePosixPath(urllib.parse.unquote(urllib.parse.urlsplit(self.url).path)).name


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
    ),
}


def fetch(name: str, progress: Progress = lambda done, total: None) -> list[Path]:
    """Download the files of a data set that are missing or damaged; return where all are.

    Parameters
    ----------
    name
        A data set of :data:`ffcp_paper.datasets.DATASETS`.
    progress
        Called as bytes come, for each file from its beginning.

    Raises
    ------
    FetchError
        If a file could not be had, in one line that says what to do.

    Examples
    --------
    >>> fetch("synthetic")  # drawn, not read
    []
    """
    return [_bring(file, progress) for file in datasets.known(name).files]


def terms(name: str) -> str | None:
    """Say where the terms of a data set are, for those that its user must accept.

    >>> terms("meps19")
    'https://meps.ahrq.gov/data_stats/data_use.jsp'
    """
    origins = (ORIGINS.get(file.path) for file in datasets.known(name).files)
    return next((origin.terms for origin in origins if origin and origin.terms), None)


def fetchable(name: str) -> bool:
    """Tell whether all files of a data set can be downloaded without an account.

    >>> fetchable("fb2"), fetchable("bike")
    (True, False)
    """
    return all(file.path in ORIGINS for file in datasets.known(name).files)


def by_hand(file: DataFile) -> str:
    """Say in one line how to get a file without this module.

    >>> by_hand(datasets.known("bike").files[0])
    'Kaggle asks for an account: ... name it bike_train.csv and put it into ...tabular'
    """
    if file.path in BY_HAND:
        return f"{BY_HAND[file.path]} and put it into {file.place.parent}"
    return f"put {file.place.name} ({file.source}) into {file.place.parent}"


def fetch_file(
    file: DataFile, origin: Origin, progress: Progress = lambda done, total: None
) -> Path:
    """Download one file to its place, whether it is there or not.

    Parameters
    ----------
    file
        What is wanted; its checksum, if it has one, is verified.
    origin
        Where it is.
    progress
        Called as bytes come.
    """
    place = file.place
    with _writing(place.parent):
        place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f"{origin.name}.part")
    resumed = part.is_file()
    try:
        _download(file, origin, part, progress)
        _install(file, origin, part)
    except WrongFileError:
        part.unlink(missing_ok=True)
        if resumed:  # its beginning may have been of an older release
            return fetch_file(file, origin, progress)
        raise
    part.unlink()
    return place


def _bring(file: DataFile, progress: Progress) -> Path:
    found = file.found
    if found is not None and _good(file):
        return found
    if file.path not in ORIGINS:
        raise FetchError(by_hand(file))
    return fetch_file(file, ORIGINS[file.path], progress)


def _good(file: DataFile) -> bool:
    if file.sha256 is None:
        return True  # nothing to check it against
    try:
        read(file)
    except ValueError:
        return False
    return True


def _advice(file: DataFile, what: str) -> str:
    reason = " ".join(what.split())  # servers and systems may speak in several lines
    return f"{reason}; put {file.place.name} into {file.place.parent} by hand"


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FetchError(
            f"cannot write into {folder}: {error.strerror or error}; set FFCP_DATA to a folder "
            "of yours with room enough"
        ) from error


# -- the download ------------------------------------------------------------------------------


class _BrokenError(Exception):
    """The connection ended before the file did."""


def _download(file: DataFile, origin: Origin, part: Path, progress: Progress) -> None:
    """Bring ``part`` to its full length, going on where it ends."""
    for left in reversed(range(TRIES)):
        before = _size(part)
        try:
            _connect(file, origin, part, progress)
        except _BrokenError as error:
            if left and _size(part) > before:
                continue  # it is worth another connection only if this one brought something
            raise FetchError(
                f"the connection to {origin.host} broke ({error}) after {_size(part):,} bytes; "
                "run the command again to go on from there"
            ) from error
        return


def _size(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _connect(file: DataFile, origin: Origin, part: Path, progress: Progress) -> None:
    start = _size(part)
    try:
        with _open(origin, start) as response:
            if not _safe(origin.url, response.geturl()):
                raise FetchError(
                    _advice(file, f"{origin.host} redirects to an address without encryption")
                )
            if start and not _goes_on(response, start):
                start = 0
            _receive(file, response, part, start, progress)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416 and start and _complete(error, start):
                return
        if error.code == 416 and start:
            part.unlink()  # longer than the file: it is of another one
            return _connect(file, origin, part, progress)
        what = f"{origin.host} answers {error.code} {error.reason} for {origin.url}"
        raise FetchError(_advice(file, what)) from error
    except urllib.error.URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise FetchError(_advice(file, f"cannot reach {origin.host}: {reason}")) from error
    except (OSError, http.client.HTTPException) as error:
        raise FetchError(_advice(file, f"cannot reach {origin.host}: {error}")) from error


def _open(origin: Origin, start: int) -> http.client.HTTPResponse:
    # Compressed on the way, a range would be one of the compressed bytes.
    headers = {"User-Agent": f"ffcp/{ffcp.__version__}", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(origin.url, headers=headers)
    return cast(http.client.HTTPResponse, urllib.request.urlopen(request, timeout=TIMEOUT))


def _safe(asked: str, given: str) -> bool:
    return given.startswith("https:") or not asked.startswith("https:")


def _goes_on(response: http.client.HTTPResponse, start: int) -> bool:
    """Tell whether the answer begins at ``start``, or is the whole file after all."""
    sent = response.headers.get("Content-Range", "")
    return response.status == 206 and sent.startswith(f"bytes {start}-")


def _complete(error: urllib.error.HTTPError, start: int) -> bool:
    """Tell whether the file ends where the part does."""
    return bool(error.headers.get("Content-Range") == f"bytes */{start}")


def _receive(
    file: DataFile,
    response: http.client.HTTPResponse,
    part: Path,
    start: int,
    progress: Progress,
) -> None:
    length = response.headers.get("Content-Length", "")
    total = start + int(length) if length.isdigit() else None
    if total is not None and total > LIMIT:
        raise WrongFileError(_advice(file, f"{response.geturl()} is said to have {total:,} bytes"))
    done = start
    with contextlib.ExitStack() as stack:
        with _writing(part.parent):
            stream = stack.enter_context(part.open("ab" if start else "wb"))
        progress(done, total)
        while block := _next(response):
            with _writing(part.parent):
                stream.write(block)
                stream.flush()  # what has come is there even if the process is killed
            done += len(block)
            progress(done, total)
            if done > LIMIT:
                raise WrongFileError(_advice(file, f"{response.geturl()} does not end"))
    if total is not None and done < total:
        raise _BrokenError(f"{total - done:,} bytes are missing")


def _next(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(_BLOCK)
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenError(str(error) or type(error).__name__) from error


# -- unpacking ---------------------------------------------------------------------------------


def _install(file: DataFile, origin: Origin, part: Path) -> None:
    """Unpack, verify and put the file into its place, whole or not at all."""
    place = file.place
    with _writing(place.parent), contextlib.ExitStack() as stack:
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
        temporary = Path(name)
        stack.callback(temporary.unlink, missing_ok=True)
        with os.fdopen(handle, "wb") as out:
            digest = _unpack(file, origin, part, out)
            out.flush()
            os.fsync(out.fileno())
        if file.sha256 is not None and digest != file.sha256:
            raise WrongFileError(
                f"what {origin.url} holds is not the expected {place.name}: its sha256 is "
                f"{digest[:16]}..., not {file.sha256[:16]}...; nothing was kept"
            )
        os.replace(temporary, place)


def _unpack(file: DataFile, origin: Origin, part: Path, out: BinaryIO) -> str:
    """Write the content of a download; return its sha256."""
    try:
        if origin.member is not None:
            with zipfile.ZipFile(part) as archive:
                member = _member(archive, origin)
                with archive.open(member) as stream:
                    return _copy(stream, out, origin)
        with part.open("rb") as plain:
            packed = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            if not packed:
                return _copy(plain, out, origin)
            with gzip.open(plain) as stream:
                return _copy(stream, out, origin)
    except (
        zipfile.BadZipFile, gzip.BadGzipFile, NotImplementedError, EOFError, zlib.error
    ) as error:  # fmt: skip
        raise WrongFileError(
            f"what {origin.url} holds is no archive or a damaged one ({error}); nothing was "
            f"kept, put {file.place.name} into {file.place.parent} by hand"
        ) from error


def _member(archive: zipfile.ZipFile, origin: Origin) -> zipfile.ZipInfo:
    """Find the one wanted file in an archive; whatever is not a plain file is refused."""
    assert origin.member is not None
    wanted = origin.member.lower()
    infos = {info.filename.lower(): info for info in archive.infolist()}
    last = PurePosixPath(wanted).name
    # Archives are repacked into other folders now and then.
    same = [info for name, info in infos.items() if PurePosixPath(name).name == last]
    found = [infos[wanted]] if wanted in infos else same
    if len(found) != 1:
        count = "no" if not found else "more than one"
        raise WrongFileError(f"{origin.url} holds {count} file {last}; nothing was kept")
    info = found[0]
    _refuse(info, origin)
    return info


def _refuse(info: zipfile.ZipInfo, origin: Origin) -> None:
    path = PurePosixPath(info.filename.replace("\\", "/"))
    mode = info.external_attr >> 16
    if path.is_absolute() or ".." in path.parts or ":" in path.parts[0]:
        fault = "leads out of its folder"
    elif stat.S_IFMT(mode) not in (0, stat.S_IFREG) or info.is_dir():
        fault = "is not a plain file"
    elif info.flag_bits & 1:
        fault = "is encrypted"
    elif info.file_size > LIMIT:
        fault = f"is said to have {info.file_size:,} bytes"
    else:
        return
    raise WrongFileError(f"{info.filename} in {origin.url} {fault}; nothing was kept")


def _copy(stream: IO[bytes] | gzip.GzipFile, out: BinaryIO, origin: Origin) -> str:
    """Copy up to the limit, whatever the archive says of its size; return the sha256."""
    digest, size = hashlib.sha256(), 0
    while block := stream.read(_BLOCK):
        size += len(block)
        if size > LIMIT:
            raise WrongFileError(
                f"what {origin.url} holds unpacks to more than {LIMIT:,} bytes; nothing was kept"
            )
        digest.update(block)
        out.write(block)
    return digest.hexdigest()
