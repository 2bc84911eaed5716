"""Files from the web: taken up again, verified, unpacked safely, whole or not at all.

pooch brings, verifies and stores them. What it does not do is done here: a download that was
stopped goes on where it was, what has no end is given up, and of an archive only the one file that
is wanted is unpacked.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import stat
import tempfile
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

import pooch
import requests

import ffcp_paper
from ffcp_paper.data import DataFile

Progress = Callable[[int, int | None], None]
"""Function of the bytes that have come and of all bytes, ``None`` if the server does not say."""

TIMEOUT = 30.0  # seconds without a byte
TRIES = 3  # connections for a file, if each of them breaks
LIMIT = 2 << 30  # bytes: four times the largest file; what claims more is not what we want
_BLOCK = 1 << 14  # bytes; of a block that breaks off in the middle, nothing is kept


class FetchError(RuntimeError):
    """A file could not be downloaded; the message, one line, says why and what to do."""


class WrongFileError(FetchError):
    """What came is not the file that is wanted; nothing of it was kept."""


class UnverifiedError(FetchError):
    """Nobody knows the checksum of a file, and nobody said that it may come all the same."""


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
    """Download one file to its place, whether it is there or not.

    Parameters
    ----------
    file
        What is wanted; it gets its name only if its checksum is right.
    origin
        Where it is.
    progress
        Called as bytes come.
    unverified
        Take a file whose checksum is not known; otherwise it is refused.
    """
    place = file.place
    if file.sha256 is None and not unverified:
        raise UnverifiedError(
            f"no checksum of {place.name} is known, so that nothing could tell whether what "
            f"{origin.host} sends is the right file; say --unverified to take it all the same, or "
            f"put it into {place.parent} by hand"
        )
    with _writing(place.parent):
        place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f"{origin.name}.part")
    resumed = part.is_file()
    try:
        _bring(file, origin, part, progress)
    except WrongFileError:
        part.unlink(missing_ok=True)
        if resumed:  # its beginning may have been of an older release
            return fetch_file(file, origin, progress, unverified=unverified)
        raise
    return place


def _bring(file: DataFile, origin: Origin, part: Path, progress: Progress) -> None:
    """Download, verify, unpack and put the file into its place, whole or not at all."""
    place = file.place
    with _writing(place.parent), tempfile.TemporaryDirectory(dir=place.parent, prefix=".") as made:
        brought = _retrieve(file, origin, Path(made), _Downloader(file, origin, part, progress))
        if origin.packed:
            packed, brought = brought, Path(made) / "unpacked"
            with brought.open("wb") as out:
                _unpack(file, origin, packed, out)
            if file.sha256 not in (None, pooch.file_hash(brought)):
                raise _wrong(file, origin)
        with brought.open("rb+") as done:
            os.fsync(done.fileno())
        os.replace(brought, place)


def _retrieve(file: DataFile, origin: Origin, folder: Path, downloader: _Downloader) -> Path:
    # The checksum is that of the file and not of what it may be packed in.
    known = None if origin.packed else file.sha256
    try:
        with _quiet():
            return Path(pooch.retrieve(origin.url, known, "download", folder, None, downloader))
    except ValueError as error:  # pooch's word for a wrong checksum
        raise _wrong(file, origin) from error


def _wrong(file: DataFile, origin: Origin) -> WrongFileError:
    return WrongFileError(
        f"what {origin.url} holds is not the expected {file.place.name}: its sha256 is not "
        f"{(file.sha256 or '')[:16]}...; nothing was kept"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave it to the caller's progress to say what is downloaded."""
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


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


class _Downloader:
    """pooch's way to download, which here goes on where ``part`` ends."""

    def __init__(self, file: DataFile, origin: Origin, part: Path, progress: Progress) -> None:
        self._file, self._origin, self._part, self._progress = file, origin, part, progress

    def __call__(self, url: str, output_file: str, pooch: Any, check_only: bool = False) -> None:
        """Bring ``part`` to its full length and give it the name that pooch asks for."""
        for left in reversed(range(TRIES)):
            before = self._size
            try:
                self._connect()
                break
            except _BrokenError as error:
                if left and self._size > before:
                    continue  # it is worth another connection only if this one brought something
                raise FetchError(
                    f"the connection to {self._origin.host} broke ({error}) after "
                    f"{self._size:,} bytes; run the command again to go on from there"
                ) from error
        os.replace(self._part, output_file)

    @property
    def _size(self) -> int:
        return self._part.stat().st_size if self._part.is_file() else 0

    def _connect(self) -> None:
        """Ask for what is missing and add it to the part."""
        start, host = self._size, self._origin.host
        sink = _Sink(self._file, self._origin, self._part, start, self._progress)
        # Compressed on the way, a range would be one of the compressed bytes.
        headers = {
            "User-Agent": f"ffcp-paper/{ffcp_paper.__version__}",
            "Accept-Encoding": "identity",
        }
        if start:
            headers["Range"] = f"bytes={start}-"
        download = pooch.HTTPDownloader(
            chunk_size=_BLOCK, timeout=TIMEOUT, headers=headers, hooks={"response": sink.look}
        )
        try:
            with contextlib.closing(sink):
                download(self._origin.url, sink, None)
        except requests.HTTPError as error:
            answer = error.response
            assert answer is not None
            if answer.status_code == 416 and start:
                if answer.headers.get("Content-Range") == f"bytes */{start}":
                    return  # the file ends where the part does
                self._part.unlink()  # longer than the file: it is of another one
                return self._connect()
            what = f"{host} answers {answer.status_code} {answer.reason} for {self._origin.url}"
            raise FetchError(_advice(self._file, what)) from error
        except requests.RequestException as error:
            if sink.begun:
                raise _BrokenError(sink.lack or _reason(error)) from error
            what = f"cannot reach {host}: {_reason(error)}"
            raise FetchError(_advice(self._file, what)) from error
        if sink.lack:
            raise _BrokenError(sink.lack)


