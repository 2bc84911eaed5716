"""Texts of a table: in how many rows its claim holds, and by which rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ffcp_paper.experiments.tasks import FCP_FEATURE, TIMED_SPLIT, Settings
from ffcp_paper.experiments.timing import ERROR, LOOKS
from ffcp_paper.tables import printed
from ffcp_paper.tables.claims import LAW_ERROR
from ffcp_paper.tables.columns import columns_of
from ffcp_paper.tables.render import Row
from ffcp_paper.tables.rows import (
    AS_LONG,
    BEST,
    LABELS,
    RUNTIMES,
    SQUARES,
    UNDECIDED,
    ours,
    smallest_speedup,
)

_THEOREM = printed.PrintedTable(
    SQUARES,
    "",
    "The square conditions of the theorem on band lengths, at split points 0 to 3",
    {},
    "Where the square conditions hold, FFCP's bands are shorter than those of split CP.",
    (),
)


def about(name: str) -> printed.PrintedTable:
    """Return the description of a table, one of the paper's or ours on its theorem.

    >>> about("square_conditions").claim
    "Where the square conditions hold, FFCP's bands are shorter than those of split CP."
    """
    return _THEOREM if name == SQUARES else printed.known(name)


def verdict(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the number of rows in which the paper's claim holds, by method.

    >>> rows = [{"method": "FFCP", "split": "0", "holds": True}, {"method": "CP", "holds": None}]
    >>> verdict([*rows, {"method": "FFCP", "split": "1", "holds": False}])["text"]
    'The claim holds in 1 of 2 rows (FFCP at split 0: 1 of 1; FFCP at split 1: 0 of 1).'
    """
    judged: dict[str, list[bool]] = {}
    for row in rows:
        if row.get("holds") is not None:
            judged.setdefault(_kind(row), []).append(row["holds"])
    held, of = sum(map(sum, judged.values())), sum(map(len, judged.values()))
    parts = "; ".join(f"{kind}: {sum(own)} of {len(own)}" for kind, own in judged.items())
    more = f" ({parts})" if len(judged) > 1 else ""
    text = f"The claim holds in {held} of {of} rows{more}." if of else "No row could be judged."
    if undecided := sum(row.get("note") == UNDECIDED for row in rows):
        text += f" Not decided: {undecided}."
    elif not of and all(row.get("note") for row in rows):
        text = "No row could be judged: its data is not available."
    return {"held": held, "of": of, "text": text}


def _kind(row: Row) -> str:
    """Return the method of a row, with its split point where that is fixed."""
    method, split = str(row.get("method") or ""), row.get("split")
    named = split and "," not in method  # the best and the automatic split differ by data set
    return f"{method} at split {split}".strip() if named else method


_RULES = {
    "regression_bands": "Split CP is what the paper calls vanilla CP. The claim holds in a row of "
    "FFCP if its mean length is below that of split CP and its coverage is within the law's range.",
    "bands_by_layer": "The claim holds in a row if its coverage is within the law's range. The "
    "paper's numbers are those printed one layer higher.",
    "split_ablation": "The claim holds for a split point if its coverage is within the law's "
    "range, and for the best one inside the network if it is shorter than split CP as well.",
    "untrained": f"The claim holds in a row of FFCP if its mean length is within "
    f"{AS_LONG:.0%} of that of split CP. The networks are untrained, initialised from the seed.",
    "group_coverage_cp": "The claim holds for a split point if its worst group is covered better, "
    "on average over seeds, than that of split CP. Split point 4 is split CP.",
    "group_coverage_lcp": "The claim holds for a split point if its worst group is covered better, "
    "on average over seeds, than that of LCP. Split point 4 is LCP. Thresholds come from the "
    "points with the nearest predictions, with the marginal guarantee.",
    SQUARES: "The claim is judged in rows in which the conditions hold in one of three readings, "
    "and holds there if FFCP's mean length on the test rows is below that of split CP.",
    "ffcqr_bands": "The claim holds in a row of FFCQR if its mean length is below that of CQR and "
    "its coverage is within the law's range. Split point 4 is CQR.",
    LABELS: "The claim holds in a row of FFRAPS if its sets are smaller on average than those of "
    "RAPS; networks with a top-1 accuracy above the level are not judged, since one label is "
    "nearly always enough. Networks and images are not those of the paper; its numbers stand "
    "beside ours only where the architecture is the same.",
}


