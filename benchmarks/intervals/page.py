"""The page of measured intervals, docs/bands.md: made of stored results only."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.intervals import sources
from benchmarks.intervals.cases import ALPHA, DATA, PROBLEMS, SERIES, SETTINGS
from benchmarks.intervals.comparison import (
    LENGTH,
    SCORE,
    Limit,
    Results,
    among,
    best_of_data,
    limits,
    of,
    ratio,
    ratios,
)
from benchmarks.intervals.methods import (
    AUTO,
    AUTO_LENGTH,
    BOOSTED,
    CP,
    CQR,
    EPIC,
    FFCP,
    LAPLACE,
    LCP,
    LEARNED,
    METHODS,
    ON_PROBLEMS,
    PEERS,
    PROTOTYPE,
    Timed,
)

_ORDER = (
    AUTO, AUTO_LENGTH, LEARNED, LCP, FFCP, CP, PROTOTYPE, *PEERS, LAPLACE, EPIC, CQR, BOOSTED,
)  # fmt: skip
_SHOWN = {
    AUTO: "**Auto**",
    AUTO_LENGTH: '**Auto**, `criterion="length"`',
    FFCP: "FFCP, layer selected",
    LAPLACE: "last-layer Laplace (as we read it)",
    EPIC: "EPICSCORE (as we read it)",
    CQR: "CQR network (trained anew)",
    BOOSTED: "boosted CQR (trained anew)",
}
_SHORT = (
    AUTO, LEARNED, LCP, FFCP, CP, PROTOTYPE, "crepes, residuals", "MAPIE, boosted", EPIC, CQR,
    BOOSTED,
)  # fmt: skip
assert set(_ORDER) == set(METHODS)

_LEARNED = "learned from training and calibration rows, "  # begins the names of most candidates
Lines = list[tuple[str, ...]]  # a heading with a title in front, and rows


def shown(method: str) -> str:
    """Return the name of a method as the page has it."""
    return _SHOWN.get(method, method)


def tables(results: Results) -> Iterator[Lines]:
    """Return all tables: overview, by data set, series, problems, choices."""
    data = among(results, DATA)
    yield _overview(data)
    title = "Interval score by data set, in bold the smallest of these methods"
    yield _by_data(title, data, _SHORT)
    yield _by_data("Interval score / coverage on two series", among(results, SERIES), _SHORT, True)
    yield _problem_table(among(results, tuple(PROBLEMS)))
    yield _choice_table(data)


def _overview(results: Results) -> Lines:
    """Make a line for each method: geometric means of ratios, and means over all data sets."""
    title = f"Means over {len(results)} data sets"
    heading = (
        "method", "interval score, CP = 1", "Auto / method", "length, CP = 1", "coverage",
        "worst third", "excess risk", "seconds",
    )  # fmt: skip
    rows: Lines = []
    for method in _ORDER:
        score, length = (_mean_ratio(results, method, CP, what) for what in (SCORE, LENGTH))
        against = ratios(results, of(AUTO, SCORE), of(method, SCORE))
        auto = str(ratio(list(against.values()))) if against and method != AUTO else ""
        numbers = [
            _mean(results, method, what) for what in ("coverage", "worst", "excess", "learn")
        ]
        if not math.isnan(numbers[0]):
            coverage, worst, excess, seconds = numbers
            learned = f"{seconds:.2g}" if method != AUTO_LENGTH else ""  # both learn once
            rows.append((shown(method), score, auto, length, f"{coverage:.1%}", f"{worst:.1%}",
                         f"{excess:+.4f}", learned))  # fmt: skip
    return [(title, *heading), *rows]


def _mean_ratio(results: Results, method: str, other: str, what: str) -> str:
    against = ratios(results, of(method, what), of(other, what))
    return _number(ratio(list(against.values())).value) if against else ""


def _mean(results: Results, method: str, what: str) -> float:
    """Average over seeds, then over data sets."""
    means = []
    for seeds in results.values():
        each = [float(getattr(one[method], what)) for one in seeds.values() if method in one]
        means += [math.fsum(each) / len(each)] if each else []
    return math.fsum(means) / len(means) if means else math.nan


def _by_data(
    title: str, results: Results, methods: Sequence[str], with_coverage: bool = False
) -> Lines:
    rows: Lines = []
    for data in results:
        own = {data: results[data]}
        scores = {method: _mean(own, method, SCORE) for method in methods}
        known = {method: score for method, score in scores.items() if not math.isnan(score)}
        best = min(known, key=lambda method: known[method])
        cells = []
        for method in methods:
            cell = _number(known[method]) if method in known else ""
            cell = f"**{cell}**" if method == best else cell
            cell += f" / {_mean(own, method, 'coverage'):.1%}" if with_coverage and cell else ""
            cells.append(cell)
        rows.append((data, *cells))
    return [(title, "data", *(shown(method).split(" (")[0] for method in methods)), *rows]


def _problem_table(results: Results) -> Lines:
    rows: Lines = []
    for data in results:
        own = {data: results[data]}
        cells = (
            f"{_mean(own, m, SCORE):.2f} / {_mean(own, m, 'noisiest'):.1%}" for m in ON_PROBLEMS
        )
        rows.append((data, *cells))
    title = "Interval score / coverage of the noisiest third"
    return [(title, "problem", *map(shown, ON_PROBLEMS)), *rows]


def _choice_table(results: Results) -> Lines:
    rows: Lines = []
    for data, seeds in results.items():
        cells = []
        for method, what in ((AUTO, SCORE), (AUTO_LENGTH, LENGTH)):
            names = Counter(str(one[method].chosen) for one in seeds.values() if method in one)
            cells.append("; ".join(f"{name} ({times})" for name, times in names.most_common()))
            cells.append(best_of_data(results, data, what) or "")
        cells = [cell.replace(_LEARNED, "learned, ") for cell in cells]
        rows.append((data, *cells))
    title = "What Auto selected, how often, and which candidate was best on the test rows"
    heading = ("data", "by score", "best in hindsight", "by length", "best in hindsight")
    return [(title, *heading), *rows]


def _number(number: float) -> str:
    """Write three digits.

    >>> _number(0.23849), _number(14.81), _number(1.5e9)
    ('0.238', '14.8', '1.5e+09')
    """
    return f"{number:#.3g}".rstrip(".") if 1e-3 < number < 1e5 else f"{number:.2g}"


def verdict(one: Limit) -> str:
    """Return whether a limit holds, in words."""
    return "holds" if one.holds else "DOES NOT HOLD"


# -- the page --------------------------------------------------------------------------------------

_HEAD = """# Intervals compared

