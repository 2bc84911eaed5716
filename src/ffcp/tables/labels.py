"""Labels of a table: which of them sets can name, and what is said of all others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

import ffcp
from ffcp.conformal.rank import conformal_rank
from ffcp.tables import cells
from ffcp.tables.errors import TableError
from ffcp.tables.fitted import BATCH
from ffcp.tables.splitting import Division
from ffcp.tables.targets import Target


def of_training(goal: Target, division: Division, name: str) -> Target:
    """Return the target with the classes of training rows alone.

    A list of labels that calibration rows had a part in would suit them better than new rows.
    """
    learned = goal.values[np.concatenate([division.train, division.stop])]
    classes = tuple(sorted(set(learned.tolist())))
    if len(classes) < 2:
        raise TableError(
            f"the target {name!r} is {classes[0]!r} in every training row: give more rows of other "
            "labels"
        )
    if ffcp.LabelSet.OTHER in classes:
        raise TableError(
            f"the target {name!r} has the label {ffcp.LabelSet.OTHER!r}, which stands for labels "
            "that no training row has: give it another name"
        )
    return replace(goal, classes=classes)


def sets(network: nn.Module, classes: tuple[str, ...], alpha: Any, seed: int) -> Any:
    """Make the predictor of label sets; calibration rows set aside choose its score."""
    return ffcp.SetPredictor(
        network,
        "auto",
        names=list(classes),
        other_labels=True,
        selection_alpha=alpha,
        seed=seed,
        batch_size=BATCH,
    )


def decisions(goal: Target, division: Division, predictor: Any, alpha: Any) -> list[str]:
    """Say which labels are rare, and what labels that no training row has do to sets."""
    return [*_rare(goal, division), *_others(predictor, alpha)] if goal.classes else []


def _others(predictor: Any, alpha: Any) -> list[str]:
    scores = predictor.calibration.scores
    others, rows = int(scores.isinf().sum()), len(scores)
    if not others:
        return []
    what = f"{others} of {rows} calibration rows have labels that no training row has"
    if conformal_rank(rows, alpha) > rows - others:
        return [f"{what}, more than alpha allows for: every set holds all labels, and another"]
    return [f"{what}: no set can name them, so all sets are larger by as much as makes up for it"]


def _rare(goal: Target, division: Division) -> list[str]:
    """Name the labels that are not in every part of the rows, and say what that means."""
    learned = np.concatenate([division.train, division.stop])
    parts = {"trains": learned, "calibrates": division.calibrate, "tests": division.test}
    there = {does: set(goal.values[rows].tolist()) for does, rows in parts.items()}
    rare = []
    for name, count in sorted(Counter(goal.values.tolist()).items()):
        absent = [f"none {does}" for does, names in there.items() if name not in names]
        if absent:
            rows = "1 row" if count == 1 else f"{count} rows"
            rare.append(f"{cells.quoted(name)} ({rows}: {', '.join(absent)})")
    if not rare:
        return []
    are = "1 class is" if len(rare) == 1 else f"{len(rare)} classes are"
    first = ", ".join(rare[:10]) + (" and others" if len(rare) > 10 else "")
    return [
        f"{are} not in every part of the rows: {first}. Coverage is promised over all rows, "
        "not for each class: sets may miss such a class far more often. Where none of its rows "
        f"trains, it is {ffcp.LabelSet.OTHER!r}; where none tests, the test cannot tell"
    ]
