"""What calibration writes down of a point besides its score: its group, or where it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ffcp.quantiles import Label, ScoreBuffer

Pairs = Iterator[tuple[Any, Tensor, int]]  # inputs, targets, number of the first row


class Points(NamedTuple):
    """Scored points, and how they were come by.

    ``kept`` marks, among the first rows of the data, those that were scored; the others chose
    something, and all rows behind were scored. ``None`` if all were. ``result`` is what was
    chosen.
    """

    scores: Tensor
    kept: Tensor | None = None
    result: Any = None


class Notes:
    """Notes nothing; the base of those that do."""

    def watch(self, pairs: Pairs) -> Pairs:
        """Hand on all batches, taking notes."""
        yield from pairs

    def of(self, kept: Tensor | None) -> Any:
        """Give the notes on the points that were kept."""
        return None


class GroupNotes(Notes):
    """Notes the group of every point.

    >>> notes = GroupNotes(["a", "b", "a"])
    >>> for _ in notes.watch(iter([(torch.zeros(3, 1), torch.zeros(3), 0)])):
    ...     pass
    >>> notes.of(torch.tensor([True, False, True]))
    ['a', 'a']
    """

    def __init__(self, groups: Any) -> None:
        self._groups = groups if callable(groups) else _labels(groups)
        self._noted: list[Label] = []

    def watch(self, pairs: Pairs) -> Pairs:
        """Hand on all batches, noting the group of each row."""
        for x, y, row in pairs:
            end = row + len(y)
            if callable(self._groups):
                self._noted += group_labels(self._groups, x, len(y))
            elif len(self._groups) < end:
                raise ValueError(f"groups has {len(self._groups)} labels, fewer than x has rows")
            else:
                self._noted += self._groups[row:end]
            yield x, y, row
        if not callable(self._groups) and len(self._noted) != len(self._groups):
            raise ValueError(
                f"groups has {len(self._groups)} labels, but x has {len(self._noted)} rows"
            )

    def of(self, kept: Tensor | None) -> list[Label]:
        """Give the groups of the points that were kept."""
        if kept is None:
            return self._noted
        dropped = set((~kept).nonzero()[:, 0].tolist())
        return [label for row, label in enumerate(self._noted) if row not in dropped]


class EmbeddingNotes(Notes):
    """Notes an embedding of every point, given by a function of a batch."""

    def __init__(self, embed: Callable[[Any, int], Tensor]) -> None:
        self._embed = embed
        self._noted = ScoreBuffer(torch.float32)

    def watch(self, pairs: Pairs) -> Pairs:
        """Hand on all batches, noting where each row lies."""
        for x, y, row in pairs:
            # First the batch: it is looked at for mistakes there.
            yield x, y, row
            self._noted.extend(self._embed(x, row))

    def of(self, kept: Tensor | None) -> Tensor:
        """Give the embeddings (n, e) of the points that were kept."""
        noted = self._noted.scores
        if kept is None:
            return noted
        rest = torch.ones(len(noted) - len(kept), dtype=torch.bool)
        return noted[torch.cat([kept, rest])]


def group_labels(groups: Any, x: Any, rows: int) -> list[Label]:
    """Read the groups of the rows of ``x``: labels, or a function that gives them.

    >>> group_labels(lambda x: x[:, 0] > 0, torch.tensor([[1.0], [-1.0]]), 2)
    [True, False]
    """
    labels = _labels(groups(x) if callable(groups) else groups)
    if len(labels) != rows:
        raise ValueError(f"groups has {len(labels)} labels, but x has {rows} rows")
    return labels


def _labels(groups: Any) -> list[Label]:
    array = groups.detach().cpu().numpy() if isinstance(groups, Tensor) else groups
    if isinstance(array, Sequence) and not isinstance(array, str):
        labels: list[Any] = list(array)  # as they are: an array would turn numbers into words
    else:
        array = np.asarray(array)
        if array.ndim != 1:
            raise ValueError(f"groups must be one label per row, got shape {array.shape}")
        labels = array.tolist()
    labels = [label.item() if isinstance(label, np.generic) else label for label in labels]
    wrong = [
        label for label in labels if not isinstance(label, (str, int, float)) or label != label
    ]
    if wrong:
        raise ValueError(
            f"a group is a word or a number, got {wrong[0]!r}: give rows without a group one of "
            "their own"
        )
    return labels
