"""A table in, bands out: fits, new rows, checks, and what can be promised with few rows."""

from __future__ import annotations

import bisect
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("pandas")
import pandas as pd
import torch

from ffcp import metrics, tables
from ffcp.conformal.rank import conformal_rank
from ffcp.tables import cells, columns, evaluation, splitting, table_io, targets
from ffcp.tables.columns import learn
from ffcp.tables.errors import TableError
from ffcp.tables.network import TableNetwork
from ffcp.tables.training import train
from ffcp.warnings import FFCPWarning
from tests.tables.material import houses, new, quick_fit


def test_bands_have_an_order_and_keep_to_the_support(fitted: tables.FittedTable) -> None:
    bands = fitted.predict(new(40))
    assert bands.columns.tolist() == ["prediction", "lower", "upper", "reason"]
    assert (bands["lower"] <= bands["upper"]).all()  # bands that are learned may lie to one side
    assert (bands["lower"] >= 0).all()
    assert (bands["reason"] == "").all()


def test_fresh_rows_are_covered(fitted: tables.FittedTable) -> None:
    found = fitted.check(houses(500, 7))
    assert fitted.still_covers(found) > 0.001
    assert found.rows == 500
    assert fitted.about.tested is not None
    assert fitted.about.tested.rows == 120


def test_rows_that_moved_are_noticed(fitted: tables.FittedTable) -> None:
    moved = houses(200, 7)
    moved["price"] *= 3
    assert fitted.still_covers(fitted.check(moved)) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("rows", [200, 1000, 5000])
@pytest.mark.parametrize("kind", ["fitted", "labelled"])
def test_unchanged_rows_alarm_in_less_than_one_case_of_a_hundred(
    kind: str, rows: int, request: pytest.FixtureRequest
) -> None:
    # The law of split conformal prediction, with the scores that are really there.
    made: tables.FittedTable = request.getfixturevalue(kind)
    n = len(made.predictor.calibration)
    assert made.about.rows["calibration"] == made.calibrated == n
    assert sum(made.about.rows.values()) == 600
    assert made.about.tested is not None
    assert 0.001 < made.still_covers(made.about.tested) <= 1
    counts = getattr(made.predictor.calibration, "groups", {"": n})
    share = (rows * 3 // 4, *(rows // 4 // max(1, len(counts) - 1),) * (len(counts) - 1))
    groups = share if made.about.group else ()
    tested = replace(made.about.tested, rows=sum(share), of_groups=groups)
    hits = np.arange(sum(share))
    chance = lambda c: made.still_covers(replace(tested, coverage=c / sum(share)))  # noqa: E731
    lowest = bisect.bisect_left(hits, 0.01, key=chance)  # the fewest without alarm
    draw = np.random.default_rng(0)
    counts = {name: counts[name] for name in made.about.groups} or counts
    ranks = [(conformal_rank(count, 0.1), count) for count in counts.values()]
    seen = sum(
        draw.binomial(of_it, draw.beta(k, count + 1 - k, 40_000))
        for of_it, (k, count) in zip(share, ranks, strict=True)
    )
    assert (seen < lowest).mean() < 0.0115  # of 40,000 draws: 3 standard errors


@pytest.mark.long
def test_rows_that_calibrate_are_counted_in_every_group() -> None:
    frame = houses(500).assign(town=np.arange(500) % 60)  # some groups lose their rows to a choice
    made = quick_fit(frame, "price", group="town")
    counts = made.predictor.calibration.groups
    assert list(made.about.groups) == sorted(counts)
    assert len(counts) < len(set(frame["town"]))
    bands = made.predicted(frame).columns
    assert (bands["reason"] != "").all()
    assert bands["lower"].notna().sum() == frame["town"].astype(str).isin(counts).sum()


def test_a_sorted_file_is_no_change(fitted: tables.FittedTable) -> None:
    found = fitted.watch(houses(400, 7).sort_values("price"))
    assert found is not None
    assert not found.alarm


def test_a_change_on_the_way_is_found_after_it(fitted: tables.FittedTable) -> None:
    moved = houses(400, 7).sort_values("sold", ignore_index=True)
    moved.loc[200:, "price"] *= 3
    shuffled = moved.sample(frac=1, random_state=0)
    found = fitted.watch(shuffled, time="sold")
    assert found is not None
    assert found.alarms["target"] is not None
    assert 200 <= found.alarms["target"] < 260
    assert "drift" in found.table()[0]["says"]


def test_targets_beyond_the_support_are_watched_all_the_same(fitted: tables.FittedTable) -> None:
    moved = houses(200, 7)
    moved["price"] -= 1000
    found = fitted.watch(moved)
    assert found is not None
    assert found.alarm


def test_labels_that_no_training_row_had_are_watched(labelled: tables.FittedTable) -> None:
    frame = houses(60, 7)
    frame["kind"] = np.where(frame.pop("price") > 350, "dear", "cheap")
    frame.loc[:9, "kind"] = "odd"
    found = labelled.watch(frame)
    assert found is not None
    assert found.rows == 60


@pytest.mark.heavy
def test_each_side_and_a_support_that_ends_where_targets_do(tmp_path: Path) -> None:
    frame = houses(450)
    ends = float(frame["price"].min()), float(frame["price"].max())
    fitted = quick_fit(frame, "price", side="each", support=ends)
    again = tables.load(fitted.save(tmp_path / "each.ffcp"))
    bands = again.predict(new(50))
    assert bands[["lower", "upper"]].stack().between(*ends).all()
    assert again.predictor.support == fitted.predictor.support is not None
    assert again.watch(houses(50, 3)) is None  # nothing to compare with
    assert again.watch(houses(50, 3), time="sold") is not None


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(4))
def test_a_target_at_the_end_of_the_support_is_in_intervals_that_end_there(seed: int) -> None:
    frame = houses(450, seed)
    frame["price"] = (frame["price"] - 250).clip(lower=0) / 7  # many are 0
    fitted = quick_fit(frame, "price", support=(0, None), seed=seed)
    lower = fitted.predict(new(100))["lower"]
    assert (lower == 0).any()
    assert ((lower == 0) | (lower > 1e-3)).all()


