"""Tables as people have them: delimiters, encodings, compression, Parquet, and damage."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import pytest

pytest.importorskip("pandas")
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from ffcp.tables import cells, table_io
from ffcp.tables.errors import TableError


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "utf-16"])
def test_any_delimiter_and_encoding_is_told(tmp_path: Path, delimiter: str, encoding: str) -> None:
    text = delimiter.join(["naïve", "b"]) + "\n" + delimiter.join(["café", "007"]) + "\n"
    (tmp_path / "a.csv").write_bytes(text.encode(encoding))
    frame = table_io.read(tmp_path / "a.csv")
    assert frame.columns.tolist() == ["naïve", "b"]
    assert frame.iloc[0].tolist() == ["café", "007"]


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".csv.bz2", ".csv.xz", ".parquet"])
def test_what_is_written_is_read_again(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    with table_io.writer(path) as add:
        add(pd.DataFrame({"a": [1.5, 2.0]}), pd.DataFrame({"b": ["x", "y, z"]}))
        add(pd.DataFrame({"a": [3.0]}), pd.DataFrame({"b": ["é"]}))
    frame = table_io.read(path)
    assert frame["b"].tolist() == ["x", "y, z", "é"]
    assert pd.to_numeric(frame["a"]).tolist() == [1.5, 2.0, 3.0]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("place", ["cell", "name"])
@pytest.mark.parametrize("signs", [{}, {"delimiter": ";", "decimal": ","}])
def test_a_lone_carriage_return_ends_no_row(
    tmp_path: Path, place: str, signs: dict[str, str]
) -> None:
    cell, name = ("one\rtwo", "text") if place == "cell" else ("one", "te\rxt")
    frame = pd.DataFrame({name: [cell, "b", ""], "kind": pd.Categorical(["x", "y", "z\r"])})
    frame.attrs.update(signs)
    with table_io.writer(tmp_path / "out.csv") as add:
        add(frame, pd.DataFrame({"upper": [1.5, 2.0, float("nan")]}))
    again = table_io.read(tmp_path / "out.csv")
    assert again[name].tolist() == [cell, "b", ""]
    assert again["kind"].tolist() == ["x", "y", "z\r"]
    assert again["upper"].str.replace(",", ".").tolist() == ["1.5", "2.0", ""]


@pytest.mark.parametrize("far", [False, True])
def test_a_byte_that_is_not_utf8_among_letters_that_are_is_refused(
    tmp_path: Path, far: bool
) -> None:
    rows = "Zürich,1\n" * (200_000 if far else 3)
    data = f"town,y\n{rows}".encode() + "Genève,2\n".encode("cp1252")
    (tmp_path / "mixed.csv").write_bytes(data)
    line = data.count(b"\n")
    with pytest.raises(TableError, match=f"line {line} .*0xE8"):
        table_io.read(tmp_path / "mixed.csv")
    (tmp_path / "cut.csv").write_bytes("town,y\nZürich,1\nGenè".encode()[:-1])
    with pytest.raises(TableError, match="line 3"):
        table_io.read(tmp_path / "cut.csv")
    (tmp_path / "plain.csv").write_bytes("town,y\nGenève,2\nUri,1\n".encode("cp1252"))
    assert table_io.read(tmp_path / "plain.csv")["town"].tolist() == ["Genève", "Uri"]


def test_decimal_commas_are_told_and_said(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a;b\n1,5;x\n2,25;y\n")
    assert table_io.sniff(tmp_path / "a.csv").decimal == ","
    assert "decimal commas" in table_io.read(tmp_path / "a.csv").attrs["decisions"][0]


def test_commas_in_quotes_do_not_divide(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('a;b\n"x; y";1\n"z, w";2\n')
    assert table_io.read(tmp_path / "a.csv")["a"].tolist() == ["x; y", "z, w"]


def test_nothing_appears_if_writing_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with table_io.writer(tmp_path / "a.csv") as add:
            add(pd.DataFrame({"a": [1]}), pd.DataFrame({"b": [1]}))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"a,b\n1,2\n1,2,3\n", "a.csv"),
        (b"a,a\n1,2\n", "'a'"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(TableError, match=message):
        table_io.read(tmp_path / "a.csv")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b"a,b\n" + b"1,2\n" * 10_000)
    (tmp_path / "a.csv.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    for name in ("a.csv.gz", "a.parquet", "nowhere.csv"):
        with pytest.raises(TableError, match=name):
            table_io.read(tmp_path / name)


def test_a_table_without_rows_has_its_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n")
    assert table_io.read(tmp_path / "a.csv").columns.tolist() == ["a", "b"]


def test_cells_beyond_the_names_are_an_error_and_push_none_aside(tmp_path: Path) -> None:
    for text in ("a,b\n9,1,2\n8,3,4\n", "a,b\n9,7,1,2\n", "a,b\n1,2,\n3,4,\n"):
        (tmp_path / "a.csv").write_text(text)
        with pytest.raises(TableError, match="csv"):
            table_io.read(tmp_path / "a.csv")


@pytest.mark.parametrize("text", ["a, a\n1,2\n", "\n\na,a\n1,2\n"])
def test_names_that_differ_by_blanks_alone_are_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(TableError, match="'a'"):
        table_io.read(tmp_path / "a.csv")


def test_names_longer_than_what_is_looked_at_first_are_read_whole(tmp_path: Path) -> None:
    names = [f"column {number}" for number in range(20_000)]
    (tmp_path / "a.csv").write_text(",".join(names) + "\n" + ",".join(["1"] * 20_000) + "\n")
    assert table_io.read(tmp_path / "a.csv").columns.tolist() == names


def test_a_blank_line_of_one_column_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n\n3\n")
    assert table_io.read(tmp_path / "a.csv")["a"].tolist() == ["1", "", "3"]
    (tmp_path / "a.csv").write_text("\na\n1\n")
    assert table_io.read(tmp_path / "a.csv")["a"].tolist() == ["1"]


@pytest.mark.parametrize("text", ["a b\n1 2\n3 4\n", "a   b\n1   2\n3   4\n", "a:b\n1:2\n3:4\n"])
def test_blanks_and_colons_divide_where_nothing_else_does(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    assert table_io.read(tmp_path / "a.csv").to_dict("list") == {"a": ["1", "3"], "b": ["2", "4"]}


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(b"a,b\n1,2\n"),
        bz2.compress(b"a,b\n1,2\n"),
        lzma.compress(b"a,b\n1,2\n"),
        b"PK\x03\x04 a spreadsheet",
        b"PAR1 and so on",
        "a,b\n1,2\n".encode("utf-16-le"),
    ],
    ids=["gz", "bz2", "xz", "zip", "parquet", "utf-16"],
)
def test_what_is_no_text_is_refused_whatever_it_is_called(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(TableError, match="csv"):
        table_io.read(tmp_path / "a.csv")


def test_decimal_commas_behind_groups_of_three_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a;b\n1.234,56;x\n12.345,00;y\n")
    assert table_io.sniff(tmp_path / "a.csv").decimal == ","


def test_a_named_index_of_parquet_is_a_column(tmp_path: Path) -> None:
    frame = pd.DataFrame({"town": ["Bern", "Chur"], "size": [1, 2]})
    frame.set_index("town").to_parquet(tmp_path / "a.parquet")
    assert sorted(table_io.read(tmp_path / "a.parquet").columns) == ["size", "town"]
    frame.set_axis([5, 3]).to_parquet(tmp_path / "a.parquet")
    assert table_io.read(tmp_path / "a.parquet").columns.tolist() == ["town", "size"]


_LARGE = [2**53, 2**53 + 1, 2**63 - 1, 2**63 - 2]


@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize("way", ["int64", "uint64", "Int64", "object", "parquet", "csv"])
def test_large_whole_numbers_stay_apart_as_words(tmp_path: Path, way: str, nulls: bool) -> None:
    numbers = [*_LARGE, None] if nulls else _LARGE
    if way in ("parquet", "csv"):
        table = pa.table({"a": pa.array(numbers, pa.int64()), "b": pa.array(range(len(numbers)))})
        write = pq.write_table if way == "parquet" else pa_csv.write_csv
        write(table, tmp_path / f"large.{way}")
        series = table_io.read(tmp_path / f"large.{way}")["a"]
    else:
        kind = {"int64": "Int64", "uint64": "UInt64"}.get(way, way) if nulls else way
        series = pd.Series(numbers, dtype=kind)
    assert cells.words(series).tolist() == [str(n) for n in _LARGE] + [""] * nulls
    values, missing, bad = cells.numbers(series)
    assert values[:4].tolist() == [float(n) for n in _LARGE]
    assert missing.tolist() == [False] * 4 + [True] * nulls
    assert not bad.any()


def test_a_quotation_mark_that_is_not_closed_is_told(tmp_path: Path) -> None:
    path = tmp_path / "open.csv"
    path.write_text('a,y\n1,2\n"4,5\n6,7\n')
    with pytest.raises(TableError, match=r"a quotation mark that is not closed.*row 2"):
        table_io.read(path)


def test_hostile_text_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "hostile.csv.gz"
    text = '\ufeffGröße m²;タイプ;prix €\n1,5;"a ""quoted""; line\nbreak";2,5\n3;b,c;4,25\n'
    path.write_bytes(gzip.compress(text.encode()))
    frame = table_io.read(path)
    assert list(frame.columns) == ["Größe m²", "タイプ", "prix €"]
    assert frame["タイプ"].tolist() == ['a "quoted"; line\nbreak', "b,c"]
    assert frame.attrs["decimal"] == ","


@pytest.mark.parametrize("table", [{"a": [1]}, [[1, 2]], pd.Series([1])])
def test_what_is_neither_file_nor_frame_is_told(table: object) -> None:
    with pytest.raises(TableError, match=f"a file or a frame, got '{type(table).__name__}'"):
        table_io.as_given(table)


def test_a_table_of_arrow_is_a_frame() -> None:
    assert table_io.as_given(pa.table({"a": [1, 2]}))["a"].tolist() == [1, 2]
