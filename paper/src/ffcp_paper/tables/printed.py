"""The numbers that the paper prints, for comparison with ours.

The files in ``printed_tables/`` hold every number of the paper's results tables. A table has the
claim that the paper makes with it, and the contradictions that concern it:

>>> print(TABLES["regression_bands"].claim)
FFCP's bands are shorter than those of split CP and cover as much.
>>> value("regression_bands", row="fb1", method="FFCP", column="length")
Printed(mean=1.472, sd=0.232)
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Printed:
    """A number of the paper and what follows its ±, apparently a standard deviation."""

    mean: float
    sd: float | None = None


@dataclass(frozen=True)
class Row:
    """One number of a table, with its data set, method and other keys.

    Parameters
    ----------
    row
        The data set; in the ImageNet table, the classifier.
    method
        As printed; empty for the accuracy of a classifier.
    column
        The metric.
    value
        The number.
    bold
        Whether it is printed bold.
    layer
        The split point, numbered as printed.
    levels
        The quantile levels that the network was trained at.
    """

    row: str
    method: str
    column: str
    value: Printed
    bold: bool = False
    layer: int | None = None
    levels: tuple[float, float] | None = None


@dataclass(frozen=True)
class PrintedTable:
    """A results table of the paper.

    Parameters
    ----------
    name
        Its name here.
    number
        Its number in the paper, by order of appearance.
    title
        What it is about.
    columns
        What each column means.
    claim
        What it shows according to the paper, in our words.
    notes
        The numbers of those :data:`CONTRADICTIONS` that concern it.
    alpha
        The miscoverage level; where the paper does not say it, coverages near 90 % point to 0.1.
    """

    name: str
    number: str
    title: str
    columns: Mapping[str, str]
    claim: str
    notes: tuple[int, ...]
    alpha: float = 0.1

    @property
    def rows(self) -> tuple[Row, ...]:
        """All numbers, in the order of the paper."""
        return _read(self.name)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that are compared.

        >>> TABLES["ffcqr_bands"].methods
        ('CQR', 'FCQR', 'FFCQR')
        """
        return tuple(dict.fromkeys(row.method for row in self.rows if row.method))

    @property
    def contradictions(self) -> tuple[str, ...]:
        """Contradictions of this table with the paper's text or its other tables."""
        return tuple(CONTRADICTIONS[number] for number in self.notes)


def known(name: str) -> PrintedTable:
    """Return a table by its name.

    >>> known("split_ablation").alpha
    0.05
    """
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}: choose one of {', '.join(TABLES)}")
    return TABLES[name]


def value(
    table: str,
    *,
    row: str,
    method: str = "",
    column: str,
    layer: int | None = None,
    levels: tuple[float, float] | None = None,
) -> Printed | None:
    """Return a printed number.

    Parameters
    ----------
    table
        One of :data:`TABLES`.
    row
        The data set; in ``raps_imagenet``, the classifier.
    method
        As printed, or ``"CP"`` for the paper's "Vanilla CP".
    column
        One of the table's columns.
    layer
        The split point, as printed, in tables that tell them apart.
    levels
        The levels of the quantile network, in ``ffcqr_bands``.

    Returns
    -------
    Printed or None
        ``None`` if the table lacks the number, as for a data set that it leaves out.

    Raises
    ------
    ValueError
        If the table does not exist, or lacks the method or the column.

    Examples
    --------
    >>> value("ffcp_runtime", row="com", method="CP", column="seconds")
    Printed(mean=0.0047, sd=0.001)
    >>> value("ffcqr_bands", row="bio", method="FFCQR", column="length", layer=3, levels=(0.1, 0.9))
    Printed(mean=1.41, sd=0.02)
    >>> value("split_ablation", row="bike", method="FFCP", column="length", layer=1) is None
    True
    """
    result = known(table)
    method = "Vanilla CP" if method == "CP" else method
    if column not in result.columns:
        raise ValueError(
            f"table {table!r} has no column {column!r}: it has {_list(result.columns)}"
        )
    if method and method not in result.methods:
        raise ValueError(
            f"table {table!r} has no method {method!r}: it has {_list(result.methods)}"
        )
    return _index(table).get((row, method, column, layer, levels))


