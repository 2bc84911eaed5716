"""Coverage through the integrations: calibrate there, predict many new rows and single ones.

Every test draws many calibration sets: by calibrating anew, or, where one is slow, by
groups, each of which is a calibration of its own. Calibration sets are small, so that coverage
falls by several hundredths if a threshold is one rank too low.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import ffcp
from ffcp.conformal.rank import conformal_rank
from tests.law import ERROR_RATE

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")]

N, T, ONES, ALPHA = 19, 200, 3, 0.1
DRAWS, QUICK = 50, 120  # calibrations: of slow integrations, and of others
CLASSES = np.array(list("abcd"))
Array = np.ndarray


class Drawn(NamedTuple):
    """Hits among new rows of one calibration: of so many rows, by so many calibration rows."""

    hits: int
    rows: int
    calibrated: int


def z_score(drawn: Sequence[Drawn], alpha: float) -> float:
    """Standardise all hits by the beta-binomial law: see tests/law.py."""
    off = var = 0.0
    for hits, rows, n in drawn:
        k = conformal_rank(n, alpha)
        if k > n:  # everything is covered
            assert hits == rows
            continue
        law = stats.betabinom(rows, k, n + 1 - k)
        off, var = off + hits - law.mean(), var + law.var()
    return off / math.sqrt(var)


def must_cover(drawn: Sequence[Drawn], alpha: float = ALPHA, *, exactly: bool = False) -> None:
    """Refuse coverage below its law, or, if it should be exact, above it."""
    z = z_score(drawn, alpha)
    assert stats.norm.cdf(z) > ERROR_RATE, z
    assert not exactly or stats.norm.sf(z) > ERROR_RATE, z


def must_differ(regions: Array) -> None:
    """Refuse predictions that are the same for all rows."""
    assert len(np.unique(regions, axis=0)) > 1


def numbers(rows: int, seed: Any) -> tuple[Array, Array]:
    """Inputs and targets whose noise grows with the input."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((rows, 3))
    return x, x[:, 0] + (0.3 + np.abs(x[:, 1])) * draw.standard_normal(rows)