Made by `python -m benchmarks.intervals --seeds {given} --time --write`; every number below was
measured by it. The paper's seven data sets and eight further ones (at most {rows:,} rows of each,
the same ones for all), the paper's networks and division of the rows, alpha = {alpha:g}, seeds
{seeds}.

The interval score is the mean length plus 2 / alpha times the distance by which targets are
missed: smaller is better, and giving up hard inputs does not pay. All methods but those trained
anew see the same network; all see the same training, calibration and test rows.

"""

_ABOUT = """
Ratios are geometric means over data sets of the same division and network, with 95 % intervals.
Worst third: coverage in the third of the rows, by the size of the target, that is covered least.
[Excess risk](api/metrics.md) is about the mean square by
which coverage depends on the input, as far as a classifier finds it; 0 or below: it finds nothing.
Seconds are those of one core to learn and calibrate, the network given; by length, Auto takes as
long as by score.

- **prototype**: boosted quantiles of the residual from input and prediction, learned from training
  rows and most calibration rows together (`benchmarks/intervals/opponents.py`).
- **crepes** ({crepes}), normalised by the spread of 25 neighbours' targets, and by their residuals,
  with its usual `beta` of 0.01, which is large beside the residuals of naval and power_plant.
- **MAPIE** ({MAPIE}), residual-normalised, with the linear model of the residual that it takes by
  itself, and with gradient boosting.
