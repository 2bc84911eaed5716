"""Which learner: small networks, boosted trees by LightGBM, or the model itself."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ffcp.regression.learned import boosting, network
from ffcp.regression.learned.boosting import BoostedQuantiles
from ffcp.regression.learned.model_quantiles import ModelQuantiles
from ffcp.regression.learned.network import QuantileNetwork

Learner = QuantileNetwork | BoostedQuantiles | ModelQuantiles
NETWORK, BOOSTING = KINDS = ("network", "boosting")
_SAVED: dict[object, type[Learner]] = {
    made.kind: made for made in (QuantileNetwork, BoostedQuantiles, ModelQuantiles)
}


def checked_learner(kind: str) -> str:
    """Refuse what is no learner.

    >>> checked_learner("forest")
    Traceback (most recent call last):
    ValueError: learner must be one of network, boosting, got 'forest'
    """
    if kind not in KINDS:
        raise ValueError(f"learner must be one of {', '.join(KINDS)}, got {kind!r}")
    return kind


def learn(kind: str, columns: Tensor, residuals: Tensor, seed: int) -> Learner:
    """Let a learner of this kind learn quantiles of residuals from columns."""
    if kind == NETWORK:
        return network.learn(columns, residuals, seed)
    return boosting.learn(columns, residuals, seed)


def from_state(kind: object, tensors: Mapping[str, Tensor]) -> Learner:
    """Make a learner again from saved tensors, once they are checked."""
    if kind not in _SAVED:
        raise ValueError(f"{kind!r} is no learner")
    return _SAVED[kind].from_state(tensors)
