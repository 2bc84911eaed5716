"""Paired comparisons over seeds and data sets, and the limits that bands must keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.bands.methods import (
    ALPHA,
    AUTO,
    AUTO_LENGTH,
    CANDIDATES,
    OPPONENT,
    PEERS,
    Measured,
    Timed,
)

Results = Mapping[str, Mapping[int, Mapping[str, Measured]]]  # by data set, seed, method
_CONFIDENCE = 0.95
_GEOMETRIC, _ROW, _BEST = 1.02, 1.10, 1.02  # limits of ratios
_SECONDS = 30.0  # of learning from 20,000 rows
_LOWEST_Z = -3.0  # by chance, the lowest of seven data sets is below in one of a hundred runs


class Ratio(NamedTuple):
    """A geometric mean of ratios, and its interval by Student's t on their logarithms."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(groups: Sequence[Sequence[float]]) -> Ratio:
    """Average ratios over groups, each the average over its members; all in logarithms.

    The interval is that of the mean of the groups as they are, with what varies inside them
    (Welch and Satterthwaite); with one member in a group nobody knows it.

    >>> ratio([[0.5, 2.0], [1.0, 1.0]]).value
    1.0
    """
    from scipy import stats

    logs = [[math.log(one) for one in group] for group in groups]
    means = [math.fsum(group) / len(group) for group in logs]
    centre = math.fsum(means) / len(means)
    if min(map(len, logs)) < 2 or not math.isfinite(centre):
        return Ratio(_exp(centre), math.nan, math.nan)
    variances = [
        math.fsum((one - mean) ** 2 for one in group) / (len(group) - 1) / len(group)
        for group, mean in zip(logs, means, strict=True)
    ]
    total = math.fsum(variances)
    if total == 0:
        return Ratio(_exp(centre), _exp(centre), _exp(centre))
    own = ((v**2, len(group) - 1) for v, group in zip(variances, logs, strict=True))
    freedom = total**2 / math.fsum(square / members for square, members in own)
    away = stats.t.ppf((1 + _CONFIDENCE) / 2, freedom) * math.sqrt(total) / len(logs)
    return Ratio(_exp(centre), _exp(centre - away), _exp(centre + away))


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)


Number = Callable[[Mapping[str, Measured]], float]  # of what all methods did with one seed


def of(method: str, what: str) -> Number:
    """Ask for a number of a method."""
    return lambda methods: float(getattr(methods[method], what))


def ratios(results: Results, mine: Number, other: Number) -> dict[str, list[float]]:
    """Divide numbers of the same data set and seed, where both are known."""
    result: dict[str, list[float]] = {}
    for data, seeds in results.items():
        for methods in seeds.values():
            try:
                result.setdefault(data, []).append(mine(methods) / other(methods))
            except KeyError:
                continue
    return {data: each for data, each in result.items() if each}


@dataclass(frozen=True)
class Limit:
    """A limit, what was measured, and whether it holds."""

    about: str
    measured: str
    limit: str
    holds: bool


def limits(results: Results, times: Timed | None = None) -> Iterator[Limit]:
    """Hold all limits against what is known."""
    for method, what, title in (
        (AUTO, "score", f"interval score of {AUTO} / "),
        (AUTO_LENGTH, "length", f"length of {AUTO} by length / "),
    ):
        mine = of(method, what)
        against = ratios(results, mine, of(OPPONENT, what))
        yield from _means(title + OPPONENT, against, _GEOMETRIC, _ROW)
        against = ratios(results, mine, best(what))
        yield from _means(title + "best candidate of each seed in hindsight", against, _BEST)
        against = against_best(results, method, what)
        yield from _means(title + "best candidate of each data set in hindsight", against, _BEST)
    for name in PEERS:
        if against := ratios(results, of(AUTO, "score"), of(name, "score")):
            data, worst = _worst(against)
            about = f"interval score of {AUTO} / {name}, worst data set"
            yield Limit(about, f"{worst} ({data})", "below 1", worst.value < 1)
    yield from _coverages(results)
    yield from _seconds(results, times)


