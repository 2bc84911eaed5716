"""Which learner: small networks, boosted trees, the mean of both, or the model itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ffcp.conformal.columns import prefixed, with_prefix
from ffcp.regression.learned import network
from ffcp.regression.learned.boosting import BoostedQuantiles
from ffcp.regression.learned.nested import at_levels
from ffcp.regression.learned.network import QuantileNetwork

# Least step between two quantiles: a share of the range of a row's, and of a range of zero.
_SMALLEST, _TINY = 1e-6, 1e-12


class ModelQuantiles:
    """Quantiles of the residual from those of the target, which come as columns.

    Columns are the prediction, its logarithm, which is not used, and the quantiles at
    :data:`~ffcp.regression.learned.nested.KNOTS`.

    >>> from ffcp.regression.learned.nested import KNOTS
    >>> row = torch.cat([torch.tensor([3.0, 0.0]), 3 + KNOTS.float()])
    >>> ModelQuantiles()(row[None])[0, 0, [5, -6]]
    tensor([0.0500, 0.9500], dtype=torch.float64)
    """

    kind = "model"
    outputs = 1

    def state(self) -> dict[str, Tensor]:
        """Return no tensors: nothing is learned."""
        return {}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor]) -> ModelQuantiles:
        """Return it; there are no saved tensors."""
        network.checked_tensors(tensors, {})
        return cls()

    def __call__(self, columns: Tensor) -> Tensor:
        """Return quantiles (n, 1, levels), in float64."""
        columns = columns.to("cpu", torch.float64)
        knots = columns[:, 2:]
        width = knots.amax(dim=1, keepdim=True) - knots.amin(dim=1, keepdim=True)
        quantiles = at_levels(knots, _SMALLEST * width.clamp_min(_TINY))
        return (quantiles - columns[:, :1])[:, None]


class MeanQuantiles:
    """The weighted mean of the quantiles that small networks and boosted trees have learned.

    Their errors differ, so that their mean is often better than either. ``weight`` is that of the
    trees.
    """

    kind = "both"

    def __init__(
        self, networks: QuantileNetwork, trees: BoostedQuantiles, weight: float = 0.5
    ) -> None:
        self._networks, self._trees, self._weight = networks, trees, weight

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of both."""
        return {
            **prefixed("network.", self._networks.state()),
            **prefixed("boosting.", self._trees.state()),
            "weight": torch.tensor(self._weight, dtype=torch.float64),
        }

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor]) -> MeanQuantiles:
        """Return the learner from saved tensors; raise ValueError for impossible ones."""
        networks = QuantileNetwork.from_state(with_prefix("network.", tensors))
        trees = BoostedQuantiles.from_state(with_prefix("boosting.", tensors))
        if networks.outputs != trees.outputs:
            raise ValueError("networks and trees have learned different numbers of outputs")
        own = {name: one for name, one in tensors.items() if "." not in name}
        weight = float(network.checked_tensors(own, {"weight": (torch.float64, ())})["weight"])
        if not 0 < weight < 1:
            raise ValueError(f"expected a weight between 0 and 1, got {weight}")
        return cls(networks, trees, weight)

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return self._networks.outputs

    def __call__(self, columns: Tensor) -> Tensor:
        """Return quantiles (n, outputs, levels), in float64."""
        return torch.lerp(self._networks(columns), self._trees(columns), self._weight)


NETWORK, BOOSTING, BOTH = KINDS = ("network", "boosting", "both")
#: The classes of what was learned, by the name of the learner.
LEARNERS = {
    made.kind: made for made in (QuantileNetwork, BoostedQuantiles, MeanQuantiles, ModelQuantiles)
}


def checked_learner(kind: str) -> str:
    """Return the name of a learner; raise ValueError if it is unknown.

    >>> checked_learner("forest")
    Traceback (most recent call last):
    ValueError: learner must be one of network, boosting, both, got 'forest'
    """
    if kind not in KINDS:
        raise ValueError(f"learner must be one of {', '.join(KINDS)}, got {kind!r}")
    return kind