class _Sink:
    """The part as a file that pooch writes to: it counts, tells and stops what has no end."""

    def __init__(
        self, file: DataFile, origin: Origin, part: Path, done: int, progress: Progress
    ) -> None:
        self._file, self._origin, self._part, self._progress = file, origin, part, progress
        self._done = done
        self._total: int | None = None
        self._stream: BinaryIO | None = None

    @property
    def begun(self) -> bool:
        """Whether the server has begun to send the file."""
        return self._stream is not None

    @property
    def lack(self) -> str:
        """How many bytes are missing, if the server said how many there are; else nothing."""
        missing = 0 if self._total is None else self._total - self._done
        return f"{missing:,} bytes are missing" if missing > 0 else ""

    def look(self, answer: requests.Response, *args: Any, **kwargs: Any) -> None:
        """Look at an answer before its content comes; where it redirects to, too."""
        following = urllib.parse.urljoin(answer.url, answer.headers.get("Location", ""))
        if not _safe(self._origin.url, following if answer.is_redirect else answer.url):
            what = f"{self._origin.host} redirects to an address without encryption"
            raise FetchError(_advice(self._file, what))
        if answer.is_redirect or not answer.ok:
            return
        if self._done and not _goes_on(answer, self._done):
            self._done = 0
        length = answer.headers.get("Content-Length", "")
        self._total = self._done + int(length) if length.isdigit() else None
        if self._total is not None and self._total > LIMIT:
            what = f"{answer.url} is said to have {self._total:,} bytes"
            raise WrongFileError(_advice(self._file, what))
        with _writing(self._part.parent):
            self._stream = self._part.open("ab" if self._done else "wb")
        self._progress(self._done, self._total)

    def write(self, block: bytes) -> None:
        """Add what has come."""
        assert self._stream is not None
        with _writing(self._part.parent):
            self._stream.write(block)
            self._stream.flush()  # what has come is there even if the process is killed
        self._done += len(block)
        self._progress(self._done, self._total)
        if self._done > LIMIT:
            raise WrongFileError(_advice(self._file, f"{self._origin.url} does not end"))

    def flush(self) -> None:
        """Do nothing: every block is flushed."""

    def close(self) -> None:
        """Close the part."""
        if self._stream is not None:
            self._stream.close()


def _reason(error: BaseException) -> str:
    """Say in the system's own words why there is no connection, if it had any."""
    if isinstance(error, requests.Timeout):
        return "timed out"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause.strerror or str(cause)
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def _safe(asked: str, given: str) -> bool:
    return given.startswith("https:") or not asked.startswith("https:")


def _goes_on(answer: requests.Response, start: int) -> bool:
    """Tell whether the answer begins at ``start``, or is the whole file after all."""
    sent = answer.headers.get("Content-Range", "")
    return answer.status_code == 206 and sent.startswith(f"bytes {start}-")


# -- unpacking ---------------------------------------------------------------------------------


def _unpack(file: DataFile, origin: Origin, packed: Path, out: BinaryIO) -> None:
    """Write the wanted content of a download."""
    try:
        if origin.member is None:
            with gzip.open(packed) as stream:
                _copy(stream, out, origin)
        else:
            with (
                zipfile.ZipFile(packed) as archive,
                archive.open(_member(archive, origin)) as stream,
            ):
                _copy(stream, out, origin)
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
    result = [infos[wanted]] if wanted in infos else same
    if len(result) != 1:
        count = "no" if not result else "more than one"
        raise WrongFileError(f"{origin.url} holds {count} file {last}; nothing was kept")
    info = result[0]
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


def _copy(stream: IO[bytes] | gzip.GzipFile, out: BinaryIO, origin: Origin) -> None:
    """Copy up to the limit, whatever the archive says of its size."""
    size = 0
    while block := stream.read(_BLOCK):
        size += len(block)
        if size > LIMIT:
            raise WrongFileError(
                f"what {origin.url} holds unpacks to more than {LIMIT:,} bytes; nothing was kept"
            )
        out.write(block)
