"""Data files: parsed as documented, checked, cached; and results that survive interruption."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from ffcp import FFCPWarning
from ffcp_paper.cli import app
from ffcp_paper.data import datasets, inventory, parsers, result_cache
from ffcp_paper.data.files import DataFile, MissingDataError, cache_dir, data_dir
from ffcp_paper.experiments import group_coverage, studies
from ffcp_paper.networks.regression import mlp
from ffcp_paper.training.regression import train_as_published

SMALL = {
    "CASP.csv": '"RMSD","F1","F2"\n1.5,2,3\n4.5,5,6\n',
    "STAR.csv": (
        '"","gender","birth","readk","read1","read2","read3","mathk","math1","math2","math3",'
        '"lunchk","lunch1","schoolid3"\n'
        '"7","male",1980.5,1,2,3,4,5,6,7,8,"free","non-free","63"\n'
        '"8","female",1980.0,1,1,1,1,1,1,1,1,"free","free","64"\n'
        '"9","female",1980.0,1,1,1,1,1,1,1,NA,"free","free","64"\n'
    ),
    "bike_train.csv": (
        "datetime,season,holiday,weather,temp,casual,registered,count\n"
        "2011-01-01 00:00:00,1,0,1,9.84,3,13,16\n"
        "2012-12-19 23:00:00,4,0,2,9.02,8,32,40\n"
    ),
    "communities.data": "8,?,?,Lakewood,1,0.19,?,0.5,0.20\n53,?,?,Tukwila,1,0.1,0.3,?,0.67\n",
    "communities_attributes.csv": "attributes\n"
    + "".join(
        f"{name}  \n"
        for name in (
            "state", "county", "community", "communityname", "fold", "population", "OtherPerCap",
            "LemasSwornFT", "ViolentCrimesPerPop",
        )
    ),
    "blogData_train.csv": "1,2,3\n4,5,6\n",
    "Features_Variant_1.csv": "9,9,9\r\n1,2,3\r\n4,5,6\r\n",
    "Features_Variant_2.csv": "9,9,9\n1,2,3\n4,5,6\n7,8,9\n",
}  # fmt: skip
EXPECTED = {
    "bio": ([[2, 3], [5, 6]], [1.5, 4.5], ("F1", "F2")),
    # male/female and free/non-free in alphabetical order; the row with NA is gone.
    "star": (
        [[7, 1, 1980.5, 1, 63], [8, 0, 1980, 0, 64]],
        [36, 8],
        ("id", "gender", "birth", "lunch1", "schoolid3"),
    ),
    "bike": (
        [[0, 9.84, 1, 0, 1, 0, 0, 5, 1, 2011], [0, 9.02, 0, 1, 0, 1, 23, 2, 12, 2012]],
        [16, 40],
        ("holiday", "temp", "season_1", "season_4", "weather_1", "weather_2", "hour", "day",
         "month", "year"),
    ),
    # OtherPerCap is filled with its mean; LemasSwornFT holds "?" and goes.
    "com": ([[0.19, 0.3], [0.1, 0.3]], [0.2, 0.67], ("population", "OtherPerCap")),
    "blog": ([[1, 2], [4, 5]], [3, 6], ("0", "1")),
    "fb1": ([[1, 2], [4, 5]], [3, 6], ("0", "1")),
    "fb2": ([[1, 2], [4, 5], [7, 8]], [3, 6, 9], ("0", "1")),
}  # fmt: skip


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FFCP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data" / "tabular").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def small(folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All data sets, two rows each, with the checksums of these files."""
    for name, content in SMALL.items():
        path = folders / "data" / "tabular" / name
        if name == "CASP.csv":  # one of them compressed
            path.with_name(name + ".gz").write_bytes(gzip.compress(content.encode()))
        else:
            path.write_text(content, newline="")
    for name, (x, _, names) in EXPECTED.items():
        data = datasets.DATASETS[name]
        own = tuple(
            dataclasses.replace(
                file, sha256=hashlib.sha256(SMALL[Path(file.path).name].encode()).hexdigest()
            )
            for file in data.files
        )
        other = dataclasses.replace(data, files=own, rows=len(x), columns=len(names))
        monkeypatch.setitem(datasets.DATASETS, name, other)
    return folders


