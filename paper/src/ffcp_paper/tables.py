"""The paper's tables with our numbers beside them, as plain data.

A table knows which pieces of work it needs (:func:`works`) and is built from what they found
(:func:`build`); :mod:`ffcp_paper.render` writes it. Shares, such as coverage, are fractions in
the data; a column marked ``percent`` shows them times 100.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ffcp_paper import datasets, labels, printed, vision
from ffcp_paper.claims import (
    LAW_ERROR,
    covers,
    credited,
    lawful,
    mean,
    shorter,
    summary,
    summary_of,
)
from ffcp_paper.datasets import NOT_AVAILABLE
from ffcp_paper.experiments import (
    AUTO,
    FCP_FEATURE,
    TIMED_SPLIT,
    TRAINED,
    UNTRAINED,
    Collected,
    LabelWork,
    Measured,
    Method,
    Settings,
    Training,
    Work,
    available,
    network_available,
)
from ffcp_paper.render import Row, Table

BEST = "best on test"  # a layer that was looked up on the test rows, as the paper does
_AS_LONG = 0.1  # how far "about as long" may be off
_SPLITS = range(5)
_INSIDE = range(4)  # split point 4 is plain CP


# -- columns -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column: how it is called, and how its values are shown."""

    key: str
    label: str
    kind: str = "text"
    digits: int | None = None
    percent: bool | None = None
    source: str | None = None

    def plain(self) -> dict[str, Any]:
        """Give it as plain data, without what does not apply."""
        made: dict[str, Any] = {"key": self.key, "label": self.label, "kind": self.kind}
        if self.digits is not None:
            made["digits"] = self.digits
        if self.percent is not None:
            made["percent"] = self.percent
        return {**made, "source": self.source}


_DATA, _METHOD, _SPLIT = (
    Column("data", "data"),
    Column("method", "method"),
    Column("split", "split"),
)
_IN_BALL = Column("feature_coverage", "in feature space", "number", 1, True, "ours")
_HOLDS = Column("holds", "claim holds", "claim")
_LAWFUL = Column("lawful", "within law", "claim")


def _pair(key: str, label: str, digits: int, percent: bool | None = None) -> list[Column]:
    """Give a column of ours and the paper's beside it."""
    ours = Column(key, label, "number", digits, percent, "ours")
    return [ours, replace(ours, key=f"{key}_paper", label="paper", source="paper")]


def _band_columns(against: str, *, ball: bool = False, levels: bool = False) -> list[Column]:
    return [
        _DATA,
        *([Column("levels", "levels")] if levels else []),
        _METHOD,
        _SPLIT,
        *_pair("coverage", "coverage", 1, True),
        *([_IN_BALL] if ball else []),
        *_pair("length", "length", 3),
        _LAWFUL,
        Column("shorter", f"shorter than {against}", "claim"),
        _HOLDS,
    ]


def _columns(name: str) -> list[Column]:
    if name in ("ffcp_runtime", "ffcqr_runtime"):
        plain, slow, fast = _RUNTIMES[name].names
        seconds = [c for of in (plain, slow, fast) for c in _pair(of, f"{of} s", 4)]
        return [_DATA, *seconds, *_pair("speedup", "times faster", 1), _HOLDS]
    if name in ("group_coverage_cp", "group_coverage_lcp"):
        overall = Column("coverage", "coverage", "number", 1, True, "ours")
        worst = _pair("group_coverage", "worst group", 1, True)
        if name == "group_coverage_lcp":  # a localized threshold has another law
            return [_DATA, _METHOD, _SPLIT, *worst, overall, _HOLDS]
        return [_DATA, _METHOD, _SPLIT, *worst, overall, _IN_BALL, _LAWFUL, _HOLDS]
    if name == "raps_imagenet":
        accuracy = [*_pair("top1", "top-1", 1, True), *_pair("top5", "top-5", 1, True)]
        return [
            Column("network", "network"),
            _METHOD,
            *accuracy,
            *_pair("coverage", "coverage", 1, True),
            *_pair("length", "labels", 2),
            _LAWFUL,
            _HOLDS,
        ]
    ball = name in ("regression_bands", "ffcqr_bands")
    against = "CQR" if name == "ffcqr_bands" else "CP"
    return _band_columns(against, ball=ball, levels=name == "ffcqr_bands")