- **last-layer Laplace** and **EPICSCORE** (UAI 2025, with Monte Carlo dropout): our own code, as
  we read them.
- **CQR network**, **boosted CQR**: other models, trained for two quantiles of the target.
"""

_PICTURE = """
![Intervals of CP, FFCP and Auto where noise grows, is the same everywhere, is skewed](bands.png)

Growing noise and flat noise are those of `ffcp demo`; the third has errors to one side only.
"""

_CHOOSE = """
## What to choose

- **`ffcp.Auto(model).fit(x_train, y_train).calibrate(x_cal, y_cal)`**, if there are training rows
  and a hundred calibration rows or more. {best}
- **`criterion="length"`**, if only the mean length counts: shorter intervals, which miss more
  where targets are hard.
- **CP**, with few calibration rows, or if all intervals must have the same length.
- **FFCP**, if widths must follow the input and nothing may be learned: it needs no training rows.
- **Another model**, as boosted CQR, if you can train another model: see [tables](tables.md), where
  `ffcp fit` trains its own.

An interval of Auto contains a new target with probability at least 1 - alpha, whatever the data and
whatever was selected: rows that are learned from or select take no part in the calibration. That is
an average over inputs and over calibration sets; what the columns on the worst third and the excess
risk show is measured, not guaranteed.
"""

_SERIES = """
## Two series, in order of time

Training, calibration and test rows follow each other in time (a stretch of {rows:,} rows that
depends on the seed), so new rows are not like calibration rows, and nothing is guaranteed;
[shift](shift.md) is about what can be done.

"""

_PROBLEMS = """
## Three synthetic problems

800 training and 800 calibration rows, a small network, {seeds} seeds.

"""

_SOURCES = """
## What the gradient norm adds, and other things to learn from

The library is named for the gradient norm, so here is what it is worth: the interval score of the
prototype's learner with a source of columns, as a ratio to that without it (below 1: it helps), by
`python -m benchmarks.intervals.sources --seeds {given}`. Images:
the bytes that an ImageNet image takes as WebP, predicted by the paper's network from stored
features of a ResNet-152 (2,048 columns, 2,000 training and as many calibration rows). Norms help
where there is only the prediction to learn from; hidden values, and in tables the input, tell
more, and beside them norms add little.

"""

_HISTORY = """
## How it was decided

What Auto does was decided on seeds from 100 on. Seeds 10 to 14 were run twice: once before the last
two points below, which were decided without them, and once after.

- An earlier state was made on the paper's seven data sets alone, with small networks as learners
  and a fifth of the calibration rows set aside. On six tables that it had never met it lost to
  boosted quantiles of the residual learned from half of the calibration rows, and where noise
  follows an input that the mean ignores it was no better than CP.
- Two causes were measured: too few rows were learned from, and trees learn tables better than small
  networks do. Best is to learn from training rows, their residuals rescaled to the size of fresh
  ones, and calibration rows together: that is the prototype above.
- Before that, on seeds 100 to 119: small networks start from the quantiles of all residuals in
  place of random ones; asking for a clearer lead before a complicated method is taken made it
  worse.
- Trees and networks are averaged with weights that cross-fitting finds: on the first synthetic
  problem (seeds 100 to 105, a finer grid of weights) 4.03 in place of 4.09 with equal weights, on
  the third 3.11 either way. Deeper, slower or more strongly sampled trees, and the mean of three
  runs of trees, gained less than 1 % there (seeds 100 to 107).
- Hidden values mislead networks of few rows, and help those of some tables: networks learn with
  and without them, and those with the smaller cross-fitted loss are taken; batches are a tenth of
  the rows. On the third problem that is a score of 3.07 in place of 3.12, and 81.2 % of the
  noisiest third in place of 79.6 % (seeds 100 to 119). Without hidden values anywhere airfoil would
  be 2 % worse (seeds 101 to 106).
