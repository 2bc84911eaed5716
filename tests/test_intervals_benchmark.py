"""The comparison of bands: paired, resumable, and honest about what does not hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.bands import methods, page, running
from benchmarks.bands.comparison import Limit, Ratio, limits, of, ratio, ratios, unmeasured
from benchmarks.bands.methods import AUTO, CANDIDATES, METHODS, OPPONENT, Measured, Timed
from benchmarks.opponent import Opponent
from scipy import stats

from ffcp_paper.networks import mlp

Found = dict[str, dict[int, dict[str, Measured]]]


def measured(score: float = 1.0, **changed: Any) -> Measured:
    whole = {
        "score": score, "length": score, "coverage": 0.9, "worst": 0.85, "calibrated": 1000,
        "tested": 500, "learn_seconds": 1.0, "learn_busy": 1.0, "predict_seconds": 0.1,
        "predict_busy": 0.1, **changed,
    }  # fmt: skip
    return Measured(**whole)


def everything(changed: Mapping[str, Measured]) -> Found:
    return {
        data: {seed: {**{name: measured() for name in METHODS}, **changed} for seed in (0, 1, 2)}
        for data in ("com", "star")
    }


def verdicts(found: Found) -> dict[str, Limit]:
    return {one.about: one for one in limits(found)}


def test_interval_of_one_group_is_students() -> None:
    logs = np.log([0.9, 1.0, 1.2])
    low, high = stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs))
    found = ratio([[0.9, 1.0, 1.2]])
    assert found == pytest.approx(tuple(np.exp([logs.mean(), low, high])))


def test_interval_of_many_groups_holds_the_truth_as_often_as_it_says() -> None:
    random, truth = np.random.default_rng(0), np.array([0.9, 1.0, 1.3])
    held = []
    for _ in range(400):
        drawn = truth[:, None] * np.exp([[0.02], [0.1], [0.05]] * random.standard_normal((3, 5)))
        found = ratio(drawn.tolist())
        held.append(found.low <= truth.prod() ** (1 / 3) <= found.high)
    assert stats.binomtest(sum(held), 400, 0.95).pvalue > 0.001


def test_one_seed_gives_no_interval() -> None:
    found = ratio([[0.5]])
    assert found.value == 0.5
    assert math.isnan(found.low)
    assert str(found) == "0.500"


def test_ratios_pair_only_what_both_have() -> None:
    found: Found = {"com": {0: {AUTO: measured(2), OPPONENT: measured(4)}, 1: {AUTO: measured(9)}}}
    assert ratios(found, of(AUTO, "score"), of(OPPONENT, "score")) == {"com": [0.5]}
    assert ratios({"com": {1: found["com"][1]}}, of(AUTO, "score"), of(OPPONENT, "score")) == {}


def test_limits_hold_where_auto_is_best_and_fail_where_it_is_not() -> None:
    good = verdicts(everything({AUTO: measured(0.9), methods.AUTO_LENGTH: measured(0.9)}))
    assert good
    assert all(one.holds for one in good.values())
    bad = verdicts(everything({AUTO: measured(1.2, learn_busy=31.0, coverage=0.8)}))
    broken = {about for about, one in bad.items() if not one.holds}
    for start in (
        "interval score of Auto / opponent, geometric mean", "interval score of Auto / opponent, w",
        "interval score of Auto / best", "interval score of Auto / crepes", "coverage of Auto:",
        "interval score of Auto / MAPIE", "processor seconds",
    ):  # fmt: skip
        assert any(about.startswith(start) for about in broken), start
    assert not any(about.startswith("length") for about in broken)


def test_a_tie_with_a_peer_does_not_beat_it() -> None:
    found = verdicts(everything({}))
    assert not any(one.holds for about, one in found.items() if "crepes" in about)


def test_best_candidate_is_that_of_hindsight() -> None:
    name = CANDIDATES[-1]
    found = verdicts(everything({name: measured(0.5)}))
    for kind in ("each seed", "each data set"):
        one = found[f"interval score of Auto / best candidate of {kind} in hindsight, geometric "
                    "mean of 2 data sets"]  # fmt: skip
        assert one.measured.startswith("2.000")
        assert not one.holds


def test_candidate_that_hindsight_does_not_know_is_named() -> None:
    trials = {name: {"score": 1.0, "length": 1.0} for name in (*CANDIDATES, "new")}
    assert unmeasured(everything({AUTO: measured(trials=trials)})) == ["new"]


def test_page_says_what_does_not_hold_and_leaves_out_what_is_not_known() -> None:
    found = everything({AUTO: measured(1.2), "MAPIE, linear": measured(library="MAPIE 1.6.0")})
    for seed in found["star"].values():
        del seed["crepes, targets"]
    text = page.text(found, Timed(31.0, 50.0, 20_000))
    assert "DOES NOT HOLD" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| crepes, targets | 1.00 /")]
    assert row.endswith("|  |")
    assert "MAPIE 1.6.0" in text
    assert "seeds 0, 1, 2." in text


def test_time_of_two_cores_counts_where_it_is_known() -> None:
    found = everything({AUTO: measured(learn_busy=40.0)})
    for times, holds in ((None, False), (Timed(29.0, 50.0, 20_000), True)):
        (one,) = [one for one in limits(found, times) if "seconds" in one.about]
        assert one.holds == holds


def test_killed_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path))
    calls: list[str] = []

    def find(method: Any, case: Any) -> dict[str, Any]:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(case.data)
        return vars(measured())

    monkeypatch.setattr(methods, "_measured", find)
    everyone = list(running.missing(["com"], [0], "", []))
    (task,) = (task for task in everyone if methods.CP in task.methods)
    with pytest.raises(KeyboardInterrupt):
        running._work(task)
    left = list(running.missing(["com"], [0], "", []))
    (rest,) = (task for task in left if methods.LCP in task.methods)
    assert rest.methods == task.methods[2:]
    # What belongs to another state of ffcp is not known; what is not ffcp's does not care.
    assert list(running.missing(["com"], [0], "other", [])) == everyone_labelled(everyone, "other")


def everyone_labelled(tasks: list[running.Task], label: str) -> list[running.Task]:
    return [task._replace(label=label) for task in tasks]


def test_missing_library_is_left_out() -> None:
    tasks = running.missing(["com"], [10**6], "", ["crepes"])
    names = [name for task in tasks for name in task.methods]
    assert "MAPIE, linear" in names
    assert not any(name.startswith("crepes") for name in names)


@pytest.mark.heavy
def test_opponent_follows_the_noise_and_covers() -> None:
    torch.manual_seed(0)
    x = torch.rand(4000, 3)
    y = x[:, 0] * torch.randn(4000)
    model = mlp(3).eval()
    learned = Opponent(model).fit(x[:1500], y[:1500]).calibrate(x[1500:3000], y[1500:3000])
    lower, upper = learned.predict(x[3000:])
    test = y[3000:].numpy()
    hits = int(((lower <= test) & (test <= upper)).sum())
    assert stats.betabinom(1000, 1351, 150).cdf(hits) > 1e-3  # the law of 1500 calibration rows
    wide = x[3000:, 0].numpy() > 0.8
    narrow = x[3000:, 0].numpy() < 0.2
    assert (upper - lower)[wide].mean() > 3 * (upper - lower)[narrow].mean()


def test_ratio_is_shown_with_its_interval() -> None:
    assert str(Ratio(0.5, 0.4, 0.6)) == "0.500 [0.400, 0.600]"
