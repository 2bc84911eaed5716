"""Tables as people have them: delimiters, encodings, compression, Parquet, and damage."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

pytest.importorskip("pandas")
import pandas as pd

from ffcp.tables import reading
from ffcp.tables.errors import TableError


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "utf-16"])
def test_any_delimiter_and_encoding_is_told(tmp_path: Path, delimiter: str, encoding: str) -> None:
    text = delimiter.join(["naïve", "b"]) + "\n" + delimiter.join(["café", "007"]) + "\n"
    (tmp_path / "a.csv").write_bytes(text.encode(encoding))
    frame = reading.read(tmp_path / "a.csv")
    assert frame.columns.tolist() == ["naïve", "b"]
    assert frame.iloc[0].tolist() == ["café", "007"]


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".csv.bz2", ".csv.xz", ".parquet"])
def test_what_is_written_is_read_again(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    with reading.Writer(path) as writer:
        writer.add(pd.DataFrame({"a": [1.5, 2.0], "b": ["x", "y, z"]}))
        writer.add(pd.DataFrame({"a": [3.0], "b": ["é"]}))
    frame = reading.read(path)
    assert frame["b"].tolist() == ["x", "y, z", "é"]
    assert pd.to_numeric(frame["a"]).tolist() == [1.5, 2.0, 3.0]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_decimal_commas_are_told_and_said(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a;b\n1,5;x\n2,25;y\n")
    assert reading.sniff(tmp_path / "a.csv").decimal == ","
    assert "decimal commas" in reading.read(tmp_path / "a.csv").attrs["decisions"][0]


def test_commas_in_quotes_do_not_divide(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('a;b\n"x; y";1\n"z, w";2\n')
    assert reading.read(tmp_path / "a.csv")["a"].tolist() == ["x; y", "z, w"]


def test_nothing_appears_if_writing_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with reading.Writer(tmp_path / "a.csv") as writer:
            writer.add(pd.DataFrame({"a": [1]}))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"a,b\n1,2\n1,2,3\n", "cannot be divided into columns"),
        (b"a,a\n1,2\n", "several columns called 'a'"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(TableError, match=message):
        reading.read(tmp_path / "a.csv")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b"a,b\n" + b"1,2\n" * 10_000)
    (tmp_path / "a.csv.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    for name in ("a.csv.gz", "a.parquet", "nowhere.csv"):
        with pytest.raises(TableError, match=name):
            reading.read(tmp_path / name)


def test_a_table_without_rows_has_its_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n")
    assert reading.read(tmp_path / "a.csv").columns.tolist() == ["a", "b"]
