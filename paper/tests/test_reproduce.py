"""The paper's tables: what they hold, that nothing is computed twice, and who decides a claim."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

from ffcp_paper import cli, reproduce
from ffcp_paper.data import datasets, result_cache
from ffcp_paper.experiments import studies
from ffcp_paper.experiments.prediction_sets import Result
from ffcp_paper.experiments.studies import Study
from ffcp_paper.experiments.tasks import (
    TRAINED,
    UNTRAINED,
    LabelResult,
    Measured,
    Method,
    RegressionTask,
    Results,
    Settings,
    Training,
)
from ffcp_paper.tables import claims, paper_tables, printed, render
from ffcp_paper.training.regression import train_as_published, train_quantiles

pytestmark = [pytest.mark.heavy, pytest.mark.xdist_group("reproduce")]  # one fixture for all

TINY = Settings(
    seeds=2, epochs=1, rows=300, only=("synthetic",), networks=("digits",), splits=1, rounds=1
)
MISSING = ("com", "fb1", "fb2", "meps19", "meps20", "meps21", "star", "bio", "blog", "bike")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_folders(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FFCP_CACHE", str(cache))
    monkeypatch.setenv("FFCP_DATA", str(tmp_path / "no-data"))


@pytest.fixture(scope="module")
def made(
    cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, render.Table], list[tuple[float, float, str]]]:
    """All tables, once, without any data file."""
    out, steps = tmp_path_factory.mktemp("out"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FFCP_CACHE", str(cache))
        patch.setenv("FFCP_DATA", str(out / "no-data"))
        found = reproduce.run(
            paper_tables.NAMES, out=out, settings=TINY, progress=lambda *step: steps.append(step)
        )
    return out, {table["name"]: table for table in found}, steps


# -- the files ---------------------------------------------------------------------------------


def test_every_table_of_the_paper_is_made(made) -> None:
    out, found, _ = made
    assert list(found) == list(paper_tables.NAMES) == [*printed.TABLES, "square_conditions"]
    names = {place.name for place in (out / "tables").iterdir()}
    assert names == {f"{n}{s}" for n in found for s in (".json", ".csv", ".md", ".tex", ".txt")}


@pytest.mark.parametrize("name", paper_tables.NAMES)
def test_a_table_keeps_to_its_schema(made, name: str) -> None:
    out, found, _ = made
    table = json.loads((out / "tables" / f"{name}.json").read_text())
    assert table == found[name]
    assert list(table) == ["name", "title", "claim", "alpha", "verdict", "columns", "rows", "notes"]
    assert set(table["verdict"]) == {"held", "of", "text"}
    assert all(isinstance(note, str) for note in table["notes"])
    keys = [column["key"] for column in table["columns"]]
    assert len(set(keys)) == len(keys)
    for column in table["columns"]:
        assert set(column) <= {"key", "label", "kind", "digits", "percent", "source"}
        assert column["source"] in ("ours", "paper", None)
        for row in table["rows"]:
            assert _fits(row[column["key"]], column["kind"])
    assert all(set(row) - {"note"} == set(keys) for row in table["rows"])


def _fits(value: Any, kind: str) -> bool:
    if value is None:
        return True
    if kind == "claim":
        return isinstance(value, bool)
    if kind == "text":
        return isinstance(value, str)
    if isinstance(value, dict):
        return set(value) == {"mean", "sd", "n"} and isinstance(value["mean"], float)
    return isinstance(value, float) and not isinstance(value, bool)


def test_the_settings_are_written_with_the_tables(made) -> None:
    about = json.loads((made[0] / "settings.json").read_text())
    assert {"command", "seeds", "quick", "versions", "machine"} < set(about)
    assert set(about) - {"command", "seeds", "quick", "versions", "machine"} == {
        "started", "seconds", "tables", "figures", "earlier"
    }  # fmt: skip
    assert about["seeds"] == 2
    assert about["tables"] == list(paper_tables.NAMES)
    assert set(about["machine"]) == {"system", "processor", "cores", "memory_gb"}
    assert about["command"].startswith("ffcp-paper reproduce")


@pytest.mark.parametrize("name", paper_tables.NAMES)
def test_all_formats_can_be_read(made, name: str) -> None:
    out, found, _ = made
    rows = found[name]["rows"]
    place = out / "tables" / name
    lines = list(csv.reader(io.StringIO(place.with_suffix(".csv").read_text())))
    assert len(lines) == 1 + len(rows)
    assert len({len(line) for line in lines}) == 1
    markdown = [x for x in place.with_suffix(".md").read_text().splitlines() if x[:1] == "|"]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in markdown}) == 1
    assert len(markdown) == 2 + len(rows)
    latex = place.with_suffix(".tex").read_text()
    body = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert len({len(re.findall(r"(?<!\\)&", line)) for line in body}) == 1
    assert not re.search(r"(?<!\\)[%#]", latex)
    assert not re.search(r"(?<!\\)_", latex.replace(rf"\label{{tab:{name}}}", ""))
    assert latex.count("{") == latex.count("}")
    assert max(map(len, place.with_suffix(".txt").read_text().splitlines())) <= 80


def test_progress_never_goes_back_and_arrives(made) -> None:
    done = [step[0] for step in made[2]]
    assert done == sorted(done)
    assert done[-1] == pytest.approx(made[2][-1][1])


# -- what is there and what is not -------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in printed.TABLES if n != "raps_imagenet"])
def test_missing_data_has_the_papers_numbers_and_none_of_ours(made, name: str) -> None:
    table = made[1][name]
    absent = [row for row in table["rows"] if row.get("note") == datasets.NOT_AVAILABLE]
    there = [row for row in printed.TABLES[name].rows if row.row in MISSING]
    assert {row["data"] for row in absent} == {row.row for row in there}
    ours = [c["key"] for c in table["columns"] if c["source"] == "ours" or c["kind"] == "claim"]
    assert all(row[key] is None for row in absent for key in ours)
    shown = [row[c["key"]] for row in absent for c in table["columns"] if c["source"] == "paper"]
    levels = {(0.1, 0.9), (0.49, 0.51), None}  # those of a quick run
    of_paper = [row for row in there if row.levels in levels]
    assert len([value for value in shown if value is not None]) == len(of_paper)
    text = (made[0] / "tables" / f"{name}.txt").read_text()
    assert text.count(datasets.NOT_AVAILABLE) == len({row["data"] for row in absent})


def test_of_missing_data_nothing_is_said_about_the_theorem(made) -> None:
    rows = [row for row in made[1]["square_conditions"]["rows"] if row.get("note")]
    assert [row["data"] for row in rows] == [d for d in datasets.DATASETS if d in MISSING]
    assert all(row["distance"] is None for row in rows)


def test_a_missing_data_set_has_the_papers_numbers_in_their_place(made) -> None:
    rows = [row for row in made[1]["bands_by_layer"]["rows"] if row["data"] == "fb2"]
    assert [row["split"] for row in rows] == ["0", "1", "2", "3"]  # printed as 1 to 4
    fourth = printed.value("bands_by_layer", row="fb2", method="FFCP", column="length", layer=4)
    assert fourth is not None
    assert rows[3]["length_paper"]["mean"] == fourth.mean
    (timed,) = [row for row in made[1]["ffcp_runtime"]["rows"] if row["data"] == "fb2"]
    slow = printed.value("ffcp_runtime", row="fb2", method="FCP", column="seconds")
    assert slow is not None
    assert timed["FCP_paper"] == {"mean": slow.mean, "sd": slow.sd, "n": None}


def test_networks_that_are_not_at_hand_are_listed_with_the_papers_numbers(made) -> None:
    listed = Settings(splits=1)
    table = paper_tables.build("raps_imagenet", Results(labels={"digits": _labels()}), listed)
    vgg = [row for row in table["rows"] if row["network"] == "VGG16"]
    assert [row["method"] for row in vgg] == ["RAPS", "FFRAPS"]
    assert all(row["note"] == datasets.NOT_AVAILABLE and row["length"] is None for row in vgg)
    assert vgg[0]["length_paper"]["mean"] > 1


def test_the_table_of_all_networks_fits_a_terminal(monkeypatch) -> None:
    monkeypatch.setattr(paper_tables, "network_available", lambda name: True)
    every = paper_tables.members("raps_imagenet", Settings())
    found = Results(labels={name: _labels() for name in every})
    table = paper_tables.build("raps_imagenet", found, Settings())
    assert max(map(len, render.to_text(table).splitlines())) <= 80


def test_a_full_table_of_bands_fits_a_terminal(monkeypatch) -> None:
    monkeypatch.setattr(paper_tables, "available", lambda name: True)
    chosen = (0, 1, 2, 3, 4)
    for name in ("regression_bands", "ffcqr_bands", "group_coverage_cp"):
        found = Results()
        for task in paper_tables.tasks(name, Settings()):
            assert isinstance(task, RegressionTask)
            for method in task.methods:
                found.bands[task.data, task.training, method, task.alpha] = [
                    Measured(0.9, 12.5, 0.9, 1000, 1000, 0.9, layer) for layer in chosen
                ]
        text = render.to_text(paper_tables.build(name, found, Settings()))
        assert max(map(len, text.splitlines())) <= 80


def _labels() -> LabelResult:
    split = [Result(m, 0.9, s, 0.0, 0.0) for m, s in zip("abc", (2.0, 1.9, 2.1), strict=True)]
    return LabelResult("digits", 100, 0.9, 0.99, [split])


def test_smaller_sets_decide_the_claim_of_raps(made) -> None:
    found = Results(labels={"digits": _labels()})
    rows = paper_tables.build("raps_imagenet", found, TINY)["rows"]
    assert [row["holds"] for row in rows] == [None, True, False]
    assert [row["lawful"] for row in rows] == [True] * 3
    easy = Results(labels={"digits": replace(_labels(), top1=0.95)})  # one label is enough
    rows = paper_tables.build("raps_imagenet", easy, TINY)["rows"]
    assert [row["holds"] for row in rows] == [None, None, None]


def test_label_sets_may_cover_more_than_the_law_but_not_less() -> None:
    few, right, many = ([Result("RAPS", c, 2.0, 0.0, 0.0)] * 3 for c in (0.86, 0.9, 0.99))
    assert claims.covers(right, 5000, 0.1)
    assert claims.covers(many, 5000, 0.1)
    assert not claims.covers(few, 5000, 0.1)


def test_unknown_names_and_no_seeds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nonsense"):
        reproduce.run(["nonsense"], out=tmp_path)
    with pytest.raises(ValueError, match="seeds"):
        reproduce.run(seeds=0, out=tmp_path)


# -- nothing twice, nothing by halves ----------------------------------------------------------


def _forbidden(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("computed again")


def test_a_second_run_computes_nothing(made, tmp_path: Path, monkeypatch) -> None:
    for name in ("train_stacked", "search_epochs_stacked", "_measure", "_times"):
        monkeypatch.setattr(studies, name, _forbidden)
    monkeypatch.setattr(studies.prediction_sets, "outputs", _forbidden)
    again = reproduce.run(paper_tables.NAMES, out=tmp_path, settings=TINY)
    assert {table["name"]: table for table in again} == made[1]


def test_the_results_of_every_seed_are_json_lines(made) -> None:
    lines = (made[0] / "results.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len({json.dumps(one["of"]) for one in records}) == len(records)
    own = [
        one["result"]["length"]
        for one in records
        if (one["of"]["what"], one["of"].get("method"), one["of"].get("training"))
        == ("bands", "CP", "mean")
        and one["of"]["alpha"] == 0.1
    ]
    row = next(r for r in made[1]["regression_bands"]["rows"] if r["method"] == "split CP")
    assert row["length"]["n"] == len(own) == 2
    assert row["length"]["mean"] == pytest.approx(sum(own) / 2)
    assert {one["of"]["what"] for one in records} == {
        "bands", "seconds", "square conditions", "label sets"
    }  # fmt: skip


def test_calls_into_one_folder_add_up(made, tmp_path: Path) -> None:
    reproduce.run(["bands_by_layer"], out=tmp_path, settings=TINY)
    first = (tmp_path / "results.jsonl").read_text()
    reproduce.run(["regression_bands", "overview"], out=tmp_path, settings=TINY)
    about = json.loads((tmp_path / "settings.json").read_text())
    assert about["tables"] == ["regression_bands", "bands_by_layer"]  # as in the paper
    assert about["figures"] == ["overview"]
    assert [call["command"] for call in about["earlier"]] == ["ffcp-paper reproduce bands_by_layer"]
    assert (tmp_path / "results.jsonl").read_text().startswith(first)
    reproduce.run(["bands_by_layer"], out=tmp_path, settings=TINY)
    about = json.loads((tmp_path / "settings.json").read_text())
    assert [call["command"] for call in about["earlier"]] == [
        "ffcp-paper reproduce bands_by_layer", "ffcp-paper reproduce regression_bands overview"
    ]  # fmt: skip
    # With other settings, the old tables are no part of the run.
    reproduce.run(["bands_by_layer"], out=tmp_path, settings=replace(TINY, seeds=1))
    about = json.loads((tmp_path / "settings.json").read_text())
    assert (about["tables"], about["figures"], about["earlier"]) == (["bands_by_layer"], [], [])
    assert len((tmp_path / "results.jsonl").read_text()) < len(first)


def test_a_foreign_settings_file_is_no_earlier_call(made, tmp_path: Path) -> None:
    for content in ("not json", "[]", '{"seeds": 2, "quick": false}'):
        (tmp_path / "settings.json").write_text(content)
        reproduce.run(["bands_by_layer"], out=tmp_path, settings=TINY)
        about = json.loads((tmp_path / "settings.json").read_text())
        assert about["earlier"] == []
        (tmp_path / "results.jsonl").unlink()


def test_one_seed_more_trains_one_network(made, monkeypatch) -> None:
    trained: list[int] = []
    train = studies.train_stacked

    def watched(models: Any, *, seeds: list[int], **rest: Any) -> Any:
        trained.extend(seeds)
        return train(models, seeds=seeds, **rest)

    monkeypatch.setattr(studies, "train_stacked", watched)
    study = Study("synthetic", replace(TINY, seeds=3))
    assert len(study.models(TRAINED)) == 3
    assert trained == [2]


def test_networks_of_any_seeds_are_those_of_the_tables_and_trained_once(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path))
    study = Study("synthetic", TINY)
    far, second = study.networks(TRAINED, [100, 1])

    def train(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("trained twice")

    monkeypatch.setattr(studies, "train_stacked", train)
    again, same = Study("synthetic", TINY).networks(TRAINED, [100, 1])
    for kept, made in ((again, far), (same, second)):
        for name, tensor in kept.state_dict().items():
            assert torch.equal(tensor, made.state_dict()[name])
    assert not torch.equal(far[0].weight, second[0].weight)
    monkeypatch.undo()
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path / "tables"))
    of_tables = Study("synthetic", TINY).models(TRAINED)[1]
    assert torch.allclose(of_tables[0].weight, second[0].weight)


def _weights(study: Study, training: Training) -> list[dict[str, Any]]:
    return [model.state_dict() for model in study.models(training)]


def _assert_equal(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        for name, weight in one.items():
            torch.testing.assert_close(weight, other[name], atol=1e-6, rtol=0)


def test_all_levels_are_trained_at_once_and_as_one_by_one(tmp_path: Path, monkeypatch) -> None:
    settings = replace(TINY, epochs=3, patience=1)
    pairs = [Training("quantiles", levels) for levels in ((0.1, 0.9), (0.4, 0.6))]
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path / "apart"))
    apart = [_weights(Study("synthetic", settings), training) for training in pairs]
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path / "together"))
    study = Study("synthetic", settings, planned=[TRAINED, UNTRAINED, *pairs])
    first = _weights(study, pairs[0])
    for name in ("train_stacked", "search_epochs_stacked"):
        monkeypatch.setattr(studies, name, _forbidden)
    _assert_equal(first, apart[0])
    _assert_equal(_weights(study, pairs[1]), apart[1])
    with pytest.raises(AssertionError, match="computed again"):
        study.models(TRAINED)  # another kind of network


def test_networks_follow_the_papers_protocol() -> None:
    settings = replace(TINY, epochs=4, patience=2)
    study = Study("synthetic", settings)
    theirs = [
        train_as_published(study.parts(seed).x_train, study.parts(seed).y_train, seed=seed,
                           epochs=4, patience=2).state_dict()
        for seed in range(2)
    ]  # fmt: skip
    _assert_equal(_weights(study, TRAINED), theirs)


def test_quantile_networks_follow_the_protocol() -> None:
    levels = (0.2, 0.7)
    study, training = Study("synthetic", replace(TINY, epochs=4)), Training("quantiles", levels)
    ours = _weights(study, training)
    theirs = []
    for seed in range(2):
        epochs = result_cache.known("epochs", study._key(seed, training))
        parts = study.parts(seed)
        made = train_quantiles(parts.x_train, parts.y_train, levels, epochs=epochs, seed=seed)
        theirs.append(made.state_dict())
    _assert_equal(ours, theirs)


def test_a_search_that_is_stopped_goes_on(tmp_path: Path, monkeypatch) -> None:
    settings = replace(TINY, epochs=5, seeds=3, patience=1)
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path / "whole"))
    study = Study("synthetic", settings)
    whole = _weights(study, TRAINED)
    keys = [study._key(seed, TRAINED) for seed in range(3)]
    best = [result_cache.known("epochs", key) for key in keys]
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path / "killed"))
    result_cache.keep("epochs", keys[0], best[0])  # the search of the first network had ended
    _assert_equal(_weights(Study("synthetic", settings), TRAINED), whole)
    assert [result_cache.known("epochs", key) for key in keys] == best


def test_a_record_of_something_else_is_not_taken(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path))
    result_cache.keep("epochs", {"seed": 0}, 7)
    place, other = (
        result_cache.place("epochs", {"seed": seed, **result_cache._VERSIONS}, ".json")
        for seed in (0, 1)
    )
    place.replace(other)  # as if the hashes were equal
    assert result_cache.known("epochs", {"seed": 1}) is None
    assert result_cache.record("epochs", {"seed": 1}, lambda: 8) == 8
    assert result_cache.known("epochs", {"seed": 1}) == 8


def test_a_training_that_is_stopped_keeps_networks_and_searches(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path / "cache"))
    settings = replace(TINY, epochs=6, patience=1)
    whole = _weights(Study("synthetic", settings), TRAINED)
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path / "killed"))
    keep = result_cache.keep_network

    def killed(*args: Any) -> None:
        keep(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(result_cache, "keep_network", killed)
    with pytest.raises(KeyboardInterrupt):
        Study("synthetic", settings).models(TRAINED)
    assert len(list((tmp_path / "killed" / "networks").iterdir())) == 1
    assert len(list((tmp_path / "killed" / "epochs").iterdir())) == 2
    monkeypatch.setattr(result_cache, "keep_network", keep)
    monkeypatch.setattr(studies, "search_epochs_stacked", _forbidden)
    _assert_equal(_weights(Study("synthetic", settings), TRAINED), whole)


def test_a_stopped_run_keeps_what_was_finished(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path / "cache"))
    measure, calls = studies._measure, []

    def killed(*args: Any) -> Measured:
        calls.append(args[0])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(studies, "_measure", killed)
    wanted = {"names": ["bands_by_layer"], "out": tmp_path / "out", "settings": TINY}
    with pytest.raises(KeyboardInterrupt):
        reproduce.run(**wanted)
    assert not (tmp_path / "out").exists()
    assert len(list((tmp_path / "cache" / "bands").iterdir())) == 3
    monkeypatch.setattr(studies, "train_stacked", _forbidden)
    reproduce.run(**wanted)
    # CP, five split points, the choice, Learned and Auto, for two seeds
    assert len(calls) == 4 + 2 * 9 - 3
    kept = [p for p in tmp_path.rglob("*") if p.is_file() and p.name.startswith(".")]
    assert kept == []


_PROGRAM = """
import sys
from ffcp_paper import reproduce
from ffcp_paper.experiments.tasks import (Settings,)
tiny = Settings(seeds=2, epochs=1, rows=300, only=("synthetic",), rounds=1)
reproduce.run(["regression_bands", "untrained"], out=sys.argv[1], settings=tiny)
"""


def _start(out: Path) -> subprocess.Popen[bytes]:
    # Threads of several processes would wait for each other.
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", _PROGRAM, str(out)], env=alone)


def _tables(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / "tables").iterdir()}


@pytest.mark.slow
def test_a_killed_process_goes_on_and_two_at_once_do_no_harm(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path / "cache"))
    killed, results = _start(tmp_path / "killed"), tmp_path / "cache" / "bands"
    for _ in range(600):
        if results.is_dir() and len(list(results.glob("*.json"))) >= 2:
            break
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    kept = {path: path.stat().st_mtime_ns for path in results.glob("*.json")}
    assert len(kept) >= 2
    both = [_start(tmp_path / "first"), _start(tmp_path / "second")]
    assert [one.wait() for one in both] == [0, 0]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # nothing was found again
    first, second = (_tables(tmp_path / name) for name in ("first", "second"))
    assert first == second
    # Bands do not depend on when they were computed: those of a run in one piece are the same.
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path / "another"))
    assert _start(tmp_path / "whole").wait() == 0
    assert _tables(tmp_path / "whole") == first


@pytest.mark.parametrize(
    "other",
    [
        Settings(seeds=1, epochs=2, rows=300),
        Settings(seeds=1, epochs=1, rows=299),
        Settings(seeds=1, epochs=1, rows=300, patience=5),
    ],
)
def test_what_a_network_depends_on_is_in_its_key(other: Settings) -> None:
    plain = Study("synthetic", Settings(seeds=1, epochs=1, rows=300))
    assert Study("synthetic", other)._key(0, TRAINED) != plain._key(0, TRAINED)
    assert plain._key(1, TRAINED) != plain._key(0, TRAINED)
    levels = [Training("quantiles", pair) for pair in ((0.1, 0.9), (0.2, 0.8))]
    assert plain._key(0, levels[0]) != plain._key(0, levels[1])
    assert plain._key(0, UNTRAINED) != plain._key(0, TRAINED)


def test_more_epochs_do_not_touch_untrained_networks() -> None:
    one, two = (Study("synthetic", Settings(epochs=e, rows=300)) for e in (1, 2))
    assert one._key(0, UNTRAINED) == two._key(0, UNTRAINED)


# -- claims, on made-up numbers ----------------------------------------------------------------


def test_the_range_is_that_of_the_beta_binomial_law() -> None:
    n, rows, alpha = 200, 150, 0.1
    k = 181  # ceil(201 * 0.9)
    low, high = claims.law_range(n, rows, alpha, 0.01)
    law = stats.betabinom(rows, k, n + 1 - k)
    assert law.cdf(round(low * rows) - 1) < 0.005 <= law.cdf(round(low * rows))
    assert law.sf(round(high * rows)) <= 0.005 < law.sf(round(high * rows) - 1)
    assert claims.law_range(20_000, 150, alpha)[0] > low  # more calibration points, narrower
    assert claims.law_range(n, 15_000, alpha)[0] > low  # more test rows too
    assert claims.law_range(5, rows, alpha) == (1.0, 1.0)  # infinite bands


def test_every_seed_must_keep_the_law() -> None:
    good, bad = (Measured(c, 1.0, 0.8, calibrated=1000, tested=1000) for c in (0.9, 0.8))
    assert claims.lawful([good] * 5, 0.1)
    assert not claims.lawful([good] * 4 + [bad], 0.1)
    assert not claims.lawful([good] * 5, 0.05)


def _made_up(lengths: dict[Method, float], coverage: float = 0.9, **where: Any) -> Results:
    training, alpha = where.get("training", TRAINED), where.get("alpha", 0.1)
    found = Results()
    for method, length in lengths.items():
        one = Measured(coverage, length, length / 10, 1000, 1000, None, None)
        found.bands["synthetic", training, method, alpha] = [one, one]
    return found


def _ffcp(*lengths: float, auto: float) -> dict[Method, float]:
    layers = {Method("FFCP", layer): length for layer, length in enumerate(lengths)}
    ours = {Method("Learned"): 1.2, Method("Auto"): 1.1}
    return {Method("CP"): 2.0, Method("FCP"): 1.0, **layers, Method("FFCP", "auto"): auto, **ours}


def _holds(name: str, found: Results) -> list[bool | None]:
    rows = paper_tables.build(name, found, TINY)["rows"]
    return [r["holds"] for r in rows if not r.get("note") and not r["method"].endswith("(ours)")]


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("regression_bands", {}),
        ("bands_by_layer", {}),
        ("split_ablation", {"alpha": 0.05}),
        ("untrained", {"training": UNTRAINED}),
    ],
)
def test_methods_that_the_paper_lacks_are_marked_and_not_judged(
    name: str, where: dict[str, Any]
) -> None:
    found = _made_up(_ffcp(3.0, 1.5, 1.9, 2.5, 2.0, auto=2.1), 0.9, **where)
    rows = [
        row for row in paper_tables.build(name, found, TINY)["rows"] if row["data"] == "synthetic"
    ]
    ours = [row for row in rows if "ours" in row["method"]]
    assert [row["method"] for row in ours] == ["Learned (ours)", "Auto (ours)"]
    assert [row["length"]["mean"] for row in ours] == pytest.approx([1.2, 1.1])
    assert all(row["shorter"] and row["holds"] is None for row in ours)
    assert all(row["length_paper"] is None and row["coverage_paper"] is None for row in ours)


def test_both_are_taught_by_the_training_rows(made) -> None:
    for name in ("regression_bands", "split_ablation", "untrained", "ffcqr_bands"):
        rows = {row["method"]: row for row in made[1][name]["rows"]}
        assert rows["Learned (ours)"]["length"]["n"] == 2
        assert rows["Auto (ours)"]["length"]["n"] == 2
    study = Study("synthetic", TINY)  # training rows teach, so all 120 calibration rows calibrate
    assert [one.calibrated for one in study.measure(TRAINED, Method("Learned"), 0.1)] == [120, 120]


def test_no_law_is_told_of_localized_thresholds() -> None:
    one = Measured(0.5, 1.0, 0.8, calibrated=1000, tested=1000)
    assert claims.lawful([one], 0.1) is False
    assert claims.lawful([replace(one, local=True)], 0.1) is None


def test_shorter_than_cp_and_covering_decide_the_bands() -> None:
    lengths = _ffcp(3.0, 1.5, 1.9, 2.5, 2.0, auto=2.1)
    assert _holds("regression_bands", _made_up(lengths)) == [None, None, True, False]
    assert _holds("regression_bands", _made_up(lengths, 0.8)) == [None, None, False, False]
    rows = paper_tables.build("regression_bands", _made_up(lengths), TINY)["rows"]
    assert (rows[2]["method"], rows[2]["split"]) == ("FFCP, best on test", "1")


def test_cp_itself_is_not_shorter_than_cp() -> None:
    lengths = _ffcp(3.0, 2.5, 2.9, 2.5, 2.0, auto=1.0)
    assert _holds("regression_bands", _made_up(lengths)) == [None, None, False, True]


def test_a_choice_of_plain_cp_is_no_merit() -> None:
    lengths = _ffcp(3.0, 2.5, 2.9, 2.5, 2.0, auto=1.9)
    found = _made_up(lengths)
    place = ("synthetic", TRAINED, Method("FFCP", "auto"), 0.1)
    found.bands[place] = [replace(one, chosen=4, worst=0.99) for one in found.bands[place]]
    assert _holds("regression_bands", found)[-1] is False
    assert _holds("group_coverage_cp", found)[-1] is False
    found.bands[place] = [
        replace(one, chosen=k) for one, k in zip(found.bands[place], (3, 4), strict=True)
    ]
    assert _holds("regression_bands", found)[-1] is True  # one seed is shorter by choice


def test_the_law_of_fcp_is_about_its_ball() -> None:
    wide = Measured(0.99, 1.0, 0.8, calibrated=1000, tested=1000, feature_coverage=0.9)
    assert claims.lawful([wide], 0.1)
    assert not claims.lawful([replace(wide, coverage=0.9, feature_coverage=0.99)], 0.1)


def test_coverage_decides_by_layer_and_inside_the_ablation() -> None:
    lengths = _ffcp(1.0, 2.5, 2.9, 2.5, 2.0, auto=1.5)
    assert _holds("bands_by_layer", _made_up(lengths)) == [True] * 6
    assert _holds("bands_by_layer", _made_up(lengths, 0.8)) == [False] * 6
    ablation = _holds("split_ablation", _made_up(lengths, 0.95, alpha=0.05))
    assert ablation == [None, *[True] * 5, False, True]  # no split inside is shorter


def test_about_as_long_decides_for_untrained_networks() -> None:
    lengths = _ffcp(2.3, 2.15, 2.9, 2.5, 2.0, auto=2.3)
    found = _made_up(lengths, training=UNTRAINED)
    assert _holds("untrained", found) == [None, True, False]


def test_the_worst_group_decides_group_coverage() -> None:
    lengths = _ffcp(3.0, 1.0, 2.0, 2.5, 2.0, auto=2.1)  # a tenth of it is the worst coverage
    found = _holds("group_coverage_cp", _made_up(lengths))
    assert found == [None, None, True, False, False, True, None, True]


def test_the_ratio_of_run_times_decides() -> None:
    for slow, holds in ((3.2, True), (3.0, False)):
        times = [{"CP": [0.05] * 7, "FCP": [slow] * 7, "FFCP": [0.1] * 7}]
        table = paper_tables.build(
            "ffcp_runtime", Results(seconds={("synthetic", TRAINED): times}), TINY
        )
        assert table["rows"][0]["holds"] is holds
        assert table["rows"][0]["speedup"] == {"mean": pytest.approx(10 * slow), "sd": None, "n": 1}


def test_a_table_of_large_ratios_fits_a_terminal() -> None:
    times = [{"CP": [0.05] * 7, "FCP": [1.2] * 7, "FFCP": [0.01] * 7}]
    found = Results(seconds={("synthetic", TRAINED): times})
    table = paper_tables.build("ffcp_runtime", found, TINY)
    assert max(map(len, render.to_text(table).splitlines())) <= 80


def test_a_ratio_whose_interval_holds_the_limit_is_not_decided() -> None:
    slow = [3.0, 3.1, 3.2, 3.2, 3.3, 3.4, 3.5]
    times = [{"CP": [0.05] * 7, "FCP": slow, "FFCP": [0.1] * 7}]
    found = Results(seconds={("synthetic", TRAINED): times})
    table = paper_tables.build("ffcp_runtime", found, TINY)
    row = table["rows"][0]
    assert (row["speedup_low"], row["speedup_high"]) == pytest.approx((30.0, 35.0))
    assert row["holds"] is None
    assert row["note"] == "not decided: the interval contains the limit"
    assert table["verdict"]["text"] == "No row could be judged. Not decided: 1."
    assert row["note"] in render.to_text(table)


def test_the_verdict_counts_judged_rows_only() -> None:
    rows = [{"holds": h, "method": "FFCP"} for h in (True, False, None, True)]
    assert paper_tables.verdict(rows) == {
        "held": 2,
        "of": 3,
        "text": "The claim holds in 2 of 3 rows.",
    }
    assert paper_tables.verdict([{"data": "fb2", "note": "data not available"}])["of"] == 0


def test_the_papers_number_stands_beside_ours() -> None:
    lengths = _ffcp(3.0, 1.5, 1.9, 2.5, 2.0, auto=2.1)
    row = paper_tables.build("bands_by_layer", _made_up(lengths), TINY)["rows"][0]
    printed_one = printed.value(
        "bands_by_layer", row="synthetic", method="FFCP", column="coverage", layer=1
    )
    assert printed_one is not None
    assert row["coverage_paper"]["mean"] == pytest.approx(printed_one.mean / 100)
    assert row["coverage"] == {"mean": pytest.approx(0.9), "sd": 0.0, "n": 2}


def test_infinite_lengths_are_left_empty() -> None:
    assert claims.summary([1.0, float("inf")]) is None
    assert claims.summary([None, None]) is None


# -- methods -----------------------------------------------------------------------------------


def test_coverage_of_fcp_is_measured_in_both_spaces(made) -> None:
    rows = made[1]["regression_bands"]["rows"]
    fcp = next(row for row in rows if row["method"] == "FCP")
    assert fcp["feature_coverage"] is not None
    assert fcp["coverage"] is not None
    assert all(row["feature_coverage"] is None for row in rows if row["method"] != "FCP")


def test_split_point_four_is_cp(made) -> None:
    rows = {(r["method"], r["split"]): r for r in made[1]["split_ablation"]["rows"]}
    assert rows["FFCP", "4"]["length"] == rows["split CP", ""]["length"]


def test_works_ask_for_nothing_that_is_missing() -> None:
    listed = paper_tables.tasks("regression_bands", Settings())
    assert [task.data for task in listed if isinstance(task, RegressionTask)] == ["synthetic"]


# -- the command -------------------------------------------------------------------------------


def _command(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["reproduce", *arguments], env={"COLUMNS": "80"})


def test_the_command_makes_what_is_named(made, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(reproduce, "QUICK", TINY)
    out = tmp_path / "out"
    result = _command("untrained", "overview", "--quick", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "Claim: " in result.output
    assert "data not available" in result.output
    assert sorted(p.name for p in out.iterdir()) == [
        "figures", "results.jsonl", "settings.json", "tables"
    ]  # fmt: skip
    assert sorted({p.stem for p in (out / "tables").iterdir()}) == ["untrained"]
    assert sorted({p.stem for p in (out / "figures").iterdir()}) == ["overview"]
    page = CliRunner().invoke(cli.app, ["report", str(out)])
    assert page.exit_code == 0, page.output
    assert (out / "report.html").is_file()


def test_the_help_names_the_defaults() -> None:
    words = " ".join(_command("--help").output.replace("│", " ").split())
    assert "[default: 5, or 2 if quick]" in words
    assert "segmentation_shapes" in words


def test_the_command_refuses_what_it_cannot_make(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    unknown = _command("nonsense", "--out", out)
    assert unknown.exit_code == 2
    assert "nonsense" in unknown.output
    assert "segmentation_shapes" in unknown.output  # the names there are
    missing = _command("segmentation_camvid", "--out", out)
    assert missing.exit_code == 2
    assert "is missing" in missing.output
    assert _command("--seeds", "0", "--out", out).exit_code == 2
    assert not (tmp_path / "out").exists()
