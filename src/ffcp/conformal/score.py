"""Nonconformity scores: how badly a target fits a prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

from ffcp.batch import BatchOutput, Requires
from ffcp.conformal.selection import Selection
from ffcp.description import Described

Self = TypeVar("Self", bound="Score")


class Score(Described):
    """A nonconformity score; the base of those of intervals and of prediction sets."""

    #: No score is below this.
    lowest: float = -math.inf
    #: Whether a score may be infinite, for a target that no threshold covers.
    takes_infinity = True

    def requires(self) -> Requires:
        """Return what the pass over the model must compute."""
        return Requires()

    def selection(self) -> Selection | None:
        """Return the selection of arguments that are not given; ``None`` if all are."""
        return None

    def score(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Return the scores of targets, (n, m)."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Return the learned tensors, which a file holds."""
        return {}

    def with_state(self: Self, state: Mapping[str, Tensor]) -> Self:
        """Return this score with the tensors of a file."""
        if state:
            raise ValueError(f"expected no learned tensors, got {', '.join(sorted(state))}")
        return self
