"""A real cluster: nodes that vanish and workers that are killed lose and repeat no row."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import ffcp

pytest.importorskip("ray.data")

import ray

from ffcp.ray import calibrate, engine, predict
from tests.ray.cluster import PATIENCE, Showing, Two, kill, meanwhile, signs, two, when
from tests.tables.material import houses, new, quick_fit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
__all__ = ["two"]
N, SIZE, FILES = 3000, 50, 10
X = ["a", "b", "c", "d"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[pd.DataFrame, str]:
    """Rows in order, and files of the same rows in another."""
    folder = tmp_path_factory.mktemp("rows")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(N, 4)).astype(np.float32), columns=X)
    noise = (0.1 + frame["a"].abs()) * rng.normal(size=N)
    frame["y"] = (frame["b"] + noise).astype(np.float32)
    frame["id"] = np.arange(N)
    mixed = frame.sample(frac=1, random_state=1)
    for number in range(FILES):
        part = mixed.iloc[number * N // FILES : (number + 1) * N // FILES]
        part.to_parquet(folder / f"part-{number}.parquet", index=False)
    return frame, str(folder)


@pytest.fixture
def show(tmp_path: Path) -> Path:
    folder = tmp_path / "signs"
    folder.mkdir()
    return folder


def chosen(folder: Path) -> Any:
    """A predictor that selects on some first rows; workers score the others."""
    model = Showing(folder)
    predictor = ffcp.FFCP(model, "auto", selection_fraction=0.25, batch_size=SIZE)
    return predictor


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_SELECTING", 400)


def holds_every_row_once(predictor: Any, frame: pd.DataFrame) -> None:
    """Hold scores to be those of different rows, all but those that were set aside."""
    found = predictor.calibration.scores.flatten().sort().values
    assert len(found) == N - predictor._state.set_aside < N
    every = predictor.settled().calibrate(frame[X], frame["y"]).calibration.scores.flatten()
    every = every.sort().values
    place = 0
    for score in found.tolist():  # in their order, no score is taken twice
        while every[place] < score - 1e-5:
            place += 1
        assert abs(float(every[place]) - score) < 1e-5
        place += 1


def read(folder: str) -> Any:
    return ray.data.read_parquet(folder).repartition(12)  # small files would be one block


def test_a_node_that_is_lost_changes_nothing(
    two: Two, data: tuple[pd.DataFrame, str], show: Path
) -> None:
    frame, folder = data
    predictor, lost = chosen(show), two.second.node_id

    def scored() -> None:
        calibrate(predictor, read(folder), x=X, y="y", workers=3, resources={"seat": 1})

    with meanwhile(scored):  # one of the workers is on the node that is replaced
        when(lambda: len(signs(show)) >= 10 and lost in {node for node, _ in signs(show)})
        two.remove()
        two.add()
    holds_every_row_once(predictor, frame)

    for sign in show.iterdir():
        sign.unlink()

    bands = list[pd.DataFrame]()
    rows = predict(predictor, read(folder), x=X, workers=3)
    with meanwhile(lambda: bands.append(rows.to_pandas())):  # one node is left, and has to do
        when(lambda: len(signs(show)) >= 5)
        two.remove()
    two.add()
    (found,) = bands
    assert sorted(found["id"]) == list(range(N))
    band = predictor.predict_interval(frame[X], 0.1)
    lower = found.sort_values("id")["lower"].to_numpy()
    assert np.allclose(lower, band.lower.numpy(), atol=1e-5)


def test_workers_that_are_killed_ten_times_change_nothing(
    two: Two, data: tuple[pd.DataFrame, str], show: Path, tmp_path: Path
) -> None:
    frame, folder = data
    predictor = chosen(show)
    scored = partial(calibrate, predictor, read(folder), x=X, y="y", workers=2)
    with meanwhile(scored):  # in a thread: it is given up if it takes for ever
        kill(show, times=5, every=8, seed=0)
    holds_every_row_once(predictor, frame)

    for sign in show.iterdir():
        sign.unlink()
    rows = read(folder)
    bands = predict(predictor, rows, x=X, id="id", workers=2, alphas=0.2)
    with meanwhile(lambda: bands.write_parquet(tmp_path / "bands")):
        kill(show, times=5, every=8, seed=1)
    found = pd.read_parquet(tmp_path / "bands").sort_values("id", ignore_index=True)
    band = predictor.predict_interval(frame[X], 0.2)
    assert np.array_equal(found["id"], np.arange(N))
    assert np.allclose(found["lower"], band.lower.numpy(), atol=1e-5)
    assert np.allclose(found["upper"], band.upper.numpy(), atol=1e-5)
    assert np.array_equal(found["y"], frame["y"])


DRIVER = """
import time
from pathlib import Path

from ffcp import tables
from ffcp.cli.app import app

load = tables.load


def waiting(folder):
    fitted = load(folder)

    class Waiting(type(fitted)):  # for ever, at the last of the tables
        def predict_file(self, table, out, alpha=None):
            while "4" in Path(table).name:
                time.sleep(1)
            return super().predict_file(table, out, alpha)

    fitted.__class__ = Waiting
    return fitted


tables.load = waiting
app()
"""


def command(two: Two, *words: str) -> subprocess.Popen[str]:
    """Start the driver of a job on the cluster, as its own process."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "RAY_ADDRESS": two.cluster.address,
    }
    return subprocess.Popen(
        [sys.executable, *words], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_a_driver_that_dies_leaves_nothing_half_written(two: Two, tmp_path: Path) -> None:
    fitted = quick_fit(houses(300), "price", minutes=0.005)
    folder = fitted.save(tmp_path / "houses.ffcp")
    tables = [tmp_path / f"new-{number}.parquet" for number in range(5)]
    for number, table in enumerate(tables):
        new(200, seed=number).to_parquet(table, index=False)
    (tmp_path / "driver.py").write_text(DRIVER)
    words = ["predict", str(folder), *map(str, tables), "--ray", "--out", str(tmp_path / "bands")]

    driver = command(two, str(tmp_path / "driver.py"), *words)
    try:
        when(lambda: len(list(tmp_path.glob(".bands.*/new-*.parquet"))) >= 2)
    finally:
        driver.kill()
        driver.communicate()
    assert not (tmp_path / "bands").exists()

    said, _ = command(two, "-m", "ffcp.cli", *words).communicate(timeout=PATIENCE)
    assert "1,000 rows" in said
    written = tmp_path / "bands"
    assert sorted(file.name for file in written.iterdir()) == [
        f"new-{number}.intervals.parquet" for number in range(5)
    ]
    for table in tables:
        for _ in fitted.predict_file(table, tmp_path / "one.parquet"):
            pass
        one = pd.read_parquet(tmp_path / "one.parquet")
        pd.testing.assert_frame_equal(
            pd.read_parquet(written / f"{table.stem}.intervals.parquet"), one
        )
