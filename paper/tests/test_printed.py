"""The paper's printed numbers, and that they contradict its words where we say so."""

from __future__ import annotations

import statistics

import pytest

from ffcp_paper.data import datasets
from ffcp_paper.tables.printed import CONTRADICTIONS, TABLES, Printed, known, value

COUNTS = {
    "ffcp_runtime": 44,
    "regression_bands": 66,
    "raps_imagenet": 54,
    "group_coverage_lcp": 66,
    "bands_by_layer": 88,
    "untrained": 44,
    "split_ablation": 36,
    "ffcqr_runtime": 44,
    "ffcqr_bands": 280,
    "group_coverage_cp": 77,
}
DATA = tuple(datasets.DATASETS)


def mean(table: str, row: str, method: str, column: str, layer: int | None = None, **more) -> float:
    found = value(table, row=row, method=method, column=column, layer=layer, **more)
    assert found is not None
    return found.mean


def test_every_number_is_there_once() -> None:
    assert list(TABLES) == list(COUNTS)
    for name, table in TABLES.items():
        assert len(table.rows) == COUNTS[name]
        keys = {(r.row, r.method, r.column, r.layer, r.levels) for r in table.rows}
        assert len(keys) == len(table.rows)


@pytest.mark.parametrize("name", TABLES)
def test_each_number_can_be_looked_up(name: str) -> None:
    table = known(name)
    for row in table.rows:
        assert row.value == value(
            name, row=row.row, method=row.method, column=row.column, layer=row.layer,
            levels=row.levels,
        )  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_a_table_says_what_it_is(name: str) -> None:
    table = TABLES[name]
    assert table.name == name
    assert table.claim.endswith(".")
    assert {row.column for row in table.rows} == set(table.columns)
    assert table.alpha == (0.05 if name == "split_ablation" else 0.1)
    assert len(table.contradictions) == len(table.notes) > 0


def test_the_tables_are_about_the_data_sets_that_we_have() -> None:
    for name, table in TABLES.items():
        rows = {row.row for row in table.rows}
        assert rows <= set(DATA) or name == "raps_imagenet"


def test_numbers_as_printed() -> None:
    assert value("ffcp_runtime", row="synthetic", method="FFCP", column="speedup") == Printed(43)
    assert value("raps_imagenet", row="VGG16", column="top1") == Printed(0.716, 0.001)
    plain = value("untrained", row="bike", method="CP", column="length")
    assert plain == value("untrained", row="bike", method="Vanilla CP", column="length")


def test_what_the_paper_does_not_print_is_none() -> None:
    assert value("regression_bands", row="moon", method="FFCP", column="length") is None
    assert value("bands_by_layer", row="bike", method="FFCP", column="length", layer=0) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table": "bands"}, "bands"),
        ({"method": "LCP"}, "LCP"),
        ({"column": "width"}, "width"),
    ],
)
def test_wrong_names_are_refused(changes: dict[str, str], message: str) -> None:
    given = {"table": "regression_bands", "method": "FFCP", "column": "length", **changes}
    with pytest.raises(ValueError, match=message):
        value(given.pop("table"), row="bike", **given)


# -- the contradictions, from the numbers ------------------------------------------------------


def test_every_contradiction_is_told_and_the_last_three_are_of_the_text() -> None:
    assert list(CONTRADICTIONS) == list(range(1, 27))
    named = {note for table in TABLES.values() for note in table.notes}
    assert set(CONTRADICTIONS) - named == {24, 25, 26}


def test_1_layer_4_is_not_cp() -> None:
    for data in DATA:
        ours = mean("bands_by_layer", data, "FFCP", "length", 4)
        assert ours != mean("regression_bands", data, "CP", "length")