@pytest.mark.heavy
def test_rows_that_could_not_be_predicted_do_not_calibrate() -> None:
    frame = houses(600).astype({"rooms": object})
    unread = np.random.default_rng(7).permutation(600)[:18]  # at most a twentieth
    frame.loc[unread, "rooms"] = [f"about {number}" for number in range(18)]
    fitted = quick_fit(frame, "price")
    rows = fitted.about.rows
    assert rows["calibration"] + rows.get("method selection", 0) < 150
    assert fitted.predict(frame)["lower"].isna().any()


def test_no_row_is_dropped(fitted: tables.FittedTable) -> None:
    rows = new(5).astype(object)
    rows.loc[2, "rooms"] = "many"
    rows.index = [9, 8, 7, 6, 5]
    bands = fitted.predict(rows)
    assert bands.index.tolist() == [9, 8, 7, 6, 5]
    assert bands["lower"].isna().tolist() == [False, False, True, False, False]
    assert bands["reason"].tolist()[2] == "rooms: 'many' is not a number"


@pytest.mark.parametrize("kind", ["fitted", "few"])
def test_rows_do_not_depend_on_their_neighbours(kind: str, request: pytest.FixtureRequest) -> None:
    made: tables.FittedTable = request.getfixturevalue(kind)
    rows = new(30)
    rows["size"] = rows["size"].fillna(50.0)
    whole = made.predict(rows)
    parts = pd.concat([made.predict(rows[i : i + 1]) for i in range(len(rows))])
    for name in ("prediction", "lower", "upper"):
        assert np.allclose(whole[name], parts[name], rtol=1e-5)
        assert whole[name].nunique() > 20  # every row has bands of its own


def test_label_sets_have_names_and_groups(labelled: tables.FittedTable) -> None:
    rows = new(30)
    rows.loc[3, "town"] = "Zug"
    sets = labelled.predicted(rows).columns
    known = sets.drop(index=3)
    assert set("|".join(known["labels"]).split("|")) <= {"dear", "cheap"}
    assert (known["size"] >= 1).all()
    assert "'Zug'" in sets.loc[3, "reason"]
    tested = labelled.about.tested
    assert tested is not None
    assert [part.value for part in tested.groups] == ["Basel", "Bern", "Chur"]


@pytest.mark.long
def test_a_table_may_repeat_rows() -> None:
    frame = houses(400)
    frame.loc[220:239] = frame.loc[:19].to_numpy()  # rows that train come again to calibrate
    frame = frame.infer_objects().assign(number=range(400))
    made = quick_fit(frame, "price", time="number")
    fresh = pd.concat([houses(100, 5).assign(number=400), frame[:10]], ignore_index=True)
    assert made.check(fresh).rows == 110  # without a word about the rows of the fit