@pytest.mark.parametrize("name", EXPECTED)
def test_every_format_is_read_as_documented(small: Path, name: str) -> None:
    x, y, names = EXPECTED[name]
    for _ in range(2):  # from the file, then from the cache
        table = datasets.load(name)
        np.testing.assert_allclose(table.x, x, rtol=1e-6)
        np.testing.assert_allclose(table.y, y, rtol=1e-6)
        assert table.names == names
        assert table.x.dtype == table.y.dtype == np.float32
    assert list((small / "cache" / "datasets").iterdir())


@pytest.mark.parametrize("name", [*EXPECTED, "meps19", "meps20", "meps21"])
def test_a_missing_file_is_named_with_its_source_and_place(folders: Path, name: str) -> None:
    file = datasets.DATASETS[name].files[0]
    with pytest.raises(MissingDataError, match="FFCP_DATA") as raised:
        datasets.load(name)
    for part in (file.path, file.source, str(folders / "data"), "FFCP_DATA"):
        assert part in str(raised.value)


def test_another_file_of_that_name_is_refused(small: Path) -> None:
    (small / "data" / "tabular" / "blogData_train.csv").write_text("1,2,3\n4,5,7\n")
    with pytest.raises(ValueError, match="sha256"):
        datasets.load("blog")


def test_a_damaged_cache_file_is_parsed_anew(small: Path) -> None:
    table = datasets.load("blog")
    (kept,) = (small / "cache" / "datasets").iterdir()
    whole = kept.read_bytes()
    for damaged in (
        b"",
        b"no archive",
        b"PK\x03\x04 cut off",
        whole[:-9],
        whole[: len(whole) // 2],
    ):
        kept.write_bytes(damaged)
        with pytest.warns(FFCPWarning, match="cache"):
            np.testing.assert_array_equal(datasets.load("blog").x, table.x)
        assert kept.read_bytes() == whole
    for position in range(0, len(whole), 17):
        flipped = bytearray(whole)
        flipped[position] ^= 255
        kept.write_bytes(flipped)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FFCPWarning)  # a byte that no one reads is no damage
            again = datasets.load("blog")
        np.testing.assert_array_equal(again.x, table.x)
        np.testing.assert_array_equal(again.y, table.y)
        assert again.names == table.names


def test_the_cache_is_used_until_the_file_is_another_one(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = datasets.load("fb2")
    data = datasets.DATASETS["fb2"]
    broken = dataclasses.replace(data, parse=lambda stream: pytest.fail("parsed twice"))
    monkeypatch.setitem(datasets.DATASETS, "fb2", broken)
    np.testing.assert_array_equal(datasets.load("fb2").x, first.x)
    file = dataclasses.replace(data.files[0], sha256=None)
    monkeypatch.setitem(datasets.DATASETS, "fb2", dataclasses.replace(data, files=(file,)))
    file.place.write_text("0,0,0\n5,5,5\n6,6,6\n7,7,7\n")
    np.testing.assert_array_equal(datasets.load("fb2").y, [5, 6, 7])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1,2\n3,4\n5,6\n", "fb2"),
        ("1,2,3\n4,abc,6\n", "Features_Variant_2.csv"),
        ("1,2,3\n4,,6\n", "fb2"),
        ("", "fb2"),
    ],
)
def test_a_file_without_checksum_is_checked_by_what_it_holds(
    small: Path, monkeypatch: pytest.MonkeyPatch, content: str, message: str
) -> None:
    data = datasets.DATASETS["fb2"]
    file = dataclasses.replace(data.files[0], sha256=None)
    monkeypatch.setitem(datasets.DATASETS, "fb2", dataclasses.replace(data, files=(file,)))
    file.place.write_text(content)
    with pytest.raises(ValueError, match=message):
        datasets.load("fb2")
    assert not (small / "cache" / "datasets").exists()