def _paper(table: str, row: str, column: str, scale: float = 1.0, **which: Any) -> Any:
    """Look up what the paper prints, as a value of a table; percentages as fractions."""
    found = printed.value(table, row=row, column=column, **which)
    if found is None:
        return None
    spread = None if found.sd is None else found.sd / scale
    return {"mean": found.mean / scale, "sd": spread, "n": None}


# -- rows of bands -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bands:
    """What a table of bands compares, and where the paper's numbers for it are."""

    table: str
    base: str
    fast: str
    alpha: float
    training: Training = TRAINED

    def get(self, found: Collected, data: str, method: Method) -> list[Measured]:
        return found.of(data, method, self.alpha, self.training)

    def best(self, found: Collected, data: str, among: Iterable[int]) -> int:
        """Look up the split point with the shortest bands on the test rows."""
        layers = [Method(self.fast, layer) for layer in among]
        found_at = min(layers, key=lambda m: mean(self.get(found, data, m), "length"))
        return int(found_at.layer or 0)

    def row(
        self,
        found: Collected,
        data: str,
        method: Method,
        label: str | None = None,
        paper_layer: int | None = None,
        in_paper: bool = True,
    ) -> Row:
        """Make a row; ``holds`` is left to the table, for every table claims something else."""
        ours = self.get(found, data, method)
        plain = method.name == self.base
        which = {"method": method.name, "layer": paper_layer, "levels": self.training.levels}

        def paper(column: str, scale: float) -> Any:
            return _paper(self.table, data, column, scale, **which) if in_paper else None

        return {
            "data": data,
            **({"levels": _levels(self.training)} if self.training.levels else {}),
            "method": label or method.name,
            "split": _split(method, ours),
            "coverage": summary_of(ours, "coverage"),
            "coverage_paper": paper("coverage", 100),
            "feature_coverage": summary_of(ours, "feature_coverage"),
            "length": summary_of(ours, "length"),
            "length_paper": paper("length", 1),
            "lawful": lawful(ours, self.alpha),
            "shorter": None if plain else shorter(ours, self.get(found, data, Method(self.base))),
            "holds": None,
        }


def _levels(training: Training) -> str:
    return ", ".join(f"{level:g}" for level in training.levels or ())


def _split(method: Method, found: Sequence[Measured]) -> str:
    """Say which split point: the one named, or those that the seeds chose."""
    if method.layer != AUTO:
        return "" if method.layer is None else str(method.layer)
    chosen = [one.chosen for one in found if one.chosen is not None]
    return ", ".join(str(layer) for layer in sorted(set(chosen)))


def _covers_and_shorter(row: Row) -> Row:
    return {**row, "holds": bool(row["lawful"] and row["shorter"])}


def _auto(of: _Bands, found: Collected, data: str) -> Row:
    """Give the row of the split point that was chosen without looking; the paper has none."""
    return of.row(found, data, Method(of.fast, AUTO), f"{of.fast}, auto", in_paper=False)


def _best(of: _Bands, found: Collected, data: str, best: int, paper_layer: int | None) -> Row:
    """Give the row of the split point that was looked up on the test rows."""
    label = f"{of.fast}, {BEST}"
    return of.row(found, data, Method(of.fast, best), label, paper_layer)


def _regression_bands(found: Collected, data: str, settings: Settings) -> list[Row]:
    of = _Bands("regression_bands", "CP", "FFCP", 0.1)
    return [
        of.row(found, data, Method("CP")),
        of.row(found, data, Method("FCP")),
        _covers_and_shorter(_best(of, found, data, of.best(found, data, _SPLITS), None)),
        _covers_and_shorter(_auto(of, found, data)),
    ]


def _bands_by_layer(found: Collected, data: str, settings: Settings) -> list[Row]:
    of = _Bands("bands_by_layer", "CP", "FFCP", 0.1)
    rows = []
    for layer in _SPLITS:
        # The paper prints the split points 0 to 3 under the names 1 to 4.
        row = of.row(found, data, Method("FFCP", layer), paper_layer=layer + 1)
        rows.append({**row, "holds": row["lawful"]})
    chosen = _auto(of, found, data)
    return [*rows, {**chosen, "holds": chosen["lawful"]}]