@pytest.mark.heavy
def test_few_rows_promise_what_the_jackknife_promises(few: tables.FittedTable) -> None:
    assert few.about.folds == 18
    assert "at least 0.800" in few.about.guarantee
    assert "jackknife+" in few.about.guarantee
    assert few.watch(houses(20, 7)) is None  # folds leave no scores to compare with
    bands = few.predict(new(10))
    assert (bands["lower"] < bands["upper"]).all()
    assert np.isfinite(bands["upper"]).all()


@pytest.mark.long
def test_folds_have_one_size_whatever_the_number_of_rows() -> None:
    fitted = tables.fit(houses(43), "price", minutes=0.02, seed=0)
    assert fitted.about.rows == {"training and calibration in folds": 42, "training only": 1}
    assert "CV+ with 14 folds" in fitted.about.guarantee
    assert float(fitted.predictor.guarantee(0.1)) > 0.73  # ten uneven folds promised 0.460
    assert any("1 rows are not used for calib" in one for one in fitted.about.decisions)
    assert np.isfinite(fitted.predict(houses(5))["upper"]).all()


@pytest.mark.heavy
def test_a_held_out_fold_changes_nothing_of_its_network() -> None:
    # The network of fold 0, its columns and its units must not change with the rows of fold 0.
    frame, other = houses(40), houses(40)
    division = splitting.divide(40, 0.1, 0, crossing=True)
    assert division.folds is not None
    held = division.folds == 0
    other.loc[held, "price"] *= 100
    other.loc[held, "size"] += 1000
    options = {"minutes": 0.5, "seed": 0}
    one, two = (_first_network(table, **options) for table in (frame, other))
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


def _first_network(frame: pd.DataFrame, minutes: float, seed: int) -> dict[str, torch.Tensor]:
    from unittest import mock

    from ffcp.tables import fitting

    made: list[torch.nn.Module] = []

    class EnoughError(Exception):
        pass

    def short(network: TableNetwork, *args: torch.Tensor, **options: object) -> object:
        options.update(most_epochs=2, seconds=1e9)
        return train(network, *args, **options)  # type: ignore[arg-type]

    def placed(network: TableNetwork, *units: float) -> None:
        made.append(fitting_placed(network, *units))
        raise EnoughError

    fitting_placed = fitting.Placed
    with mock.patch.multiple(fitting, train=short, Placed=placed), pytest.raises(EnoughError):
        fitting.fit(frame, "price", minutes=minutes, seed=seed)
    return made[0].state_dict()


@pytest.mark.long
def test_nothing_learned_of_columns_comes_from_rows_that_calibrate_or_test(
    fitted: tables.FittedTable,
) -> None:
    frame = houses(600)
    parts = splitting.divide(600, 0.1, 0, crossing=True)
    learned = np.sort(np.concatenate([parts.train, parts.stop]))
    assert learn(frame.iloc[learned], "price") == fitted.columns[0]
    used = np.concatenate([parts.train, parts.stop, parts.calibrate, parts.test])
    assert sorted(used) == list(range(600))


def test_with_time_the_past_trains_and_the_last_rows_test() -> None:
    order = np.random.default_rng(0).permutation(1000)
    parts = splitting.divide(1000, 0.1, 0, crossing=True, order=order)
    place = np.argsort(order)
    assert place[parts.train].max() < place[parts.stop].min()
    assert place[parts.stop].max() < place[parts.calibrate].min()
    assert place[parts.calibrate].max() < place[parts.test].min()


@pytest.mark.parametrize(("rows", "message"), [(0, "price"), (1, "price"), (8, "8")])
def test_too_few_rows_for_any_promise_are_refused(rows: int, message: str) -> None:
    frame = houses(40)[:rows] if rows else houses(40)[:1].assign(price=np.nan)
    if rows == 1:
        frame = pd.concat([frame, houses(2).assign(price=np.nan)])
    with pytest.raises(tables.TableError, match=message):
        tables.fit(frame, "price", minutes=0.01)


