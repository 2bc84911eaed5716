"""From a file to new rows by the commands for tables: coverage against its law, row by row.

Every case fits several samples, and predicts many new rows at once and some one at a time. The
number of covered rows of a fit is beta-binomial with the scores that calibrated; what all fits
cover together lies within what this allows, but for a share ERROR_RATE of all seeds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

pytest.importorskip("pandas")
pytest.importorskip("tabm")
import pandas as pd

from ffcp import tables
from ffcp.cli.app import app
from ffcp.conformal.rank import conformal_rank
from ffcp.regression.learned import network
from ffcp.tables import table_io
from tests.law import ERROR_RATE

pytestmark = pytest.mark.heavy
ALPHA = 0.2
ENDS = ["prediction", "lower", "upper"]


def sample(rows: int, draw: np.random.Generator) -> pd.DataFrame:
    """Return rows whose noise grows with ``a`` and is far greater in the group "b"."""
    frame = pd.DataFrame(
        {
            "a": draw.uniform(0, 1, rows),
            "b": draw.normal(size=rows),
            "kind": draw.choice(["a", "b"], rows, p=[0.7, 0.3]),
            "day": np.arange(rows),
        }
    )
    noise = (0.2 + frame["a"]) * np.where(frame["kind"] == "b", 5, 1) * draw.normal(size=rows)
    return frame.assign(y=3 * frame["a"] + frame["b"] + noise)


def run(*words: str | Path) -> None:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output


def written(frame: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False)
    return path


def predicted(folder: Path, frame: pd.DataFrame, place: Path) -> pd.DataFrame:
    """Predict by the command, through files."""
    table = written(frame.drop(columns="y"), place)
    out = place.with_name(f"out{place.suffix}")
    run("predict", folder, table, "--out", out)
    made = table_io.read(out)
    assert len(made) == len(frame)
    assert (made["reason"] == "").all()
    return made[ENDS].astype(float)


class FitCommands:
    """Fits, one after the other: what they covered, and what they must."""

    def __init__(self, place: Path, rows: int, *options: str, ending: str = ".csv") -> None:
        self.place, self.rows, self.options, self.ending = place, rows, options, ending
        self.results: list[tuple[tables.FittedTable, pd.DataFrame, np.ndarray]] = []

    def fit(self, seed: int, new_rows: int = 250) -> None:
        """Fit one sample, predict another; some of its rows one at a time, too."""
        draw = np.random.default_rng(seed)
        folder = self.place / f"{seed}.ffcp"
        table = written(sample(self.rows, draw), self.place / f"fit{self.ending}")
        limits = ("--alpha", str(ALPHA), "--minutes", "0.004", "--seed", str(seed))
        run("fit", table, "--target", "y", "--out", folder, *limits, *self.options)
        new = sample(new_rows, draw)
        new["day"] += self.rows
        bands = predicted(folder, new, self.place / f"new{self.ending}")
        for row in range(3):
            alone = predicted(folder, new[row : row + 1], self.place / f"one{self.ending}")
            assert np.allclose(alone, bands[row : row + 1], rtol=1e-4, atol=1e-4)
        for name in ENDS:  # an end without limit is infinite, or an empty cell
            finite = bands[name][np.isfinite(bands[name])]
            assert finite.nunique() >= 0.9 * len(finite)
        inside = (bands["lower"].fillna(-np.inf) <= new["y"]) & (
            new["y"] <= bands["upper"].fillna(np.inf)
        )
        assert bands["prediction"].nunique() > 0.9 * len(bands)
        self.results.append((tables.load(folder), new, inside.to_numpy()))

    def z(self, kind: str | None = None) -> float:
        """Return by how many standard deviations all fits together cover more than the law's mean.

        Of one group, if it is named.
        """
        hits = mean = variance = 0.0
        for fitted, new, inside in self.results:
            calibration = fitted.predictor.calibration
            n = len(calibration) if kind is None else calibration.groups[kind]
            some = inside if kind is None else inside[(new["kind"] == kind).to_numpy()]
            k = conformal_rank(n, ALPHA)
            law = stats.betabinom(len(some), k, n + 1 - k)
            hits, mean, variance = hits + some.sum(), mean + law.mean(), variance + law.var()
        return float((hits - mean) / variance**0.5)


LIMIT = float(stats.norm.isf(ERROR_RATE))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is learned about errors learn for a moment: it changes lengths, not coverage."""
    monkeypatch.setattr(network, "_EPOCHS", 4)


@pytest.mark.parametrize("rows", [20, 50])
def test_few_rows_cover_as_the_folds_promise(rows: int, tmp_path: Path) -> None:
    commands = FitCommands(tmp_path, rows)
    for seed in range(6):
        commands.fit(seed)
    shares = np.array([inside.mean() for _, _, inside in commands.results])
    promised = commands.results[0][0].predictor.guarantee(ALPHA)
    error = 0.5 / len(shares) ** 0.5  # no share differs by more than a half from any mean
    assert shares.mean() > promised - error * LIMIT / 3
    assert shares.mean() > 0.65  # as usual: 0.8, and 0.2 if every row had the first one's
    assert all(fitted.about.folds for fitted, _, _ in commands.results)


@pytest.mark.parametrize("side", ["both", "lower", "upper", "each"])
def test_every_side_covers_by_its_law(side: str, tmp_path: Path) -> None:
    commands = FitCommands(tmp_path, 420, "--side", side)
    for seed in range(6):
        commands.fit(seed)
    assert -LIMIT < commands.z() < 2 * LIMIT  # "each" has two ranks, rounded up
    for fitted, new, _ in commands.results:
        bands = fitted.predict(new.drop(columns="y"))
        assert np.isinf(bands["upper"]).all() == (side == "lower")
        assert np.isinf(bands["lower"]).all() == (side == "upper")


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_every_group_covers_by_its_law(ending: str, tmp_path: Path) -> None:
    commands = FitCommands(tmp_path, 600, "--group", "kind", ending=ending)
    for seed in range(6):
        commands.fit(seed)
    for kind in ("a", "b"):
        assert abs(commands.z(kind)) < LIMIT


def test_rows_in_order_of_time_cover_by_their_law(tmp_path: Path) -> None:
    commands = FitCommands(tmp_path, 500, "--time", "day")
    for seed in range(6):
        commands.fit(seed)
    assert abs(commands.z()) < LIMIT


def test_a_check_of_new_rows_says_what_the_bands_covered(tmp_path: Path) -> None:
    commands = FitCommands(tmp_path, 420)
    commands.fit(0)
    ((fitted, new, inside),) = commands.results
    written(new, tmp_path / "known.csv")
    checked = CliRunner().invoke(
        app, ["check", str(tmp_path / "0.ffcp"), str(tmp_path / "known.csv")]
    )
    said = " ".join(checked.output.split())
    assert checked.exit_code == 0, said
    assert f"Coverage {inside.mean():.1%}" in said
    assert f"Calibrated with {len(fitted.predictor.calibration)} rows" in said
    assert fitted.calibrated < 105  # some chose the method