def _split_ablation(found: Collected, data: str, settings: Settings) -> list[Row]:
    of = _Bands("split_ablation", "CP", "FFCP", 0.05)
    rows = [of.row(found, data, Method("CP"))]
    for layer in _SPLITS:
        row = of.row(found, data, Method("FFCP", layer), paper_layer=layer)
        rows.append({**row, "holds": row["lawful"]})
    best = of.best(found, data, range(1, 4))
    inside = of.row(found, data, Method("FFCP", best), f"FFCP inside, {BEST}", paper_layer=best)
    return [*rows, _covers_and_shorter(inside), _covers_and_shorter(_auto(of, found, data))]


def _untrained(found: Collected, data: str, settings: Settings) -> list[Row]:
    of = _Bands("untrained", "CP", "FFCP", 0.1, UNTRAINED)
    base = mean(of.get(found, data, Method("CP")), "length")
    best = of.best(found, data, _INSIDE)
    rows = [of.row(found, data, Method("CP"))]
    for row in (_best(of, found, data, best, None), _auto(of, found, data)):
        ratio = row["length"]["mean"] / base
        rows.append({**row, "holds": abs(ratio - 1) <= _AS_LONG})
    return rows


def quantile_levels(settings: Settings) -> tuple[tuple[float, float], ...]:
    """Give the pairs of levels in the paper's tables of FFCQR; the first and last if quick.

    >>> quantile_levels(Settings())[0]
    (0.1, 0.9)
    """
    rows = printed.TABLES["ffcqr_bands"].rows
    every = tuple(dict.fromkeys(row.levels for row in rows if row.levels))
    return every if settings.rows is None else (every[0], every[-1])


def _ffcqr_bands(found: Collected, data: str, settings: Settings) -> list[Row]:
    rows = []
    for levels in quantile_levels(settings):
        of = _Bands("ffcqr_bands", "CQR", "FFCQR", 0.1, Training("quantiles", levels))
        rows += [of.row(found, data, Method(name)) for name in ("CQR", "FCQR")]
        for layer in _SPLITS:
            row = of.row(found, data, Method("FFCQR", layer), paper_layer=layer)
            rows.append(_covers_and_shorter(row) if layer in _INSIDE else row)
        best = of.best(found, data, _SPLITS)
        for row in (_best(of, found, data, best, best), _auto(of, found, data)):
            rows.append(_covers_and_shorter(row))
    return rows


# -- rows of groups, run times and label sets --------------------------------------------------


def _groups(
    table: str, base: str, fast: str, slow: tuple[str, ...], layers: tuple[int | str, ...]
) -> _Rows:
    methods = (*map(Method, (base, *slow)), *(Method(fast, layer) for layer in layers))

    def row(found: Collected, data: str, method: Method) -> Row:
        ours, auto = found.of(data, method), method.layer == AUTO
        which = {"method": method.name, "layer": method.layer}
        judged = method.name == fast and (auto or method.layer in _INSIDE)
        plain = found.of(data, Method(base))
        better = mean(credited(ours, plain), "worst") > mean(plain, "worst")
        return {
            "data": data,
            "method": f"{fast}, auto" if auto else method.name,
            "split": _split(method, ours),
            "group_coverage": summary_of(ours, "worst"),
            "group_coverage_paper": _paper(table, data, "group_coverage", 100, **which),
            "coverage": summary_of(ours, "coverage"),
            "feature_coverage": summary_of(ours, "feature_coverage"),
            "lawful": lawful(ours, 0.1),
            "holds": better if judged else None,
        }

    return lambda found, data, settings: [row(found, data, method) for method in methods]


@dataclass(frozen=True)
class _Runtime:
    """The methods that a table times, the paper's names of them, and on which network."""

    names: tuple[str, str, str]
    training: Training

    @property
    def methods(self) -> tuple[Method, ...]:
        plain, slow, fast = self.names
        return Method(plain), Method(slow), Method(fast, TIMED_SPLIT)


_RUNTIMES = {
    "ffcp_runtime": _Runtime(("CP", "FCP", "FFCP"), TRAINED),
    "ffcqr_runtime": _Runtime(("CQR", "FCQR", "FFCQR"), Training("quantiles", (0.1, 0.9))),
}


