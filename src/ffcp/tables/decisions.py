"""What was decided for a fit, and what it promises, in words."""

from __future__ import annotations

from typing import Any

import numpy as np

import ffcp
from ffcp.conformal.rank import conformal_rank, exact_alpha, rows_needed
from ffcp.tables import cells
from ffcp.tables.columns import LEFT_OUT, Columns
from ffcp.tables.splitting import RowSplit
from ffcp.tables.targets import Target


def decided(
    columns: Columns, goal: Target, division: RowSplit, predictor: Any, alpha: float, groups: Any
) -> list[str]:
    """Return what the columns, the groups, the labels and few rows lead to."""
    left_out = (column for column in columns if column.kind == LEFT_OUT)
    said = [f"column {column.name!r} is left out: {column.why}" for column in left_out]
    if groups is not None:
        said += _thin_groups(predictor.calibration.groups, set(groups.tolist()), alpha)
    elif division.folds is None and len(predictor.calibration) < rows_needed(alpha):
        every = "set holds all labels" if goal.classes else "band is infinite"
        few = f"{len(predictor.calibration)} rows calibrate"
        said.append(f"{few}, and alpha = {alpha:g} needs {rows_needed(alpha)}: every {every}")
    if goal.classes:
        said += [*_rare(goal, division), *_others(predictor.calibration.scores, alpha)]
    if division.folds is not None:
        said.append("no rows are kept for a test: all of them train")
        if outside := int((division.folds < 0).sum()):
            said.append(f"{outside} rows calibrate nothing, so that folds have one size")
    return said


def _thin_groups(counts: dict[str, int], names: set[str], alpha: float) -> list[str]:
    """Say where too few rows calibrate for a finite band, or for a set that leaves labels out."""
    said, few = [], rows_needed(alpha)
    if thin := sorted(name for name in counts if counts[name] < few):
        said.append(f"in {len(thin)} groups fewer than {few} rows calibrate: {cells.listed(thin)}")
    if none := sorted(names - set(counts)):
        said.append(f"{len(none)} groups have no bands, as no row calibrates: {cells.listed(none)}")
    return said


def _others(scores: Any, alpha: float) -> list[str]:
    """Say what labels that no training row has do to sets."""
    others, rows = int(scores.isinf().sum()), len(scores)
    if not others:
        return []
    what = f"{others} of {rows} calibration rows have labels that no training row has"
    if conformal_rank(rows, alpha) > rows - others:
        return [f"{what}, more than alpha allows for: every set holds all labels, and another"]
    return [f"{what}: no set can name them, so all sets are larger by as much as makes up for it"]


def _rare(goal: Target, division: RowSplit) -> list[str]:
    """Name the labels that are not in every part of the rows, and say what that means."""
    learned = np.concatenate([division.train, division.stop])
    parts = (goal.values[rows].tolist() for rows in (learned, division.calibrate, division.test))
    rare = sorted(set(goal.values.tolist()) - set.intersection(*map(set, parts)))
    if not rare:
        return []
    return [
        f"{len(rare)} classes do not train, calibrate and test, all three: {cells.listed(rare)}. "
        "Coverage is promised over all rows, not for each class: sets may miss them more often. "
        f"One that does not train is {ffcp.LabelSet.OTHER!r}"
    ]


def chosen(predictor: Any, unit: float) -> Any:
    """Return how the method was chosen, in the units of the target; ``None`` without a choice."""
    choice: Any = getattr(predictor, "choice", None)
    return choice.in_units(unit) if hasattr(choice, "in_units") else choice


def method(predictor: Any, unit: float) -> str:
    """Name the method, and how it was chosen."""
    choice = chosen(predictor, unit)
    return type(predictor).__name__ if choice is None else str(choice)


def guarantee(predictor: Any, alpha: float, group: str | None, time: str | None, folds: Any) -> str:
    """Return what is promised, and on what condition."""
    exact = exact_alpha(alpha)
    share = f"{float(1 - exact):.4g}"
    if folds is not None:
        count = len(predictor.models)
        name = "jackknife+" if count == len(folds) else f"CV+ with {count} folds"
        return (
            f"Few rows: {name}. Rows drawn like those of the table are covered with probability "
            f"at least {predictor.guarantee(exact):.3f} (Barber et al., 2021); about {share} is "
            "usual, and not promised."
        )
    where = f" in every group of {group!r}" if group is not None else ""
    said = [
        f"Rows drawn like those that calibrated are covered with probability at least {share}"
        f"{where}, on average over calibrations."
    ]
    if getattr(predictor, "other_labels", False):
        other = ffcp.LabelSet.OTHER
        said.append(f"A label that no training row has is covered by sets that hold {other!r}.")
    if time is not None:
        said.append("This holds as far as the future is like the past: the last rows test it.")
    return " ".join(said)