def test_a_table_of_names_alone_is_told_from_one_without_targets() -> None:
    with pytest.raises(tables.TableError, match="rows"):
        tables.fit(houses(40)[:0], "price", minutes=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "prize"}, "prize"),
        ({"target": "id"}, "id"),
        ({"target": "country"}, "CH"),
        ({"target": "empty"}, "empty"),
        ({"target": "sold"}, "sold"),
        ({"target": "price", "support": (None, 10)}, "support"),
        ({"target": "price", "support": (5, 1)}, "support"),
        ({"target": "price", "group": "village"}, "village"),
        ({"target": "price", "time": "town"}, "town"),
        ({"target": "price", "side": "left"}, "side"),
        ({"target": "price", "alpha": 2}, "alpha"),
        ({"target": "garden", "support": (0, 1)}, "support"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_training(
    options: dict[str, object], message: str
) -> None:
    frame = houses(600)
    frame["sold"] = frame["sold"].astype(str)
    with pytest.raises(ValueError, match=message):
        tables.fit(frame, **options)  # type: ignore[arg-type]


@pytest.mark.heavy
def test_rows_without_a_target_are_left_out_and_said() -> None:
    frame = houses(450)
    frame.loc[[3, 4], "price"] = np.nan
    fitted = quick_fit(frame, "price")
    assert any("2 rows have no target" in decision for decision in fitted.about.decisions)


@pytest.mark.heavy
def test_one_side_ends_on_that_side_only() -> None:
    fitted = quick_fit(houses(450), "price", side="upper")
    bands = fitted.predict(new(9))
    assert np.isinf(bands["lower"]).all()
    assert np.isfinite(bands["upper"]).all()
    assert (bands["reason"] == "").all()


@pytest.mark.long
def test_ctrl_c_keeps_the_best_so_far() -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 2)
    network = TableNetwork.for_rows(x, 2, 1)
    looks = []

    def interrupt(share: float) -> None:
        looks.append(share)
        if len(looks) == 3:
            raise KeyboardInterrupt

    found = train(network, x, x[:, 0], x[:50], x[:50, 0], seconds=60, seed=0, progress=interrupt)
    assert "Ctrl-C" in found.ended
    assert found.loss < 1
    assert not network.training


@pytest.mark.long
def test_a_frame_whose_columns_are_numbers_is_predicted_again(few: tables.FittedTable) -> None:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.normal(size=(12, 3)))
    fitted = quick_fit(frame, "2", minutes=0.002)
    assert fitted.predict(frame.drop(columns=2))["lower"].notna().all()
    with pytest.warns(FFCPWarning, match="100"):
        assert fitted.check(frame).rows == 12


def test_columns_of_one_name_are_refused(few: tables.FittedTable) -> None:
    frame = houses(20)
    twice = pd.concat([frame, frame[["size"]]], axis=1)
    for use in (lambda: tables.fit(twice, "price"), lambda: few.predict(twice)):
        with pytest.raises(TableError, match="size"):
            use()


@pytest.mark.parametrize("factor", [1e200, 1e305, 1e-300])
def test_targets_that_cannot_be_computed_with_are_refused(factor: float) -> None:
    frame = houses(450)
    with pytest.raises(TableError, match="price"):
        quick_fit(frame.assign(price=frame["price"] * factor), "price")


@pytest.mark.parametrize("option", ["group", "time"])
def test_the_target_is_no_option(option: str) -> None:
    with pytest.raises(TableError, match="price"):
        tables.fit(houses(450), "price", **{option: "price"})


@pytest.mark.long
def test_a_group_for_every_row_is_refused() -> None:
    with pytest.raises(TableError, match="id"):
        quick_fit(houses(450), "price", group="id")


@pytest.mark.long
def test_groups_without_calibration_rows_are_named() -> None:
    frame = houses(450).assign(part=["solo"] + ["a", "b"] * 224 + ["a"])
    fitted = quick_fit(frame, "price", group="part")
    decided = [one for one in fitted.about.decisions if "groups have no calibration rows" in one]
    assert len(decided) == 1
    assert "'solo'" in decided[0]


@pytest.mark.long
def test_that_every_set_holds_all_labels_is_said() -> None:
    frame = houses(30).assign(price=["dear", "cheap"] * 15)
    decisions = quick_fit(frame, "price").about.decisions
    assert "7 calibration rows, but alpha = 0.1 needs 9: every set holds all labels" in decisions