def test_synthetic_data_follows_its_formula() -> None:
    table = datasets.load("synthetic", seed=3)
    assert table.x.shape == (10_000, 100)
    assert table.x.dtype == table.y.dtype == np.float32
    assert 0 <= table.x.min() < 0.001
    assert 0.999 < table.x.max() <= 1
    weights, (rest,), *_ = np.linalg.lstsq(table.x, table.y, rcond=None)
    # 10,000 rows determine each weight to 0.035, and the variance of the noise to 0.014.
    assert weights.min() > -0.2
    assert weights.max() < 1.2
    assert weights.mean() == pytest.approx(0.5, abs=0.15)
    assert rest / 9_900 == pytest.approx(1, abs=0.06)
    np.testing.assert_array_equal(datasets.load("synthetic", seed=3).y, table.y)
    assert not np.array_equal(datasets.load("synthetic").y, table.y)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="beer"):
        datasets.load("beer")


def test_where_data_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("FFCP_DATA", "FFCP_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "ffcp"
    assert data_dir() == tmp_path / "ffcp" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "ffcp"
    monkeypatch.setenv("FFCP_DATA", "~/there")
    assert data_dir() == Path.home() / "there"


def test_scaling_looks_at_the_training_rows_alone() -> None:
    random = np.random.default_rng(0)
    table = datasets.Table(random.normal(5, 3, (500, 2)), random.normal(9, 1, 500), ("a", "b"))
    parts = datasets.split(table, seed=1)
    assert parts.x_train.mean(dim=0).abs().max() < 1e-5
    assert (parts.x_train.std(dim=0, correction=0) - 1).abs().max() < 1e-5
    assert parts.y_train.abs().mean() == pytest.approx(1)
    assert parts.x_cal.mean(dim=0).abs().max() > 1e-3
    assert [len(y) for y in (parts.y_train, parts.y_cal, parts.y_test)] == [200, 200, 100]
    units = table.y.sum() / sum(float(y.sum()) for y in (parts.y_train, parts.y_cal, parts.y_test))
    everyone = torch.cat([parts.y_train, parts.y_cal, parts.y_test]) * units
    np.testing.assert_allclose(np.sort(everyone.numpy()), np.sort(table.y), rtol=1e-5)


SHAPES = {
    "bike": (10_886, 18), "com": (1_994, 100), "bio": (45_730, 9), "star": (2_161, 39),
    "blog": (52_397, 280), "fb1": (40_948, 53), "fb2": (81_311, 53), "meps19": (15_785, 139),
    "meps20": (17_541, 139), "meps21": (15_656, 139), "synthetic": (10_000, 100),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_the_real_files_have_the_shapes_of_the_papers(name: str) -> None:
    missing = datasets.DATASETS[name].missing
    if missing:
        pytest.skip(f"{missing[0].path} is not there: set FFCP_DATA")
    assert datasets.load(name).x.shape == SHAPES[name]


def test_the_paper_s_data_sets_are_known_in_its_order() -> None:
    assert list(datasets.DATASETS) == [
        "synthetic", "com", "fb1", "fb2", "meps19", "meps20", "meps21", "star", "bio", "blog",
        "bike",
    ]  # fmt: skip
    assert {name: (d.rows, d.columns) for name, d in datasets.DATASETS.items()} == SHAPES


# -- the further ones --------------------------------------------------------------------------


@pytest.mark.parametrize("name", datasets.FURTHER)
def test_a_further_data_set_has_its_shape_or_says_what_is_missing(name: str) -> None:
    data = datasets.known(name)
    if data.missing:
        with pytest.raises(MissingDataError, match=r"tabular_more.*comes from"):
            data.files[0].require()
        pytest.skip(f"{data.missing[0].path} is not there: set FFCP_DATA")
    assert datasets.load(name).x.shape == (data.rows, data.columns)


def test_a_table_with_words_codes_and_gaps_becomes_numbers() -> None:
    text = (
        "id,date,size,kind,zip,y\n7,20141003T000000,4,None,5,1\n8,20141001T000000,,b,6,2\n"
        "9,20141002T000000,2,b,5,3"
    )
    read = parsers.table(io.BytesIO(text.encode()), "y", ("id",), codes=("zip",), day="date")
    frame, target = read[0].astype(float), read[1]
    assert frame["date"].tolist() == [2, 0, 1]
    assert frame["size"].tolist() == [4, 3, 2]  # the median of 4 and 2
    assert frame["kind_None"].tolist() == [1, 0, 0]  # a level, not a missing value
    assert frame["zip_6"].tolist() == [0, 1, 0]
    assert list(frame) == ["date", "size", "kind_None", "kind_b", "zip_5", "zip_6"]
    assert target.tolist() == [1, 2, 3]


def test_a_series_is_read_and_divided_in_the_order_of_time() -> None:
    times = ["2012-10-02 09:30", "2012-10-01 23:00", "2012-10-02 09:30", "2013-01-06 00:00"]
    text = "\n".join(["when,y", *(f"{time},{row}" for row, time in enumerate(times))])
    frame, target = parsers.table(io.BytesIO(text.encode()), "y", when="when")
    assert target.tolist() == [1, 0, 3]  # sorted; of equal times the first
    assert frame["hour"].tolist() == [23, 9.5, 0]
    assert frame["day"].tolist() == [0, 1, 6]
    assert frame["month"].tolist() == [10, 10, 1]
    y = np.arange(1, 101)
    series = datasets.Table(y[:, None].astype(np.float32), y.astype(np.float32), ("x",))
    parts = datasets.split(series, seed=3, in_time=True)
    unit = float(y[:40].mean())
    assert not torch.equal(parts.y_train, parts.y_train.sort().values)  # in no order
    for part, expected in (
        (parts.y_train.sort().values, y[:40]),
        (parts.y_cal, y[40:80]),
        (parts.y_test, y[80:]),
    ):
        np.testing.assert_allclose(part * unit, expected, rtol=1e-5)


def test_a_stretch_of_a_series_depends_on_the_seed_and_keeps_its_order() -> None:
    y = np.arange(1000, dtype=np.float32)
    series = datasets.Table(y[:, None], y, ("x",))
    starts = set()
    for seed in range(5):
        some = studies._subset(series, 100, seed).y
        np.testing.assert_array_equal(np.diff(some), 1)
        starts.add(float(some[0]))
    assert len(starts) == 5
    assert len(set(np.diff(studies._subset(series, 100, None).y))) > 1


# -- the survey --------------------------------------------------------------------------------

YES_NO = [
    "HIBPDX", "CHDDX", "ANGIDX", "MIDX", "OHRTDX", "STRKDX", "EMPHDX", "CHBRON53", "CHOLDX",
    "CANCERDX", "DIABDX", "JTPAIN53", "ARTHDX", "ADHDADDX", "PREGNT53", "WLKLIM53", "ACTLIM53",
    "SOCLIM53", "COGLIM53", "DFHEAR42", "DFSEE42", "ADSMOK42",
]  # fmt: skip
OTHERS = [
    "ACTDTY53", "HONRDC53", "RTHLTH53", "MNHLTH53", "FTSTU53X", "ARTHTYPE", "ASTHDX", "EMPST53",
    "POVCAT15", "INSCOV15", "SEX", "REGION53", "MARRY53X", "EDUCYR", "HIDEG",
]  # fmt: skip
PERSON = {
    **dict.fromkeys([*YES_NO, *OTHERS], 1.0),
    "PANEL": 19.0, "HISPANX": 2.0, "RACEV2X": 1.0, "PHQ242": 0.0, "AGE53X": 44.0, "PCS42": 51.25,
    "MCS42": -1.0, "K6SUM42": 3.0, "PERWT15F": 4711.125, "OBTOTV15": 5.0, "OPTOTV15": 0.0,
    "ERTOT15": 1.0, "IPNGTD15": 2.0, "HHTOTD15": 0.0, "UNUSED": 1.0,
}  # fmt: skip
SECOND = {"HISPANX": 1.0, "PHQ242": 6.0, "HIBPDX": -1.0, "SEX": 2.0, "OBTOTV15": 0.0}
LEFT_OUT: list[dict[str, float]] = [
    {"PANEL": 20.0}, {"REGION53": -1.0}, {"AGE53X": -1.0}, {"MARRY53X": -7.0}, {"ASTHDX": -1.0},
    {"CHOLDX": -8.0}, {"EDUCYR": -9.0}, {"HIDEG": -2.0}, {"INSCOV15": -3.0}, {"ERTOT15": -1.0},
    {"PCS42": float("nan")},
]  # fmt: skip
SURVEY = [PERSON | change for change in ({}, *LEFT_OUT, SECOND)]


def ibm_double(value: float) -> bytes:
    """Code a number as SAS does: sign, exponent of 16 plus 64, 56 bits of a fraction."""
    if value != value:
        return b"." + bytes(7)
    if value == 0:
        return bytes(8)
    exponent, fraction = 64, abs(value)
    while fraction >= 1:
        exponent, fraction = exponent + 1, fraction / 16
    while fraction < 1 / 16:
        exponent, fraction = exponent - 1, fraction * 16
    sign = 128 if value < 0 else 0
    return bytes([sign | exponent]) + int(fraction * 2**56).to_bytes(7, "big")


def transport(rows: list[dict[str, float]]) -> bytes:
    """Write a SAS transport file, version 5: numbers, and a column of words as in the survey."""

    def header(kind: str, end: str = "0" * 30) -> str:
        return f"HEADER RECORD*******{kind:<8}HEADER RECORD!!!!!!!{end}  "

    date = "01JAN17:00:00:00"
    names = ["DUPERSID", *rows[0]]
    parts = [
        header("LIBRARY"),
        f"SAS     SAS     SASLIB  9.4     X64_7PRO{'':24}{date}",
        f"{date:<80}",
        header("MEMBER", "000000000000000001600000000140"),
        header("DSCRPTR"),
        f"SAS     H181    SASDATA 9.4     X64_7PRO{'':24}{date}",
        f"{date:<80}",
        header("NAMESTR", f"000000{len(names):04d}{'0' * 20}"),
    ]
    fields, position = b"", 0
    for number, name in enumerate(names):
        # Codes are kept in 3 bytes, as SAS does to save room.
        size = 8 if number == 0 or name in ("PCS42", "PERWT15F") else 3
        kind = 2 if number == 0 else 1
        fields += struct.pack(
            ">hhhh8s40s8shhh2s8shhl52s", kind, 0, size, number, name.encode().ljust(8),
            b" " * 40, b" " * 8, 0, 0, 0, b"", b" " * 8, 0, 0, position, b"",
        )  # fmt: skip
        position += size
    data = b""
    for row in rows:
        data += b"\xc9d 1    "
        for name, value in row.items():
            data += ibm_double(value)[: 8 if name in ("PCS42", "PERWT15F") else 3]
    blocks = [part.encode() for part in parts] + [fields, header("OBS").encode(), data]
    return b"".join(block + b" " * (-len(block) % 80) for block in blocks)


def comma_separated(rows: list[dict[str, float]]) -> bytes:
    """Write what R's write.csv(quote=FALSE) writes."""
    lines = [["NA" if v != v else f"{v:.15g}" for v in row.values()] for row in rows]
    return "\n".join([",".join(rows[0]), *map(",".join, lines), ""]).encode()


def in_2016(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    names = {name: name.replace("15", "16") for name in rows[0]}
    panels = {19.0: 21.0, 20.0: 22.0}
    changed = [{names[name]: value for name, value in row.items()} for row in rows]
    return [row | {"PANEL": panels[row["PANEL"]]} for row in changed]


@pytest.mark.parametrize("form", ["h181.ssp", "h181.ssp.gz", "h181.csv", "h181.csv.gz"])
def test_the_survey_is_read_as_the_cqr_paper_does(
    folders: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    content = transport(SURVEY) if "ssp" in form else comma_separated(SURVEY)
    path = folders / "data" / "tabular" / form
    path.write_bytes(gzip.compress(content) if form.endswith(".gz") else content)
    data = datasets.DATASETS["meps19"]
    monkeypatch.setitem(datasets.DATASETS, "meps19", dataclasses.replace(data, rows=2))
    assert not data.missing
    table = datasets.load("meps19")
    assert table.x.shape == (2, 139)
    assert table.names[:6] == ("AGE", "PCS42", "MCS42", "K6SUM42", "PERWT15F", "REGION=1")
    assert table.names[-2:] == ("INSCOV=3", "RACE")
    np.testing.assert_array_equal(table.x[:, :5], [[44, 51.25, -1, 3, 4711.125]] * 2)
    np.testing.assert_array_equal(table.y, [8, 3])
    first, second = (dict(zip(table.names, row.tolist(), strict=True)) for row in table.x)
    assert sum(list(first.values())[5:-1]) == sum(list(second.values())[5:-1]) == 36
    assert (first["RACE"], second["RACE"]) == (1, 0)  # Hispanics count apart
    assert (first["PHQ242=0"], second["PHQ242=6"]) == (1, 1)
    assert (first["HIBPDX=1"], second["HIBPDX=-1"]) == (1, 1)
    assert (first["SEX=1"], second["SEX=2"]) == (1, 1)
    assert "ASTHDX=-1" not in table.names


def test_the_other_panels_are_read_from_their_files(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders / "data" / "tabular"
    (folder / "h181.ssp").write_bytes(transport(SURVEY))
    (folder / "h192.ssp").write_bytes(transport(in_2016(SURVEY)))
    for name, rows in (("meps20", 1), ("meps21", 2)):
        data = datasets.DATASETS[name]
        monkeypatch.setitem(datasets.DATASETS, name, dataclasses.replace(data, rows=rows))
        assert datasets.load(name).x.shape == (rows, 139)
    assert "PERWT16F" in datasets.load("meps21").names


def test_the_extract_of_the_cqr_paper_will_do_too(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders / "data" / "tabular"
    data = dataclasses.replace(datasets.DATASETS["meps19"], rows=2)
    monkeypatch.setitem(datasets.DATASETS, "meps19", data)
    (folder / "h181.csv").write_bytes(comma_separated(SURVEY))
    table = datasets.load("meps19")
    (folder / "h181.csv").unlink()
    names = ["", "UTILIZATION_reg", *reversed(table.names)]
    rows = [
        [number, y, *reversed(x)]
        for number, (x, y) in enumerate(zip(table.x.tolist(), table.y.tolist(), strict=True))
    ]
    lines = [",".join(names), *(",".join(map(str, row)) for row in rows)]
    (folder / "meps_19_reg.csv").write_text("\n".join(lines))
    again = datasets.load("meps19")
    assert again.names == table.names
    np.testing.assert_array_equal(again.x, table.x)
    np.testing.assert_array_equal(again.y, table.y)


def test_another_number_of_rows_than_the_papers_is_told(folders: Path) -> None:
    (folders / "data" / "tabular" / "h181.ssp").write_bytes(transport(SURVEY))
    with pytest.warns(FFCPWarning, match="meps19"):
        datasets.load("meps19")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (comma_separated([{"PANEL": 19.0}]), "ACTDTY53"),
        (comma_separated([PERSON | {"PANEL": 18.0}]), r"\b19\b"),
        (b"HEADER RECORD*******LIBRARY", "meps19"),
        (transport(SURVEY)[:900], "meps19"),
        (b"", "meps19"),
    ],
)
def test_a_file_that_is_not_the_survey_is_refused(
    folders: Path, content: bytes, message: str
) -> None:
    (folders / "data" / "tabular" / "h181.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        datasets.load("meps19")


def test_a_packed_survey_that_is_cut_off_is_refused(folders: Path) -> None:
    packed = gzip.compress(transport(SURVEY))
    (folders / "data" / "tabular" / "h181.ssp.gz").write_bytes(packed[:-40])
    with pytest.raises(ValueError, match="meps19"):
        datasets.load("meps19")


# -- the list ----------------------------------------------------------------------------------


def test_the_list_says_what_is_there(small: Path) -> None:
    (small / "data" / "tabular" / "communities_attributes.csv").unlink()
    (small / "data" / "tabular" / "blogData_train.csv").write_text("1,2,3\n")
    listed = {entry.name: entry for entry in inventory.entries(check=True)}
    assert list(listed) == [*datasets.DATASETS, *datasets.FURTHER]
    assert {listed[name].status for name in datasets.FURTHER} == {"missing"}
    status = {name: listed[name].status for name in datasets.DATASETS}
    assert status == {
        "synthetic": "built in", "com": "missing", "fb1": "present", "fb2": "present",
        "meps19": "missing", "meps20": "missing", "meps21": "missing", "star": "present",
        "bio": "present", "blog": "damaged", "bike": "present",
    }  # fmt: skip
    assert listed["com"].files == ("communities_attributes.csv",)
    assert listed["bio"].files == ("CASP.csv.gz",)
    assert listed["meps20"].place == small / "data" / "tabular"
    unchecked = {entry.name: entry.status for entry in inventory.entries()}
    unchecked = {name: unchecked[name] for name in datasets.DATASETS}
    assert unchecked == status | {"blog": "present"}


def test_the_list_says_how_to_get_what_is_not_there(folders: Path) -> None:
    listed = inventory.entries()
    lines = dict(zip([e.name for e in listed][1:], inventory.advice(listed), strict=True))
    for name, line in lines.items():
        assert line.startswith(f"{name} is missing: ")
        assert str(folders / "data" / "tabular") in line
        assert "\n" not in line
        by_hand = {"bike", *datasets.FURTHER}
        assert ("ffcp-paper data fetch" in line) == (name not in by_hand)
    assert "Kaggle asks for an account" in lines["bike"]
    assert "communities.data" in lines["com"]
    assert "communities_attributes.csv" in lines["com"]
    table = inventory.tabulate(listed)
    assert all(len(line) == len(inventory.COLUMNS) for line in table)
    assert table[4][:4] == ["meps19", "missing", "15,785", "139"]


# -- runs --------------------------------------------------------------------------------------


def test_results_are_found_once(folders: Path) -> None:
    calls = []
    for _ in range(2):
        assert result_cache.record("kind", {"seed": 1}, lambda: calls.append(1) or [1.5, "a"]) == [
            1.5,
            "a",
        ]
    assert result_cache.record("kind", {"seed": 2}, lambda: "other") == "other"
    assert len(calls) == 1


def test_an_interrupted_result_leaves_nothing_behind(folders: Path) -> None:
    def broken() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        result_cache.record("kind", {}, broken)
    assert result_cache.record("kind", {}, lambda: 3) == 3


def test_networks_are_kept(folders: Path) -> None:
    x = torch.rand(100, 3)
    trained = result_cache.network({"a": 1}, lambda: mlp(3), lambda: mlp(3))
    again = result_cache.network({"a": 1}, lambda: mlp(3), lambda: pytest.fail("trained twice"))
    assert torch.equal(trained.eval()(x), again(x))


@pytest.mark.heavy
def test_training_stops_when_nothing_gets_better() -> None:
    x, epochs = torch.randn(400, 3), []
    noise = torch.randn(400)  # nothing to learn: the error only grows
    model = train_as_published(
        x, noise, seed=0, epochs=1000, patience=20, progress=lambda: epochs.append(1)
    )
    assert len(epochs) < 300
    assert isinstance(model, nn.Module)
    assert not model.training


def fake_table() -> datasets.Table:
    random = np.random.default_rng(0)
    x = random.normal(size=(900, 3))
    return datasets.Table(x, np.exp(x[:, 0] + 0.2 * random.normal(size=900)), ("a", "b", "c"))


def test_the_groups_command_compares_all_methods_and_resumes(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "load", lambda name: fake_table())
    arguments = ["groups", "bike", "--epochs", "3", "--seeds", "2"]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    for method in ("CP", "FFCP", "LCP", "FFLCP"):
        assert f"\n{method} " in first.output
    assert first.output.count("FFLCP  ") == 5
    assert "±" in first.output
    assert "Worst group: FFLCP at best" in first.output
    monkeypatch.setattr(group_coverage, "train_as_published", lambda *a, **k: pytest.fail("again"))
    monkeypatch.setattr(group_coverage, "_measure", lambda *a, **k: pytest.fail("again"))
    assert CliRunner().invoke(app, arguments).output == first.output


def test_the_groups_command_says_what_is_missing(folders: Path) -> None:
    result = CliRunner().invoke(app, ["groups"])
    assert result.exit_code == 1
    assert "tabular/CASP.csv is missing" in result.output
    assert result.output.count("missing") == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wine"], "unknown data set 'wine'"),
        (["--alpha", "2"], "must lie strictly between 0 and 1, got 2.0"),
        (["--kernel", "cosine"], "unknown kernel 'cosine'"),
        (["--guarantee", "sure"], "unknown guarantee 'sure'"),
        (["--on", "nowhere"], "nowhere"),
    ],
)
def test_the_groups_command_refuses(small: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["groups", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_file_without_checksum_is_taken_as_it_is(folders: Path) -> None:
    file = DataFile("tabular/any.csv", "anywhere")
    assert file.found is None
    file.place.write_text("x")
    assert file.require() == file.place
    assert file.verify(b"whatever") == b"whatever"
