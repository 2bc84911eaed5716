"""Class names: validation, and conversion of string labels to class numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.network import arrays

#: Stands in a set for every label that the model does not know.
OTHER = "another label"


def checked_names(names: Sequence[str]) -> list[str]:
    """Return the class names as a list of distinct strings.

    >>> checked_names(("cat", "dog"))
    ['cat', 'dog']
    """
    listed = list(names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in listed):
        raise TypeError(f"'names' must be a list with one string per class, got {names!r}")
    if len(set(listed)) < len(listed):
        twice = next(name for name in listed if listed.count(name) > 1)
        raise ValueError(f"'names' must be distinct: two classes are named {twice!r}")
    return [str(name) for name in listed]


def label_tensor(y: Any, names: Sequence[str] | None, other_labels: bool = False) -> Tensor:
    """Return labels as class numbers: integers as they are, strings by their index in ``names``.

    With ``other_labels`` a string that is not in ``names`` has the number after the last.

    >>> label_tensor(["dog", "cat", "dog"], ["cat", "dog"])
    tensor([1, 0, 1])
    >>> label_tensor(["dog", "owl"], ["cat", "dog"], other_labels=True)
    tensor([1, 2])
    """
    if isinstance(y, Tensor):
        return arrays.target_tensor(y)
    array = np.asarray(y)
    is_text = array.dtype.kind in "UOST" and array.ndim == 1 and array.size > 0
    if not is_text or not any(isinstance(label, str) for label in array.tolist()):
        return arrays.target_tensor(y)
    if names is None:
        raise TypeError(
            f"'y' must hold class numbers, got strings like {str(array[0])!r}: pass names=[...] to "
            "the predictor, the class names in the order of the model's outputs"
        )
    place = {name: number for number, name in enumerate(names)}
    for row, label in enumerate(array.tolist()):
        if label not in place and not (other_labels and isinstance(label, str)):
            raise ValueError(f"label {label!r} in row {row} is not one of the names {list(names)}")
    return torch.tensor([place.get(label, len(place)) for label in array.tolist()])