_ON_SQUARES = (
    "s is the score, Q its (1 - alpha) quantile, both of the calibration rows: the first number is "
    "the mean of |Q - s| for FFCP, in the unit of its score; 'in y' is that times the mean "
    "gradient norm; then the mean of Q - s for split CP. The gap is the distance between Q of the "
    "calibration rows and Q of the test rows, on average over seeds, the larger of FFCP's and that "
    "of split CP.",
    "Expansion as the paper checks it: the first number is below that of split CP. It depends on "
    "the unit of the feature, which changes no band; with the number 'in y' it does not. "
    "As stated: with the largest gradient norm as the constant L, which the proof needs, exponent "
    "1, and the last term with the smallest c for which quantiles are stable.",
    "Where the conditions do not hold they say nothing.",
)


def notes_of(name: str, settings: Settings) -> list[str]:
    """Return the notes below a table."""
    notes = [_RULES[name]] if name in _RULES else []
    if name in RUNTIMES:
        notes += [
            "Seconds from scoring the calibration rows to the test bands, all methods in one "
            "process in turn, the shortest of all rounds. The gradient is taken at split point "
            f"{TIMED_SPLIT}. The slow method searches its number of steps, as published. The "
            "paper's seconds were measured on another machine; ratios can be compared.",
            "Times faster: the median of the rounds' ratios, averaged over seeds, with a "
            f"{1 - ERROR:.0%} confidence interval for these networks and independent rounds, "
            "whatever the distribution of the noise. In a round the fast methods count with the "
            "shortest of five calls. Rounds are repeated until the interval is narrow, at most "
            f"{settings.rounds} times; that is checked {LOOKS} times, and the confidence is that "
            "of all checks together.",
            "The claim holds in a row if the whole interval is at least "
            f"{smallest_speedup(name):g}, the smallest ratio that the paper prints; a row whose "
            "interval contains that number is not decided.",
        ]
    if name == SQUARES:
        notes += _ON_SQUARES
    columns = {column.key for column in columns_of(name)}
    if name == LABELS:
        notes.append(
            "Within law: the coverage of every split is at least the low end of the "
            f"beta-binomial law for its n, at an error of {LAW_ERROR:.0%} for a row. It can be "
            "larger, since sets are never empty."
        )
    elif "lawful" in columns:
        notes.append(
            "Within law: with n calibration scores, the number of test rows covered is "
            "beta-binomial; the coverage of every seed must lie in the range that a correct "
            f"program leaves in at most {LAW_ERROR:.0%} of all runs of a row."
        )
    if "feature_coverage" in columns:
        notes.append(
            f"FCP and FCQR cut the network at layer {FCP_FEATURE!r}, as published, and select "
            "their number of steps on calibration rows set aside for it. The law is about their "
            "coverage in feature space, not about that of their bands."
        )
    if "length" in columns and name != LABELS:
        notes.append(
            f"'{BEST}' is the split point with the shortest bands on the test rows, as in the "
            "paper; 'auto' is selected on calibration rows set aside for it. A seed for which it "
            "is split point 4, which is split CP, counts as no shorter."
        )
        notes.append(
            f"{ours('Learned')} and {ours('Auto')} are methods of this library, not of the paper, "
            "and no claim is judged by them. Both learn from the training rows; Auto selects the "
            "method with the shortest bands on calibration rows set aside for it."
            + (" They start from the network of the mean." if name == "ffcqr_bands" else "")
        )
    division = f"{settings.splits} splits" if name == LABELS else f"{settings.seeds} seeds"
    notes.append(f"Ours: mean and standard deviation over {division}.")
    if settings.rows is not None or settings.only is not None:
        notes.append(_quick_note(settings))
    return notes + [f"The paper: {text}" for text in about(name).contradictions]


def _quick_note(settings: Settings) -> str:
    rows = "all rows" if settings.rows is None else f"at most {settings.rows:,} rows"
    return (
        f"A quick run: {rows}, at most {settings.epochs} epochs, few data sets and levels. It "
        "checks that everything runs, and is too small to judge the paper."
    )