@pytest.mark.long
def test_classes_that_are_not_in_every_part_are_named() -> None:
    frame = houses(600)
    kinds = np.where(frame.pop("price") > 350, "dear", "cheap").astype(object)
    parts = splitting.divide(600, 0.1, 0, crossing=False)
    kinds[parts.train[0]] = "one"
    kinds[[parts.calibrate[0], parts.test[0]]] = "two"
    kinds[[*parts.train[1:3], parts.calibrate[1], parts.test[1]]] = "four"  # in all of them
    decisions = quick_fit(frame.assign(kind=kinds), "kind").about.decisions
    (said,) = [one for one in decisions if "not for each class" in one]
    assert "'one', 'two'" in said
    assert "four" not in said


def test_where_every_class_is_in_every_part_nothing_is_said(labelled: tables.FittedTable) -> None:
    assert not any("for each class" in one for one in labelled.about.decisions)


@pytest.mark.long
def test_labels_with_bars_are_covered_and_told_apart() -> None:
    frame = houses(450)
    frame["price"] = np.where(frame["price"] > 300, "a|b\\", "c")
    fitted = quick_fit(frame, "price")
    assert fitted.about.tested is not None
    assert fitted.about.tested.coverage > 0.75
    assert set(fitted.predict(frame)["labels"]) <= {"a\\|b\\\\", "c", "a\\|b\\\\|c", "c|a\\|b\\\\"}


def test_a_seed_that_no_generator_takes_is_refused() -> None:
    with pytest.raises(TableError, match="seed"):
        tables.fit(houses(30), "price", seed=2**70)


@pytest.mark.long
def test_a_support_without_end_is_saved(tmp_path: Path) -> None:
    made = quick_fit(houses(450), "price", support=(0, float("inf")))
    made.save(tmp_path / "a.ffcp")
    assert tables.load(tmp_path / "a.ffcp").about.support == (0.0, None)
    for wrong in ((float("nan"), None), (float("inf"), None)):
        with pytest.raises(TableError, match="support"):
            tables.fit(houses(450), "price", support=wrong)


def test_too_many_columns_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "MOST", 20)
    frame = pd.DataFrame(np.zeros((3, 21))).rename(columns=str)
    frame.to_csv(tmp_path / "wide.csv", index=False)
    frame.to_parquet(tmp_path / "wide.parquet")
    monkeypatch.setattr(table_io, "read", None)
    for table in (frame, tmp_path / "wide.csv", tmp_path / "wide.parquet"):
        with pytest.raises(TableError, match="21"):
            tables.fit(table, "0")


@pytest.mark.long
def test_a_wide_table_takes_no_longer_than_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    exact = metrics.clopper_pearson
    monkeypatch.setattr(
        metrics, "clopper_pearson", lambda *given: counted.append(1) or exact(*given)
    )
    monkeypatch.setattr(cells, "spelled", None)  # numbers need not be spelled
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.normal(size=(90, 1000))).rename(columns=str)
    learned_columns = learn(frame, "0")
    assert max(len(column.knots) for column in learned_columns) <= 50
    bands = pd.DataFrame({"prediction": 0.0, "lower": -1.0, "upper": 1.0}, index=frame.index)
    about = SimpleNamespace(classes=(), group=None, groups=(), side="both")
    made = SimpleNamespace(about=about, columns=[learned_columns])
    found = evaluation.measure(made, bands, frame["0"].to_numpy(), frame, 0.1)
    assert len(found.columns) == 3 * 999
    assert len(counted) < 30  # slices of as many rows and hits have one interval
    most = splitting.most_rows(3000, 60)
    parts = splitting.divide(50_000, 0.1, 0, crossing=True, most=most)
    assert len(parts.calibrate) == len(parts.test) == most < 3000
    few_bins = TableNetwork.for_rows(torch.randn(90, 2500), numbers=2500, outputs=1).shape
    assert few_bins.embedding == 2
    assert max(few_bins.bins) <= 20


@pytest.mark.parametrize("time", [None, "0"])
def test_a_table_too_wide_for_its_time_uses_fewer_rows(
    time: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitting, "_PREPARED", 450 * 4 / 1.3)  # in 0.3 seconds, and one more
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.normal(size=(2000, 4))).rename(columns=str)
    made = quick_fit(frame, "3", time=time)
    assert sum(made.about.rows.values()) == 450
    assert any("450 of 2,000" in said for said in made.about.decisions)
    last = frame.sort_values("0")[-450:] if time else frame
    assert fitted_share(made, frame) == pytest.approx(0.8 * 450 / 2000)
    assert fitted_share(made, last) == pytest.approx(0.8 if time else 0.8 * 450 / 2000)


