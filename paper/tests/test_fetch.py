"""Downloads: verified, unpacked safely. The only server is one of the tests' own."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import socket
import stat
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ffcp_paper.cli import app
from ffcp_paper.data import datasets, download, fetch
from ffcp_paper.data.download import (
    FetchError,
    Origin,
    UnverifiedError,
    WrongFileError,
    fetch_file,
)
from ffcp_paper.data.files import DataFile

CONTENT = b"".join(f"{number},{number * 7 % 1000}\n".encode() for number in range(40_000))
SHA = hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves ``pages``; can break connections."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pages: dict[str, bytes] = {}
        self.says_length = True
        self.breaks_after: list[int] = []  # bytes of the next answers, before they break off
        self.redirects: dict[str, str] = {}
        self.asked: list[str] = []  # the paths of all requests

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path = self.path.lstrip("/")
        self.server.asked.append(path)
        if path in self.server.redirects:
            self.send_response(302)
            self.send_header("Location", self.server.redirects[path])
            self.end_headers()
            return
        if path not in self.server.pages:
            self.send_error(404)
            return
        body = self.server.pages[path]
        self.send_response(200)
        if self.server.says_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        end = self.server.breaks_after.pop(0) if self.server.breaks_after else None
        self.wfile.write(body[:end])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("FFCP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("no_proxy", "*")
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


FILE = DataFile("tabular/numbers.csv", "the tests", SHA)


def zipped(members: dict[str, bytes], links: bool = False) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            if links:
                info.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(info, content)
    return buffer.getvalue()


def left() -> list[str]:
    """List what is in the data directory, with whatever is hidden or temporary."""
    return sorted(path.name for path in FILE.place.parent.iterdir())


@pytest.mark.parametrize("says_length", [True, False])
def test_a_file_comes_whole_and_progress_is_told(server: Server, says_length: bool) -> None:
    server.pages["numbers.csv"] = CONTENT
    server.says_length = says_length
    told: list[tuple[int, int | None]] = []
    origin = Origin(server.url("numbers.csv"))
    path = fetch_file(FILE, origin, lambda done, total: told.append((done, total)))
    assert path == FILE.place
    assert path.read_bytes() == CONTENT
    assert left() == ["numbers.csv"]
    done = [d for d, _ in told]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, len(CONTENT))
    assert {total for _, total in told} == {len(CONTENT) if says_length else None}


def test_a_broken_connection_keeps_nothing(server: Server) -> None:
    server.pages["numbers.csv"] = CONTENT
    server.breaks_after = [100_000]
    with pytest.raises(FetchError, match="127"):
        fetch_file(FILE, Origin(server.url("numbers.csv")))
    assert left() == []


def test_an_interruption_keeps_nothing(server: Server) -> None:
    server.pages["numbers.csv"] = CONTENT

    def interrupt(done: int, total: int | None) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_file(FILE, Origin(server.url("numbers.csv")), interrupt)
    assert left() == []


def test_a_wrong_checksum_keeps_nothing(server: Server) -> None:
    server.pages["numbers.csv"] = CONTENT + b"1,2\n"
    with pytest.raises(WrongFileError, match="sha256"):
        fetch_file(FILE, Origin(server.url("numbers.csv")))
    assert left() == []


def test_a_wrong_file_leaves_the_old_one(server: Server) -> None:
    FILE.place.parent.mkdir(parents=True)
    FILE.place.write_text("old")
    server.pages["numbers.csv"] = b"wrong"
    with pytest.raises(WrongFileError):
        fetch_file(FILE, Origin(server.url("numbers.csv")))
    assert FILE.place.read_text() == "old"


def test_what_is_not_there_is_told_in_one_line(server: Server) -> None:
    with pytest.raises(FetchError) as raised:
        fetch_file(FILE, Origin(server.url("nowhere.csv")))
    message = str(raised.value)
    assert all(word in message for word in ("404", "nowhere.csv", str(FILE.place.parent)))
    assert "\n" not in message
    assert left() == []


def test_no_network_is_told_in_one_line(server: Server) -> None:
    with socket.socket() as closed:  # bound, but nobody listens
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/numbers.csv"
        with pytest.raises(FetchError) as raised:
            fetch_file(FILE, Origin(url))
    message = str(raised.value)
    assert "127.0.0.1" in message
    assert message.endswith("by hand")


def test_a_silent_server_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/numbers.csv"
        with pytest.raises(FetchError, match="Timeout"):
            fetch_file(FILE, Origin(url))


def test_a_folder_that_cannot_be_written_is_told(server: Server) -> None:
    FILE.place.parent.parent.mkdir()
    FILE.place.parent.write_text("a file where the folder should be")
    with pytest.raises(FetchError, match="FFCP_DATA"):
        fetch_file(FILE, Origin(server.url("numbers.csv")))


def test_redirections_are_followed_but_not_out_of_encryption(server: Server) -> None:
    server.pages["numbers.csv"] = CONTENT
    server.redirects["old.csv"] = server.url("numbers.csv")
    fetch_file(FILE, Origin(server.url("old.csv")))
    assert FILE.place.read_bytes() == CONTENT
    assert download._is_safe("https://a/b", ["https://a/b", "https://c/d"])
    assert not download._is_safe("https://a/b", ["http://a/b", "https://c/d"])


# -- checksums ---------------------------------------------------------------------------------


def test_a_file_without_a_known_checksum_is_refused_unless_asked_for(server: Server) -> None:
    server.pages["numbers.csv"] = CONTENT
    unknown, origin = dataclasses.replace(FILE, sha256=None), Origin(server.url("numbers.csv"))
    with pytest.raises(UnverifiedError, match="checksum") as raised:
        fetch_file(unknown, origin)
    assert "--unverified" in str(raised.value)
    assert server.asked == []
    assert fetch_file(unknown, origin, unverified=True).read_bytes() == CONTENT


def test_a_known_checksum_counts_even_if_others_need_not_be_known(server: Server) -> None:
    server.pages["numbers.csv"] = CONTENT + b"1,2\n"
    with pytest.raises(WrongFileError, match="sha256"):
        fetch_file(FILE, Origin(server.url("numbers.csv")), unverified=True)
    assert left() == []


def test_the_command_refuses_and_says_how_to_go_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = datasets.DATASETS["meps19"].files[0]
    origin = Origin(server.url("h181ssp.zip"), "h181.ssp")
    monkeypatch.setitem(fetch.ORIGINS, file.path, origin)
    server.pages["h181ssp.zip"] = zipped({"h181.ssp": CONTENT})
    refused = CliRunner().invoke(app, ["data", "fetch", "meps19"], env={"COLUMNS": "500"})
    assert refused.exit_code == 1
    assert "the checksum of h181.ssp is unknown" in refused.output
    taken = CliRunner().invoke(app, ["data", "fetch", "meps19", "--unverified"])
    assert taken.exit_code == 0, taken.output
    assert file.place.read_bytes() == CONTENT


# -- archives ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["Data/numbers.csv", "numbers.csv", "Elsewhere/numbers.csv", "DATA/NUMBERS.CSV"],
)
def test_only_the_wanted_member_is_unpacked(server: Server, name: str) -> None:
    others = {"../evil.csv": b"evil", "/etc/evil": b"evil", "other.csv": b"1,2\n"}
    server.pages["all.zip"] = zipped({**others, name: CONTENT})
    fetch_file(FILE, Origin(server.url("all.zip"), "Data/numbers.csv"))
    assert FILE.place.read_bytes() == CONTENT
    assert left() == ["numbers.csv"]
    assert sorted(p.name for p in FILE.place.parent.parent.iterdir()) == ["tabular"]


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (zipped({"numbers.csv": b"/etc/passwd"}, links=True), "sha256"),
        (zipped({"other.csv": CONTENT}), "0 files"),
        (zipped({"a/numbers.csv": b"1", "b/numbers.csv": b"2"}), "2 files"),
        (zipped({"numbers.csv": b"1,2\n"}), "sha256"),
        (zipped({"numbers.csv": CONTENT})[:-30], "archive"),
        (b"<html>We moved.</html>", "archive"),
    ],
)
def test_a_bad_archive_is_refused_and_nothing_kept(
    server: Server, archive: bytes, message: str
) -> None:
    server.pages["all.zip"] = archive
    with pytest.raises(WrongFileError, match=message):
        fetch_file(FILE, Origin(server.url("all.zip"), "numbers.csv"))
    assert left() == []
    assert not (FILE.place.parent.parent / "numbers.csv").exists()


def test_damage_within_an_archive_is_found(server: Server) -> None:
    archive = bytearray(zipped({"numbers.csv": CONTENT}))
    archive[len(archive) // 2] ^= 255
    server.pages["all.zip"] = bytes(archive)
    unknown = dataclasses.replace(FILE, sha256=None)  # the archive's own checks must do
    with pytest.raises(WrongFileError, match="archive"):
        fetch_file(unknown, Origin(server.url("all.zip"), "numbers.csv"), unverified=True)
    assert left() == []


def test_an_archive_that_unpacks_without_end_is_stopped(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = bytearray(zipped({"numbers.csv": bytes(5_000_000)}))
    monkeypatch.setattr(download, "LIMIT", 1_000_000)
    server.pages["all.zip"] = bytes(bomb)
    origin = Origin(server.url("all.zip"), "numbers.csv")
    with pytest.raises(WrongFileError, match="1,000,000"):
        fetch_file(FILE, origin)
    server.pages["numbers.csv.gz"] = gzip.compress(bytes(5_000_000))
    with pytest.raises(WrongFileError, match="1,000,000"):
        fetch_file(FILE, Origin(server.url("numbers.csv.gz")))
    assert left() == []


@pytest.mark.parametrize("says_length", [True, False])
def test_a_download_without_end_is_stopped(
    server: Server, monkeypatch: pytest.MonkeyPatch, says_length: bool
) -> None:
    monkeypatch.setattr(download, "LIMIT", 100_000)
    server.pages["numbers.csv"] = CONTENT
    server.says_length = says_length
    with pytest.raises(FetchError, match="100,000"):
        fetch_file(FILE, Origin(server.url("numbers.csv")))
    assert left() == []


@pytest.mark.parametrize("cut", [False, True])
def test_a_gzip_file_is_unpacked(server: Server, cut: bool) -> None:
    packed = gzip.compress(CONTENT)
    server.pages["numbers.csv.gz"] = packed[:-50] if cut else packed
    origin = Origin(server.url("numbers.csv.gz"))
    if cut:
        with pytest.raises(WrongFileError, match="archive"):
            fetch_file(FILE, origin)
        assert left() == []
    else:
        assert fetch_file(FILE, origin).read_bytes() == CONTENT


# -- data sets by name -------------------------------------------------------------------------


@pytest.fixture
def bio(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The data set bio as a small one, from the test's server."""
    content = b"RMSD,F1,F2\n1.5,2,3\n4.5,5,6\n"
    data = datasets.DATASETS["bio"]
    file = dataclasses.replace(data.files[0], sha256=hashlib.sha256(content).hexdigest())
    own = dataclasses.replace(data, files=(file,), rows=2, columns=2)
    monkeypatch.setitem(datasets.DATASETS, "bio", own)
    monkeypatch.setenv("FFCP_CACHE", str(file.place.parents[2] / "cache"))
    monkeypatch.setitem(fetch.ORIGINS, file.path, Origin(server.url("casp.zip"), "CASP.csv"))
    server.pages["casp.zip"] = zipped({"CASP.csv": content})
    return server


