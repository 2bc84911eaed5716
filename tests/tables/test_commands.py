"""The commands for tables, as somebody with a CSV meets them."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from decimal import Decimal
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("pandas")
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ffcp import tables
from ffcp.cli.app import app
from ffcp.cli.tables import _support
from ffcp.regression.learned import network
from ffcp.tables import table_io
from ffcp.tables.folder import must_be_writable
from tests.tables.material import houses, new

runner = CliRunner()


def words(result: object) -> str:
    return " ".join(str(getattr(result, "output", "")).split())


@pytest.mark.heavy
def test_fit_predict_check_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_EPOCHS", 8)
    table, folder = tmp_path / "houses.csv", tmp_path / "houses.ffcp"
    houses(450).to_csv(table, index=False)
    options = ["--target", "price", "--minutes", "0.02", "--support", "0,"]
    result = runner.invoke(app, ["fit", str(table), *options])
    assert result.exit_code == 0, result.output
    for said in ("Target 'price'", "Decided: column 'id' is left out", "Guarantee:", "Coverage"):
        assert said in words(result)
    assert (folder / "report.html").is_file()
    again = runner.invoke(app, ["fit", str(table), *options])
    assert again.exit_code == 2
    assert "--force" in words(again)
    shown = runner.invoke(app, ["show", str(folder)])
    assert "a different word in every row" in words(shown)


def test_predict_writes_the_rows_as_they_were_and_their_bands(folder: Path, tmp_path: Path) -> None:
    rows = new(30).assign(code="007")
    rows.to_csv(tmp_path / "new.csv", index=False)
    result = runner.invoke(app, ["predict", str(folder), str(tmp_path / "new.csv")])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "new.intervals.csv").read_text().splitlines()
    before = (tmp_path / "new.csv").read_text().splitlines()
    assert text[0] == before[0] + ",prediction,lower,upper,reason"
    assert all(line.startswith(old) for line, old in zip(text, before, strict=True))


@pytest.mark.long
@pytest.mark.parametrize(
    ("delimiter", "decimal"), [(";", ","), ("\t", ","), ("|", "."), (",", ".")]
)
def test_bands_are_written_as_the_table_was_and_can_be_checked(
    folder: Path, tmp_path: Path, delimiter: str, decimal: str
) -> None:
    table, out = tmp_path / "new.csv", tmp_path / "new.intervals.csv"
    houses(60, 5).to_csv(table, sep=delimiter, decimal=decimal, index=False)
    assert runner.invoke(app, ["predict", str(folder), str(table)]).exit_code == 0
    written = pd.read_csv(out, sep=delimiter, decimal=decimal)
    assert {str(written[name].dtype) for name in ("price", "lower", "upper")} == {"float64"}
    checked = [runner.invoke(app, ["check", str(folder), str(path)]) for path in (table, out)]
    assert checked[1].exit_code == 0, checked[1].output
    assert words(checked[1]) == words(checked[0])


def test_a_blank_that_divides_is_not_written(fitted: tables.FittedTable, tmp_path: Path) -> None:
    # The cells of an empty reason would be no cells any more.
    lines = ["size rooms town sold id garden", "51,5 3 Bern 2020-02-01 a True"]
    (tmp_path / "new.csv").write_text("\n".join([*lines, "80,0 2 Chur 2021-02-01 b False\n"]))
    list(fitted.predict_file(tmp_path / "new.csv", tmp_path / "out.csv"))
    assert table_io.sniff(tmp_path / "out.csv").delimiter == ";"
    assert table_io.read(tmp_path / "out.csv")["reason"].tolist() == ["", ""]


def test_targets_that_are_no_numbers_are_not_called_missing(folder: Path, tmp_path: Path) -> None:
    frame = houses(30, 5)
    frame.assign(price="CHF " + frame["price"].astype(str)).to_csv(tmp_path / "a.csv", index=False)
    result = runner.invoke(app, ["check", str(folder), str(tmp_path / "a.csv")])
    assert result.exit_code == 2
    assert "'price'" in words(result)
    assert "'CHF " in words(result)


def test_a_table_of_no_rows_gives_a_table_of_no_rows(folder: Path, tmp_path: Path) -> None:
    new(5)[:0].to_csv(tmp_path / "none.csv", index=False)
    result = runner.invoke(app, ["predict", str(folder), str(tmp_path / "none.csv")])
    assert result.exit_code == 0, result.output
    assert len(pd.read_csv(tmp_path / "none.intervals.csv")) == 0


@pytest.mark.long
def test_check_ends_with_a_code_that_says_whether_it_covers(folder: Path, tmp_path: Path) -> None:
    frame = houses(300, 5)
    frame.to_csv(tmp_path / "a.csv", index=False)
    good = runner.invoke(app, ["check", str(folder), str(tmp_path / "a.csv"), "--group", "town"])
    assert (good.exit_code, "Basel" in words(good)) == (0, True)
    assert "No drift detected" in words(good)
    assert "Coverage by columns:" in words(good)
    assert "excess risk" in words(good)
    frame.assign(price=frame["price"] * 3).to_csv(tmp_path / "b.csv", index=False)
    bad = runner.invoke(app, ["check", str(folder), str(tmp_path / "b.csv")])
    assert (bad.exit_code, "too low" in words(bad)) == (1, True)
    assert "Drift detected: the probability of a false alarm is at most 0.01" in words(bad)


@pytest.mark.long
def test_check_says_that_rows_had_a_part_in_the_fit(folder: Path, tmp_path: Path) -> None:
    seen, fresh = houses(600), houses(300, 5)  # the first are those of the fit
    seen.to_csv(tmp_path / "seen.csv", index=False)
    pd.concat([seen, fresh]).to_csv(tmp_path / "both.csv", index=False)
    fresh.to_csv(tmp_path / "fresh.csv", index=False)
    for name, share in (("seen", "80 %"), ("both", "53 %")):
        result = runner.invoke(app, ["check", str(folder), str(tmp_path / f"{name}.csv")])
        assert f"Note: about {share} of these rows" in words(result)
        assert "Coverage is as guaranteed" not in words(result)
        assert "part of the fit" in words(result)
    result = runner.invoke(app, ["check", str(folder), str(tmp_path / "fresh.csv")])
    assert "trained or calibrated" not in words(result)
    assert "Coverage is as guaranteed" in words(result)


@pytest.mark.long
def test_check_in_order_of_time_shows_all_tests(folder: Path, tmp_path: Path) -> None:
    houses(200, 5).to_csv(tmp_path / "a.csv", index=False)
    found = runner.invoke(app, ["check", str(folder), str(tmp_path / "a.csv"), "--time", "sold"])
    for said in ("in order of 'sold'", "test of target", "test of prediction"):
        assert said in words(found)
    wrong = runner.invoke(app, ["check", str(folder), str(tmp_path / "a.csv"), "--time", "town"])
    assert (wrong.exit_code, "neither a number nor a date" in words(wrong)) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "nowhere.ffcp", "a.csv"], "nowhere.ffcp"),
        (["fit", "nowhere.csv", "--target", "y"], "nowhere.csv"),
        (["fit", "nowhere.csv", "--target", "y", "--support", "x"], "--support"),
    ],
)
def test_errors_are_one_sentence(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert message in words(result)
    assert "Traceback" not in words(result)


def test_a_full_disk_is_said_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    houses(30, 1).to_csv(tmp_path / "new.csv", index=False)
    monkeypatch.setattr(os, "replace", full)
    result = runner.invoke(app, ["predict", str(folder), str(tmp_path / "new.csv")])
    assert result.exit_code == 2
    assert "No space left on device" in words(result)
    assert [file.name for file in tmp_path.iterdir()] == ["new.csv"]


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".csv.bz2", ".csv.xz", ".parquet"])
def test_what_a_disk_refuses_is_said_of_the_file_that_was_asked_for(
    folder: Path, tmp_path: Path, ending: str
) -> None:
    new(4).to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / f"{'x' * 240}{ending}"  # with our addition too long for any disk
    result = runner.invoke(
        app, ["predict", str(folder), str(tmp_path / "new.csv"), "--out", str(out)]
    )
    assert result.exit_code == 2
    assert words(result) == f"Error: File name too long: {out}"
    assert [file.name for file in tmp_path.iterdir()] == ["new.csv"]


def test_a_parent_that_is_a_file_is_said(folder: Path, tmp_path: Path) -> None:
    new(4).to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / "new.csv" / "out.csv"
    result = runner.invoke(
        app, ["predict", str(folder), str(tmp_path / "new.csv"), "--out", str(out)]
    )
    assert words(result) == f"Error: Not a directory: {tmp_path / 'new.csv'}"


def test_a_file_that_cannot_take_its_place_is_said_by_its_name(
    fitted: tables.FittedTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(old: Path, new: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied", str(old), None, str(new))

    new(4).to_csv(tmp_path / "new.csv", index=False)
    monkeypatch.setattr(os, "replace", denied)
    with pytest.raises(PermissionError) as caught:
        list(fitted.predict_file(tmp_path / "new.csv", tmp_path / "out.csv"))
    assert caught.value.filename == str(tmp_path / "out.csv")
    with pytest.raises(PermissionError) as caught:
        fitted.save(tmp_path / "fit")
    assert "/." not in str(caught.value)


def _must_not_train(*args: object, **options: object) -> None:
    raise AssertionError("trained before the folder was tried")


def test_a_folder_that_cannot_be_made_is_said_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "fit", _must_not_train)
    houses(20).to_csv(tmp_path / "a.csv", index=False)
    for out in (tmp_path / "a.csv" / "fit", tmp_path / "a.csv" / "deep" / "fit"):
        result = runner.invoke(
            app, ["fit", str(tmp_path / "a.csv"), "--target", "price", "--out", str(out)]
        )
        assert result.exit_code == 2
        assert f"{out} cannot be written (Not a directory: {tmp_path / 'a.csv'})" in words(result)
        assert "--out" in words(result)
    assert [file.name for file in tmp_path.iterdir()] == ["a.csv"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_that_cannot_be_written_is_said_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    def refused(self: Path, *args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    out = tmp_path / "deep" / "fit"
    if exists:
        out.mkdir(parents=True)
    houses(20).to_csv(tmp_path / "a.csv", index=False)
    monkeypatch.setattr(tables, "fit", _must_not_train)
    monkeypatch.setattr(Path, "touch", refused)
    result = runner.invoke(
        app, ["fit", str(tmp_path / "a.csv"), "--target", "price", "--out", str(out)]
    )
    assert result.exit_code == 2
    nearest = out if exists else tmp_path
    assert f"{out} cannot be written (Read-only file system: {nearest})" in words(result)
    left = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*")}
    assert left == {"a.csv", *(("deep", "deep/fit") if exists else ())}


def test_trying_a_folder_leaves_nothing(tmp_path: Path) -> None:
    must_be_writable(tmp_path / "deep" / "fit")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "fit").mkdir()
    must_be_writable(tmp_path / "fit")
    assert [file.name for file in tmp_path.rglob("*")] == ["fit"]


def test_a_column_that_has_our_name_is_kept(fitted: tables.FittedTable, tmp_path: Path) -> None:
    new(4).assign(lower="mine").to_csv(tmp_path / "new.csv", index=False)
    list(fitted.predict_file(tmp_path / "new.csv", tmp_path / "out.csv"))
    written = pd.read_csv(tmp_path / "out.csv")
    assert written["lower"].tolist() == ["mine"] * 4
    assert "ffcp_lower" in written


def test_support_is_read() -> None:
    assert _support("0,") == (0.0, None)
    assert _support("-1,2.5") == (-1.0, 2.5)


def test_the_table_itself_is_never_written_over(folder: Path, tmp_path: Path) -> None:
    new(4).to_csv(tmp_path / "new.csv", index=False)
    before = (tmp_path / "new.csv").read_bytes()
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.csv").symlink_to(tmp_path / "new.csv")
    for out in (tmp_path / "sub" / ".." / "new.csv", tmp_path / "link.csv"):
        result = runner.invoke(
            app, ["predict", str(folder), str(tmp_path / "new.csv"), "--out", str(out)]
        )
        assert (result.exit_code, "is the table itself" in words(result)) == (2, True)
    assert (tmp_path / "new.csv").read_bytes() == before


def test_two_tables_do_not_become_one_file(folder: Path, tmp_path: Path) -> None:
    tables_ = [tmp_path / "new.csv", tmp_path / "new.csv.gz"]
    for table in tables_:
        new(4).to_csv(table, index=False)
    result = runner.invoke(app, ["predict", str(folder), *map(str, tables_)])
    assert (result.exit_code, "would both be written to" in words(result)) == (2, True)
    assert not (tmp_path / "new.intervals.csv").exists()


def test_bands_of_bands_keep_all_columns(fitted: tables.FittedTable, tmp_path: Path) -> None:
    new(4).to_csv(tmp_path / "0.csv", index=False)
    for turn in range(3):
        list(fitted.predict_file(tmp_path / f"{turn}.csv", tmp_path / f"{turn + 1}.csv"))
    names = (tmp_path / "3.csv").read_text().splitlines()[0].split(",")
    assert len(set(names)) == len(names) == len(new(4).columns) + 12


@pytest.mark.parametrize("out", ["folder", "a.csv.zip"])
def test_what_cannot_be_written_is_said_before_the_work(
    fitted: tables.FittedTable, tmp_path: Path, out: str
) -> None:
    new(4).to_csv(tmp_path / "new.csv", index=False)
    (tmp_path / "folder").mkdir()
    with pytest.raises(tables.TableError, match=out):
        next(fitted.predict_file(tmp_path / "new.csv", tmp_path / out))
    assert {path.name for path in tmp_path.iterdir()} == {"new.csv", "folder"}


@pytest.mark.long
def test_a_killed_predict_does_no_harm_to_the_next(
    fitted: tables.FittedTable, tmp_path: Path
) -> None:
    new(4).to_csv(tmp_path / "new.csv", index=False)
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_write_and_die, args=(tmp_path / "out.csv",))
    process.start()
    process.join()
    assert not (tmp_path / "out.csv").exists()
    list(fitted.predict_file(tmp_path / "new.csv", tmp_path / "out.csv"))
    assert len(pd.read_csv(tmp_path / "out.csv")) == 4


def _write_and_die(path: Path) -> None:
    with table_io.writer(path) as add:
        add(pd.DataFrame({"a": [1]}), pd.DataFrame({"b": [1]}))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_check_says_which_rows_have_no_target(folder: Path, tmp_path: Path) -> None:
    frame = houses(200, 5)
    frame["price"] = frame["price"].astype(object)
    frame.loc[:6, "price"] = ["", "unknown", None, "NA", "?", "inf", ""]
    frame.to_csv(tmp_path / "a.csv", index=False)
    result = runner.invoke(app, ["check", str(folder), str(tmp_path / "a.csv")])
    assert "7 rows have no target 'price'" in words(result)
    assert "of 193 rows" in words(result)


def test_rows_of_parquet_are_written_as_they_were(
    fitted: tables.FittedTable, tmp_path: Path
) -> None:
    rows = pa.Table.from_pandas(new(6), preserve_index=False)
    odd = {
        "large": pa.array([2**60 + 1, None] * 3, pa.int64()),
        "exact": pa.array(
            [Decimal("1.50")] * 3 + [Decimal("12345678.90")] * 3, pa.decimal128(20, 2)
        ),
        "late": pa.array([None] * 4 + ["x", "y"]),
        "pairs": pa.array([[("a", 1)], None] * 3, pa.map_(pa.string(), pa.int64())),
        "parts": pa.array([{"a": 1}, None] * 3),
        "kind": pa.array(["a", "b", "c"] * 2).dictionary_encode(),
    }
    for name, values in odd.items():
        rows = rows.append_column(name, values)
    pq.write_table(rows, tmp_path / "new.parquet")
    list(fitted.predict_file(tmp_path / "new.parquet", tmp_path / "out.parquet", rows=2))
    written = pq.read_table(tmp_path / "out.parquet")
    assert written.select(rows.column_names).cast(rows.schema).equals(rows)
    assert written.column_names == [*rows.column_names, "prediction", "lower", "upper", "reason"]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_no_row_depends_on_the_part_of_the_file_that_it_is_in(
    labelled: tables.FittedTable, tmp_path: Path, ending: str
) -> None:
    rows = new(8).astype({"rooms": str})
    rows.loc[6:, "rooms"] = "many"  # nothing but words in the last part
    path = tmp_path / f"new.{ending}"
    rows.to_csv(path, index=False) if ending == "csv" else rows.to_parquet(path)
    for count in (2, 8):
        list(labelled.predict_file(path, tmp_path / f"{count}.{ending}", rows=count))
    one, other = (table_io.read(tmp_path / f"{count}.{ending}") for count in (2, 8))
    assert one["reason"].tolist() == other["reason"].tolist()
    assert one["reason"].tolist()[5:] == ["", *["rooms: 'many' is not a number"] * 2]


def test_parquet_whose_first_rows_cannot_be_predicted_has_words_all_the_same(
    labelled: tables.FittedTable, tmp_path: Path
) -> None:
    rows = new(6).assign(town=["Nowhere"] * 3 + ["Bern"] * 3)
    rows.to_parquet(tmp_path / "new.parquet")
    list(labelled.predict_file(tmp_path / "new.parquet", tmp_path / "out.parquet", rows=3))
    assert (
        pd.read_parquet(tmp_path / "out.parquet")["labels"].notna().tolist()
        == [False] * 3 + [True] * 3
    )