- Of what was learned the mean of trees and networks is taken unless another candidate is better by
  more than a standard error: 3.04 on the third problem (seeds 100 to 119), and on airfoil, wine,
  com and star, with less dropout, 0.997 of the score before both points (seeds 101 to 106).

All guarantees, with their tests: [Guarantees](promises.md).
"""


def text(results: Results, times: Timed | None = None) -> str:
    """Write the page."""
    overview, by_data, series, problems, chosen = map(_markdown, tables(results))
    seeds = _seeds(among(results, DATA))
    filled = {
        "alpha": ALPHA,
        "rows": SETTINGS.rows,
        "seeds": seeds,
        "given": seeds.replace(" ", ""),
    }
    held: Lines = [("Limits", "what", "measured", "limit", "")]
    held += [(one.about, one.measured, one.limit, verdict(one)) for one in limits(results, times)]
    drawn = {name: len(seeds) for name, seeds in results.items() if name in PROBLEMS}
    parts = (
        _HEAD.format(**filled) + overview,
        _ABOUT.format(**_peers(results)),
        _PICTURE,
        _CHOOSE.format(best=wins(among(results, DATA))),
        f"\n## By data set\n\n{by_data}",
        _SERIES.format(**filled) + series,
        _PROBLEMS.format(seeds=max(drawn.values(), default=0)) + problems,
        *_sources(seeds.replace(" ", "")),
        f"\n## Limits\n\nSet beforehand; ratios with 95 % intervals.\n\n{_markdown(held)}",
        f"\n## What was selected\n\n{chosen}",
        _HISTORY,
    )
    return "".join(parts)


def _sources(given: str) -> list[str]:
    """Write what each source of columns adds, if that is known."""
    seeds = [int(seed) for seed in re.findall(r"\d+", given)]
    seeds = [seed for seed in seeds if sources.measured([seed])]
    if not seeds:
        return []
    count, given = sources.measured(seeds), ",".join(map(str, seeds))
    rows = sources.rows(seeds)
    title = "Interval score with a source / without it"
    heading = ("source", "beside", f"tables ({count} data sets)", "images")
    return [_SOURCES.format(given=given), _markdown([(title, *heading), *rows])]


def _seeds(results: Results) -> str:
    """Name the seeds, and the data sets of each if they differ."""
    known = {data: ", ".join(map(str, seeds)) for data, seeds in results.items()}
    if len(set(known.values())) == 1:
        return next(iter(known.values()))
    return "; ".join(f"{seeds} ({data})" for data, seeds in known.items())


def _peers(results: Results) -> dict[str, str]:
    """Return the libraries to compare with, with the versions that were measured."""
    found = {"crepes": "crepes", "MAPIE": "MAPIE"}
    listed = [one for seeds in results.values() for one in seeds.values()]
    for name in PEERS:
        versions = [one[name].library for one in listed if name in one and one[name].library]
        if versions:
            found[name.split(",")[0]] = str(versions[0])
    return found


def wins(results: Results) -> str:
    """Write on how many data sets Auto is best, and where another method is."""
    others: dict[str, list[str]] = {}
    for data in results:
        own = {data: results[data]}
        scores = {method: _mean(own, method, SCORE) for method in _ORDER}
        scores = {method: score for method, score in scores.items() if not math.isnan(score)}
        others.setdefault(min(scores, key=lambda method: scores[method]), []).append(data)
    first = f"Its mean interval score is the smallest on {len(others.pop(AUTO, []))} of "
    first += f"{len(results)} data sets"
    rest = "; ".join(f"that of {method} on {', '.join(names)}" for method, names in others.items())
    return f"{first}; {rest}." if rest else f"{first}."


def _markdown(lines: Lines) -> str:
    (title, *heading), *rows = lines
    bar = "|".join(["---"] * len(heading))
    first, *rest = ("| " + " | ".join(row) + " |" for row in (heading, *rows))
    return "\n".join([f"{title}:", "", first, f"|{bar}|", *rest, ""])
