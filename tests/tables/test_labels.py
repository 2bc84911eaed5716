"""Labels that no training row had: no set can name them, and all that is counted counts them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ffcp import tables
from ffcp.tables import evaluation, splitting
from ffcp.tables.errors import TableError
from tests.tables.material import houses, quick_fit

pytestmark = pytest.mark.long

ROWS = 600
PARTS = splitting.divide(ROWS, 0.1, 0, crossing=False)
LEARNED = np.concatenate([PARTS.train, PARTS.stop])


def kinds(rows: np.ndarray | list[int]) -> pd.DataFrame:
    """Houses, dear or cheap; but these rows have labels of their own."""
    frame = houses(ROWS)
    made = np.where(frame.pop("price") > 350, "dear", "cheap").astype(object)
    made[rows] = [f"kind {number}" for number in range(len(rows))]
    return frame.assign(kind=made)


@pytest.fixture(scope="module")
def some() -> tables.FittedTable:
    """A few calibration rows, and many test rows, have labels that no training row has."""
    return quick_fit(kinds([*PARTS.calibrate[:5], *PARTS.test[:60]]), "kind")


@pytest.fixture(scope="module")
def many() -> tables.FittedTable:
    """More calibration rows than alpha allows for have such labels."""
    return quick_fit(kinds([*PARTS.calibrate[:40], *PARTS.test[:60]]), "kind")


def test_labels_come_from_training_rows_alone(some: tables.FittedTable) -> None:
    assert some.about.classes == ("cheap", "dear")
    assert int(some.predictor.calibration.scores.isinf().sum()) <= 5
    assert any("labels that no training row has" in one for one in some.about.decisions)


def test_a_test_row_of_another_label_is_missed_by_sets_that_cannot_hold_it(
    some: tables.FittedTable,
) -> None:
    tested = some.about.tested
    assert tested is not None
    assert tested.coverage <= 0.5  # half of the test rows have labels of their own
    assert some.still_covers(tested) < 0.01


def test_where_too_many_are_new_every_set_holds_all_and_another(many: tables.FittedTable) -> None:
    sets = many.predicted(houses(20).drop(columns="price")).columns
    for cell in sets["labels"]:
        assert sorted(evaluation.labels_of(cell)) == ["another label", "cheap", "dear"]
    assert set(sets["prediction"]) <= {"cheap", "dear"}
    assert (sets["size"] == 3).all()
    tested = many.about.tested
    assert tested is not None
    assert tested.coverage == 1.0
    assert any("every set holds all labels" in one for one in many.about.decisions)


def test_a_check_counts_other_labels(
    some: tables.FittedTable, many: tables.FittedTable, tmp_path: Path
) -> None:
    frame = kinds([])[:100].assign(kind="odd")
    again = tables.load(some.save(tmp_path / "some.ffcp"))
    with pytest.warns(match="odd"):
        assert again.check(frame).coverage == 0.0
    with pytest.warns(match="odd|infinite"):
        assert many.check(frame).coverage == 1.0


def test_one_label_among_training_rows_is_refused() -> None:
    frame = kinds([])
    frame["kind"] = "dear"
    frame.loc[PARTS.calibrate, "kind"] = "cheap"
    with pytest.raises(TableError, match="'dear'"):
        quick_fit(frame, "kind")


def test_a_class_named_as_the_word_for_others_is_refused() -> None:
    frame = kinds([])
    frame["kind"] = frame["kind"].replace("dear", "another label")
    with pytest.raises(TableError, match="another label"):
        quick_fit(frame, "kind")


def test_the_score_is_chosen_at_the_level_of_the_fit_and_said() -> None:
    fitted = quick_fit(kinds([]), "kind", alpha=0.2)
    assert fitted.predictor.choice.alpha == 0.2
    assert fitted.predictor.choice.rows == 30
    assert "on 30 rows" in fitted.about.method


def test_too_few_rows_to_choose_the_score_are_said() -> None:
    frame = houses(100)
    frame["kind"] = np.where(frame.pop("price") > 350, "dear", "cheap")
    fitted = quick_fit(frame, "kind")
    assert len(fitted.predictor.calibration) == 25
    assert "not selected" in fitted.about.method