def _list(names: Mapping[str, str] | tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in names)


@functools.cache
def _index(name: str) -> dict[tuple[object, ...], Printed]:
    return {(r.row, r.method, r.column, r.layer, r.levels): r.value for r in _read(name)}


@functools.cache
def _read(name: str) -> tuple[Row, ...]:
    text = (resources.files("ffcp_paper.tables") / "printed_tables" / f"{name}.csv").read_text(
        encoding="utf-8"
    )
    return tuple(_row(cells) for cells in csv.DictReader(text.splitlines()))


def _row(cells: Mapping[str, str]) -> Row:
    low, high = cells.get("level_low"), cells.get("level_high")
    return Row(
        row=cells.get("model") or cells["dataset"],
        method=cells["method"],
        column=cells["metric"],
        value=Printed(float(cells["mean"]), float(cells["std"]) if cells["std"] else None),
        bold=cells["bold"] == "1",
        layer=int(cells["layer"]) if cells["layer"] else None,
        levels=(float(low), float(high)) if low and high else None,
    )


# -- contradictions ----------------------------------------------------------------------------

CONTRADICTIONS: dict[int, str] = {
    1: "Table 5 says that its layer 4 is split CP, but it differs from split CP in Table 2 on all "
    "11 data sets; it seems to print layers 0 to 3 under the names 1 to 4.",
    2: "The network has five layers in the text and four in the appendix and Table 7; four, with "
    "five split points, fits the tables.",
    3: "FFCP's coverage is said to exceed the level everywhere; it is below 90 % on fb2, meps20, "
    "meps21, bio and bike.",
    4: "FFCP is said to be shorter than split CP; it is equal on synthetic, star and bio, and "
    "cannot be longer, since the shortest layer is selected on the test rows and split CP is one "
    "of them. FCP is longer than split CP on fb1 and bike.",
    5: "On synthetic, noise N(0, 1) needs a length of at least 3.29; 0.176 is printed. The scale "
    "of the target is never given.",
    6: "Table 4 reports the maximum over groups by its caption and the minimum by the appendix; "
    "only the minimum is possible.",
    7: "On bike, FFCP's worst group at layers 0 to 2 covers 94 to 95 %, more than all rows "
    "together (89.5 to 89.9 %).",
    8: "On meps21, split CP has 71.38 and FFCP at layer 4 has 71.39; on the other ten data sets "
    "the two are equal, as they must be.",
    9: "LCP is said to cover groups better; it is below split CP on 8 of 11 data sets, and the "
    "best FFLCP is below the best FFCP on all.",
    10: "FFCP is said to outperform split CP; on meps19, meps20, meps21 and star no layer from 0 "
    "to 3 does.",
    11: "FFRAPS is said to win on most data sets; there is one, with nine classifiers. Its sets "
    "are smaller on 8, each time by less than the larger ±.",
    12: "FFCQR is said to be shorter than CQR; at levels 0.1 and 0.9 no layer from 0 to 3 is on "
    "com and bike.",
    13: "FFCQR's bands are said to narrow as the levels close in; most lengths grow.",
    14: "alpha stands for the levels that the network was trained at and for the miscoverage "
    "level.",
    15: "The network is called untrained, incompletely trained and randomly initialised. On blog "
    "its bands are shorter than those of the trained one.",
    16: "On bike 1.8528 / 0.2382 is 7.8 but 6 is printed, and both ± exceed their mean; on fb2 "
    "FFCQR is faster than CQR.",
    17: "About 50 times faster is claimed: Table 1 has 31 to 108 with median 44, Table 8 has "
    "median 7.",
    18: "FFRAPS divides by or multiplies with the gradient in words; its formulas add it.",
    19: "FFRAPS adds its term to each score in one place and once to their sum in another; which "
    "gradient is meant is not stated.",
    20: "FFRAPS takes the k-th largest score as the threshold; it must be the k-th smallest.",
    21: "FFRAPS adds one label to every set without the random step that would take it away.",
    22: "FFRAPS's labels run from 0 to K, one class too many, and the value of delta is not given.",
    23: "FFLCP's weights sum to 1 before a full mass is added at infinity, and grow with the "
    "distance.",
    24: "The point mass at infinity stands outside the factor 1/(n+1) in the algorithms.",
    25: "alpha is the confidence level in the algorithms and 1 - alpha in the introduction.",
    26: "The proof of coverage says intersection of the two folds; it must be the union.",
}