def test_a_data_set_is_fetched_once_and_can_be_loaded(bio: Server) -> None:
    for _ in range(2):
        (path,) = fetch.fetch("bio")
        assert path == datasets.DATASETS["bio"].files[0].place
    assert len(bio.asked) == 1
    assert datasets.load("bio").y.tolist() == [1.5, 4.5]


def test_a_damaged_file_is_fetched_again(bio: Server) -> None:
    place = datasets.DATASETS["bio"].files[0].place
    place.parent.mkdir(parents=True)
    place.with_name("CASP.csv.gz").write_bytes(b"damaged")
    fetch.fetch("bio")
    assert datasets.load("bio").y.tolist() == [1.5, 4.5]


def test_a_survey_file_of_another_form_is_not_fetched(server: Server) -> None:
    FILE.place.parent.mkdir(parents=True)
    csv = FILE.place.with_name("h181.csv")
    csv.write_text("PANEL\n")
    assert fetch.fetch("meps19") == [csv]


def test_what_cannot_be_downloaded_is_told_in_one_line(server: Server) -> None:
    with pytest.raises(FetchError, match=r"train\.csv"):
        fetch.fetch("bike")
    with pytest.raises(ValueError, match="beer"):
        fetch.fetch("beer")


def test_every_file_has_an_official_address_or_a_way_by_hand() -> None:
    paths = {file.path for data in datasets.DATASETS.values() for file in data.files}
    assert paths == set(fetch.ORIGINS) | set(fetch.BY_HAND)
    assert not set(fetch.ORIGINS) & set(fetch.BY_HAND)
    for origin in fetch.ORIGINS.values():
        assert origin.url.startswith("https://")
        assert origin.name.endswith(".zip") == (origin.member is not None)
    assert {name for name in datasets.DATASETS if fetch.terms(name)} == {
        "meps19", "meps20", "meps21",
    }  # fmt: skip
