"""No learner: quantiles of the target that the model gives itself, at one of its layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ffcp.regression.learned.knots import KNOTS, at_levels

# Step between two quantiles: of all that a row has, and where those are one number.
_SMALLEST, _TINY = 1e-6, 1e-12


class ModelQuantiles:
    """Quantiles of the residual from those of the target, which come as columns.

    Columns are the prediction, its logarithm, which is not looked at, and the quantiles at
    :data:`~ffcp.regression.learned.knots.KNOTS`.

    >>> row = torch.cat([torch.tensor([3.0, 0.0]), 3 + KNOTS.float()])
    >>> ModelQuantiles()(row[None])[0, 0, [5, -6]]
    tensor([0.0500, 0.9500], dtype=torch.float64)
    """

    kind = "model"
    outputs = 1
    columns = 2 + len(KNOTS)

    def state(self) -> dict[str, Tensor]:
        """Give no tensors: nothing is learned."""
        return {}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor]) -> ModelQuantiles:
        """Make it again; refuse, by ValueError, what cannot have been saved."""
        if tensors:
            raise ValueError(f"it holds {', '.join(sorted(tensors))}, where nothing is learned")
        return cls()

    def __call__(self, columns: Tensor) -> Tensor:
        """Give quantiles (n, 1, levels), in float64."""
        columns = columns.to("cpu", torch.float64)
        knots = columns[:, 2:]
        width = knots.amax(dim=1, keepdim=True) - knots.amin(dim=1, keepdim=True)
        quantiles = at_levels(knots, _SMALLEST * width.clamp_min(_TINY))
        return (quantiles - columns[:, :1])[:, None]
