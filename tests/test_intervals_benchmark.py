"""The comparison of intervals: paired, resumable, and honest about what does not hold."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.intervals import cases, methods, opponents, page, running, sources
from benchmarks.intervals.cases import DATA, PROBLEMS, Case
from benchmarks.intervals.comparison import Limit, Ratio, limits, of, ratio, ratios
from benchmarks.intervals.methods import AUTO, AUTO_LENGTH, METHODS, PROTOTYPE, Measured, Timed
from scipy import stats

from ffcp_paper.data import result_cache as runs
from ffcp_paper.data.datasets import Split
from ffcp_paper.networks.regression import mlp

Found = dict[str, dict[int, dict[str, Measured]]]
CANDIDATES = {"CP": (1.0, 1.0), "Learned": (1.0, 1.0)}


def measured(score: float = 1.0, **changed: Any) -> Measured:
    whole = {
        "score": score, "length": score, "coverage": 0.9, "worst": 0.85, "excess": 0.0,
        "calibrated": 1000, "tested": 500, "learn": 1.0, "predict": 0.1, "noisiest": 0.9,
        "candidates": CANDIDATES, **changed,
    }  # fmt: skip
    return Measured(**whole)


def everything(changed: Mapping[str, Measured]) -> Found:
    return {
        data: {seed: {**{name: measured() for name in METHODS}, **changed} for seed in (0, 1, 2)}
        for data in ("com", "star", "tetuan_power", *PROBLEMS)
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
    found: Found = {"com": {0: {AUTO: measured(2), PROTOTYPE: measured(4)}, 1: {AUTO: measured(9)}}}
    assert ratios(found, of(AUTO, "score"), of(PROTOTYPE, "score")) == {"com": [0.5]}
    assert ratios({"com": {1: found["com"][1]}}, of(AUTO, "score"), of(PROTOTYPE, "score")) == {}


def test_limits_hold_where_auto_is_best_and_fail_where_it_is_not() -> None:
    good = verdicts(everything({AUTO: measured(0.89), AUTO_LENGTH: measured(0.89)}))
    assert len(good) > 20
    assert all(one.holds for one in good.values())
    bad = verdicts(everything({AUTO: measured(5.0, coverage=0.8, noisiest=0.7)}))
    broken = {about for about, one in bad.items() if not one.holds}
    for part in (
        "interval score of Auto / prototype", "score of Auto / best candidate of each seed",
        "score of Auto / best candidate of each data set", "score of Auto / crepes, targets",
        "score of Auto / MAPIE, boosted", "score of Auto / CQR network", "Auto / boosted CQR",
        "interval score of Auto: wholly above", "coverage of Auto:", "coverage of the noisiest",
        "seeds: interval score of Auto",
    ):  # fmt: skip
        assert any(part in about for about in broken), part
    assert not any(about.startswith("coverage of Auto, length") for about in broken)


def test_a_tie_with_a_peer_does_not_beat_it() -> None:
    found = verdicts(everything({}))
    assert not any(one.holds for about, one in found.items() if "/ crepes" in about)


def test_only_a_whole_interval_above_one_is_clearly_worse() -> None:
    found = everything({})
    for seed, score in enumerate((1.0, 1.5, 0.9)):
        found["com"][seed][AUTO] = measured(score)
        found["star"][seed][AUTO] = measured(1.01 + score / 1000)
    (one,) = [
        one for one in limits(found) if one.about.startswith("interval score of Auto: wholly")
    ]
    assert not one.holds
    assert "star, prototype" in one.measured
    assert "com" not in one.measured


def test_best_candidate_is_that_of_hindsight() -> None:
    candidates = {**CANDIDATES, "Learned": (0.5, 0.5)}
    found = verdicts(everything({AUTO: measured(candidates=candidates)}))
    for kind in ("each seed", "each data set"):
        for what in ("interval score of Auto", "length of Auto by length"):
            about = f"{what} / best candidate of {kind} in hindsight, geometric mean of 2 data sets"
            assert found[about].measured.startswith("2.000")
            assert not found[about].holds


def test_series_and_problems_are_not_among_the_data_sets() -> None:
    found = everything({})
    for one in found["tetuan_power"].values():
        one[AUTO] = measured(100.0)
    assert (
        "1.000"
        in verdicts(found)[
            "interval score of Auto / prototype, geometric mean of 2 data sets"
        ].measured
    )


def test_page_says_what_does_not_hold_and_leaves_out_what_is_not_known() -> None:
    found = everything({AUTO: measured(1.2), "MAPIE, linear": measured(library="MAPIE 1.6.0")})
    for seed in found["star"].values():
        del seed["crepes, residuals"]
    text = page.text(found, Timed(41.0, 20_000, 8_000, 60, 2))
    assert "| 41.0 | 40 | DOES NOT HOLD |" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| star | 1.20 ")]
    assert "|  |" in row
    assert "MAPIE 1.6.0" in text
    assert "seeds\n0, 1, 2." in text
    assert "smallest on 0 of 2" in text


def test_sources_are_compared_in_pairs_and_shown_where_they_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path))
    text = page.text(everything({}))
    assert "What the gradient norm adds" not in text
    pair = (sources.PREDICTION,), (sources.NORMS, sources.PREDICTION)
    for columns, score in zip(pair, (2.0, 1.0), strict=True):
        for seed in (0, 1):
            runs.keep("interval_sources", sources._key(Case("com", seed), columns), score)
    runs.keep("interval_sources", sources._key(Case("star", 0), pair[0]), 5.0)  # has no pair
    found = sources.gain(("com", "star"), (0, 1), sources.NORMS, (sources.PREDICTION,))
    assert found is not None
    assert found == pytest.approx((0.5, 0.5, 0.5))
    assert "| gradient norms | prediction | 0.500 [0.500, 0.500] |  |" in page.text(everything({}))


@pytest.mark.heavy
def test_every_source_gives_columns_for_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path))
    torch.manual_seed(0)
    x, y = torch.rand(300, 3), torch.rand(300)
    parts = Split(x[:100], y[:100], x[100:200], y[100:200], x[200:], y[200:])
    loaded = cases.Loaded(parts, mlp(3).eval())
    monkeypatch.setattr(cases, "loaded", lambda case: loaded)
    views = sources._views(Case("com", 0))
    assert set(views) == {name for added, beside in sources.ADDED for name in (added, *beside)}
    for view in views.values():
        assert len(view(parts.x_test)) == 100
        assert np.isfinite(view(parts.x_test)).all()
    own = np.abs(opponents.numbers(y[:100]) - opponents.predicted(loaded.model, x[:100]))
    nearest = (torch.cdist(x[:1], x[:100])[0]).argsort()[1:26].numpy()  # without itself
    assert views[sources.NEAR](x[:1])[0] == pytest.approx(own[nearest].mean())


def test_killed_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path))
    calls: list[str] = []

    def find(method: Any, case: Any) -> dict[str, Any]:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(case.data)
        return vars(measured())

    monkeypatch.setattr(methods, "measured", find)
    case, wanted = [Case("com", 0)], list(METHODS)
    everyone = list(running.missing(case, wanted, "", []))
    (task,) = (task for task in everyone if methods.CP in task.methods)
    with pytest.raises(KeyboardInterrupt):
        running._work(task)
    left = list(running.missing(case, wanted, "", []))
    (rest,) = (task for task in left if methods.LCP in task.methods)
    assert rest.methods == task.methods[2:]
    # What belongs to another state of ffcp is not known; what is not ffcp's does not care.
    other = list(running.missing(case, wanted, "other", []))
    assert other == [task._replace(label="other") for task in everyone]
    (alone,) = running.missing(case, [PROTOTYPE], "", [])
    assert alone.methods == (PROTOTYPE,)


def test_missing_library_is_left_out() -> None:
    tasks = running.missing([Case("com", 10**6)], list(METHODS), "", ["crepes"])
    names = [name for task in tasks for name in task.methods]
    assert "MAPIE, linear" in names
    assert not any(name.startswith("crepes") for name in names)


def test_fifteen_data_sets_are_measured_and_problems_by_some_methods() -> None:
    assert len(DATA) == 15
    tasks = running.missing([Case(name, 10**6) for name in PROBLEMS], list(METHODS), "", [])
    assert {name for task in tasks for name in task.methods} == set(methods.ON_PROBLEMS)


OPPONENTS: dict[str, Callable[..., Any]] = {
    "pooled": lambda model, parts: opponents.pooled(model, parts, 0.1),
    "laplace": lambda model, parts: opponents.laplace(model, parts, 0.1),
    "epicscore": lambda model, parts: opponents.epicscore(model, parts, 0.1, seed=0),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", OPPONENTS)
def test_opponents_cover_and_those_that_learn_follow_the_noise(name: str) -> None:
    torch.manual_seed(0)
    x = torch.rand(5000, 3)
    y = x[:, 0] * torch.randn(5000)
    parts = Split(*(part for rows in (slice(0, 1500), slice(1500, 4000), slice(4000, None))
                    for part in (x[rows], y[rows])))  # fmt: skip
    lower, upper = OPPONENTS[name](mlp(3).eval(), parts)(parts.x_test)
    test = parts.y_test.numpy()
    hits = int(((lower <= test) & (test <= upper)).sum())
    # The law of 1,000 calibration rows, which is what the fewest of these calibrate with.
    assert 1e-3 < stats.betabinom(1000, 901, 100).cdf(hits) < 1 - 1e-3
    if name != "laplace":
        wide, narrow = parts.x_test[:, 0].numpy() > 0.8, parts.x_test[:, 0].numpy() < 0.2
        assert (upper - lower)[wide].mean() > 1.5 * (upper - lower)[narrow].mean()


@pytest.mark.heavy
def test_auto_and_its_candidates_are_made_in_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path))
    case = Case(next(iter(PROBLEMS)), 100)
    by_score, by_length = (
        Measured(**methods.measured(METHODS[name], case)) for name in (AUTO, AUTO_LENGTH)
    )
    assert by_score.candidates is not None
    assert by_score.chosen in by_score.candidates
    assert by_score.candidates[by_score.chosen] == (by_score.score, by_score.length)
    assert by_length.chosen is not None
    assert by_score.candidates[by_length.chosen] == (by_length.score, by_length.length)
    assert by_score.noisiest is not None
    assert cases.loaded(case).noise is not None


def test_ratio_is_shown_with_its_interval() -> None:
    assert str(Ratio(0.5, 0.4, 0.6)) == "0.500 [0.400, 0.600]"


PAGE = Path(__file__).parents[1] / "docs" / "bands.md"


def rows_with_scores(text: str) -> list[str]:
    """Return the data sets of the table "By data set" whose cells are all positive numbers."""
    _, _, after = text.partition("\n## By data set\n")
    lines = after.partition("\n## ")[0].splitlines()
    names = []
    for name, *cells in (line.strip("|").split("|") for line in lines if line.startswith("|")):
        numbers = [cell.strip(" *") for cell in cells]
        if name.strip() in DATA and all(re.fullmatch(r"[\d.]+(e\+\d+)?|inf", n) for n in numbers):
            names.append(name.strip())
    return names


def test_the_committed_page_has_numbers_for_all_data_sets() -> None:
    text = PAGE.read_text()
    assert len(DATA) == 15
    assert sorted(rows_with_scores(text)) == sorted(DATA)
    assert f"Means over {len(DATA)} data sets" in text
    for method in METHODS:
        assert f"| {page.shown(method)} | " in text


def test_an_emptied_page_is_noticed() -> None:
    text = PAGE.read_text()
    assert rows_with_scores(page.text({})) == []
    without = "\n".join(line for line in text.splitlines() if not line.startswith("| bike |"))
    assert sorted(rows_with_scores(without)) == sorted(set(DATA) - {"bike"})