def _means(
    title: str, against: Mapping[str, Sequence[float]], limit: float, row: float | None = None
) -> Iterator[Limit]:
    if not against:
        return
    mean = ratio(list(against.values()))
    about = f"{title}, geometric mean of {len(against)} data sets"
    yield Limit(about, str(mean), f"{limit:.2f}", mean.value <= limit)
    if row is not None:
        data, worst = _worst(against)
        about = f"{title}, worst data set"
        yield Limit(about, f"{worst} ({data})", f"{row:.2f}", worst.value <= row)


def _worst(against: Mapping[str, Sequence[float]]) -> tuple[str, Ratio]:
    rows = {data: ratio([each]) for data, each in against.items()}
    data = max(rows, key=lambda name: rows[name].value)
    return data, rows[data]


def best(what: str) -> Number:
    """Ask for the smallest number of all candidates, as hindsight finds it for this seed."""
    return lambda methods: min(of(name, what)(methods) for name in CANDIDATES)


def best_of_data(results: Results, data: str, what: str) -> str | None:
    """Find the candidate that does best on a data set, over all seeds that know all of them."""
    seeds = [methods for methods in results[data].values() if set(CANDIDATES) <= set(methods)]
    if not seeds:
        return None
    means = {name: ratio([[of(name, what)(one) for one in seeds]]).value for name in CANDIDATES}
    return min(means, key=lambda name: means[name])


def against_best(results: Results, method: str, what: str) -> dict[str, list[float]]:
    """Divide a method's numbers by those of the best candidate of each data set."""
    result: dict[str, list[float]] = {}
    for data in results:
        if (name := best_of_data(results, data, what)) is not None:
            result |= ratios({data: results[data]}, of(method, what), of(name, what))
    return result


def unmeasured(results: Results) -> list[str]:
    """Name the candidates that Auto compared and nobody measured: hindsight must know them all."""
    compared = {
        name
        for seeds in results.values()
        for methods in seeds.values()
        for one in methods.values()
        for name in one.trials or ()
    }
    return sorted(compared - set(CANDIDATES))


def _coverages(results: Results) -> Iterator[Limit]:
    for method in (AUTO, AUTO_LENGTH):
        known = {}
        for data, seeds in results.items():
            if result := [methods[method] for methods in seeds.values() if method in methods]:
                known[data] = _deviations(result)
        if known:
            data = min(known, key=lambda name: known[name])
            about = (
                f"coverage of {method}: standard deviations above {1 - ALPHA:g}, lowest data set"
            )
            shown = f"{known[data]:+.1f} ({data})"
            yield Limit(about, shown, f"at least {_LOWEST_Z}", known[data] >= _LOWEST_Z)


def _deviations(result: Sequence[Measured]) -> float:
    """Say how far the mean coverage is from its level, as split conformal prediction spreads.

    Rows that chose do not calibrate, so the truth spreads a little more.
    """
    away = math.fsum(one.coverage - (1 - ALPHA) for one in result)
    spread = math.fsum(
        ALPHA * (1 - ALPHA) * (1 / one.tested + 1 / one.calibrated) for one in result
    )
    return away / math.sqrt(spread)


def _seconds(results: Results, times: Timed | None) -> Iterator[Limit]:
    if times is not None:
        about = f"seconds in which {AUTO} learns from {times.rows:,} rows and calibrates, two cores"
        yield Limit(about, f"{times.seconds:.1f}", f"{_SECONDS:g}", times.seconds <= _SECONDS)
        return
    busy = {
        f"{data}, seed {seed}": methods[AUTO].learn_busy
        for data, seeds in results.items()
        for seed, methods in seeds.items()
        if AUTO in methods
    }
    if busy:
        case = max(busy, key=lambda name: busy[name])
        about = f"processor seconds in which {AUTO} learns and calibrates, one core, longest"
        yield Limit(about, f"{busy[case]:.1f} ({case})", f"{_SECONDS:g}", busy[case] <= _SECONDS)
