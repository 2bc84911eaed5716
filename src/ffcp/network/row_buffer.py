"""Whole tensors from consecutive batches, made once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class RowBuffer:
    """Puts the results of consecutive batches into whole tensors, made once.

    Keeping the small results in a list until the end would leave a hole in the heap beside each
    of them, of the size of a batch's intermediates.

    >>> buffer = RowBuffer(5)
    >>> for part in torch.arange(5).split(2):
    ...     buffer.add({"square": part**2})
    >>> buffer["square"]
    tensor([ 0,  1,  4,  9, 16])

    Rows may stand in another dimension than the first, ``dim``.
    """

    def __init__(self, rows: int | None, dim: int = 0) -> None:
        self._rows = rows  # None: as many as come, which costs the holes
        self._dim = dim
        self._filled = 0
        self._whole: dict[str, Tensor] = {}
        self._parts: dict[str, list[Tensor]] = {}

    def add(self, parts: Mapping[str, Tensor]) -> None:
        """Take the next rows of every tensor."""
        if self._rows is None:
            for name, part in parts.items():
                self._parts.setdefault(name, []).append(part)
            return
        rows = 0
        for name, part in parts.items():
            rows = part.shape[self._dim]
            if name not in self._whole:
                if rows == self._rows:  # all at once
                    self._whole[name] = part
                    continue
                shape = list(part.shape)
                shape[self._dim] = self._rows
                self._whole[name] = part.new_empty(shape)
            self._whole[name].narrow(self._dim, self._filled, rows).copy_(part)
        self._filled += rows

    def __getitem__(self, name: str) -> Tensor:
        if self._rows is not None:
            return self._whole[name]
        return torch.cat(self._parts[name], dim=self._dim)
