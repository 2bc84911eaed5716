"""Prediction sets of a classifier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ffcp import metrics
from ffcp.classification.names import OTHER, label_tensor
from ffcp.extras import needed


class LabelSet:
    """A prediction set of labels for each row.

    Parameters
    ----------
    mask : Tensor
        Shape (n, K): whether label j is in the set of row i.
    weights : callable, default=None
        Yields the labels' weights, one block of rows after another; called when :attr:`labels`
        is first accessed. Without it labels are listed by index.
    ordered : list of Tensor, default=None
        The labels of each set in order, if known.
    names : sequence of str, default=None
        Class names; :attr:`labels` then lists names.
    other_labels : bool, default=False
        Whether the last column of the mask stands for "another label", one that is not among the
        model's classes.

    Attributes
    ----------
    OTHER : str
        The name of that last column, ``"another label"``.

    Examples
    --------
    >>> sets = LabelSet(torch.tensor([[True, False, True], [False, True, False]]))
    >>> sets
    LabelSet(2 rows, 3 classes, mean size 1.5)
    >>> sets.sizes
    tensor([2, 1])
    >>> sets.labels
    [tensor([0, 2]), tensor([1])]
    >>> sets.coverage([2, 2])
    0.500 [0.095, 0.905]
    """

    OTHER = OTHER

    def __init__(
        self,
        mask: Tensor,
        weights: Callable[[], Iterator[Tensor]] | None = None,
        ordered: list[Tensor] | None = None,
        names: Sequence[str] | None = None,
        other_labels: bool = False,
    ) -> None:
        self.mask = mask
        self.names = names
        self.other_labels = other_labels
        self._weights = weights
        self._ordered = ordered

    def __len__(self) -> int:
        return len(self.mask)

    def __repr__(self) -> str:
        rows, classes = len(self), self.mask.shape[1] - self.other_labels
        mean = f"{metrics.mean_set_size(self):.4g}" if rows else "nan"
        return f"LabelSet({rows} rows, {classes} classes, mean size {mean})"

    @property
    def sizes(self) -> Tensor:
        """How many labels each set holds, shape (n,)."""
        return self.mask.sum(dim=1)

    @property
    def labels(self) -> Any:
        """The labels of each set, best first: a tensor for each row, or a list of names.

        >>> LabelSet(torch.tensor([[True, False, True]]), names=["cat", "dog", "fox"]).labels
        [['cat', 'fox']]
        """
        if self.names is None:
            return self.ordered
        names = [*self.names, OTHER]
        return [[names[label] for label in row.tolist()] for row in self.ordered]

    @property
    def ordered(self) -> list[Tensor]:
        """The labels of each set by their numbers, best first.

        Weights are not stored with the mask, as they are far larger: the first access runs the
        model again on the input, which is not copied.
        """
        if self._ordered is None:
            blocks = iter([self.mask.double()]) if self._weights is None else self._weights()
            ordered: list[Tensor] = []
            for weights in blocks:
                start = len(ordered)
                ordered += _in_order(self.mask[start : start + len(weights)], weights)
            self._ordered = ordered
        return self._ordered

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists for JSON: the labels of each set, best first, and how many they are.

        >>> LabelSet(torch.tensor([[True, False, True]]), names=["cat", "dog", "fox"]).to_dict()
        {'labels': [['cat', 'fox']], 'sizes': [2]}
        >>> LabelSet(torch.tensor([[True, False, True]])).to_dict()
        {'labels': [[0, 2]], 'sizes': [2]}
        """
        labels = self.labels if self.names is not None else [row.tolist() for row in self.ordered]
        return {"labels": labels, "sizes": self.sizes.tolist()}

    def to_frame(self, index: Any = None) -> Any:
        """Return a pandas frame with the size of each set, its labels, best first, and the mask.

        The mask has a column for each class, by its name or number, and one for "another label" if
        sets can hold it.

        Parameters
        ----------
        index : array-like, default=None
            Index of the frame.
        """
        pandas = needed("pandas", "frames", "to_frame()")
        labels = self.to_dict()["labels"]
        names = [*(self.names or range(self.mask.shape[1] - self.other_labels))]
        names += [OTHER] if self.other_labels else []
        mask = pandas.DataFrame(self.mask.cpu().numpy(), columns=names)
        frame = pandas.DataFrame({"size": self.sizes.cpu().numpy(), "labels": labels})
        frame = pandas.concat({"set": frame, "holds": mask}, axis=1)
        return frame if index is None else frame.set_axis(index, axis=0)

    def coverage(self, y: Any) -> metrics.Coverage:
        """Return the share of rows whose true label is in the set.

        A label outside the model's classes is in the sets that hold "another label".

        Parameters
        ----------
        y : array-like
            Labels, integers of shape (n,).
        """
        return metrics.set_coverage(self, label_tensor(y, self.names, self.other_labels))


def _in_order(mask: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """Return the labels of each set, those with the largest weights first."""
    if weights.shape[1] < mask.shape[1]:  # "another label" comes last
        weights = pad(weights, (0, 1))
    order = weights.masked_fill(~mask, -1).sort(dim=1, descending=True, stable=True).indices
    sizes = mask.sum(dim=1)
    inside = torch.arange(mask.shape[1], device=mask.device) < sizes[:, None]
    labels: tuple[Tensor, ...] = order[inside].split(sizes.tolist())
    return labels