def smallest_speedup(table: str) -> float:
    """Give the smallest ratio of run times that the paper prints.

    >>> smallest_speedup("ffcp_runtime")
    31.0
    """
    rows = printed.TABLES[table].rows
    return min(row.value.mean for row in rows if row.column == "speedup")


def _runtime(table: str) -> _Rows:
    def rows(found: Collected, data: str, settings: Settings) -> list[Row]:
        setup = _RUNTIMES[table]
        seconds = found.seconds[data, setup.training]
        _, slow, fast = setup.names
        ratios = summary(one[slow] / one[fast] for one in seconds)
        assert ratios is not None
        row: Row = {"data": data}
        for name in setup.names:
            row[name] = summary(one[name] for one in seconds)
            row[f"{name}_paper"] = _paper(table, data, "seconds", method=name)
        row["speedup"] = ratios
        row["speedup_paper"] = _paper(table, data, "speedup", method=fast)
        row["holds"] = ratios["mean"] >= smallest_speedup(table)
        return [row]

    return rows


_SAME_NETWORK = {"resnet152": "ResNet152"}  # the only one of the paper's that is at hand


def _raps(found: Collected, network: str, settings: Settings) -> list[Row]:
    result = found.labels[network]
    title = result.title if network == labels.DIGITS else _title(network)
    paper = _SAME_NETWORK.get(network)
    alpha = printed.TABLES[_LABELS].alpha
    easy = result.top1 > 1 - alpha  # one label is nearly always enough, whatever the method
    rows: list[Row] = []
    for number, method in enumerate(labels.METHODS):
        ours = [split[number] for split in result.splits]
        plain = [split[0] for split in result.splits]
        printed_as = {"RAPS": "RAPS", "FFRAPS, softmax": "FFRAPS"}.get(method)

        def value(column: str, name: str | None) -> Any:
            if paper is None or name is None:
                return None
            return _paper("raps_imagenet", paper, column, method=name)

        rows.append(
            {
                "network": title,
                "method": method,
                "top1": result.top1 if number == 0 else None,
                "top1_paper": value("top1", "") if number == 0 else None,
                "top5": result.top5 if number == 0 else None,
                "top5_paper": value("top5", "") if number == 0 else None,
                "coverage": summary_of(ours, "coverage"),
                "coverage_paper": value("coverage", printed_as),
                "length": summary_of(ours, "size"),
                "length_paper": value("length", printed_as),
                "lawful": covers(ours, result.images, alpha),
                "holds": None if easy or not number else mean(ours, "size") < mean(plain, "size"),
            }
        )
    return rows


def _title(network: str) -> str:
    known = vision.NETWORKS[network]
    return f"{known.title}, {known.data}"


# -- the tables --------------------------------------------------------------------------------

_Rows = Callable[[Collected, str, Settings], list[Row]]
_LABELS = "raps_imagenet"
_FFCP = tuple(Method("FFCP", layer) for layer in _SPLITS)
_FFCQR = tuple(Method("FFCQR", layer) for layer in _SPLITS)
_BUILDERS: dict[str, _Rows] = {
    "ffcp_runtime": _runtime("ffcp_runtime"),
    "regression_bands": _regression_bands,
    _LABELS: _raps,
    "group_coverage_lcp": _groups("group_coverage_lcp", "LCP", "FFLCP", (), tuple(_SPLITS)),
    "bands_by_layer": _bands_by_layer,
    "untrained": _untrained,
    "split_ablation": _split_ablation,
    "ffcqr_runtime": _runtime("ffcqr_runtime"),
    "ffcqr_bands": _ffcqr_bands,
    "group_coverage_cp": _groups("group_coverage_cp", "CP", "FFCP", ("FCP",), (*_SPLITS, AUTO)),
}
#: The tables that can be made, in the paper's order.
NAMES = tuple(_BUILDERS)


def members(name: str, settings: Settings) -> tuple[str, ...]:
    """Name the rows of a table: data sets in the paper's order, or image networks.

    With ``settings.only``, those data sets, and the paper's that are missing, so that the table
    says so.

    >>> members("split_ablation", Settings())
    ('fb1', 'meps19', 'blog')
    """
    printed.known(name)
    if name == _LABELS:
        return settings.networks or (*vision.NETWORKS, labels.DIGITS)
    own = {row.row for row in printed.TABLES[name].rows}
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
        if name == _LABELS:
            listed += [LabelWork(member)] if network_available(member) else []
        elif available(member):
            listed += _works(name, member, settings)
    return listed


