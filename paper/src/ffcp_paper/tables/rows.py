"""The rows of the paper's tables: our results beside the printed numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ffcp_paper.data.datasets import NOT_AVAILABLE
from ffcp_paper.experiments import prediction_sets, square_conditions, timing
from ffcp_paper.experiments.tasks import (
    AUTO,
    TIMED_SPLIT,
    TRAINED,
    UNTRAINED,
    Measured,
    Method,
    Results,
    Settings,
    Training,
)
from ffcp_paper.networks import pretrained
from ffcp_paper.tables import printed
from ffcp_paper.tables.claims import covers, credited, lawful, mean, shorter, summary, summary_of
from ffcp_paper.tables.render import Row

BEST = "best on test"  # a layer selected on the test rows, as the paper does
AS_LONG = 0.1  # relative tolerance of "about as long"
SPLITS = range(5)
INSIDE = range(4)  # split point 4 is plain CP
Rows = Callable[[Results, str, Settings], list[Row]]
LABELS = "raps_imagenet"


def printed_value(table: str, row: str, column: str, scale: float = 1.0, **which: Any) -> Any:
    """Return a printed number as a value of a table; percentages as fractions."""
    result = printed.value(table, row=row, column=column, **which)
    if result is None:
        return None
    spread = None if result.sd is None else result.sd / scale
    return {"mean": result.mean / scale, "sd": spread, "n": None}


# -- rows of bands -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bands:
    """The methods that a table of bands compares, and the table of their printed numbers."""

    table: str
    base: str
    fast: str
    alpha: float
    training: Training = TRAINED

    def get(self, result: Results, data: str, method: Method) -> list[Measured]:
        return result.of(data, method, self.alpha, self.training)

    def best(self, result: Results, data: str, among: Iterable[int]) -> int:
        """Return the split point with the shortest bands on the test rows."""
        layers = [Method(self.fast, layer) for layer in among]
        best = min(layers, key=lambda m: mean(self.get(result, data, m), "length"))
        return int(best.layer or 0)

    def row(
        self,
        result: Results,
        data: str,
        method: Method,
        label: str | None = None,
        paper_layer: int | None = None,
        in_paper: bool = True,
    ) -> Row:
        """Return a row; ``holds`` is set by the table, since every table has its own claim."""
        ours = self.get(result, data, method)
        plain = method.name == self.base
        which = {"method": method.name, "layer": paper_layer, "levels": self.training.levels}

        def paper(column: str, scale: float) -> Any:
            return printed_value(self.table, data, column, scale, **which) if in_paper else None

        return {
            "data": data,
            **({"levels": _levels(self.training)} if self.training.levels else {}),
            "method": label or method_title(method.name),
            "split": _split(method, ours),
            "coverage": summary_of(ours, "coverage"),
            "coverage_paper": paper("coverage", 100),
            "feature_coverage": summary_of(ours, "feature_coverage"),
            "length": summary_of(ours, "length"),
            "length_paper": paper("length", 1),
            "lawful": lawful(ours, self.alpha),
            "shorter": None if plain else shorter(ours, self.get(result, data, Method(self.base))),
            "holds": None,
        }


def _levels(training: Training) -> str:
    return ", ".join(f"{level:g}" for level in training.levels or ())


def _split(method: Method, result: Sequence[Measured]) -> str:
    """Return the split point: the given one, or those that were selected for the seeds."""
    if method.layer != AUTO:
        return "" if method.layer is None else str(method.layer)
    chosen = [one.chosen for one in result if one.chosen is not None]
    return ", ".join(str(layer) for layer in sorted(set(chosen)))


OURS = ("Learned", "Auto")  # methods that the paper does not have


def method_title(name: str) -> str:
    """Return the name of a method as the tables show it.

    >>> method_title("CP"), method_title("FFCP")
    ('split CP', 'FFCP')
    """
    return "split CP" if name == "CP" else name


def ours(name: str) -> str:
    """Return the name of one of our own methods, marked as ours.

    >>> ours("Auto")
    'Auto (ours)'
    """
    return f"{name} (ours)"


def _ours(of: _Bands, result: Results, data: str) -> list[Row]:
    """Return the rows of our own methods, about which the paper claims nothing."""
    return [of.row(result, data, Method(name), ours(name), in_paper=False) for name in OURS]


def _covers_and_shorter(row: Row) -> Row:
    return {**row, "holds": bool(row["lawful"] and row["shorter"])}


def _auto(of: _Bands, result: Results, data: str) -> Row:
    """Return the row of the split point selected without the test rows; the paper has none."""
    return of.row(result, data, Method(of.fast, AUTO), f"{of.fast}, auto", in_paper=False)


def _best(of: _Bands, result: Results, data: str, best: int, paper_layer: int | None) -> Row:
    """Return the row of the split point that is best on the test rows."""
    label = f"{of.fast}, {BEST}"
    return of.row(result, data, Method(of.fast, best), label, paper_layer)


def regression_bands(result: Results, data: str, settings: Settings) -> list[Row]:
    """Return the rows of the bands of CP, FCP and FFCP."""
    of = _Bands("regression_bands", "CP", "FFCP", 0.1)
    return [
        of.row(result, data, Method("CP")),
        of.row(result, data, Method("FCP")),
        _covers_and_shorter(_best(of, result, data, of.best(result, data, SPLITS), None)),
        _covers_and_shorter(_auto(of, result, data)),
        *_ours(of, result, data),
    ]


def bands_by_layer(result: Results, data: str, settings: Settings) -> list[Row]:
    """Return the rows of the bands of FFCP at every layer."""
    of = _Bands("bands_by_layer", "CP", "FFCP", 0.1)
    rows = []
    for layer in SPLITS:
        # The paper prints the split points 0 to 3 under the names 1 to 4.
        row = of.row(result, data, Method("FFCP", layer), paper_layer=layer + 1)
        rows.append({**row, "holds": row["lawful"]})
    chosen = _auto(of, result, data)
    return [*rows, {**chosen, "holds": chosen["lawful"]}, *_ours(of, result, data)]


def split_ablation(result: Results, data: str, settings: Settings) -> list[Row]:
    """Return the rows of the bands of FFCP at every split point."""
    of = _Bands("split_ablation", "CP", "FFCP", 0.05)
    rows = [of.row(result, data, Method("CP"))]
    for layer in SPLITS:
        row = of.row(result, data, Method("FFCP", layer), paper_layer=layer)
        rows.append({**row, "holds": row["lawful"]})
    best = of.best(result, data, range(1, 4))
    inside = of.row(result, data, Method("FFCP", best), f"FFCP inside, {BEST}", paper_layer=best)
    chosen = (_covers_and_shorter(inside), _covers_and_shorter(_auto(of, result, data)))
    return [*rows, *chosen, *_ours(of, result, data)]


def untrained(result: Results, data: str, settings: Settings) -> list[Row]:
    """Return the rows of bands on untrained networks."""
    of = _Bands("untrained", "CP", "FFCP", 0.1, UNTRAINED)
    base = mean(of.get(result, data, Method("CP")), "length")
    best = of.best(result, data, INSIDE)
    rows = [of.row(result, data, Method("CP"))]
    for row in (_best(of, result, data, best, None), _auto(of, result, data)):
        ratio = row["length"]["mean"] / base
        rows.append({**row, "holds": abs(ratio - 1) <= AS_LONG})
    return [*rows, *_ours(of, result, data)]


def quantile_levels(settings: Settings) -> tuple[tuple[float, float], ...]:
    """Return the pairs of levels in the paper's tables of FFCQR; the first and last if quick.

    >>> quantile_levels(Settings())[0]
    (0.1, 0.9)
    """
    rows = printed.TABLES["ffcqr_bands"].rows
    every = tuple(dict.fromkeys(row.levels for row in rows if row.levels))
    return every if settings.rows is None else (every[0], every[-1])


def ffcqr_bands(result: Results, data: str, settings: Settings) -> list[Row]:
    """Return the rows of the bands of CQR, FCQR and FFCQR, by quantile levels."""
    rows = []
    for levels in quantile_levels(settings):
        of = _Bands("ffcqr_bands", "CQR", "FFCQR", 0.1, Training("quantiles", levels))
        rows += [of.row(result, data, Method(name)) for name in ("CQR", "FCQR")]
        for layer in SPLITS:
            row = of.row(result, data, Method("FFCQR", layer), paper_layer=layer)
            rows.append(_covers_and_shorter(row) if layer in INSIDE else row)
        best = of.best(result, data, SPLITS)
        for row in (_best(of, result, data, best, best), _auto(of, result, data)):
            rows.append(_covers_and_shorter(row))
    # Ours start from a network that predicts the mean, whatever the levels.
    means = _Bands("ffcqr_bands", "CP", "FFCP", 0.1)
    return [*rows, *({**row, "shorter": None} for row in _ours(means, result, data))]


# -- rows of groups, run times and conditions --------------------------------------------------


def groups(
    table: str, base: str, fast: str, slow: tuple[str, ...], layers: tuple[int | str, ...]
) -> Rows:
    """Return the function that builds the rows of a table of worst-group coverage."""
    methods = (*map(Method, (base, *slow)), *(Method(fast, layer) for layer in layers))

    def row(result: Results, data: str, method: Method) -> Row:
        ours, auto = result.of(data, method), method.layer == AUTO
        which = {"method": method.name, "layer": method.layer}
        judged = method.name == fast and (auto or method.layer in INSIDE)
        plain = result.of(data, Method(base))
        better = mean(credited(ours, plain), "worst") > mean(plain, "worst")
        return {
            "data": data,
            "method": f"{fast}, auto" if auto else method_title(method.name),
            "split": _split(method, ours),
            "group_coverage": summary_of(ours, "worst"),
            "group_coverage_paper": printed_value(table, data, "group_coverage", 100, **which),
            "coverage": summary_of(ours, "coverage"),
            "feature_coverage": summary_of(ours, "feature_coverage"),
            "lawful": lawful(ours, 0.1),
            "holds": better if judged else None,
        }

    return lambda result, data, settings: [row(result, data, method) for method in methods]


@dataclass(frozen=True)
class Runtime:
    """The methods that a table times, and on which network."""

    names: tuple[str, str, str]
    training: Training

    @property
    def methods(self) -> tuple[Method, ...]:
        """The timed methods."""
        plain, slow, fast = self.names
        return Method(plain), Method(slow), Method(fast, TIMED_SPLIT)


RUNTIMES = {
    "ffcp_runtime": Runtime(("CP", "FCP", "FFCP"), TRAINED),
    "ffcqr_runtime": Runtime(("CQR", "FCQR", "FFCQR"), Training("quantiles", (0.1, 0.9))),
}


def smallest_speedup(table: str) -> float:
    """Return the smallest printed ratio of run times.

    >>> smallest_speedup("ffcp_runtime")
    31.0
    """
    rows = printed.TABLES[table].rows
    return min(row.value.mean for row in rows if row.column == "speedup")


UNDECIDED = "not decided: the interval contains the limit"


def runtimes(table: str) -> Rows:
    """Return the function that builds the rows of a table of run times."""

    def rows(result: Results, data: str, settings: Settings) -> list[Row]:
        setup = RUNTIMES[table]
        seconds = result.seconds[data, setup.training]
        _, slow, fast = setup.names
        each, ratio = timing.of_seeds(seconds, slow, fast)
        row: Row = {"data": data}
        for name in setup.names:
            row[name] = summary(min(one[name]) for one in seconds)
            row[f"{name}_paper"] = printed_value(table, data, "seconds", method=name)
        row["speedup"] = summary_of(each, "middle")
        row.update(speedup_low=ratio.low, speedup_high=ratio.high)
        row["speedup_paper"] = printed_value(table, data, "speedup", method=fast)
        limit = smallest_speedup(table)
        decided = not ratio.low < limit <= ratio.high
        row["holds"] = ratio.low >= limit if decided else None
        return [row if decided else {**row, "note": UNDECIDED}]

    return rows


SQUARES = "square_conditions"


def square_condition_rows(result: Results, data: str, settings: Settings) -> list[Row]:
    """Return the rows of the square conditions: whether they hold, and the ratio of lengths."""
    plain = result.of(data, Method("CP"))
    rows = []
    for split in INSIDE:
        seeds, fast = result.squares[data, split], result.of(data, Method("FFCP", split))
        conditions = {
            "checked": square_conditions.holds_as_checked(seeds),
            "in_unit": square_conditions.holds_in_unit(seeds),
            "stated": square_conditions.holds_as_stated(seeds),
        }
        rows.append(
            {
                "data": data,
                "split": str(split),
                **{name: summary_of(seeds, name) for name in asdict(seeds[0])},
                "gap": square_conditions.gap(seeds),
                **conditions,
                "ratio": mean(fast, "length") / mean(plain, "length"),
                "holds": shorter(fast, plain) if any(conditions.values()) else None,
            }
        )
    return rows


# -- rows of missing data ----------------------------------------------------------------------


def absent(table: str, data: str, settings: Settings) -> list[Row]:
    """Return the printed numbers for a data set whose files are missing.

    >>> rows = absent("regression_bands", "fb2", Settings())
    >>> [(row["method"], row["length_paper"]["mean"]) for row in rows]
    [('split CP', 2.016), ('FCP', 1.371), ('FFCP, best on test', 1.425)]
    """
    note = {"data": data, "note": NOT_AVAILABLE}
    if table == SQUARES:
        return [note]
    own = [row for row in printed.TABLES[table].rows if row.row == data]
    if table in RUNTIMES:
        names = RUNTIMES[table].names
        seconds = {f"{n}_paper": printed_value(table, data, "seconds", method=n) for n in names}
        faster = printed_value(table, data, "speedup", method=names[-1])
        return [{**note, **seconds, "speedup_paper": faster}]
    shown = quantile_levels(settings)
    rows: dict[Any, Row] = {}
    for one in own:
        if one.levels is None or one.levels in shown:
            place = (one.method, one.layer, one.levels)
            row = rows.setdefault(place, {**note, **_place(table, one)})
            scale = 100 if "coverage" in one.column else 1
            spread = None if one.value.sd is None else one.value.sd / scale
            row[f"{one.column}_paper"] = {"mean": one.value.mean / scale, "sd": spread, "n": None}
    return list(rows.values())


def _place(table: str, one: printed.Row) -> Row:
    """Return the method and the split point of a printed number."""
    name = "CP" if one.method == "Vanilla CP" else one.method
    if one.layer is None:
        best = name == "FFCP" and table != "group_coverage_cp"  # of all layers, by the test rows
        split, label = "", f"{name}, {BEST}" if best else method_title(name)
    else:
        split, label = str(one.layer - (table == "bands_by_layer")), name
    levels = {} if one.levels is None else {"levels": _levels(Training("quantiles", one.levels))}
    return {**levels, "method": label, "split": split}


# -- rows of prediction sets -------------------------------------------------------------------

SAME_NETWORK = {"resnet152": "ResNet152"}  # the only one of the paper's networks that we have


def label_sets(outcome: Results, network: str, settings: Settings) -> list[Row]:
    """Return the rows of RAPS and FFRAPS for a network."""
    result = outcome.labels[network]
    title = result.title if network == prediction_sets.DIGITS else network_title(network)
    paper = SAME_NETWORK.get(network)
    alpha = printed.TABLES[LABELS].alpha
    easy = result.top1 > 1 - alpha  # one label is nearly always enough, whatever the method
    rows: list[Row] = []
    for number, method in enumerate(prediction_sets.METHODS):
        ours = [split[number] for split in result.splits]
        plain = [split[0] for split in result.splits]
        printed_as = {"RAPS": "RAPS", "FFRAPS, softmax": "FFRAPS"}.get(method)

        def value(column: str, name: str | None) -> Any:
            if paper is None or name is None:
                return None
            return printed_value("raps_imagenet", paper, column, method=name)

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


def network_title(network: str) -> str:
    """Return the title of a network and of its images."""
    known = pretrained.NETWORKS[network]
    return f"{known.title}, {known.data}"
