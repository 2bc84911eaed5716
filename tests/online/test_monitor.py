"""Monitors: p-values, false alarms as a law, what is found, and what is told."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import ffcp
from ffcp.metrics import clopper_pearson
from ffcp.online.martingales import Average, OnlineRanks, PlugIn, PowerMixture
from tests.conftest import normal, small_mlp
from tests.test_threads import together

STREAMS, LENGTH, CALIBRATION, THRESHOLD = 2000, 250, 50, 20.0


def online_p_values(scores: np.ndarray, start: int, theta: np.ndarray) -> np.ndarray:
    """Rank columns among all earlier ones, (streams, length), for many streams at once."""
    return np.stack(
        [
            ((scores[:, :t] > scores[:, t, None]).sum(axis=1) + theta[:, t]) / (t + 1)
            for t in range(start, scores.shape[1])
        ],
        axis=1,
    )


def alarms(p: np.ndarray, martingale: Any) -> int:
    """Count the streams whose wealth ever reaches the threshold."""
    raised = np.zeros(len(p), dtype=bool)
    for column in p.T:
        martingale.bet(column)
        raised |= np.asarray(martingale.log_wealth) >= math.log(THRESHOLD)
    return int(raised.sum())


@pytest.fixture(scope="module")
def streams() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return random.random((STREAMS, CALIBRATION + LENGTH)), random.random(
        (STREAMS, CALIBRATION + LENGTH)
    )


@pytest.mark.heavy
@pytest.mark.parametrize("make", [PowerMixture, PlugIn, Average], ids=lambda make: make.__name__)
def test_false_alarms_over_2000_streams_are_at_most_one_in_the_threshold(
    make: Any, streams: tuple[np.ndarray, np.ndarray]
) -> None:
    scores, theta = streams
    raised = alarms(online_p_values(scores, CALIBRATION, theta), make())
    assert stats.binomtest(raised, STREAMS, 1 / THRESHOLD, alternative="greater").pvalue > 1e-3


@pytest.mark.heavy
def test_p_values_against_a_fixed_set_raise_false_alarms_in_the_end(
    streams: tuple[np.ndarray, np.ndarray],
) -> None:
    scores, theta = streams
    first, later = scores[:, :CALIBRATION], scores[:, CALIBRATION:]
    larger = (first[:, None, :] > later[:, :, None]).sum(axis=2)
    fixed = (larger + theta[:, CALIBRATION:]) / (CALIBRATION + 1)
    raised = alarms(fixed, Average())
    assert stats.binomtest(raised, STREAMS, 1 / THRESHOLD, alternative="greater").pvalue < 1e-6


@pytest.mark.slow
def test_false_alarms_of_long_streams_stay_rare() -> None:
    random = np.random.default_rng(2)
    # Online p-values are independent and uniform; drawn as such, streams can be long.
    raised = alarms(random.random((STREAMS, 10_000)), Average())
    assert stats.binomtest(raised, STREAMS, 1 / THRESHOLD, alternative="greater").pvalue > 1e-3


def test_online_p_values_are_independent_and_uniform(
    streams: tuple[np.ndarray, np.ndarray],
) -> None:
    scores, theta = streams
    p = online_p_values(scores[:, :80], 20, theta)
    assert stats.kstest(p.ravel(), "uniform").pvalue > 1e-3
    assert stats.pearsonr(p[:, :-1].ravel(), p[:, 1:].ravel()).pvalue > 1e-3
    sums = stats.kstest(p.sum(axis=1), stats.norm(30, math.sqrt(60 / 12)).cdf)
    assert sums.pvalue > 1e-3  # would be too spread out against a fixed set


# crepes 0.9.1, from crepes.martingales:
#   class Powers:
#       def apply(self, p):
#           e = np.arange(1, 33) / 32
#           return e * p[:, None] ** (e - 1)  # of 1 - p where mirrored
#   p = np.random.default_rng(7).beta(0.6, 1.2, size=40)
#   SimpleJumper(J=J, bf=Powers()).apply(p)[[0, 9, 39]]
CREPES = {
    (1e-4, False): [0.6777554877096409, 67.26826575533119, 361.141508716057],
    (1e-4, True): [0.6336795528986245, 0.18100281486981015, 0.0735665782758633],
    (0.01, False): [0.6777554877096409, 68.23243918758853, 333.77907048694124],
    (0.01, True): [0.6336795528986245, 0.17486842649225454, 0.056644667022186554],
}


@pytest.mark.parametrize(("jump", "mirrored"), CREPES)
def test_wealth_agrees_with_crepes(jump: float, mirrored: bool) -> None:
    p = np.random.default_rng(7).beta(0.6, 1.2, size=40)
    martingale, found = PowerMixture(32, jump, mirrored), []
    for one in p:
        martingale.bet(one)
        found.append(math.exp(martingale.log_wealth))
    assert np.allclose(np.array(found)[[0, 9, 39]], CREPES[jump, mirrored], rtol=1e-10)


def test_p_values_agree_with_crepes(monkeypatch: pytest.MonkeyPatch) -> None:
    # a = np.random.default_rng(8).integers(0, 6, size=12).astype(float)
    # crepes.martingales.semi_online_p_values(a, seed=3)
    a = np.random.default_rng(8).integers(0, 6, size=12).astype(float)
    expected = [0.5507979025745755, 0.8540739113090524, 0.5272698259419629, 0.12770690129941575]
    expected += [0.9357681726085929, 0.9308620592889586, 0.3036550443519766, 0.1768107195345467]
    expected += [0.34477048962240664, 0.0881619687301273, 0.911806928261688, 0.538069435366226]
    drawn = iter(1 - np.random.RandomState(3).rand(12))
    ranks = OnlineRanks()
    monkeypatch.setattr(ranks, "_random", type("Drawn", (), {"random": lambda self: next(drawn)})())
    assert np.allclose([ranks.p_value(one) for one in a], expected, rtol=1e-12)


def test_many_streams_at_once_are_many_streams() -> None:
    p = np.random.default_rng(3).random((5, 60))
    together = Average()
    for column in p.T:
        together.bet(column)
    for row, wealth in zip(p, together.log_wealth, strict=True):
        alone = Average()
        for one in row:
            alone.bet(one)
        assert alone.log_wealth == pytest.approx(wealth, rel=1e-12)


@pytest.mark.parametrize(("hits", "rows"), [(0, 10), (3, 7), (9, 10), (450, 500), (500, 500)])
def test_the_interval_of_coverage_is_exact(hits: int, rows: int) -> None:
    oracle = stats.binomtest(hits, rows).proportion_ci(0.95, "exact")
    assert np.allclose(clopper_pearson(hits, rows), (oracle.low, oracle.high), atol=1e-9)


def watched(kind: str) -> tuple[ffcp.Monitor, torch.Tensor, torch.Tensor]:
    x = normal(900, 4, seed=1)
    if kind == "label sets":
        y = torch.randint(0, 3, (900,), generator=torch.Generator().manual_seed(2))
        predictor: Any = ffcp.RAPS(nn.Linear(4, 3), seed=0).calibrate(x[:300], y[:300])
        return ffcp.Monitor(predictor, seed=0), x[300:], y[300:]
    y = normal(900, seed=2)
    predictor = ffcp.FFCP(small_mlp(), "0").calibrate(x[:300], y[:300])
    return ffcp.Monitor(predictor, seed=0).start(x[:300]), x[300:], y[300:]


@pytest.mark.parametrize("kind", ["bands", "label sets"])
def test_nothing_is_told_without_change_and_a_change_is(kind: str) -> None:
    monitor, x, y = watched(kind)
    monitor.update(x[:300], y[:300])
    assert not monitor.alarm
    moved = (y[300:] + 3) if kind == "bands" else y[300:].mul(0)
    if kind == "bands":
        monitor.update(x[300:], moved)
        assert monitor.alarms["target"] is not None
        assert monitor.alarms["target"] >= 300
    monitor.update(4 * x[300:] + 2)
    assert monitor.alarms["prediction"] is not None
    share, low, high, rows = monitor.coverage()[None]
    assert low <= share <= high
    assert rows == min(500, 600 if kind == "bands" else 300)


def test_inputs_alone_are_watched_where_truth_never_comes() -> None:
    monitor, x, _ = watched("bands")
    for part in x.split(50):
        monitor.update(part)
    assert not monitor.alarm
    monitor.update(3 * x)
    assert monitor.alarms["layer values"] is not None
    assert monitor.tests["target"].rows == 0


def test_rows_one_by_one_or_at_once_are_the_same() -> None:
    (one, x, y), (other, _, _) = watched("bands"), watched("bands")
    one.update(x[:40], y[:40])
    for i in range(40):
        other.update(x[i : i + 1], y[i : i + 1])
    for name, test in one.tests.items():
        mine, theirs = test.martingale.log_wealth, other.tests[name].martingale.log_wealth
        assert mine == pytest.approx(theirs, rel=1e-6)


def test_coverage_is_told_by_group_and_over_the_last_rows() -> None:
    x, y = normal(400, 1, seed=3), normal(400, seed=4)
    predictor = ffcp.CP(nn.Linear(1, 1)).calibrate(x[:200], y[:200])
    monitor = ffcp.Monitor(predictor, window=50)
    monitor.update(x[200:300], y[200:300] + 100, groups=["a", "b"] * 50)
    monitor.update(x[300:], y[300:], groups=["a"] * 100)
    told = monitor.coverage()
    assert told[None][3] == told["a"][3] == told["b"][3] == 50
    assert told["b"][0] == 0 < told["a"][0]


def test_a_group_may_have_any_name() -> None:
    x, y = normal(300, 1, seed=3), normal(300, seed=4)
    predictor = ffcp.CP(nn.Linear(1, 1)).calibrate(x[:200], y[:200])
    monitor = ffcp.Monitor(predictor).update(x[200:], y[200:], groups=["all"] * 30 + ["b"] * 70)
    told = monitor.coverage()
    assert (told[None][3], told["all"][3], told["b"][3]) == (100, 30, 70)
    shown = [row["what"] for row in monitor.table() if "coverage" in row["what"]]
    assert shown == ["coverage", "coverage of group 'all'", "coverage of group 'b'"]


@pytest.mark.parametrize("read", [ffcp.Monitor.coverage, ffcp.Monitor.table, str])
def test_what_is_told_is_of_one_moment(
    read: Callable[[ffcp.Monitor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = normal(300, 1, seed=3), normal(300, seed=4)
    predictor = ffcp.CP(nn.Linear(1, 1)).calibrate(x[:200], y[:200])
    monitor = ffcp.Monitor(predictor, seed=0).update(x[:50], y[:50], groups=["a"] * 50)
    later: list[threading.Thread] = []

    def told(*numbers: int) -> tuple[float, float]:
        """Let another thread bring rows of a new group while coverage is told."""
        news = {"groups": [f"new {len(later)}"] * 50}
        later.append(threading.Thread(target=monitor.update, args=(x[:50], y[:50]), kwargs=news))
        later[-1].start()
        later[-1].join(0.1)
        return 0.0, 1.0

    monkeypatch.setattr("ffcp.online.monitor.clopper_pearson", told)
    read(monitor)
    for thread in later:
        thread.join()
    assert monitor.rows == 50 + 50 * len(later)


def test_a_monitor_is_copied_as_it_is_at_one_moment() -> None:
    monitor, x, y = watched("bands")
    monitor.update(x[:50], y[:50], groups=["a"] * 50)
    state = monitor.__getstate__()
    before = pickle.dumps((state["_hits"], state["rows"], state["tests"]))
    monitor.update(x[:50], y[:50], groups=["b"] * 50)
    assert pickle.dumps((state["_hits"], state["rows"], state["tests"])) == before


@pytest.mark.parametrize("outputs", [1, 3])
def test_targets_that_are_not_known_are_not_watched(outputs: int) -> None:
    x, y = normal(500, 2, seed=5), normal(500, outputs, seed=6)
    unknown = torch.rand(500, outputs, generator=torch.Generator().manual_seed(7)) < 0.3
    gaps = y.masked_fill(unknown, math.nan)
    predictor = ffcp.CP(nn.Linear(2, outputs), missing=True).calibrate(x[:200], gaps[:200])
    monitor = ffcp.Monitor(predictor, seed=0).update(x[200:], gaps[200:], groups=["a"] * 300)
    known = int((~unknown[200:]).any(dim=1).sum())
    assert monitor.tests["target"].rows == monitor.coverage()["a"][3] == known < 300
    ranked = monitor.tests["target"].ranks.scores
    assert ranked == sorted(ranked)
    assert not monitor.alarm
    assert monitor.update(x[200:], gaps[200:] + 9).alarms["target"] is not None


def test_wealth_is_drawn_with_its_limits() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monitor, x, y = watched("bands")
    monitor.update(x, y)
    ax = monitor.plot()
    labels = [line.get_label() for line in ax.get_lines() if not line.get_label().startswith("_")]
    assert labels == list(monitor.tests)
    assert len(ax.get_lines()) == 2 * len(labels)
    _, given = pyplot.subplots()
    assert monitor.plot(given) is given
    pyplot.close("all")
    table = monitor.table()
    assert [row["what"] for row in table][:2] == ["test of target", "test of prediction"]
    assert str(monitor).partition("\n\n")[0].count("\n") == len(table)


def test_what_cannot_be_watched_is_refused() -> None:
    with pytest.raises(RuntimeError, match="CP"):
        ffcp.Monitor(ffcp.CP(nn.Linear(1, 1)))
    with pytest.raises(TypeError, match="Linear"):
        ffcp.Monitor(nn.Linear(1, 1))  # type: ignore[arg-type]
    monitor, x, y = watched("bands")
    bad = (
        ("threshold", "x"),
        ("threshold", math.inf),
        ("window", 1.5),
        ("seed", "a"),
        ("seed", -1),
    )
    for name, value in bad:
        with pytest.raises(ValueError, match=name):
            ffcp.Monitor(monitor.predictor, **{name: value})
    with pytest.raises(ValueError, match="nowhere"):
        ffcp.Monitor(monitor.predictor, feature="nowhere")
    with pytest.raises(ValueError, match="two rows"):
        ffcp.Monitor(monitor.predictor).start(x[:1])
    with pytest.raises(ValueError, match="x"):
        ffcp.Monitor(monitor.predictor).start(x[:0])
    with pytest.raises(TypeError, match="RiskControl"):
        ffcp.Monitor(ffcp.RiskControl(nn.Linear(4, 3)))
    with pytest.raises(RuntimeError, match="update"):
        monitor.update(x, y).start(x)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["bands", "label sets"])
def test_a_monitor_goes_on_where_it_was_saved(kind: str, tmp_path: Path) -> None:
    monitor, x, y = watched(kind)
    predictor: Any = monitor.predictor
    if kind == "label sets":  # without random numbers of its own
        predictor = ffcp.LAC(predictor.model).calibrate(x, y)
    whole, cut = (ffcp.Monitor(predictor, seed=0).start(x[:50]) for _ in range(2))
    path = tmp_path / "monitor"
    for part in torch.arange(100).split(7):
        groups = ["even" if i % 2 == 0 else "odd" for i in part.tolist()]
        for monitor in (whole, cut):
            monitor.update(x[part], y[part], groups=groups)
        cut.save(path)
        cut = ffcp.Monitor(predictor).load(path)
    assert cut.table() == whole.table()
    assert cut.alarms == whole.alarms
    assert str(cut) == str(whole)
    assert (
        cut.update(x[100:120], y[100:120]).table() == whole.update(x[100:120], y[100:120]).table()
    )
    with pytest.raises(ffcp.CalibrationFileError, match="settings"):
        ffcp.Monitor(predictor, alpha=0.2).load(path)


def test_rows_that_cannot_be_taken_change_nothing() -> None:
    monitor, x, y = watched("bands")
    monitor.update(x[:10], y[:10])
    before = monitor.table()
    for bad in ({"groups": ["a"]}, {"groups": [None] * 10}):
        with pytest.raises(ValueError, match="group"):
            monitor.update(x[:10], y[:10], **bad)
    with pytest.raises(ValueError, match="nan"):
        monitor.update(torch.full_like(x[:10], torch.nan), y[:10])
    assert monitor.table() == before
    nn.init.zeros_(monitor.predictor.model[0].weight)
    with pytest.raises(RuntimeError, match="weights"):
        monitor.update(x[:10])
    assert monitor.table() == before


def test_many_threads_and_predictors_with_weights_are_watched() -> None:
    x, y = normal(200, 2, seed=1), normal(200, 1, seed=2)
    weighted = ffcp.CP(nn.Linear(2, 1), calibration=ffcp.calibrations.Weighted("given"))
    monitor = ffcp.Monitor(weighted.calibrate(x, y, weights=torch.ones(200)))

    def job() -> None:
        for i in range(0, 40, 4):
            monitor.update(x[i : i + 4], y[i : i + 4], weights=torch.ones(4))

    assert not together(*[job] * 4)
    assert monitor.rows == monitor.tests["target"].rows == 160
    assert copy.deepcopy(monitor).update(x[:4]).rows == 164


def test_sets_without_randomness_raise_no_alarm_where_nothing_moves() -> None:
    x = normal(900, 4, seed=0)
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    y = torch.distributions.Categorical(logits=model(x).detach()).sample()
    predictor = ffcp.APS(model, randomized=False, seed=0).calibrate(x[:300], y[:300])
    monitor = ffcp.Monitor(predictor, seed=0).update(x[300:], y[300:])
    assert not monitor.alarm


@pytest.mark.parametrize("feature", [None, "0"])
def test_a_model_that_returns_one_number_per_row_is_monitored(feature: str | None) -> None:
    model = small_mlp()
    flat = nn.Sequential(*model, nn.Flatten(0))  # (n,), not (n, 1)
    x, y = normal(60, 4, seed=0), normal(60, seed=1)
    tables = []
    for one in (model, flat):
        predictor = ffcp.CP(one) if feature is None else ffcp.FFCP(one, feature)
        monitor = ffcp.Monitor(predictor.calibrate(x[:40], y[:40]), seed=0)
        tables.append(monitor.update(x[40:], y[40:]).table())
    assert tables[0] == tables[1]


def test_a_later_calibration_does_not_change_the_scores_that_are_compared() -> None:
    x, y = normal(400, 4, seed=0), normal(400, seed=1)
    predictor = ffcp.FFCP(small_mlp(), "0").calibrate(x[:200], y[:200])
    monitor = ffcp.Monitor(predictor, seed=0)
    predictor.calibrate(x[200:], 1e3 * y[200:])
    scores = predictor.calibration.scores
    assert not torch.equal(monitor.predictor.calibration.scores, scores)
