"""The folder of a fit: complete or not there, checked when read, never pickled."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy as shallow
from pathlib import Path

import pytest

pytest.importorskip("pandas")
import numpy as np
import pandas as pd
import torch
from typer.testing import CliRunner

from ffcp import files, tables
from ffcp.cli.app import app
from ffcp.tables import folder
from tests.tables.material import houses, new, quick_fit


def test_what_was_saved_predicts_the_same(fitted: tables.FittedTable, folder: Path) -> None:
    assert tables.load(folder).predict(new(40)).equals(fitted.predict(new(40)))
    assert {file.suffix for file in folder.glob("[!.]*")} == {".json", ".safetensors", ".html"}


@pytest.mark.heavy
def test_sets_and_few_rows_are_saved_too(
    labelled: tables.FittedTable, few: tables.FittedTable, tmp_path: Path
) -> None:
    for name, fitted in (("labels", labelled), ("few", few)):
        fitted.save(tmp_path / name)
        assert tables.load(tmp_path / name).predict(new(20)).equals(fitted.predict(new(20)))


def test_a_second_fit_needs_force(fitted: tables.FittedTable, tmp_path: Path) -> None:
    where = fitted.save(tmp_path / "a.ffcp")
    with pytest.raises(tables.TableError, match="--force"):
        fitted.save(where)
    fitted.save(where, force=True)
    assert len(list(where.glob("[!.]*"))) == 4
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.txt").write_text("mine")
    with pytest.raises(tables.TableError, match="thesis"):
        fitted.save(tmp_path / "own", force=True)


@pytest.mark.parametrize("kind", ["weights", "calibration", "ffcp.json"])
def test_damage_is_found(folder: Path, tmp_path: Path, kind: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (file,) = [one for one in copy.iterdir() if one.name.startswith(kind)]
    whole = file.read_bytes()
    for place in (10, len(whole) // 2, len(whole) - 5):
        broken = bytearray(whole)
        broken[place] ^= 4
        file.write_bytes(broken)
        with pytest.raises(tables.TableError, match="damaged"):
            tables.load(copy)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(tables.TableError):
        tables.load(copy)
    file.unlink()
    with pytest.raises(tables.TableError):
        tables.load(copy)


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_rows_of_the_fit_are_known_again(fitted: tables.FittedTable, tmp_path: Path) -> None:
    assert tables.load(fitted.save(tmp_path / "a")).check(houses(600)).seen > 0.75


def test_hashes_of_rows_that_cannot_be_are_found(
    fitted: tables.FittedTable, tmp_path: Path
) -> None:
    for number, wrong in enumerate((torch.tensor([2, 1]), torch.tensor([[1]]), torch.ones(3))):
        damaged = shallow(fitted)
        damaged.row_hashes = wrong
        with pytest.raises(tables.TableError, match="hashes"):
            tables.load(damaged.save(tmp_path / str(number)))


@pytest.mark.parametrize("kind", ["weights", "calibration"])
def test_a_file_that_is_missing_is_named(folder: Path, tmp_path: Path, kind: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (file,) = copy.glob(f"{kind}-*")
    file.unlink()
    with pytest.raises(tables.TableError) as caught:
        tables.load(copy)
    assert file.name in str(caught.value)
    assert "Copy" in str(caught.value)


def test_a_folder_of_another_version_is_not_called_damaged(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    manifest = copy / "ffcp.json"
    whole = json.loads(manifest.read_text())
    for content in (whole, {}):
        manifest.write_text(json.dumps({**content, "format": "ffcp-table-9"}))
        with pytest.raises(tables.TableError, match="format") as caught:
            tables.load(copy)
        assert "ffcp-table-9" in str(caught.value)
        assert "damaged" not in str(caught.value)
        assert "run ffcp fit again" in str(caught.value)
    manifest.write_text(json.dumps({**whole, "format": "another"}))
    with pytest.raises(tables.TableError, match="another"):
        tables.load(copy)


def test_numbers_that_cannot_be_are_found_behind_the_checksum(folder: Path, tmp_path: Path) -> None:
    from ffcp.tables.folder import MANIFEST, digest

    copy = shutil.copytree(folder, tmp_path / "copy")
    whole = json.loads((copy / MANIFEST).read_text())
    changes = [
        ("about", "scale", -1.0),
        ("about", "alpha", 7),
        ("about", "classes", ["one"]),
        ("about", "support", [0]),
        ("about", "folds", 3),
        ("about", "target", 5),
    ]
    for part, name, value in changes:
        content = {
            key: json.loads(json.dumps(whole[key])) for key in ("about", "columns", "shapes")
        }
        content[part][name] = value
        checksum = digest(json.dumps(content).encode())
        changed = {**whole, **content, "checksum": checksum}
        (copy / MANIFEST).write_text(json.dumps(changed))
        with pytest.raises(tables.TableError, match="damaged"):
            tables.load(copy)


def test_an_unfinished_folder_says_so_and_may_be_fitted_again(
    fitted: tables.FittedTable, tmp_path: Path
) -> None:
    where = fitted.save(tmp_path / "a.ffcp")
    (where / "ffcp.json").unlink()  # as a fit that was killed leaves it
    with pytest.raises(tables.TableError, match="ffcp"):
        tables.load(where)
    fitted.save(where)
    tables.load(where)


@pytest.mark.long
def test_two_predictions_at_once_do_not_mix(fitted: tables.FittedTable, tmp_path: Path) -> None:
    new(300).to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / "new.intervals.csv"
    rows: list[int] = []

    def work() -> None:
        parts = fitted.predict_file(tmp_path / "new.csv", out, rows=50)
        rows.append(sum(len(part.columns) for part in parts))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows == [300, 300]
    assert len(pd.read_csv(out)) == 300
    assert sorted(file.name for file in tmp_path.iterdir()) == ["new.csv", "new.intervals.csv"]


def test_two_that_replace_a_fit_at_once_leave_one_whole(
    fitted: tables.FittedTable, labelled: tables.FittedTable, tmp_path: Path
) -> None:
    where = fitted.save(tmp_path / "a.ffcp")

    def replace(one: tables.FittedTable) -> None:
        for _ in range(25):
            one.save(where, force=True)
            assert tables.load(where).about.target in ("price", "kind")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(replace, (fitted, labelled)))
    assert len(list(where.glob("*.safetensors"))) == 2


def test_of_two_that_fit_into_one_new_folder_the_second_is_refused(
    fitted: tables.FittedTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "a.ffcp"
    others = folder.FileLock

    @contextmanager
    def another_was_first(lock: Path) -> Iterator[None]:
        monkeypatch.setattr(folder, "FileLock", others)
        fitted.save(lock.parent)
        yield

    monkeypatch.setattr(folder, "FileLock", another_was_first)
    with pytest.raises(tables.TableError, match="--force"):
        fitted.save(where)
    tables.load(where)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be forked")
def test_killed_at_any_moment_nothing_is_half_written(
    fitted: tables.FittedTable, labelled: tables.FittedTable, tmp_path: Path
) -> None:
    # One fit replaces the other again and again, and is killed: one of the two is there, whole.
    where = fitted.save(tmp_path / "houses.ffcp")
    draw, seen = np.random.default_rng(0), set()
    for _ in range(15):
        child = os.fork()
        if not child:
            while True:
                labelled.save(where, force=True)
                fitted.save(where, force=True)
        time.sleep(float(draw.uniform(0.02, 0.4)))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = tables.load(where)
        seen.add(found.about.target)
        one = labelled if found.about.classes else fitted
        assert found.predict(new(5)).equals(one.predict(new(5)))
    assert seen == {"price", "kind"}  # the kills came before and after


@pytest.mark.long
@pytest.mark.parametrize("options", [{"side": "lower"}, {"group": "town"}])
def test_intervals_without_end_are_saved(options: dict[str, str], tmp_path: Path) -> None:
    frame = houses(450)
    frame.loc[::40, "town"] = "Chur, some of it"  # too few rows for an interval with ends
    made = quick_fit(frame, "price", **options)
    assert made.about.tested is not None
    few_rows = "group" in options  # a one-sided interval lacks no end
    assert bool(made.about.tested.infinite) is few_rows
    where = made.save(tmp_path / "a.ffcp")
    assert tables.load(where).about.tested == made.about.tested
    for command in (["show", str(where)], ["check", str(where), str(tmp_path / "new.csv")]):
        frame.to_csv(tmp_path / "new.csv", index=False)
        assert ("infinite" in CliRunner().invoke(app, command).output) is few_rows


def test_a_fit_that_is_replaced_leaves_no_report(
    fitted: tables.FittedTable, labelled: tables.FittedTable, tmp_path: Path
) -> None:
    copy = labelled.save(tmp_path / "copy.ffcp")
    where = fitted.save(tmp_path / "a.ffcp")
    assert "price" in (where / "report.html").read_text()
    tables.load(copy).save(where, force=True)
    assert not (where / "report.html").exists()  # it would be that of another fit


@pytest.mark.parametrize("kind", ["weights-", "calibration-", "ffcp.json", "report.html"])
@pytest.mark.parametrize("old", [False, True])
def test_a_fit_that_cannot_be_written_leaves_what_was_there(
    fitted: tables.FittedTable,
    labelled: tables.FittedTable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    old: bool,
) -> None:
    where = tmp_path / "new" / "a.ffcp"
    before = set(labelled.save(where).iterdir()) if old else set()
    put = files.put

    def full(path: Path, data: bytes) -> None:
        if path.name.startswith(kind):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        put(path, data)

    monkeypatch.setattr(files, "put", full)
    with pytest.raises(OSError, match="space"):
        fitted.save(where, force=True)
    if kind == "report.html":  # all else is written: the fit is there, and no page of another
        assert tables.load(where).about.target == "price"
        assert not (where / "report.html").exists()
    elif old:
        assert set(where.iterdir()) == before
        assert tables.load(where).about.target == "kind"
    else:
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "header",
    [b"", b"\xff" * 40, b"\x10" + b"\0" * 7 + b"{" * 16],
    ids=["none", "long", "no JSON"],
)
def test_weights_with_a_bad_header_are_found(folder: Path, tmp_path: Path, header: bytes) -> None:
    from ffcp.tables.folder import MANIFEST, digest

    copy = shutil.copytree(folder, tmp_path / "copy")
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["files"]["weights"] = f"weights-{digest(header)[:32]}.safetensors"
    (copy / manifest["files"]["weights"]).write_bytes(header)
    (copy / MANIFEST).write_text(json.dumps(manifest))
    result = CliRunner().invoke(app, ["show", str(copy)])
    assert (result.exit_code, "damaged" in result.output) == (2, True), result.output


def test_nothing_is_written_into_a_fit(
    fitted: tables.FittedTable, folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy.ffcp")
    new(5).to_csv(tmp_path / "new.csv", index=False)
    new(5).to_csv(copy / "new.csv", index=False)
    commands = [
        ["predict", str(copy), str(tmp_path / "new.csv"), "--out", str(copy / "ffcp.json")],
        ["predict", str(copy), str(tmp_path / "new.csv"), "--out", str(copy / "deep" / "out.csv")],
        ["predict", str(copy), str(copy / "new.csv")],
        ["fit", str(tmp_path / "new.csv"), "--target", "size", "--out", str(copy / "inner.ffcp")],
    ]
    (copy / "link").symlink_to(copy)
    commands.append([*commands[0][:-1], str(copy / "link" / "out.csv")])
    names = sorted(copy.iterdir())
    for command in commands:
        result = CliRunner().invoke(app, command)
        assert (result.exit_code, "copy.ffcp" in result.output) == (2, True), command
    assert sorted(copy.iterdir()) == names
    tables.load(copy)
