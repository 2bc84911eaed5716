"""The paper's tables with our numbers beside them, as plain data.

A table lists the tasks it needs (:func:`tasks`) and is built from their results (:func:`build`);
:mod:`ffcp_paper.tables.render` writes it. Coverage and other shares are
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
    ClassificationTask,
    Method,
    RegressionTask,
    Results,
    Settings,
    Task,
    Training,
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
#: All tables: the paper's in its order, and one about its theorem.
NAMES = tuple(_BUILDERS)


def members(name: str, settings: Settings) -> tuple[str, ...]:
    """Return the data sets of a table in the paper's order, or its image networks.

    With ``settings.only``, those data sets, and the missing ones of the paper, which the table
    marks as not available.

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


def tasks(name: str, settings: Settings) -> list[Task]:
    """List the tasks that a table needs, for the data that are present.

    >>> tiny = Settings(only=("synthetic",))
    >>> [(task.data, task.alpha) for task in tasks("split_ablation", tiny)]
    [('synthetic', 0.05)]
    """
    listed: list[Task] = []
    for member in members(name, settings):
        if name == LABELS:
            listed += [ClassificationTask(member)] if network_available(member) else []
        elif available(member):
            listed += _tasks(name, member, settings)
    return listed


def _tasks(name: str, data: str, settings: Settings) -> list[RegressionTask]:
    chosen, slow, plain = Method("FFCP", AUTO), Method("FCP"), Method("CP")
    if name in RUNTIMES:
        setup = RUNTIMES[name]
        return [RegressionTask(data, setup.training, timed=setup.methods)]
    if name == "ffcqr_bands":
        methods = (Method("CQR"), Method("FCQR"), *_FFCQR, Method("FFCQR", AUTO))
        pairs = quantile_levels(settings)
        quantiles = [
            RegressionTask(data, Training("quantiles", levels), methods) for levels in pairs
        ]
        return [*quantiles, RegressionTask(data, TRAINED, (plain, *_OURS))]
    if name == "group_coverage_lcp":
        local = (Method("LCP"), *(Method("FFLCP", layer) for layer in SPLITS))
        return [RegressionTask(data, TRAINED, local)]
    if name == SQUARES:
        inside = tuple(INSIDE)
        return [RegressionTask(data, TRAINED, (plain, *_FFCP[: len(inside)]), squares=inside)]
    with_fcp = name in ("regression_bands", "group_coverage_cp")
    ours = () if name == "group_coverage_cp" else _OURS
    methods = (plain, *((slow,) if with_fcp else ()), *_FFCP, chosen, *ours)
    training = UNTRAINED if name == "untrained" else TRAINED
    return [RegressionTask(data, training, methods, printed.TABLES[name].alpha)]


def build(name: str, result: Results, settings: Settings) -> Table:
    """Return a table of the results, as plain data.

    Parameters
    ----------
    name
        One of :data:`NAMES`.
    result
        The results of all its :func:`tasks`.
    settings
        Size of the run.

    Returns
    -------
    dict
        Name, title, claim, alpha, verdict, columns, rows and notes.
    """
    of, columns = about(name), columns_of(name)
    rows: list[Row] = []
    for member in members(name, settings):
        present = network_available(member) if name == LABELS else available(member)
        build_rows = _BUILDERS[name] if present else _missing(name)
        rows += [
            {column.key: row.get(column.key) for column in columns} | _note(row)
            for row in build_rows(result, member, settings)
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
    """Return the function that builds the rows of missing data."""
    if name != LABELS:
        return lambda result, data, settings: absent(name, data, settings)
    return lambda result, network, settings: [
        {"network": network_title(network), "note": NOT_AVAILABLE}
    ]


def _networks_of_the_paper(columns: Sequence[Column]) -> list[Row]:
    """Return the rows of the paper's classifiers that we do not have, with its numbers."""
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
