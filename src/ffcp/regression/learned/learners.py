"""Which learner: small networks, boosted trees by LightGBM, or the model itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ffcp.regression.learned import boosting, network
from ffcp.regression.learned.boosting import BoostedQuantiles
from ffcp.regression.learned.nested import at_levels
from ffcp.regression.learned.network import QuantileNetwork

# Step between two quantiles: of all that a row has, and where those are one number.
_SMALLEST, _TINY = 1e-6, 1e-12


class ModelQuantiles:
    """Quantiles of the residual from those of the target, which come as columns.

    Columns are the prediction, its logarithm, which is not looked at, and the quantiles at
    :data:`~ffcp.regression.learned.nested.KNOTS`.

    >>> from ffcp.regression.learned.nested import KNOTS
    >>> row = torch.cat([torch.tensor([3.0, 0.0]), 3 + KNOTS.float()])
    >>> ModelQuantiles()(row[None])[0, 0, [5, -6]]
    tensor([0.0500, 0.9500], dtype=torch.float64)
    """

    kind = "model"
    outputs = 1

    def state(self) -> dict[str, Tensor]:
        """Give no tensors: nothing is learned."""
        return {}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor]) -> ModelQuantiles:
        """Make it again; nothing was saved."""
        network.checked_tensors(tensors, {})
        return cls()

    def __call__(self, columns: Tensor) -> Tensor:
        """Give quantiles (n, 1, levels), in float64."""
        columns = columns.to("cpu", torch.float64)
        knots = columns[:, 2:]
        width = knots.amax(dim=1, keepdim=True) - knots.amin(dim=1, keepdim=True)
        quantiles = at_levels(knots, _SMALLEST * width.clamp_min(_TINY))
        return (quantiles - columns[:, :1])[:, None]


NETWORK, BOOSTING = KINDS = ("network", "boosting")
#: The functions that learn quantiles of residuals from columns, and the classes they return.
LEARN = {NETWORK: network.learn, BOOSTING: boosting.learn}
LEARNERS = {made.kind: made for made in (QuantileNetwork, BoostedQuantiles, ModelQuantiles)}


def checked_learner(kind: str) -> str:
    """Refuse what is no learner.

    >>> checked_learner("forest")
    Traceback (most recent call last):
    ValueError: learner must be one of network, boosting, got 'forest'
    """
    if kind not in KINDS:
        raise ValueError(f"learner must be one of {', '.join(KINDS)}, got {kind!r}")
    return kind
