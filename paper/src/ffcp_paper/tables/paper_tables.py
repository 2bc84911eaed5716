"""The paper's tables with our numbers beside them, as plain data.

A table knows which pieces of work it needs (:func:`works`) and is built from what they found
(:func:`build`); :mod:`ffcp_paper.tables.render` writes it. Coverage and other shares are
fractions in the data; a column marked ``percent`` shows them times 100.
"""

from __future__ import annotations

from collections.abc import Sequence

from ffcp_paper.data import datasets
from ffcp_paper.data.datasets import NOT_AVAILABLE
from ffcp_paper.experiments import prediction_sets
from ffcp_paper.experiments.studies import available, network_available
from ffcp_paper.experiments.tasks import (
    AUTO,
    TRAINED,
    UNTRAINED,
    Collected,
    LabelWork,
    Method,
    Settings,
    Training,
    Work,
)
from ffcp_paper.networks import pretrained
from ffcp_paper.tables import printed
from ffcp_paper.tables.columns import Column, columns_of
from ffcp_paper.tables.notes import about, notes_of, verdict
from ffcp_paper.tables.render import Row, Table
from ffcp_paper.tables.rows import (
    INSIDE,
    LABELS,
    OURS,
    RUNTIMES,
    SAME_NETWORK,
    SPLITS,
    SQUARES,
    Rows,
    absent,
    bands_by_layer,
    ffcqr_bands,
    groups,
    label_sets,
    network_title,
    printed_value,
    quantile_levels,
    regression_bands,
    runtimes,
    split_ablation,
    square_condition_rows,
    untrained,
)

_FFCP = tuple(Method("FFCP", layer) for layer in SPLITS)
_OURS = tuple(map(Method, OURS))
_FFCQR = tuple(Method("FFCQR", layer) for layer in SPLITS)
_BUILDERS: dict[str, Rows] = {
    "ffcp_runtime": runtimes("ffcp_runtime"),
    "regression_bands": regression_bands,
    LABELS: label_sets,
    "group_coverage_lcp": groups("group_coverage_lcp", "LCP", "FFLCP", (), tuple(SPLITS)),
    "bands_by_layer": bands_by_layer,
    "untrained": untrained,
    "split_ablation": split_ablation,
    "ffcqr_runtime": runtimes("ffcqr_runtime"),
    "ffcqr_bands": ffcqr_bands,
    "group_coverage_cp": groups("group_coverage_cp", "CP", "FFCP", ("FCP",), (*SPLITS, AUTO)),
    SQUARES: square_condition_rows,
}
#: The tables that can be made: the paper's in its order, and one about its theorem.
NAMES = tuple(_BUILDERS)


def members(name: str, settings: Settings) -> tuple[str, ...]:
    """Name the rows of a table: data sets in the paper's order, or image networks.

    With ``settings.only``, those data sets, and the paper's that are missing, so that the table
    says so.

    >>> members("split_ablation", Settings())
    ('fb1', 'meps19', 'blog')
    """
    about(name)
    if name == LABELS:
        return settings.networks or (*pretrained.NETWORKS, prediction_sets.DIGITS)
    of_paper = {row.row for row in printed.TABLES[name].rows} if name != SQUARES else None
    own = set(datasets.DATASETS) if of_paper is None else of_paper
    if settings.only is not None:
        own = {data for data in own if not available(data)} | set(settings.only)
    return tuple(data for data in datasets.DATASETS if data in own)


def works(name: str, settings: Settings) -> list[Work | LabelWork]:
    """List the pieces of work that a table needs, for what is there.

    >>> tiny = Settings(only=("synthetic",))
    >>> [(work.data, work.alpha) for work in works("split_ablation", tiny)]
    [('synthetic', 0.05)]
    """
    listed: list[Work | LabelWork] = []
    for member in members(name, settings):
        if name == LABELS:
            listed += [LabelWork(member)] if network_available(member) else []
        elif available(member):
            listed += _works(name, member, settings)
    return listed


def _works(name: str, data: str, settings: Settings) -> list[Work]:
    chosen, slow, plain = Method("FFCP", AUTO), Method("FCP"), Method("CP")
    if name in RUNTIMES:
        setup = RUNTIMES[name]
        return [Work(data, setup.training, timed=setup.methods)]
    if name == "ffcqr_bands":
        methods = (Method("CQR"), Method("FCQR"), *_FFCQR, Method("FFCQR", AUTO))
        pairs = quantile_levels(settings)
        quantiles = [Work(data, Training("quantiles", levels), methods) for levels in pairs]
        return [*quantiles, Work(data, TRAINED, (plain, *_OURS))]
    if name == "group_coverage_lcp":
        local = (Method("LCP"), *(Method("FFLCP", layer) for layer in SPLITS))
        return [Work(data, TRAINED, local)]
    if name == SQUARES:
        inside = tuple(INSIDE)
        return [Work(data, TRAINED, (plain, *_FFCP[: len(inside)]), squares=inside)]
    with_fcp = name in ("regression_bands", "group_coverage_cp")
    ours = () if name == "group_coverage_cp" else _OURS
    methods = (plain, *((slow,) if with_fcp else ()), *_FFCP, chosen, *ours)
    training = UNTRAINED if name == "untrained" else TRAINED
    return [Work(data, training, methods, printed.TABLES[name].alpha)]


def build(name: str, result: Collected, settings: Settings) -> Table:
    """Make a table of what was computed, as plain data.

    Parameters
    ----------
    name
        One of :data:`NAMES`.
    result
        What came of all its :func:`works`.
    settings
        How much was computed.

    Returns
    -------
    dict
        Name, title, claim, alpha, verdict, columns, rows and notes.
    """
    of, columns = about(name), columns_of(name)
    rows: list[Row] = []
    for member in members(name, settings):
        there = network_available(member) if name == LABELS else available(member)
        make = _BUILDERS[name] if there else _missing(name)
        made = make(result, member, settings)
        rows += [
            {column.key: row.get(column.key) for column in columns} | _note(row) for row in made
        ]
    if name == LABELS and settings.networks is None:
        rows += _networks_of_the_paper(columns)
    return {
        "name": name,
        "title": of.title,
        "claim": of.claim,
        "alpha": None if name in RUNTIMES else of.alpha,
        "verdict": verdict(rows),
        "columns": [column.plain() for column in columns],
        "rows": rows,
        "notes": notes_of(name, settings),
    }


def _note(row: Row) -> Row:
    return {"note": row["note"]} if "note" in row else {}


def _missing(name: str) -> Rows:
    """Make the function that gives the rows of what is not there."""
    if name != LABELS:
        return lambda result, data, settings: absent(name, data, settings)
    return lambda result, network, settings: [
        {"network": network_title(network), "note": NOT_AVAILABLE}
    ]


def _networks_of_the_paper(columns: Sequence[Column]) -> list[Row]:
    """Give the paper's classifiers that are not at hand, with its numbers."""
    every = dict.fromkeys(row.row for row in printed.TABLES[LABELS].rows)
    rows = []
    for network in every:
        if network in SAME_NETWORK.values():
            continue
        for method in ("RAPS", "FFRAPS"):
            row: Row = {column.key: None for column in columns}
            row.update(network=network, method=method, note=NOT_AVAILABLE)
            for column in ("coverage", "length"):
                row[f"{column}_paper"] = printed_value(LABELS, network, column, method=method)
            if method == "RAPS":
                for column in ("top1", "top5"):
                    row[f"{column}_paper"] = printed_value(LABELS, network, column, method="")
            rows.append(row)
    return rows