def fitted_share(made: tables.FittedTable, frame: pd.DataFrame) -> float:
    """Return the share of rows that trained or calibrated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FFCPWarning)
        return made.check(frame).seen


def test_a_short_training_leaves_enough_rows_for_the_level() -> None:
    assert splitting.rows_in_time(30_000, 1.2, 0.1) == 400
    assert splitting.rows_in_time(3000, 1.2, 0.005) == 8000
    parts = splitting.divide(9000, 0.005, 0, crossing=True, most=1000)
    assert parts.folds is None  # enough rows calibrate, however few a wide table usually has
    assert len(parts.calibrate) == 2000


@pytest.mark.long
def test_text_that_is_numbers_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    as_text = houses(500).astype(str)
    read: list[str] = []
    numbers = cells.numbers
    monkeypatch.setattr(
        cells,
        "numbers",
        lambda series, *given: (
            (None if cells.is_number(series) else read.append(series.name))
            or numbers(series, *given)
        ),
    )
    fitted = quick_fit(as_text, "price")
    assert read.count("rooms") == 1
    monkeypatch.undo()
    bands, same = fitted.predict(new(20)), fitted.predict(new(20).astype(str))
    assert bands["lower"].tolist() == same["lower"].tolist()


def test_groups_stay_words_where_they_look_like_numbers() -> None:
    frame = pd.DataFrame({"a": ["1", "2.5"], "b": ["007", "7"], "c": ["3", ""], "d": ["1", "x"]})
    read = cells.read_once(frame, but="b")
    assert [str(kind) for kind in read.dtypes] == ["float64", "str", "str", "str"]
    assert cells.read_once(pd.DataFrame({"a": ["1_000", "2"]}))["a"].tolist() == ["1_000", "2"]


@pytest.mark.long
def test_torch_may_have_another_default_type(tmp_path: Path) -> None:
    frame, rows = houses(500), new(20)
    usual = quick_fit(frame, "price", minutes=1e-9)
    torch.set_default_dtype(torch.float64)
    try:
        made = quick_fit(frame, "price", minutes=1e-9)
        quick_fit(frame, "town", minutes=1e-9)
        quick_fit(frame[:60], "price", minutes=1e-9)
        made.save(tmp_path / "fit")
        loaded = tables.load(tmp_path / "fit").predict(rows)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {tensor.dtype for tensor in made.networks[0].parameters()} == {torch.float32}
    assert loaded["lower"].tolist() == made.predict(rows)["lower"].tolist()
    assert usual.predict(rows)["reason"].tolist() == loaded["reason"].tolist()


@pytest.mark.parametrize("kind", ["int64", "str", "object"])
def test_times_from_2_to_the_53_up_keep_their_order(kind: str) -> None:
    whole = [2**53 + 2, 2**53 + 1, 2**53, 2**53 + 3, 5]
    frame = pd.DataFrame({"t": pd.Series(whole, dtype=kind)})
    assert np.argsort(targets.times(frame, "t"), kind="stable").tolist() == [4, 2, 1, 0, 3]


@pytest.mark.heavy
def test_predictions_lie_in_their_intervals_where_the_mean_of_a_long_tail_does_not() -> None:
    random = np.random.default_rng(0)
    x = random.random(1500)
    y = np.where(random.random(1500) < 0.96, x, 2000 * random.exponential(size=1500))
    frame = pd.DataFrame({"x": x, "z": random.random(1500), "y": y})
    fitted = quick_fit(frame, "y", minutes=0.02)
    for alpha in (0.1, 0.3):
        made = fitted.predict(frame, alpha)
        assert (made["prediction"] >= made["lower"]).all()
        assert (made["prediction"] <= made["upper"]).all()


def test_targets_that_are_no_name_and_minutes_in_words_are_told() -> None:
    frame = houses(60)
    with pytest.raises(TableError, match=r"name of a column \(--target\) in quotes, got 'Series'"):
        tables.fit(frame, frame["price"])
    with pytest.raises(TableError, match=r"'minutes' must be a positive number, got '3'"):
        tables.fit(frame, "price", minutes="3")  # type: ignore[arg-type]
    with pytest.raises(TableError, match=r"'country' is 'CH' in all of 60 rows: there is nothing"):
        tables.fit(frame, "country")
