"""Venn-Abers: isotonic regression with the new row added, once with each possible label.

With the label 1 at the score s, isotonic regression gives the new row the probability p1(s), with
the label 0 it gives p0(s). The one of the label that the row turns out to have is calibrated. Both
are step functions of s, found here for all s at once: the values of isotonic regression are slopes
of the greatest convex minorant of a diagram of cumulative sums, and adding a row with label 1
moves the part left of it by (-1, -1) (Vovk, Petej and Fedorova, 2015).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ffcp.batch import BatchOutput
from ffcp.conformal.calibration import Calibration, Traits
from ffcp.conformal.columns import Columns

Point = tuple[int, int]


class Steps(NamedTuple):
    """The probabilities p0 and p1 as functions of the score.

    ``p1[i]`` is that of scores above ``scores[i - 1]`` up to ``scores[i]``, and ``p0[i]`` that of
    scores from ``scores[i - 1]`` up to, but without, ``scores[i]``.

    >>> steps = Steps.of(np.array([0.0, 1.0, 2.0]), np.array([0, 1, 1]))
    >>> p0, p1 = steps.at(np.array([-1.0, 0.5, 3.0]))
    >>> p0.round(3), p1.round(3)
    (array([0.   , 0.   , 0.667]), array([0.5, 1. , 1. ]))
    """

    scores: np.ndarray
    p0: np.ndarray
    p1: np.ndarray

    @classmethod
    def of(cls, scores: np.ndarray, ones: np.ndarray) -> Steps:
        """Return the functions for calibration scores and labels of 0 and 1."""
        values, which = np.unique(scores, return_inverse=True)
        weights = np.bincount(which, minlength=len(values))
        sums = np.bincount(which, weights=ones, minlength=len(values)).astype(np.int64)
        upper = _with_a_one(weights.tolist(), sums.tolist())
        # With labels and order reversed, a row with label 0 is one with label 1.
        lower = _with_a_one(weights[::-1].tolist(), (weights - sums)[::-1].tolist())
        return cls(values, np.array([0.0, *(1 - p for p in lower[::-1])]), np.array([*upper, 1.0]))

    def at(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return p0 and p1 at some scores."""
        p0 = self.p0[np.searchsorted(self.scores, scores, side="right")]
        return p0, self.p1[np.searchsorted(self.scores, scores, side="left")]


def _with_a_one(weights: Sequence[int], ones: Sequence[int]) -> list[float]:
    """Return the isotonic probability at each score in turn, with a row of label 1 added there."""
    points = list(zip(np.cumsum(weights).tolist(), np.cumsum(ones).tolist(), strict=True))
    # The minorant of all points, with the origin moved by (-1, -1): its leftmost corner is last.
    corners: list[Point] = []
    for point in reversed(points):
        _push(corners, point)
    _push(corners, (-1, -1))
    slopes = []
    for x, y in points:
        (x0, y0), (x1, y1) = corners[-1], corners[-2]
        slopes.append((y1 - y0) / (x1 - x0))
        # Next the added row stands behind this point, which moves. Above the first segment it
        # makes no difference; below, it begins the minorant.
        moved = (x - 1, y - 1)
        if (moved[1] - y0) * (x1 - x0) < (y1 - y0) * (moved[0] - x0):
            corners.pop()
            _push(corners, moved)
    return slopes


def _push(corners: list[Point], point: Point) -> None:
    """Add a point left of the others to the corners of a convex minorant."""
    x, y = point
    while len(corners) > 1:
        (x1, y1), (x2, y2) = corners[-1], corners[-2]
        if (y1 - y) * (x2 - x) < (y2 - y) * (x1 - x):
            break
        corners.pop()
    corners.append(point)


@dataclass(frozen=True)
class VennAbersRows(Calibration):
    """Scores of calibration rows and their labels: one column for two classes, else one for each.

    Examples
    --------
    >>> labels = {"label": torch.tensor([0, 1, 1])}
    >>> rows = VennAbersRows().fit(torch.tensor([[0.0], [1.0], [2.0]]), labels)
    >>> rows.pairs(torch.tensor([[0.5]]))
    (tensor([[0.]], dtype=torch.float64), tensor([[1.]], dtype=torch.float64))
    """

    traits = Traits(labels=True)

    def metadata(self, out: BatchOutput, y: Tensor | None = None) -> dict[str, Any]:
        """Return the labels of rows, where known; raise ValueError for groups."""
        if out.groups is not None:
            raise ValueError(
                "Venn-Abers calibrates all rows together: leave out groups=, or make a VennAbers "
                "for each group"
            )
        return {} if y is None else {"label": y.cpu().long()}

    def fit(self, scores: Tensor, metadata: Columns | None = None) -> VennAbersRows:
        """Return this calibration with these rows."""
        filled = super().fit(scores, metadata)
        label, columns = filled.rows.get("label"), filled.scores.shape[1]
        classes = 2 if columns == 1 else columns
        if label is None or label.dtype != torch.int64 or label.dim() != 1 or columns == 2:
            raise ValueError("expected labels to be class numbers, one per row")
        if bool(((label < 0) | (label >= classes)).any()):
            raise ValueError(f"expected labels from 0 to {classes - 1}")
        if not bool(filled.scores.isfinite().all()):
            raise ValueError("expected finite scores")
        return filled

    @cached_property
    def _steps(self) -> list[Steps]:
        scores, label = self.scores.numpy(), self.rows["label"].numpy()
        classes = [1] if scores.shape[1] == 1 else range(scores.shape[1])
        return [Steps.of(scores[:, column], label == one) for column, one in enumerate(classes)]

    def pairs(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return p0 and p1 of each column of scores of new rows, (n, columns) each."""
        if scores.shape[1] != self.scores.shape[1]:
            raise ValueError(
                f"calibrated with {self.scores.shape[1]} scores for each row, but the model now "
                f"gives {scores.shape[1]}"
            )
        values = scores.detach().to("cpu", torch.float64).numpy()
        pairs = [steps.at(values[:, column]) for column, steps in enumerate(self._steps)]
        p0, p1 = (np.stack(columns, axis=1) for columns in zip(*pairs, strict=True))
        return torch.from_numpy(p0), torch.from_numpy(p1)
