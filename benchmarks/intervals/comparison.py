"""Paired comparisons over seeds and data sets, and the limits that Auto must meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.intervals.cases import ALPHA, DATA, PROBLEMS
from benchmarks.intervals.methods import (
    AUTO,
    AUTO_LENGTH,
    PEERS,
    PROTOTYPE,
    RETRAINED,
    Measured,
    Timed,
)

Results = dict[str, dict[int, dict[str, Measured]]]  # by data set, seed, method
_CONFIDENCE = 0.95
_BEST, _PROTOTYPE, _PEER, _RETRAINED = 1.02, 0.99, 0.90, 1.00  # limits of geometric means
_SECONDS = 40.0  # of learning from 20,000 rows
_SCORES = dict(zip(PROBLEMS, (4.05, 2.80, 3.20), strict=True))
_NOISIEST = dict(zip(PROBLEMS, (0.86, 0.85, 0.81), strict=True))
_LOWEST_Z = -3.0  # by chance, the lowest of fifteen data sets is below in one of fifty runs


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

    The interval is for the mean over these groups, taken as fixed, with the degrees of freedom of
    Welch and Satterthwaite; with one member in a group it is unknown.

    >>> ratio([[0.5, 2.0], [1.0, 1.0]]).value
    1.0
    """
    from scipy import stats

    logs = [[math.log(max(one, 1e-30)) for one in group] for group in groups]  # 0: infinite
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
SCORE, LENGTH = "score", "length"


def of(method: str, what: str) -> Number:
    """Return a function that looks up a number of a method."""
    return lambda methods: float(getattr(methods[method], what))


def among(results: Results, names: Sequence[str]) -> Results:
    """Return the results of some data sets."""
    return {name: results[name] for name in names if name in results}


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
    """Compare all limits with what is known."""
    tables = among(results, DATA)
    for method, what, title in (
        (AUTO, SCORE, "interval score of Auto"),
        (AUTO_LENGTH, LENGTH, "length of Auto by length"),
    ):
        mine = of(method, what)
        if what == SCORE:
            against = ratios(tables, mine, of(PROTOTYPE, what))
            yield from _means(f"{title} / {PROTOTYPE}", against, _PROTOTYPE)
        for kind, against in (
            ("seed", ratios(tables, mine, best(what))),
            ("data set", against_best(tables, method, what)),
        ):
            about = f"{title} / best candidate of each {kind} in hindsight"
            yield from _means(about, against, _BEST)
        for name in PEERS:
            yield from _means(f"{title} / {name}", ratios(tables, mine, of(name, what)), _PEER)
        if what == SCORE:
            for name in RETRAINED:
                against = ratios(tables, mine, of(name, what))
                yield from _means(f"{title} / {name}", against, _RETRAINED)
        others = (PROTOTYPE, *PEERS) if what == SCORE else PEERS
        paired = paired_ratios(tables, mine, others, what)
        if not all(math.isnan(one.low) for one in paired.values()):  # one seed has no interval
            worse = [f"{pair}: {one}" for pair, one in paired.items() if one.low > 1]
            whom = "prototype or peer" if what == SCORE else "a peer"
            about = f"{title}: wholly above 1.00 against {whom}"
            yield Limit(about, "; ".join(worse) or "nowhere", "nowhere", not worse)
    yield from _problems(results)
    yield from _coverages(tables)
    if times is not None:
        about = (
            f"seconds of learning: {times.rows:,} + {times.calibrated:,} rows of {times.columns} "
            f"columns, {times.threads} cores"
        )
        yield Limit(about, f"{times.seconds:.1f}", f"{_SECONDS:g}", times.seconds <= _SECONDS)


def paired_ratios(
    results: Results, mine: Number, others: Sequence[str], what: str
) -> dict[str, Ratio]:
    """Return the ratio to each other method on each data set, with its paired interval."""
    return {
        f"{data}, {name}": ratio([each])
        for name in others
        for data, each in ratios(results, mine, of(name, what)).items()
    }


def _means(title: str, against: Mapping[str, Sequence[float]], limit: float) -> Iterator[Limit]:
    if against:
        mean = ratio(list(against.values()))
        about = f"{title}, geometric mean of {len(against)} data sets"
        yield Limit(about, str(mean), f"{limit:.2f}", mean.value <= limit)


def _candidates(methods: Mapping[str, Measured], what: str) -> dict[str, float]:
    """Return what each candidate of Auto would have had on the test rows."""
    place = (SCORE, LENGTH).index(what)
    return {name: one[place] for name, one in (methods[AUTO].candidates or {}).items()}


def best(what: str) -> Number:
    """Return a function that looks up the best candidate, as hindsight finds it for a seed."""

    def smallest(methods: Mapping[str, Measured]) -> float:
        return min(_candidates(methods, what).values(), default=math.nan)

    return smallest


def best_of_data(results: Results, data: str, what: str) -> str | None:
    """Return the candidate that does best on a data set, over all seeds that know it."""
    seeds = [_candidates(one, what) for one in results[data].values() if AUTO in one]
    common = set.intersection(*(set(one) for one in seeds)) if seeds else set()
    means = {name: ratio([[one[name] for one in seeds]]).value for name in sorted(common)}
    return min(means, key=lambda name: means[name]) if means else None


def against_best(results: Results, method: str, what: str) -> dict[str, list[float]]:
    """Divide a method's numbers by those of the best candidate of each data set."""
    result: dict[str, list[float]] = {}
    for data in results:
        name = best_of_data(results, data, what)
        if name is not None:
            found = {data: results[data]}

            def other(methods: Mapping[str, Measured], name: str = name) -> float:
                return _candidates(methods, what)[name]

            result |= ratios(found, of(method, what), other)
    return result


def _problems(results: Results) -> Iterator[Limit]:
    for name in PROBLEMS:
        seeds = [one[AUTO] for one in results.get(name, {}).values() if AUTO in one]
        if seeds:
            score = math.fsum(one.score for one in seeds) / len(seeds)
            third = math.fsum(one.noisiest or 0.0 for one in seeds) / len(seeds)
            about = f"{name}, {len(seeds)} seeds: "
            limit, least = _SCORES[name], _NOISIEST[name]
            yield Limit(f"{about}interval score of Auto", f"{score:.2f}", f"{limit:.2f}",
                        score <= limit)  # fmt: skip
            yield Limit(f"{about}coverage of the noisiest third", f"{third:.1%}",
                        f"at least {least:.0%}", third >= least)  # fmt: skip


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
    """Return how far the mean coverage is from its level, as split conformal prediction spreads."""
    away = math.fsum(one.coverage - (1 - ALPHA) for one in result)
    spread = math.fsum(
        ALPHA * (1 - ALPHA) * (1 / one.tested + 1 / one.calibrated) for one in result
    )
    return away / math.sqrt(spread)