def test_3_and_4_coverage_and_length_of_ffcp() -> None:
    below = {d for d in DATA if mean("regression_bands", d, "FFCP", "coverage") < 90}
    assert below == {"fb2", "meps20", "meps21", "bio", "bike"}
    lengths = {
        d: [mean("regression_bands", d, method, "length") for method in ("CP", "FCP", "FFCP")]
        for d in DATA
    }
    assert {d for d, (cp, _, ours) in lengths.items() if cp == ours} == {"synthetic", "star", "bio"}
    assert {d for d, (cp, fcp, _) in lengths.items() if fcp > cp} == {"fb1", "bike"}


def test_6_to_10_group_coverage() -> None:
    lcp, cp = TABLES["group_coverage_lcp"], TABLES["group_coverage_cp"]
    assert max(row.value.mean for row in lcp.rows) < 87.2
    column = "group_coverage"
    bike = [mean(cp.name, "bike", "FFCP", column, layer) for layer in range(3)]
    assert min(bike) > max(mean("bands_by_layer", "bike", "FFCP", "coverage", n) for n in (1, 2, 3))
    plain = {d: mean(cp.name, d, "CP", column) for d in DATA}
    assert {d for d in DATA if mean(cp.name, d, "FFCP", column, 4) != plain[d]} == {"meps21"}
    assert sum(mean(lcp.name, d, "LCP", column) < plain[d] for d in DATA) == 8
    best = {d: max(mean(cp.name, d, "FFCP", column, layer) for layer in range(4)) for d in DATA}
    assert {d for d in DATA if best[d] <= plain[d]} == {"meps19", "meps20", "meps21", "star"}
    for data in DATA:
        ours = max(mean(lcp.name, data, "FFLCP", column, layer) for layer in range(5))
        assert ours < max(mean(cp.name, data, "FFCP", column, layer) for layer in range(5))


def test_11_ffraps_is_smaller_by_less_than_the_spread() -> None:
    smaller = 0
    for model in dict.fromkeys(row.row for row in TABLES["raps_imagenet"].rows):
        ours, theirs = (
            value("raps_imagenet", row=model, method=method, column="length")
            for method in ("FFRAPS", "RAPS")
        )
        smaller += ours.mean < theirs.mean
        assert abs(ours.mean - theirs.mean) < max(ours.sd, theirs.sd)
    assert smaller == 8


def test_12_ffcqr_is_not_shorter_on_com_and_bike() -> None:
    worse = set()
    for data in ("meps19", "com", "bike", "bio"):
        levels = (0.1, 0.9)
        cqr = mean("ffcqr_bands", data, "CQR", "length", levels=levels)
        ours = [mean("ffcqr_bands", data, "FFCQR", "length", k, levels=levels) for k in range(4)]
        if min(ours) >= cqr:
            worse.add(data)
    assert worse == {"com", "bike"}


def test_15_an_untrained_network_is_shorter_on_blog() -> None:
    for method in ("CP", "FFCP"):
        untrained = mean("untrained", "blog", method, "length")
        assert untrained < mean("regression_bands", "blog", method, "length")


def test_16_and_17_speed() -> None:
    ratios = {
        name: {d: mean(name, d, slow, "seconds") / mean(name, d, fast, "seconds") for d in DATA}
        for name, slow, fast in (
            ("ffcp_runtime", "FCP", "FFCP"),
            ("ffcqr_runtime", "FCQR", "FFCQR"),
        )
    }
    assert ratios["ffcqr_runtime"]["bike"] == pytest.approx(7.8, abs=0.05)
    assert mean("ffcqr_runtime", "bike", "FFCQR", "speedup") == 6
    fast, slow = (mean("ffcqr_runtime", "fb2", method, "seconds") for method in ("FFCQR", "CQR"))
    assert fast < slow
    printed = {
        name: [mean(name, d, method, "speedup") for d in DATA]
        for name, method in (("ffcp_runtime", "FFCP"), ("ffcqr_runtime", "FFCQR"))
    }
    assert (min(printed["ffcp_runtime"]), max(printed["ffcp_runtime"])) == (31, 108)
    assert statistics.median(printed["ffcp_runtime"]) == 44
    assert statistics.median(printed["ffcqr_runtime"]) == 7
