"""Data files: parsed as documented, checked, cached; and results that survive interruption."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from ffcp.cli import app
from ffcp.paper import datasets, groups, runs
from ffcp.paper.data import DataFile, MissingDataError, cache_dir, data_dir
from ffcp.paper.networks import mlp
from ffcp.paper.training import train_as_published

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
    for name, data in datasets.DATA_SETS.items():
        own = tuple(
            dataclasses.replace(
                file, sha256=hashlib.sha256(SMALL[Path(file.path).name].encode()).hexdigest()
            )
            for file in data.files
        )
        monkeypatch.setitem(datasets.DATA_SETS, name, dataclasses.replace(data, files=own))
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
    assert list((small / "cache" / "tables").iterdir())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_missing_file_is_named_with_its_source_and_place(folders: Path, name: str) -> None:
    file = datasets.DATA_SETS[name].files[0]
    with pytest.raises(MissingDataError, match=r"is missing\. It comes from") as raised:
        datasets.load(name)
    for part in (file.path, file.source, str(folders / "data"), "FFCP_DATA"):
        assert part in str(raised.value)


def test_another_file_of_that_name_is_refused(small: Path) -> None:
    (small / "data" / "tabular" / "blogData_train.csv").write_text("1,2,3\n4,5,7\n")
    with pytest.raises(ValueError, match="damaged or another version: its sha256 is not"):
        datasets.load("blog")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown data set 'wine': choose one of bike, com"):
        datasets.load("wine")


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
    "blog": (52_397, 280), "fb1": (40_948, 53),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_the_real_files_have_the_shapes_of_the_papers(name: str) -> None:
    missing = datasets.DATA_SETS[name].missing
    if missing:
        pytest.skip(f"{missing[0].path} is not there: set FFCP_DATA")
    assert datasets.load(name).x.shape == SHAPES[name]


# -- runs --------------------------------------------------------------------------------------


def test_results_are_found_once(folders: Path) -> None:
    calls = []
    for _ in range(2):
        assert runs.record("kind", {"seed": 1}, lambda: calls.append(1) or [1.5, "a"]) == [1.5, "a"]
    assert runs.record("kind", {"seed": 2}, lambda: "other") == "other"
    assert len(calls) == 1


def test_an_interrupted_result_leaves_nothing_behind(folders: Path) -> None:
    def broken() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.record("kind", {}, broken)
    assert runs.record("kind", {}, lambda: 3) == 3


def test_networks_are_kept(folders: Path) -> None:
    x = torch.rand(100, 3)
    trained = runs.network({"a": 1}, lambda: mlp(3), lambda: mlp(3))
    again = runs.network({"a": 1}, lambda: mlp(3), lambda: pytest.fail("trained twice"))
    assert torch.equal(trained.eval()(x), again(x))


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
    monkeypatch.setattr(groups, "train_as_published", lambda *a, **k: pytest.fail("again"))
    monkeypatch.setattr(groups, "_measure", lambda *a, **k: pytest.fail("again"))
    assert CliRunner().invoke(app, arguments).output == first.output


def test_the_groups_command_says_what_is_missing(folders: Path) -> None:
    result = CliRunner().invoke(app, ["groups"])
    assert result.exit_code == 1
    assert "tabular/CASP.csv is missing" in result.output
    assert result.output.count("is missing") == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wine"], "unknown data set 'wine'"),
        (["--alpha", "2"], "2.0 does not lie between 0 and 1"),
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
