"""A threshold for each class, from the points of that class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.batch import BatchOutput
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import Columns
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import conformal_rank, rows_needed
from ffcp.recipes import public


@public
class ByLabel(Calibration):
    """A threshold for each label, so that points of every class are covered.

    Points are sorted by label and score. A class may have no point at all: thousands of classes
    cost no more than a few. Classes with too few points have an infinite threshold. It is what
    ``class_conditional=True`` of the named label sets takes.

    Attributes
    ----------
    scores : Tensor
        The scores, (n, 1).
    label : Tensor
        The label of each, (n,).

    Examples
    --------
    >>> scores = ByLabel()
    >>> scores.add(torch.tensor([[0.5], [0.7], [0.3]]), {"label": torch.tensor([1, 0, 1])})
    >>> scores.threshold(0.5)
    tensor([0.7000, 0.5000,    inf], dtype=torch.float64)
    """

    label: Tensor
    looks_at_labels = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("label", torch.empty(0, dtype=torch.int64))

    def note(self, out: BatchOutput, y: Tensor | None = None) -> dict[str, Any]:
        """Note the true label of points that have one."""
        return {} if y is None else {"label": y.cpu().long()}

    def check(self, points: Mapping[str, Tensor]) -> None:
        """Refuse labels that are none, and points that are not sorted by label and score."""
        super().check(points)
        label, scores = points["label"], points["scores"]
        if label.dim() != 1 or (len(label) and (int(label.min()) < 0 or scores.shape[1] != 1)):
            raise ValueError("labels are not the numbers of classes, one for each score")
        rises = (label[:-1] < label[1:]) | (scores[:-1] <= scores[1:]).all(dim=1)
        if not bool(((label[:-1] <= label[1:]) & rises).all()):
            raise ValueError("points are not sorted by label and score")

    def arranged(self, points: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sort by label and score."""
        order = np.lexsort((points["scores"][:, 0].numpy(), points["label"].numpy()))
        return {name: values[torch.from_numpy(order)] for name, values in points.items()}

    def threshold(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Look up the conformal quantile of each class, up to one behind the last with points."""
        counts = torch.bincount(self.label, minlength=int(self.label.max()) + 2)
        kinds, which = counts.unique(return_inverse=True)
        ranks = torch.tensor([conformal_rank(n, alpha) for n in kinds.tolist()])[which]
        enough = ranks <= counts
        place = counts.cumsum(0) - counts + ranks - 1
        quantiles = torch.full((len(counts),), torch.inf, dtype=torch.float64)
        quantiles[enough] = self.scores[place[enough], 0]
        return quantiles

    def why_infinite(self, alpha: Any, metadata: Columns) -> str:
        """Say how many points a class needs."""
        return (
            f": alpha={float(alpha):g} needs at least {rows_needed(alpha)} calibration points of "
            "each class"
        )
