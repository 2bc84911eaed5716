"""The decisions of a fit, and its guarantee, in words."""

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
    columns: Columns, goal: Target, split: RowSplit, predictor: Any, alpha: float, groups: Any
) -> list[str]:
    """Return the decisions about columns, groups, labels and numbers of rows."""
    left_out = (column for column in columns if column.kind == LEFT_OUT)
    lines = [f"column {column.name!r} is left out: {column.why}" for column in left_out]
    if groups is not None:
        lines += _thin_groups(predictor.calibration.groups, set(groups.tolist()), alpha)
    elif split.folds is None and len(predictor.calibration) < rows_needed(alpha):
        every = "set holds all labels" if goal.classes else "interval is infinite"
        few = f"{len(predictor.calibration)} calibration rows"
        lines.append(f"{few}, but alpha = {alpha:g} needs {rows_needed(alpha)}: every {every}")
    if goal.classes:
        lines += [*_rare(goal, split), *_others(predictor.calibration.scores, alpha)]
    if split.folds is not None:
        lines.append("no test rows are held out: all rows are used for training")
        if outside := int((split.folds < 0).sum()):
            lines.append(f"{outside} rows are not used for calibration, for folds of equal size")
    return lines


def _thin_groups(counts: dict[str, int], names: set[str], alpha: float) -> list[str]:
    """Return the groups with too few calibration rows for a finite interval or a proper subset."""
    lines, few = [], rows_needed(alpha)
    if thin := sorted(name for name in counts if counts[name] < few):
        what = f"{len(thin)} groups have fewer than {few} calibration rows"
        lines.append(f"{what}: {cells.listed(thin)}")
    if none := sorted(names - set(counts)):
        what = f"{len(none)} groups have no calibration rows, and no predictions"
        lines.append(f"{what}: {cells.listed(none)}")
    return lines


def _others(scores: Any, alpha: float) -> list[str]:
    """Return the effect on sets of labels that no training row has."""
    others, rows = int(scores.isinf().sum()), len(scores)
    if not others:
        return []
    what = f"{others} of {rows} calibration rows have labels that no training row has"
    if conformal_rank(rows, alpha) > rows - others:
        other = ffcp.LabelSet.OTHER
        return [f"{what}, more than alpha allows: every set holds all labels and {other!r}"]
    return [f"{what}: no set can contain them, so all sets are larger to compensate"]


def _rare(goal: Target, split: RowSplit) -> list[str]:
    """Return the labels that are not in every part of the rows, and what that means."""
    learned = np.concatenate([split.train, split.stop])
    parts = (goal.values[rows].tolist() for rows in (learned, split.calibrate, split.test))
    rare = sorted(set(goal.values.tolist()) - set.intersection(*map(set, parts)))
    if not rare:
        return []
    return [
        f"{len(rare)} classes are not in all of training, calibration and test rows: "
        f"{cells.listed(rare)}. Coverage is guaranteed over all rows, not for each class: sets may "
        f"miss them more often. A class without training rows is {ffcp.LabelSet.OTHER!r}"
    ]


def chosen(predictor: Any, unit: float) -> Any:
    """Return how the method was chosen, in the units of the target; ``None`` without a choice."""
    choice: Any = getattr(predictor, "choice", None)
    return choice.in_units(unit) if hasattr(choice, "in_units") else choice


def method(predictor: Any, unit: float) -> str:
    """Return the name of the method, and how it was chosen."""
    choice = chosen(predictor, unit)
    return type(predictor).__name__ if choice is None else str(choice)


def guarantee(predictor: Any, alpha: float, group: str | None, time: str | None, folds: Any) -> str:
    """Return the guarantee and its conditions."""
    exact = exact_alpha(alpha)
    share = f"{float(1 - exact):.4g}"
    if folds is not None:
        count = len(predictor.models)
        name = "jackknife+" if count == len(folds) else f"CV+ with {count} folds"
        return (
            f"Few rows: {name}. New rows from the same distribution are covered with probability "
            f"at least {predictor.guarantee(exact):.3f} (Barber et al., 2021); about {share} is "
            "usual, but not guaranteed."
        )
    where = f" in every group of {group!r}" if group is not None else ""
    sentences = [
        "New rows from the distribution of the calibration rows are covered with probability at "
        f"least {share}{where}, on average over calibration sets."
    ]
    if getattr(predictor, "other_labels", False):
        other = ffcp.LabelSet.OTHER
        sentences.append(f"A label that no training row has is covered by sets with {other!r}.")
    if time is not None:
        sentences.append("This holds if the future is like the past, as tested on the last rows.")
    return " ".join(sentences)