def words(rows: int, seed: Any, new: float = 0.0) -> tuple[Array, Array]:
    """Inputs and one of four labels, which they tell loosely; a share of labels is always new."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((rows, 3))
    y = CLASSES[np.digitize(x[:, 0] + draw.standard_normal(rows), (-1, 0, 1))].astype(object)
    alone = draw.random(rows) < new
    y[alone] = [f"name {number}" for number in draw.integers(0, 2**60, alone.sum())]
    return x, y.astype(str)


def inside(ends: Array, y: Array) -> Array:
    return (ends[:, 0] <= y) & (y <= ends[:, 1])


def held(mask: Array, y: Array, classes: Sequence[str]) -> Array:
    """Say which sets hold the label; behind the classes stands the column of all others."""
    place = {name: number for number, name in enumerate(classes)}
    return mask[np.arange(len(y)), [place.get(label, len(place)) for label in y]]


# -- ffcp fit and ffcp predict, through files ---------------------------------------------------


class Commands:
    """``ffcp fit --classify`` and ``ffcp predict`` on files of a folder."""

    def __init__(self, folder: Path) -> None:
        from typer.testing import CliRunner

        self.folder, self.runner = folder, CliRunner()

    def run(self, *words: str) -> None:
        from ffcp.cli.app import app

        result = self.runner.invoke(app, list(words))
        assert result.exit_code == 0, result.output

    def table(self, name: str, x: Array, **columns: Any) -> str:
        import pandas as pd

        path = self.folder / name
        pd.DataFrame({**dict(zip("pqr", x.T, strict=True)), **columns}).to_csv(path, index=False)
        return str(path)

    def fit(self, x: Array, y: Array, seed: int, *options: str, **columns: Any) -> Any:
        from ffcp import tables

        path, out = self.table("known.csv", x, y=y, **columns), str(self.folder / "known.ffcp")
        how = ("--target", "y", "--classify", "--minutes", "0.002", "--seed", str(seed), "--force")
        self.run("fit", path, "--out", out, *how, *options)
        return tables.load(out)

    def predict(self, x: Array, **columns: Any) -> list[list[str]]:
        import pandas as pd

        from ffcp.tables.evaluation import labels_of

        path = self.table("new.csv", x, **columns)
        self.run("predict", str(self.folder / "known.ffcp"), path)
        written = pd.read_csv(self.folder / "new.sets.csv", keep_default_na=False)
        assert len(written) == len(x)
        return [labels_of(cell) for cell in written["labels"]]


def covered_words(sets: list[list[str]], y: Array, classes: Sequence[str]) -> Array:
    truth = [label if label in classes else "another label" for label in y]
    return np.array([label in found for label, found in zip(truth, sets, strict=True)])


@pytest.mark.parametrize("new", [pytest.param(0.0, marks=pytest.mark.slow), 0.2])
def test_ffcp_fit_and_predict_cover_new_rows_through_files(new: float, tmp_path: Path) -> None:
    pytest.importorskip("tabm")
    commands, many, ones, sizes = Commands(tmp_path), [], [], []
    for draw in range(DRAWS):
        fitted = commands.fit(*words(4 * N, (draw, 0), new), draw)
        x, y = words(T, (draw, 1), new)
        sets, classes = commands.predict(x), fitted.about.classes
        n = len(fitted.predictor.calibration)
        assert n == N
        hits = covered_words(sets, y, classes)
        many.append(Drawn(hits.sum(), T, n))
        alone = commands.predict(x[:1])  # a row by itself has the set that it has among others
        assert alone == sets[:1]
        ones.append(Drawn(int(covered_words(alone, y[:1], classes)[0]), 1, n))
        sizes.append(np.mean([len(found) for found in sets]) / (len(classes) + 1))
        if sizes[-1] < 1:
            must_differ(np.array([len(found) for found in sets]))
    must_cover(many)
    must_cover(ones)
    assert min(sizes) < 0.9  # not by sets of everything
    assert (max(sizes) == 1) == (new > 0)


@pytest.mark.parametrize("new", [0.0, 0.03])
def test_ffcp_fit_covers_new_rows_of_every_group(new: float, tmp_path: Path) -> None:
    pytest.importorskip("tabm")
    commands, groups = Commands(tmp_path), 100
    x, y = words(groups * 100, 0, new)
    fitted = commands.fit(x, y, 0, "--group", "g", g=np.arange(len(x)) % groups)
    assert fitted.predictor.choice.rows > 0
    counts = {str(name): count for name, count in fitted.predictor.calibration.groups.items()}
    assert sum(counts.values()) == len(x) // 4 - fitted.predictor.choice.rows
    x, y = words(groups * 100, 1, new)
    group = np.arange(len(x)) % groups
    hits = covered_words(commands.predict(x, g=group), y, fitted.about.classes)
    must_cover([Drawn(hits[group == g].sum(), 100, counts[str(g)]) for g in range(groups)])


# -- scikit-learn -------------------------------------------------------------------------------


def fitted_on_others(estimator: Any, sample: Callable[..., tuple[Array, Array]], draw: int) -> Any:
    from sklearn.frozen import FrozenEstimator

    return FrozenEstimator(estimator.fit(*sample(60, (draw, 2))))


def scikit(
    make: Callable[[int], Any],
    sample: Callable[..., tuple[Array, Array]],
    covered: Callable[[Any, Array, Array], tuple[Array, Array]],
    rows: int,
    alpha: float,
) -> tuple[list[Drawn], list[Drawn]]:
    """Fit, and predict many rows and single ones; those must be what they are among others."""
    many, ones = [], []
    for draw in range(QUICK):
        fitted = make(draw).fit(*sample(rows, (draw, 0)))
        n = len(fitted.predictor_.calibration)
        x, y = sample(T, (draw, 1))
        regions, hits = covered(fitted, x, y)
        must_differ(regions)
        many.append(Drawn(hits.sum(), T, n))
        for row in range(ONES):
            alone, hit = covered(fitted, x[row : row + 1], y[row : row + 1])
            np.testing.assert_allclose(alone[0], regions[row])
            ones.append(Drawn(int(hit[0]), 1, n))
    return many, ones


@pytest.mark.parametrize(
    ("prefit", "method", "rows", "alpha"),
    [
        (False, "cp", 4 * N, ALPHA),
        (True, "cp", N, ALPHA),
        (False, "auto", 400, 0.02),
        (True, "lcp", 3 * N, ALPHA),
    ],
)
def test_regressors_cover_new_rows(prefit: bool, method: str, rows: int, alpha: float) -> None:
    pytest.importorskip("sklearn")
    from sklearn.linear_model import LinearRegression

    from ffcp.sklearn import ConformalRegressor

    def make(draw: int) -> Any:
        own = fitted_on_others(LinearRegression(), numbers, draw) if prefit else LinearRegression()
        return ConformalRegressor(own, alpha=alpha, method=method, random_state=draw)

    def covered(fitted: Any, x: Array, y: Array) -> tuple[Array, Array]:
        ends = fitted.predict_interval(x)
        return ends, inside(ends, y)

    many, ones = scikit(make, numbers, covered, rows, alpha)
    must_cover(many, alpha, exactly=method == "cp")
    must_cover(ones, alpha)


@pytest.mark.parametrize("new", [0.0, 0.03])
@pytest.mark.parametrize(
    ("prefit", "method", "rows", "alpha"),
    [(False, "lac", 4 * N, ALPHA), (True, "lac", N, ALPHA), (False, "auto", 500, 0.02)],
)
def test_classifiers_cover_new_rows(
    prefit: bool, method: str, rows: int, alpha: float, new: float
) -> None:
    pytest.importorskip("sklearn")
    from sklearn.linear_model import LogisticRegression

    from ffcp.sklearn import ConformalClassifier

    def sample(rows: int, seed: Any) -> tuple[Array, Array]:
        return words(rows, seed, new)

    def make(draw: int) -> Any:
        own = LogisticRegression()
        own = fitted_on_others(own, sample, draw) if prefit else own
        return ConformalClassifier(own, alpha=alpha, method=method, random_state=draw)

    def covered(fitted: Any, x: Array, y: Array) -> tuple[Array, Array]:
        mask = fitted.predict_set(x)
        # Sets of everything are alike, and those of a random score are drawn anew.
        own = [] if fitted.predictor_.calibrated().score.randomized else [mask]
        regions = np.column_stack([*own, fitted.predict_proba(x)])
        return regions, held(mask, y, fitted.classes_.tolist())

    many, ones = scikit(make, sample, covered, rows, alpha)
    must_cover(many, alpha)
    must_cover(ones, alpha)


# -- an ONNX file -------------------------------------------------------------------------------


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).eval()


ONNX = {
    "CP": lambda: ffcp.CP(network(1)),
    "FFCP": lambda: ffcp.FFCP(network(1), "0"),
    "RAPS": lambda: ffcp.RAPS(network(4), 0.01, 2, seed=0, allow_zero_sets=True),
}


def in_groups(rows: int, seed: int, labels: bool) -> tuple[Array, Array, Array]:
    """Rows of DRAWS groups, so many of each."""
    x, y = words(DRAWS * rows, seed) if labels else numbers(DRAWS * rows, seed)
    target = np.searchsorted(CLASSES, y) if labels else y.astype(np.float32)
    return x.astype(np.float32), target, np.arange(DRAWS * rows) % DRAWS


@pytest.mark.usefixtures("torch_that_exports")
@pytest.mark.parametrize("name", ONNX)
def test_an_onnx_file_covers_new_rows(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    labels = name == "RAPS"
    x, y, group = in_groups(N, 0, labels)
    predictor = ONNX[name]().calibrate(x, torch.from_numpy(y), groups=group)
    predictor.export(tmp_path / "commands.onnx", x[:100], alphas=(ALPHA,))
    session = onnxruntime.InferenceSession(tmp_path / "commands.onnx")
    x, y, group = in_groups(T, 1, labels)
    feed = {"x": x, "group": group}
    if labels:
        feed["random"] = np.random.default_rng(2).random(len(x))

    def regions(rows: slice) -> Array:
        some = {given: values[rows] for given, values in feed.items()}
        if labels:
            return session.run(["mask"], some)[0]
        lower, upper = session.run(["lower", "upper"], some)
        return np.column_stack([lower.reshape(-1), upper.reshape(-1)])

    every = regions(slice(None))
    must_differ(every)
    for row in range(DRAWS):
        np.testing.assert_allclose(regions(slice(row, row + 1))[0], every[row], rtol=1e-5)
    hits = held(every, CLASSES[y], CLASSES.tolist()) if labels else inside(every, y)
    must_cover([Drawn(hits[group == g].sum(), T, N) for g in range(DRAWS)], exactly=True)


# -- Ray, in one process ------------------------------------------------------------------------

try:
    from tests.ray.local import Rows, here
except ImportError:  # there is no Ray: its test says so

    @pytest.fixture
    def here() -> None:
        pytest.skip("ray is not installed")


@pytest.mark.usefixtures(here.__name__)
@pytest.mark.parametrize("labels", [False, True])
def test_ray_covers_new_rows(labels: bool) -> None:
    from ffcp.ray import calibrate, predict

    many, ones = [], []
    for draw in range(QUICK):
        known, new = (_columns(rows, (draw, part), labels) for part, rows in ((0, N), (1, T)))
        made = (
            ffcp.LAC(network(4), other_labels=True, allow_zero_sets=True)
            if labels
            else ffcp.CP(network(1))
        )
        made = calibrate(made, Rows.of(known, seed=draw), x="x", y="y")

        def regions(columns: dict[str, Any], made: Any = made) -> list[Any]:
            parts = predict(made, Rows.of(columns), x="x", id="id", alphas=ALPHA).iter_batches()
            rows = {row["id"]: row for part in parts for row in part.to_pylist()}
            names = ("labels",) if labels else ("lower", "upper")
            return [[rows[place][name] for name in names] for place in sorted(rows)]

        found = regions(new)
        hits = [_is_in(region, y, labels) for region, y in zip(found, new["y"], strict=True)]
        many.append(Drawn(sum(hits), T, N))
        assert len({str(region) for region in found}) > 1
        (one,) = regions({name: values[:1] for name, values in new.items()})
        assert one == (found[0] if labels else pytest.approx(found[0], rel=1e-5))
        ones.append(Drawn(int(_is_in(one, new["y"][0], labels)), 1, N))
    must_cover(many, exactly=True)
    must_cover(ones)


def _columns(rows: int, seed: Any, labels: bool) -> dict[str, Any]:
    x, y = words(rows, seed) if labels else numbers(rows, seed)
    target = np.searchsorted(CLASSES, y) if labels else y.astype(np.float32)
    return {"x": x.astype(np.float32), "y": target, "id": np.arange(rows)}


def _is_in(region: list[Any], y: Any, labels: bool) -> bool:
    return bool(y in region[0]) if labels else bool(region[0] <= y <= region[1])


# -- a stream -----------------------------------------------------------------------------------


def test_a_stream_covers_many_rows_and_one_after_the_other() -> None:
    many, off, var, steps = [], 0.0, 0.0, 30
    for draw in range(QUICK):
        x, y = (torch.from_numpy(part).float() for part in numbers(N + T, (draw, 0)))
        predictor = ffcp.CP(network(1)).calibrate(x[:N], y[:N])
        x, y = x[N:], y[N:]
        band = ffcp.Online(predictor, "plain", ALPHA).predict_interval(x)
        every = torch.stack([band.lower.reshape(-1), band.upper.reshape(-1)], dim=1)
        must_differ(every.numpy())
        many.append(Drawn(int(inside(every, y).sum()), T, N))
        # One after the other, each among all before it: misses are then independent.
        online = ffcp.Online(predictor, "plain", ALPHA)
        for row in range(steps):
            one = online.predict_interval(x[row : row + 1])
            if not row:
                assert float(one.lower) == pytest.approx(float(every[0, 0]), rel=1e-5)
            online.update(x[row : row + 1], y[row : row + 1])
            n = N + row
            share = conformal_rank(n, ALPHA) / (n + 1)
            off, var = off + (1 - share), var + share * (1 - share)
        off -= sum(online.misses)
    must_cover(many, exactly=True)
    assert abs(off / math.sqrt(var)) < stats.norm.isf(ERROR_RATE)


def test_a_stream_with_a_level_that_follows_keeps_its_promise() -> None:
    x, y = (torch.from_numpy(part).float() for part in numbers(N + 800, 0))
    gamma = 0.05
    online = ffcp.Online(ffcp.CP(network(1)).calibrate(x[:N], y[:N]), "aci", ALPHA, gamma=gamma)
    widths = []
    for row in range(N, len(x)):
        band = online.predict_interval(x[row : row + 1])
        widths.append(float(band.upper - band.lower))
        online.update(x[row : row + 1], y[row : row + 1])
    must_differ(np.array(widths))
    truths, misses = online.observed[0], online.misses[0]
    assert truths == 800
    assert abs(misses / truths - ALPHA) <= (1 - ALPHA + gamma) / (gamma * truths)