def _works(name: str, data: str, settings: Settings) -> list[Work]:
    chosen, slow, plain = Method("FFCP", AUTO), Method("FCP"), Method("CP")
    if name in _RUNTIMES:
        setup = _RUNTIMES[name]
        return [Work(data, setup.training, timed=setup.methods)]
    if name == "ffcqr_bands":
        methods = (Method("CQR"), Method("FCQR"), *_FFCQR, Method("FFCQR", AUTO))
        pairs = quantile_levels(settings)
        return [Work(data, Training("quantiles", levels), methods) for levels in pairs]
    if name == "group_coverage_lcp":
        local = (Method("LCP"), *(Method("FFLCP", layer) for layer in _SPLITS))
        return [Work(data, TRAINED, local)]
    with_fcp = name in ("regression_bands", "group_coverage_cp")
    methods = (plain, *((slow,) if with_fcp else ()), *_FFCP, chosen)
    training = UNTRAINED if name == "untrained" else TRAINED
    return [Work(data, training, methods, printed.TABLES[name].alpha)]


def build(name: str, found: Collected, settings: Settings) -> Table:
    """Make a table of what was found, as plain data.

    Parameters
    ----------
    name
        One of :data:`NAMES`.
    found
        What all of its :func:`works` found.
    settings
        How much was computed.

    Returns
    -------
    dict
        Name, title, claim, alpha, verdict, columns, rows and notes.
    """
    about, columns = printed.known(name), _columns(name)
    rows: list[Row] = []
    for member in members(name, settings):
        there = network_available(member) if name == _LABELS else available(member)
        made = _BUILDERS[name](found, member, settings) if there else [_missing(name, member)]
        rows += [
            {column.key: row.get(column.key) for column in columns} | _note(row) for row in made
        ]
    if name == _LABELS and settings.networks is None:
        rows += _networks_of_the_paper(columns)
    return {
        "name": name,
        "title": about.title,
        "claim": about.claim,
        "alpha": None if name in _RUNTIMES else about.alpha,
        "verdict": verdict(rows),
        "columns": [column.plain() for column in columns],
        "rows": rows,
        "notes": _notes(name, settings),
    }


def _note(row: Row) -> Row:
    return {"note": row["note"]} if "note" in row else {}


def _missing(name: str, member: str) -> Row:
    if name == _LABELS:
        return {"network": _title(member), "note": NOT_AVAILABLE}
    return {"data": member, "note": NOT_AVAILABLE}


def _networks_of_the_paper(columns: Sequence[Column]) -> list[Row]:
    """Give the paper's classifiers that are not at hand, with its numbers."""
    every = dict.fromkeys(row.row for row in printed.TABLES[_LABELS].rows)
    rows = []
    for network in every:
        if network in _SAME_NETWORK.values():
            continue
        for method in ("RAPS", "FFRAPS"):
            row: Row = {column.key: None for column in columns}
            row.update(network=network, method=method, note=NOT_AVAILABLE)
            for column in ("coverage", "length"):
                row[f"{column}_paper"] = _paper(_LABELS, network, column, method=method)
            if method == "RAPS":
                for column in ("top1", "top5"):
                    row[f"{column}_paper"] = _paper(_LABELS, network, column, method="")
            rows.append(row)
    return rows


def verdict(rows: Sequence[Row]) -> dict[str, Any]:
    """Count the rows in which the paper's claim holds, and say it by method.

    >>> rows = [{"method": "FFCP", "split": "0", "holds": True}, {"method": "CP", "holds": None}]
    >>> verdict([*rows, {"method": "FFCP", "split": "1", "holds": False}])["text"]
    'The claim holds in 1 of 2 rows (FFCP at split 0: 1 of 1; FFCP at split 1: 0 of 1).'
    """
    judged: dict[str, list[bool]] = {}
    for row in rows:
        if row.get("holds") is not None:
            judged.setdefault(_kind(row), []).append(row["holds"])
    held, of = sum(map(sum, judged.values())), sum(map(len, judged.values()))
    if not of:
        return {"held": 0, "of": 0, "text": "No row could be judged: its data is not available."}
    parts = "; ".join(f"{kind}: {sum(own)} of {len(own)}" for kind, own in judged.items())
    more = f" ({parts})" if len(judged) > 1 else ""
    return {"held": held, "of": of, "text": f"The claim holds in {held} of {of} rows{more}."}


