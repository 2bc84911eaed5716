"""False alarms of ``ffcp check`` where nothing has changed: every case fits anew, file to file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

pytest.importorskip("pandas")
pytest.importorskip("tabm")
import pandas as pd

from ffcp import tables
from ffcp.cli.app import app
from ffcp.regression.learned import network
from tests.law import ERROR_RATE

FITS, ROWS, NEW_ROWS = 200, 420, 1500
STATED = 0.01  # the share of false alarms is below it


def sample(rows: int, draw: np.random.Generator) -> pd.DataFrame:
    frame = pd.DataFrame(draw.normal(size=(rows, 2)), columns=["a", "b"])
    return frame.assign(y=frame["a"] + (0.2 + frame["b"].abs()) * draw.normal(size=rows))


def exit_code(*words: str | Path) -> int:
    return CliRunner().invoke(app, [str(word) for word in words]).exit_code


@pytest.mark.slow
def test_fits_whose_data_does_not_change_alarm_as_rarely_as_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_EPOCHS", 4)  # what is learned changes lengths, not coverage
    chances, set_aside, still_covers = [], [], tables.FittedTable.still_covers

    def noted(fitted: tables.FittedTable, *given: Any) -> float:
        chances.append(still_covers(fitted, *given))
        set_aside.append(fitted.about.rows["method selection"])
        return chances[-1]

    monkeypatch.setattr(tables.FittedTable, "still_covers", noted)
    table, fresh, folder = tmp_path / "fit.csv", tmp_path / "new.parquet", tmp_path / "fit.ffcp"
    codes = []
    for seed in range(FITS):
        draw = np.random.default_rng([28, seed])  # not the numbers that divide the rows
        sample(ROWS, draw).to_csv(table, index=False)
        sample(NEW_ROWS, draw).to_parquet(fresh)
        limits = ("--minutes", "0.0005", "--seed", str(seed), "--force")
        assert exit_code("fit", table, "--target", "y", "--out", folder, *limits) == 0
        codes.append(exit_code("check", folder, fresh))
    assert codes == [int(chance < STATED) for chance in chances]
    assert min(set_aside) > 10  # so that it matters which rows are counted
    assert sum(codes) <= stats.binom.isf(ERROR_RATE, FITS, STATED)
    # All chances together show a fault with far fewer fits than alarms do: where they follow
    # their law, the squares of the normal deviates that they stand for add up to chi-square.
    squares = stats.norm.isf(np.clip(chances, 1e-9, 1 - 1e-9)) ** 2
    assert squares.sum() < stats.chi2.isf(ERROR_RATE, FITS)
