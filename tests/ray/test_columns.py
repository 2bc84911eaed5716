"""Columns by name, and errors that say at once what is wrong, or in which file and row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

import ffcp

pytest.importorskip("ray.data")

from ffcp.ray import calibrate, predict
from ffcp.ray.engine import pool_of
from tests.ray.local import Rows, here

pytestmark = pytest.mark.usefixtures(here.__name__)
N = 60


class Pair(nn.Module):
    """Two inputs: numbers and an image."""

    def forward(self, a: Tensor, image: Tensor) -> Tensor:
        return a.sum(dim=1, keepdim=True) + image.float().mean(dim=(1, 2, 3))[:, None]


def data() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=N).astype(np.float32),
        "b": rng.normal(size=N).astype(np.float32),
        "image": rng.integers(0, 255, size=(N, 3, 4, 4)).astype(np.uint8),
        "y": rng.normal(size=N).astype(np.float32),
        "id": np.arange(N),
    }


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 1)


@pytest.mark.heavy
def test_columns_of_numbers_stand_side_by_side_and_their_order_is_remembered() -> None:
    given = data()
    frame = np.stack([given["a"], given["b"]], axis=1)
    one = ffcp.CP(linear()).calibrate(frame, given["y"])
    two = calibrate(ffcp.CP(linear()), Rows.of(given), x=["a", "b"], y="y")
    assert torch.allclose(one.calibration.scores, two.calibration.scores)
    (swapped,) = predict(two, Rows.of(given, blocks=1), x=["b", "a"], keep=["id"]).iter_batches()
    band = one.predict_interval(frame, 0.1)
    assert torch.allclose(torch.from_numpy(swapped["lower"].to_numpy()), band.lower)
    assert swapped.column_names == ["id", "prediction", "lower", "upper"]


@pytest.mark.long
@pytest.mark.parametrize(
    "x", [{"a": ["a", "b"], "image": "image"}, (["a", "b"], "image")], ids=["dict", "tuple"]
)
def test_models_with_several_inputs_take_a_dict_or_tuple_of_columns(x: Any) -> None:
    given = data()
    numbers = np.stack([given["a"], given["b"]], axis=1)
    whole = (numbers, given["image"])
    both = dict(zip(("a", "image"), whole, strict=True)) if isinstance(x, dict) else whole
    one = ffcp.CP(Pair()).calibrate(both, given["y"])
    two = calibrate(ffcp.CP(Pair()), Rows.of(given), x=x, y="y")
    assert torch.allclose(one.calibration.scores, two.calibration.scores)
    (found,) = predict(two, Rows.of(given, blocks=1), x=x, id="id").iter_batches()
    band = one.predict_interval(both, 0.1)
    assert torch.allclose(torch.from_numpy(found["upper"].to_numpy()), band.upper)


@pytest.mark.long
def test_what_is_wrong_with_all_rows_is_said_at_once() -> None:
    rows = Rows.of(data())
    cp = ffcp.CP(linear())
    with pytest.raises(ValueError, match="'c'"):
        calibrate(cp, rows, x=["a", "c"], y="y")
    with pytest.raises(TypeError, match="list"):
        calibrate(cp, [1], x=["a"], y="y")
    with pytest.raises(TypeError, match="x"):
        calibrate(cp, rows, x=[], y="y")
    with pytest.raises(ValueError, match="'image'"):
        calibrate(cp, rows, x=["a", "image"], y="y")
    with pytest.raises(ValueError, match="weights"):
        calibrate(cp, rows, x=["a", "b"], y="y", weights="a")
    with pytest.raises(TypeError, match="Linear"):
        calibrate(linear(), rows, x=["a", "b"], y="y")
    with pytest.raises(TypeError, match="Linear"):
        predict(linear(), rows, x=["a", "b"])
    with pytest.raises(RuntimeError, match="calibrat"):
        predict(cp, rows, x=["a", "b"])
    with pytest.raises(ValueError, match="alpha"):
        predict(cp, rows, x=["a", "b"], alphas=[0.1, 1.5])
    cp.calibrate(torch.randn(50, 2), torch.randn(50))
    with pytest.raises(ValueError, match="groups"):
        predict(cp, rows, x=["a", "b"], groups="a")
    taken = Rows.of({**data(), "lower": data()["a"]})
    with pytest.raises(ValueError, match="'lower'"):
        predict(cp, taken, x=["a", "b"])
    with pytest.raises(ValueError, match="empty"):
        calibrate(cp, Rows.of({n: v[:0] for n, v in data().items()}), x=["a", "b"], y="y")


def test_a_dataset_whose_rows_were_all_left_out_is_empty() -> None:
    class Filtered(Rows):
        def select_columns(self, names: list[str]) -> Rows:
            return Rows(pa.table({}))  # of no rows Ray does not know the columns

    with pytest.raises(ValueError, match="empty"):
        calibrate(ffcp.CP(linear()), Filtered.of(data()), x=["a", "b"], y="y")


@pytest.mark.long
def test_one_column_is_kept_by_its_name_and_one_column_is_the_target() -> None:
    cp = ffcp.CP(linear()).calibrate(torch.randn(50, 2), torch.randn(50))
    (part, *_) = predict(cp, Rows.of(data()), x=["a", "b"], keep="id").iter_batches()
    assert part.column_names == ["id", "prediction", "lower", "upper"]
    with pytest.raises(TypeError, match="y"):
        calibrate(cp, Rows.of(data()), x=["a", "b"], y=["y"])  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, -1, "two"])
def test_a_number_of_workers_that_cannot_be_is_refused(workers: Any) -> None:
    with pytest.raises(ValueError, match="workers"):
        pool_of(workers, {})


def test_numbers_of_rows_are_whole_and_may_leave_some_out() -> None:
    given = data()
    aps = ffcp.APS(nn.Linear(2, 3), seed=0).calibrate(
        np.stack([given["a"], given["b"]], axis=1), np.arange(N) % 3
    )
    with pytest.raises(ValueError, match="id"):
        predict(aps, Rows.of({**given, "id": np.arange(N) / 2}), x=["a", "b"], id="id")
    parts = predict(aps, Rows.of(given, seed=2), x=["a", "b"], id="id").iter_batches()
    whole = {row["id"]: row["labels"] for part in parts for row in part.to_pylist()}
    some = np.random.default_rng(0).permutation(N)[:40]
    fewer = Rows.of({name: values[some] for name, values in given.items()}, blocks=2)
    parts = predict(aps, fewer, x=["a", "b"], id="id").iter_batches()
    found = [row for part in parts for row in part.to_pylist()]
    assert [row["id"] for row in found] == sorted(some.tolist())
    assert all(row["labels"] == whole[row["id"]] for row in found)


def files(folder: Path, spoil: Any) -> Rows:
    """Write two files, spoil the second, and read both with the names of their files."""
    tables = []
    for number in range(2):
        given = data()
        given["id"] = given["id"] + number * N
        del given["image"]
        columns = {name: pa.array(values) for name, values in given.items()}
        if number:
            spoil(columns)
        path = str(folder / f"part-{number}.parquet")
        pq.write_table(pa.table(columns), path)
        tables.append(pa.table({**columns, "path": pa.array([path] * N)}))
    return Rows(pa.concat_tables(tables), seed=3)


def hole(name: str, row: int = 41) -> Any:
    def spoil(columns: dict[str, Any]) -> None:
        values = columns[name].to_pylist()
        values[row] = None
        columns[name] = pa.array(values, pa.float32())

    return spoil


@pytest.mark.long
@pytest.mark.parametrize("name", ["a", "y"])
def test_a_bad_row_is_named_by_its_file(tmp_path: Path, name: str) -> None:
    cp = ffcp.CP(linear(), batch_size=2)
    with pytest.raises(ValueError, match="part-1"):
        calibrate(cp, files(tmp_path, hole(name)), x=["a", "b"], y="y")
    assert not len(cp.calibration)


def test_a_bad_row_among_the_very_first_is_named_as_well(tmp_path: Path) -> None:
    files(tmp_path, hole("y", 3))
    table = pq.read_table(tmp_path / "part-1.parquet")
    path = pa.array([str(tmp_path / "part-1.parquet")] * N)
    rows = Rows(table.append_column("path", path))
    with pytest.raises(ValueError, match="part-1"):
        calibrate(ffcp.CP(linear()), rows, x=["a", "b"], y="y")


def test_a_bad_row_is_named_by_file_and_number_when_predicting_too(tmp_path: Path) -> None:
    cp = ffcp.CP(linear(), batch_size=16).calibrate(torch.randn(50, 2), torch.randn(50))
    rows = files(tmp_path, hole("b"))
    with pytest.raises(ValueError, match="part-1"):
        list(predict(cp, rows, x=["a", "b"]).iter_batches())
    rows = rows.select_columns(["a", "b", "y", "id"])
    with pytest.raises(ValueError, match=f"id={N + 41}"):
        list(predict(cp, rows, x=["a", "b"], id="id").iter_batches())
    with pytest.raises(ValueError, match="include_paths=True"):
        list(predict(cp, rows, x=["a", "b"]).iter_batches())


def test_tensors_of_several_shapes_and_rows_without_one_are_named() -> None:
    given = data()
    images: list[Any] = [[1.0, 2.0]] * N
    for bad in ([1.0], None):
        images[37] = bad
        table = pa.table({"v": pa.array(images), "y": given["y"], "id": given["id"]})
        with pytest.raises(ValueError, match="'v'"):
            calibrate(ffcp.CP(linear(), batch_size=20), Rows(table), x="v", y="y")
    images[37] = [3.0, 4.0]
    table = pa.table({"v": pa.array(images), "y": given["y"], "id": given["id"]})
    assert len(calibrate(ffcp.CP(linear()), Rows(table), x="v", y="y").calibration) == N


def test_a_dataset_that_may_leave_out_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rows.context, "max_errored_blocks", 3)
    with pytest.raises(ValueError, match="max_errored_blocks"):
        calibrate(ffcp.CP(linear()), Rows.of(data()), x=["a", "b"], y="y")


def test_calibrating_under_autocast_is_refused_as_workers_have_none() -> None:
    predictor = ffcp.CP(nn.Linear(1, 1))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
        calibrate(predictor, Rows.of(data()), x="a", y="y")


@pytest.mark.parametrize("name", ["alpha", "pac", "confidence", "significance", "coverage"])
def test_no_word_for_coverage_is_taken_for_what_a_worker_needs(name: str) -> None:
    nothing: Any = None
    with pytest.raises(TypeError, match=name):
        predict(nothing, nothing, x="x", **{name: 0.1})
