"""What ``ffcp fit --minutes`` bounds: processor time beside reading the file once.

Times are compared with those of reading the same file and of fitting a small one, on the same
machine, so that they hold for a slow one, too.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pandas")
pytest.importorskip("tabm")
import pandas as pd

from ffcp.tables import cells, columns, fit, splitting, table_io

MINUTES = 0.02
READING, FITTING, FOLDS = 1.25, 3.5, 6.0  # times reading, and fitting a small table; in folds
WORDS = np.array([f"level {number}" for number in range(40)])


def table(rows: int, many: int, kind: str) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    if kind == "numbers":
        cells_of = draw.normal(size=(rows, many)).round(4)
    else:
        cells_of = WORDS[draw.integers(0, len(WORDS), (rows, many))]
    frame = pd.DataFrame(cells_of).rename(columns="c{}".format)
    return frame.assign(y=draw.normal(size=rows))


def seconds_of_fit(path: Path) -> float:
    """Return the processor time of the command, in a process of its own with one thread."""
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-m", "ffcp.cli", "fit", path, "--target", "y", "--force"]
    limits = ["--minutes", str(MINUTES), "--out", path.with_suffix(".ffcp")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*words, *limits], check=True, capture_output=True, env=environment)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> float:
    path = tmp_path_factory.mktemp("small") / "small.csv"
    table(500, 5, "numbers").to_csv(path, index=False)
    return seconds_of_fit(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "many", "kind", "times"),
    [
        (100_000, 10, "numbers", FITTING),
        (5_000, 3_000, "numbers", FITTING),
        (4_000, 1_500, "words", FITTING),
        (390, 3_000, "numbers", FOLDS),
    ],
)
def test_a_fit_takes_no_longer_than_reading_and_a_few_small_fits(
    rows: int, many: int, kind: str, times: float, small: float, tmp_path: Path
) -> None:
    path = tmp_path / "table.csv"
    table(rows, many, kind).to_csv(path, index=False)
    begin = time.process_time()
    table_io.read(path)
    reading = time.process_time() - begin
    assert seconds_of_fit(path) < READING * reading + times * small


def test_a_short_time_leaves_every_group_the_rows_that_alpha_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frame = table(6_000, 3, "numbers")
    frame["g"] = np.where(np.arange(6_000) % 50 == 0, "rare", "often")  # 120 of 6,000
    monkeypatch.setattr(splitting, "_PREPARED", 1e3)  # a long table would allow no more
    fitted = fit(frame, "y", group="g", minutes=0.0005, seed=3)
    assert sum(fitted.about.rows.values()) < 1_000
    assert fitted.predictor.calibration.groups["rare"] >= 9


def test_rows_that_are_prepared_and_passed_grow_with_the_time() -> None:
    for many in (1, 30, 1000, 5000):
        for seconds in (1.2, 12.0, 120.0):
            prepared = splitting.rows_in_time(many, seconds, 0.1)
            assert prepared == 400 or prepared * many <= 1e6 * (seconds + 1)
            passed = splitting.most_rows(many, seconds)
            assert passed <= min(20_000, 1.5e5 * (seconds + 1) / (many + 400))
    assert splitting.most_rows(30, 180.0) == 20_000  # as ever, in the usual time


def test_levels_of_many_categories_are_few_in_all() -> None:
    frame = table(600, 500, "words")
    learned = columns.learn(frame, "y")
    assert {column.kind for column in learned} == {columns.CATEGORY}
    assert max(len(column.levels) for column in learned) == 19  # of 40; one more is for the others
    assert learned.flags <= 10_000


def test_words_without_a_year_or_three_numbers_are_not_tried_as_dates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert cells.date_format(pd.Series(["1.2.20", "", "3.4.21"])) == "%d.%m.%y"
    assert cells.date_format(pd.Series(["2020", "2020-05"])) == cells.ISO
    assert cells.date_format(pd.Series(["20200131", "20200201"])) == cells.ISO
    assert cells.date_format(pd.Series(["May 4, 2020"])) == "%b %d, %Y"
    monkeypatch.setattr(cells, "dates", None)
    assert cells.date_format(pd.Series(["0/1", "1/1", "level 12"])) is None
    assert cells.date_format(pd.Series(["", ""])) is None