def _kind(row: Row) -> str:
    """Name what rows of several data sets have in common."""
    method, split = str(row.get("method") or ""), row.get("split")
    named = split and "," not in method  # the best and the automatic split differ by data set
    return f"{method} at split {split}" if named else method


_RULES = {
    "regression_bands": "The claim holds in a row of FFCP if its mean length is below that of CP "
    "and its coverage is within the law's range.",
    "bands_by_layer": "The claim holds in a row if its coverage is within the law's range. The "
    "paper's numbers are those printed one layer higher.",
    "split_ablation": "The claim holds for a split point if its coverage is within the law's "
    "range, and for the best one inside the network if it is shorter than CP as well.",
    "untrained": f"The claim holds in a row of FFCP if its mean length is within "
    f"{_AS_LONG:.0%} of that of CP. The networks have their first weights, drawn from the seed.",
    "group_coverage_cp": "The claim holds for a split point if its worst group is covered better, "
    "on average over seeds, than that of CP. Split point 4 is CP.",
    "group_coverage_lcp": "The claim holds for a split point if its worst group is covered better, "
    "on average over seeds, than that of LCP. Split point 4 is LCP. Thresholds come from the "
    "points with the nearest predictions, with the marginal guarantee.",
    "ffcqr_bands": "The claim holds in a row of FFCQR if its mean length is below that of CQR and "
    "its coverage is within the law's range. Split point 4 is CQR.",
    _LABELS: "The claim holds in a row of FFRAPS if its sets are smaller on average than those of "
    "RAPS; networks whose first label is right more often than the level asks are not judged, for "
    "one label is nearly always enough. These are the networks and images at hand, not those of "
    "the paper; its numbers stand beside ours only where the architecture is the same.",
}


def _notes(name: str, settings: Settings) -> list[str]:
    notes = [_RULES[name]] if name in _RULES else []
    if name in _RUNTIMES:
        notes += [
            "Seconds from scoring the calibration rows to the test bands, all methods in one "
            "process in turn, the shortest of several. The gradient is taken at split point "
            f"{TIMED_SPLIT}. The slow method searches its number of steps, as published. The "
            "paper's seconds are those of another machine; ratios can be compared.",
            "The claim holds in a row if the ratio is at least "
            f"{smallest_speedup(name):g}, the smallest that the paper prints.",
        ]
    columns = {column.key for column in _columns(name)}
    if name == _LABELS:
        notes.append(
            "Within law: the coverage of every division is at least the low end of the "
            f"beta-binomial law for its n, at an error of {LAW_ERROR:.0%} for a row. More is "
            "possible, for sets are never empty."
        )
    elif "lawful" in columns:
        notes.append(
            "Within law: with n calibration scores, the number of test rows covered is "
            "beta-binomial; the coverage of every seed must lie in the range that a correct "
            f"program leaves in at most {LAW_ERROR:.0%} of all runs of a row."
        )
    if "feature_coverage" in columns:
        notes.append(
            f"FCP and FCQR cut the network at layer {FCP_FEATURE!r}, as published, and choose "
            "their number of steps on calibration rows that then do not calibrate. The law is "
            "about their coverage in feature space, not that of their bands."
        )
    if "length" in columns and name != _LABELS:
        notes.append(
            f"'{BEST}' is the split point with the shortest bands on the test rows, as in the "
            "paper; 'auto' is chosen on calibration rows that then do not calibrate. A seed for "
            "which it is split point 4, which is plain CP, counts as no shorter."
        )
    division = f"{settings.splits} divisions" if name == _LABELS else f"{settings.seeds} seeds"
    notes.append(f"Ours: mean and standard deviation over {division}.")
    if settings.rows is not None or settings.only is not None:
        notes.append(_quick_note(settings))
    return notes + [f"The paper: {text}" for text in printed.TABLES[name].contradictions]


def _quick_note(settings: Settings) -> str:
    rows = "all rows" if settings.rows is None else f"at most {settings.rows:,} rows"
    return (
        f"A quick run: {rows}, at most {settings.epochs} epochs, few data sets and levels. It "
        "shows that everything works, and says nothing about the paper."
    )
