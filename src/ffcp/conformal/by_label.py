"""A threshold for each class, from the rows of that class."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.batch import BatchOutput
from ffcp.conformal.calibration import Calibration, Traits
from ffcp.conformal.columns import Columns, take
from ffcp.conformal.p_values import TailCounts, counts_beyond
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.rank import conformal_rank, rows_needed


@dataclass(frozen=True)
class ByLabel(Calibration):
    """A threshold for each label, so that rows of every class are covered.

    Thousands of classes cost no more than a few. Classes with too few rows have an infinite
    threshold. The named prediction sets use it for ``class_conditional=True``.

    Parameters
    ----------
    rows : dict of Tensor, default={}
        Scores and metadata of the calibration rows; filled by :meth:`fit`.

    Examples
    --------
    >>> labels = {"label": torch.tensor([1, 0, 1])}
    >>> ByLabel().fit(torch.tensor([[0.5], [0.7], [0.3]]), labels).quantile(0.5)
    tensor([0.7000, 0.5000,    inf], dtype=torch.float64)
    """

    traits = Traits(labels=True)

    def metadata(self, out: BatchOutput, y: Tensor | None = None) -> dict[str, Any]:
        """Return the labels of rows, where they are known."""
        return {} if y is None else {"label": y.cpu().long()}

    def fit(self, scores: Tensor, metadata: Columns | None = None) -> ByLabel:
        """Return this calibration with these rows, sorted by label and score."""
        filled = super().fit(scores, metadata)
        label = checked_classes(filled.rows["label"], filled.scores)
        order = np.lexsort((filled.scores[:, 0].numpy(), label.numpy()))
        rows = take(filled.rows, torch.from_numpy(order))
        return super().fit(rows["scores"], {"label": rows["label"]})

    def quantile(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Return the conformal quantile of each class, and infinity for one more."""
        label = self.rows["label"]
        counts = torch.bincount(label, minlength=int(label.max()) + 2)
        sizes, which = counts.unique(return_inverse=True)
        ranks = torch.tensor([conformal_rank(n, alpha) for n in sizes.tolist()])[which]
        enough = ranks <= counts
        place = counts.cumsum(0) - counts + ranks - 1
        quantiles = torch.full((len(counts),), torch.inf, dtype=torch.float64)
        quantiles[enough] = self.scores[place[enough], 0]
        return quantiles

    def tail_counts(self, scores: Tensor, metadata: Columns) -> TailCounts:
        """Count for each label the scores of its calibration rows beyond those of new rows."""
        label, column = self.rows["label"], self.scores[:, 0]
        ends = torch.searchsorted(label, torch.arange(scores.shape[1] + 1)).tolist()
        counts = [
            counts_beyond(column[first:last].contiguous(), scores[:, number])
            for number, (first, last) in enumerate(pairwise(ends))
        ]
        return TailCounts(*(torch.stack(columns, dim=1) for columns in zip(*counts, strict=True)))

    def explain(self, alpha: Any, metadata: Columns) -> str:
        """Explain how many rows a class needs."""
        return (
            f": alpha={float(alpha):g} needs at least {rows_needed(alpha)} calibration rows of "
            "each class"
        )


def checked_classes(label: Tensor, scores: Tensor) -> Tensor:
    """Return the labels; raise ValueError unless they are class numbers, one for each score."""
    is_list = label.dtype == torch.int64 and label.dim() == 1 and scores.shape[1:] == (1,)
    if not is_list or bool((label < 0).any()):
        raise ValueError("expected labels to be class numbers, one per score")
    return label
