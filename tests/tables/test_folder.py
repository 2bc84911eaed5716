"""The folder of a fit: complete or not there, checked when read, never pickled."""

from __future__ import annotations

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

from ffcp import files, tables
from tests.tables.material import houses, new


def test_what_was_saved_predicts_the_same(fitted: tables.FittedTable, folder: Path) -> None:
    assert tables.load(folder).predict(new(40)).equals(fitted.predict(new(40)))
    assert {file.suffix for file in folder.iterdir()} == {".json", ".safetensors", ".html"}


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
    assert len(list(where.iterdir())) == 4
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.txt").write_text("mine")
    with pytest.raises(tables.TableError, match="other things"):
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


def test_a_folder_without_hashes_of_rows_is_read_all_the_same(
    fitted: tables.FittedTable, tmp_path: Path
) -> None:
    older = shallow(fitted)
    older.seen = None
    found = tables.load(older.save(tmp_path / "older"))
    assert (found.seen, found.seen_share(houses(600))) == (None, 0.0)
    assert tables.load(fitted.save(tmp_path / "newer")).seen_share(houses(600)) > 0.75


def test_hashes_of_rows_that_cannot_be_are_found(
    fitted: tables.FittedTable, tmp_path: Path
) -> None:
    for number, wrong in enumerate((torch.tensor([2, 1]), torch.tensor([[1]]), torch.ones(3))):
        damaged = shallow(fitted)
        damaged.seen = wrong
        with pytest.raises(tables.TableError, match="hashes of rows"):
            tables.load(damaged.save(tmp_path / str(number)))


@pytest.mark.parametrize("kind", ["weights", "calibration"])
def test_a_file_that_is_missing_is_named(folder: Path, tmp_path: Path, kind: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (file,) = copy.glob(f"{kind}-*")
    file.unlink()
    with pytest.raises(tables.TableError) as caught:
        tables.load(copy)
    assert str(caught.value) == (
        f"{copy} is damaged: its file {file.name} is missing. Copy the whole folder, or run ffcp "
        "fit again"
    )


def test_a_folder_of_another_version_is_not_called_damaged(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    manifest = copy / "ffcp.json"
    whole = json.loads(manifest.read_text())
    about = {**whole["about"], "version": "9.1"}
    for content, said in (({**whole, "about": about}, r"version of ffcp \(9.1\)"), ({}, "version")):
        manifest.write_text(json.dumps({**content, "format": "ffcp-table-9"}))
        with pytest.raises(tables.TableError, match=said) as caught:
            tables.load(copy)
        assert "ffcp-table-9" in str(caught.value)
        assert "damaged" not in str(caught.value)
        assert "run ffcp fit again" in str(caught.value)
    manifest.write_text(json.dumps({**whole, "format": "another"}))
    with pytest.raises(tables.TableError, match="damaged"):
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
        checksum = digest(json.dumps(content, indent=1).encode())
        changed = {**whole, **content, "checksum": checksum}
        (copy / MANIFEST).write_text(json.dumps(changed, indent=1))
        with pytest.raises(tables.TableError, match="damaged"):
            tables.load(copy)


def test_an_unfinished_folder_says_so_and_may_be_fitted_again(
    fitted: tables.FittedTable, tmp_path: Path
) -> None:
    where = fitted.save(tmp_path / "a.ffcp")
    (where / "ffcp.json").unlink()  # as a fit that was killed leaves it
    with pytest.raises(tables.TableError, match="no finished fit"):
        tables.load(where)
    fitted.save(where)
    tables.load(where)


@pytest.mark.long
def test_two_predictions_at_once_do_not_mix(fitted: tables.FittedTable, tmp_path: Path) -> None:
    new(300).to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / "new.bands.csv"
    rows: list[int] = []

    def work() -> None:
        parts = fitted.predict_file(tmp_path / "new.csv", out, rows=50)
        rows.append(sum(len(part.bands) for part in parts))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows == [300, 300]
    assert len(pd.read_csv(out)) == 300
    assert sorted(file.name for file in tmp_path.iterdir()) == ["new.bands.csv", "new.csv"]


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
    others = files.alone

    @contextmanager
    def another_was_first(folder: Path) -> Iterator[None]:
        monkeypatch.setattr(files, "alone", others)
        fitted.save(folder)
        yield

    monkeypatch.setattr(files, "alone", another_was_first)
    with pytest.raises(tables.TableError, match="holds a fit already"):
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
