"""What every column is taken for, and rows that cannot be predicted."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

pytest.importorskip("pandas")
import pandas as pd

from ffcp import tables
from ffcp.tables import cells, columns, targets
from ffcp.tables.columns import Column, Columns
from ffcp.tables.errors import TableError
from tests.tables.material import houses, new


def learned(**values: object) -> Column:
    frame = pd.DataFrame({"a": values["a"], "y": 0})
    frame["b"] = np.arange(len(frame)) % 2
    return columns.learn(frame, "y").all[0]


@pytest.mark.long
def test_a_table_of_houses_is_understood() -> None:
    found = {one.name: one for one in columns.learn(houses(300), "price")}
    assert {name: one.kind for name, one in found.items()} == {
        "size": "number",
        "rooms": "number",
        "town": "category",
        "sold": "date",
        "id": "left out",
        "garden": "category",
        "country": "left out",
        "empty": "left out",
    }
    assert found["id"].why == "a different word in every row"
    assert found["country"].why == "always 'CH'"
    assert found["empty"].why == "empty"
    assert found["size"].missing


@pytest.mark.long
def test_the_same_table_as_text_is_understood_in_the_same_way() -> None:
    frame = houses(300)
    text = frame.astype(object).where(frame.notna(), "").astype(str)
    text["sold"] = frame["sold"].dt.strftime("%d.%m.%Y")
    one, other = columns.learn(frame, "price"), columns.learn(text, "price")
    assert [c.kind for c in one] == [c.kind for c in other]
    assert np.allclose(one.encode(frame).x, other.encode(text).x)


@pytest.mark.parametrize("spelling", ["1", "1.0", "01", 1.0])
@pytest.mark.parametrize("other", [1.0, "1.00"])
def test_one_number_or_missing_is_read_in_any_spelling(spelling: object, other: object) -> None:
    frame = pd.DataFrame({"a": [spelling, None, spelling, ""] * 10, "y": range(40)})
    found = columns.learn(frame, "y")
    assert found.all[0].why == "1 or missing"
    encoded = found.encode(pd.DataFrame({"a": [other, None, spelling]}))
    assert encoded.x[:, 0].tolist() == [0, 0, 0]
    assert encoded.x[:, 1].tolist() == [0, 1, 0]  # missing
    assert not encoded.remarks


def test_a_few_words_among_numbers_are_missing() -> None:
    cells = [str(n) for n in np.random.default_rng(0).integers(0, 9, 60)] + ["unknown"]
    column = learned(a=cells)
    assert (column.kind, column.words) == ("number", ("unknown",))


def test_a_column_that_counts_the_rows_is_left_out() -> None:
    rows = np.sort(np.random.default_rng(0).permutation(1000)[:500])  # some of all rows train
    assert learned(a=rows).why == "row numbers"
    assert learned(a=np.random.default_rng(0).permutation(500)).kind == "number"


@pytest.mark.parametrize("form", ["€{}", "{:,}", "{} %", "$ {}", "{}'000", "-{}€"])
def test_numbers_with_signs_are_named_and_are_no_classes_unasked(form: str) -> None:
    written = [form.format(1000 + row % 50) for row in range(300)]
    assert f"{written[0]!r} is not read as a number" in learned(a=written).why
    frame = pd.DataFrame({"a": range(300), "price": written})
    with pytest.raises(TableError, match=f"holds {re.escape(repr(written[0]))}: write plain"):
        tables.fit(frame, "price", minutes=0.02)
    assert targets.learn(frame, "price", True, []).classes


@pytest.mark.parametrize("words", [["red", "5 %"], ["12:30", "13:05"], ["1a", "2b"], ["A-1", "-"]])
def test_words_with_digits_are_categories_without_a_remark(words: list[str]) -> None:
    assert learned(a=words * 20).why == "2 levels"


def test_month_and_day_that_could_be_swapped_are_said() -> None:
    dates = [f"{m:02}/{d:02}/2020" for m in range(1, 12) for d in range(1, 12)]
    assert "month first" in learned(a=dates).why
    assert learned(a=[*dates, "30/01/2020"]).form == "%d/%m/%Y"


@pytest.mark.long
def test_rows_that_cannot_be_read_have_a_reason_and_the_others_do_not() -> None:
    known = columns.learn(houses(300), "price")
    rows = new(4).astype(object)
    rows.loc[1, "rooms"] = "many"
    rows.loc[2, "sold"] = "yesterday"
    rows.loc[3, "rooms"] = np.inf
    found = known.encode(rows)
    assert found.reasons[0] == ""
    assert "rooms: 'many' is not a number" in found.reasons[1]
    assert "sold: 'yesterday' is not a date" in found.reasons[2]
    assert "rooms" in found.reasons[3]
    assert bool(found.x.isfinite().all())


@pytest.mark.long
def test_only_what_matters_is_an_error() -> None:
    known = columns.learn(houses(300), "price")
    rows = new(50)
    shuffled = rows[rows.columns[::-1]].assign(extra=1).drop(columns=["id", "country", "empty"])
    assert np.array_equal(known.encode(rows).x, known.encode(shuffled).x)
    with pytest.raises(TableError, match="rooms"):
        known.encode(rows.drop(columns="rooms"))
    with pytest.raises(TableError, match="rooms"):
        known.encode(rows.assign(rooms="many"))


@pytest.mark.long
def test_levels_that_no_training_row_had_are_said() -> None:
    known = columns.learn(houses(300), "price")
    found = known.encode(new(3).assign(town="Zug"))
    assert found.reasons.tolist() == ["", "", ""]
    assert any("'Zug'" in remark for remark in found.remarks)


@pytest.mark.long
def test_columns_survive_json_and_damage_is_refused() -> None:
    known = columns.learn(houses(300), "price")
    text = json.dumps(known.to_json())
    assert Columns.from_json(json.loads(text)) == known
    for old, broken in (('"number"', '"magic"'), ('"knots": [', '"knots": [1e99, '), ("CH", "CH")):
        saved = json.loads(text.replace(old, broken, 1))
        if broken == old:
            saved[0]["name"] = saved[1]["name"]
        with pytest.raises(ValueError):  # noqa: PT011 - what it says differs
            Columns.from_json(saved)


def test_nothing_left_to_predict_from_is_an_error() -> None:
    with pytest.raises(TableError, match="'a'"):
        columns.learn(pd.DataFrame({"a": ["x"] * 30, "y": range(30)}), "y")


def test_dates_with_points_are_dates_where_commas_are_decimal_signs() -> None:
    frame = pd.DataFrame(
        {
            "sold": [f"{day:02}.0{1 + day % 3}.2020" for day in range(1, 29)],
            "size": [f"{n},5" for n in range(28)],
            "area": [f"{1 + n % 9}.{n:03},25" for n in range(28)],
            "y": "1",
        }
    )
    frame.attrs["decimal"] = ","
    found = {column.name: column for column in columns.learn(frame, "y")}
    assert (found["sold"].kind, found["sold"].form) == ("date", "%d.%m.%Y")
    assert found["size"].knots[0] == 0.5
    assert found["area"].knots[0] == 1000.25


def test_a_point_where_commas_are_decimal_signs_is_not_taken_away() -> None:
    values, missing, bad = cells.numbers(pd.Series(["1,5", "1.5", "1.500", ""]), ",")
    assert values[[0, 2]].tolist() == [1.5, 1500.0]
    assert (missing.tolist(), bad.tolist()) == (
        [False, False, False, True],
        [False, True, False, False],
    )


def test_the_last_day_of_all_is_a_date() -> None:
    dates = pd.Series(np.array(["9999-12-31", "NaT", "0001-01-01"], dtype="datetime64[s]"))
    seconds, missing, bad = cells.dates(dates)
    assert seconds[[0, 2]].tolist() == [253402214400.0, -62135596800.0]
    assert (missing.tolist(), bad.any()) == ([False, True, False], False)


def test_truth_values_may_be_spelled_otherwise_in_new_tables() -> None:
    frame = pd.DataFrame({"a": [True, False] * 20, "b": range(40), "y": 0})
    found = columns.learn(frame, "y")
    given = [True, "TRUE", "true", "1", 1, 1.0]
    rows = pd.DataFrame({"a": pd.Series(given, dtype=object), "b": 1})
    encoded = found.encode(rows)
    assert encoded.remarks == []
    assert (encoded.x == encoded.x[0]).all()
    other = found.encode(pd.DataFrame({"a": ["0", "FALSE"], "b": 1}))
    assert (other.x[0] == other.x[1]).all()
    assert not (other.x[0] == encoded.x[0]).all()
    assert "maybe" in found.encode(pd.DataFrame({"a": ["maybe"], "b": 1})).remarks[0]


def test_long_cells_are_quoted_by_their_beginning() -> None:
    long = "word " * 200_000
    frame = houses(60).astype({"rooms": object})
    known = columns.learn(frame, "price")
    rows = new(3).astype({"rooms": object})
    rows.loc[1, "rooms"] = long
    rows.loc[2, "town"] = long
    made = known.encode(rows)
    assert 20 < len(made.reasons[1]) < 150
    assert "1,000,000 characters" in made.reasons[1]
    assert all(len(remark) < 300 for remark in made.remarks)
    with pytest.raises(TableError, match="rooms") as error:
        known.encode(rows.assign(rooms=long))
    assert len(str(error.value)) < 300
    assert len(learned(a=[long] * 30).why) < 150
    assert len(learned(a=[*range(60), long]).why) < 150


def test_a_long_group_is_quoted_by_its_beginning(labelled: tables.FittedTable) -> None:
    reasons = labelled.predicted(new(2).assign(town="word " * 200_000)).columns["reason"]
    assert reasons.str.len().between(20, 150).all()
