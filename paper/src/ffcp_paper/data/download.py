"""Downloads of data files: verified, unpacked and written atomically."""

from __future__ import annotations

import contextlib
import gzip
import os
import tempfile
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import pooch
import requests

import ffcp_paper
from ffcp_paper.data.files import DataFile

Progress = Callable[[int, int | None], None]
"""Function of the bytes received and the total, ``None`` if the server does not say."""

TIMEOUT = 30.0  # seconds without a byte
LIMIT = 2 << 30  # bytes: four times the largest file
_BLOCK = 1 << 14  # bytes
_DAMAGED = (zipfile.BadZipFile, gzip.BadGzipFile, NotImplementedError, EOFError, zlib.error)


class FetchError(RuntimeError):
    """A file could not be downloaded; the message, one line, says why and what to do."""


class WrongFileError(FetchError):
    """The downloaded file is not the expected one; nothing was kept."""


class UnverifiedError(FetchError):
    """The checksum of a file is unknown, and the caller did not accept an unverified file."""


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
        """Host of the server."""
        return urllib.parse.urlsplit(self.url).netloc

    @property
    def name(self) -> str:
        """Name of the file or archive."""
        return PurePosixPath(urllib.parse.unquote(urllib.parse.urlsplit(self.url).path)).name

    @property
    def packed(self) -> bool:
        """Whether the file has to be unpacked from what is downloaded."""
        return self.member is not None or self.name.endswith(".gz")


def fetch_file(
    file: DataFile,
    origin: Origin,
    progress: Progress = lambda done, total: None,
    *,
    unverified: bool = False,
) -> Path:
    """Download one file to its place, replacing one that is there.

    Parameters
    ----------
    file
        The file; it is renamed into place only if its checksum is right.
    origin
        Where it is.
    progress
        Called as bytes arrive.
    unverified
        Accept a file whose checksum is unknown; otherwise that is an error.
    """
    place = file.place
    if file.sha256 is None and not unverified:
        raise UnverifiedError(
            f"the checksum of {place.name} is unknown, so a download from {origin.host} cannot be "
            f"verified; pass --unverified to accept it, or put it into {place.parent} by hand"
        )
    with _writing(place.parent):
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".") as folder:
            downloaded = Path(folder) / "download"
            _download(file, origin, downloaded, progress)
            if origin.packed:
                downloaded = _unpacked(file, origin, downloaded)
            if file.sha256 not in (None, pooch.file_hash(downloaded)):
                raise _wrong(file, f"the sha256 of {origin.url} is not {file.sha256}")
            os.replace(downloaded, place)
    return place


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FetchError(
            f"cannot write into {folder}: {error.strerror or error}; set FFCP_DATA to a "
            "writable folder with enough space"
        ) from error


def _by_hand(file: DataFile, what: str) -> str:
    return f"{what}; put {file.place.name} into {file.place.parent} by hand"


def _wrong(file: DataFile, what: str) -> WrongFileError:
    return WrongFileError(_by_hand(file, f"{what}; nothing was kept"))


def _download(file: DataFile, origin: Origin, place: Path, progress: Progress) -> None:
    # Not compressed on the way, so that the length is that of the file.
    headers = {"User-Agent": f"ffcp-paper/{ffcp_paper.__version__}", "Accept-Encoding": "identity"}
    try:
        with requests.get(origin.url, stream=True, timeout=TIMEOUT, headers=headers) as response:
            if not response.ok:
                what = f"{origin.host} answers {response.status_code} for {origin.url}"
                raise FetchError(_by_hand(file, what))
            if not _is_safe(origin.url, [one.url for one in (*response.history, response)]):
                what = f"{origin.host} redirects to an address without encryption"
                raise FetchError(_by_hand(file, what))
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdigit() else None
            progress(0, total)
            with place.open("wb") as out:
                for done in _copied(response.iter_content(_BLOCK), out, file, origin):
                    progress(done, total)
    except requests.RequestException as error:
        what = f"cannot download from {origin.host}: {type(error).__name__}"
        raise FetchError(_by_hand(file, what)) from error


def _is_safe(asked: str, given: list[str]) -> bool:
    return not asked.startswith("https:") or all(one.startswith("https:") for one in given)


def _copied(blocks: Any, out: IO[bytes], file: DataFile, origin: Origin) -> Iterator[int]:
    """Write blocks and yield how many bytes there are, up to the limit."""
    done = 0
    for block in blocks:
        out.write(block)
        done += len(block)
        if done > LIMIT:
            raise _wrong(file, f"{origin.url} has more than {LIMIT:,} bytes")
        yield done


def _unpacked(file: DataFile, origin: Origin, packed: Path) -> Path:
    """Write the wanted content of an archive to a file beside it."""
    place = packed.with_name("unpacked")
    try:
        with contextlib.ExitStack() as stack:
            if origin.member is None:
                stream: Any = stack.enter_context(gzip.open(packed))
            else:
                archive = stack.enter_context(zipfile.ZipFile(packed))
                stream = stack.enter_context(archive.open(_member(file, origin, archive)))
            out = stack.enter_context(place.open("wb"))
            for _ in _copied(iter(lambda: stream.read(_BLOCK), b""), out, file, origin):
                pass
    except _DAMAGED as error:
        raise _wrong(file, f"{origin.url} is no archive or a damaged one ({error})") from error
    return place


def _member(file: DataFile, origin: Origin, archive: zipfile.ZipFile) -> str:
    """Return the name of the wanted file; archives are repacked into other folders now and then."""
    assert origin.member is not None
    wanted = PurePosixPath(origin.member.lower())
    names = [PurePosixPath(name.lower()) for name in archive.namelist()]
    same = [i for i, name in enumerate(names) if name == wanted]
    same = same or [i for i, name in enumerate(names) if name.name == wanted.name]
    if len(same) != 1:
        raise _wrong(file, f"{origin.url} holds {len(same)} files {wanted.name}")
    return archive.namelist()[same[0]]