# -- the tables, in the paper's order ----------------------------------------------------------

_SECONDS = {
    "seconds": "time from scoring to bands, in seconds",
    "speedup": "how many times faster than inverting the network, under the fast method",
}
_BANDS = {
    "coverage": "test rows inside their band, in percent",
    "length": "mean length of the bands, in units of a scaled target",
}
_GROUPS = {"group_coverage": "coverage of the worst third of the test rows cut by y, in percent"}
_SETS = {
    "top1": "accuracy of the classifier, as a fraction",
    "top5": "how often the label is among its first five, as a fraction",
    "coverage": "test images whose label is in the set, as a fraction",
    "length": "mean number of labels in the set",
}

TABLES: dict[str, PrintedTable] = {
    table.name: table
    for table in (
        PrintedTable(
            "ffcp_runtime",
            "1",
            "Running time of split CP, FCP and FFCP",
            _SECONDS,
            "FFCP is about 50 times faster than FCP.",
            (17,),
        ),
        PrintedTable(
            "regression_bands",
            "2",
            "Bands of split CP, FCP and FFCP, the latter at its best layer",
            _BANDS,
            "FFCP's bands are shorter than those of split CP and cover as much.",
            (1, 3, 4, 5),
        ),
        PrintedTable(
            "raps_imagenet",
            "3",
            "Prediction sets of RAPS and FFRAPS for nine ImageNet classifiers",
            _SETS,
            "FFRAPS's sets are smaller than those of RAPS for most classifiers.",
            (11, 18, 19, 20, 21, 22),
        ),
        PrintedTable(
            "group_coverage_lcp",
            "4",
            "Coverage of the worst group by LCP and by FFLCP at split points 0 to 4",
            _GROUPS,
            "FFLCP covers the worst group better than LCP.",
            (6, 9, 23),
        ),
        PrintedTable(
            "bands_by_layer",
            "5",
            "Bands of FFCP at each layer, numbered 1 to 4 as printed",
            _BANDS,
            "FFCP covers as promised at every layer; the length depends on the layer.",
            (1, 2),
        ),
        PrintedTable(
            "untrained",
            "6",
            "Bands of split CP and FFCP on a network that was hardly trained",
            _BANDS,
            "On an untrained network FFCP's bands are about as long as those of split CP.",
            (15,),
        ),
        PrintedTable(
            "split_ablation",
            "7",
            "Bands of FFCP for each split of the network, layer k being h:k g:4-k",
            _BANDS,
            "FFCP covers as promised wherever the network is split, and a split inside it is "
            "shorter than split CP.",
            (1, 2),
            alpha=0.05,
        ),
        PrintedTable(
            "ffcqr_runtime",
            "8",
            "Running time of CQR, FCQR and FFCQR",
            _SECONDS,
            "FFCQR is several times faster than FCQR.",
            (16, 17),
        ),
        PrintedTable(
            "ffcqr_bands",
            "9-12",
            "Bands of CQR, FCQR and FFCQR at split points 0 to 4, for five pairs of levels",
            _BANDS,
            "FFCQR's bands are shorter than CQR's.",
            (12, 13, 14),
        ),
        PrintedTable(
            "group_coverage_cp",
            "13",
            "Coverage of the worst group by split CP, by FCP and by FFCP at split points 0 to 4",
            _GROUPS,
            "FFCP covers the worst group better than split CP.",
            (6, 7, 8, 9, 10),
        ),
    )
}
