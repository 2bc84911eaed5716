"""A small classifier, its data, and every method of label sets."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ffcp
from tests.conftest import normal, small_mlp

K = 6
X = normal(300, 4, seed=0)


def network(outputs: int = K) -> nn.Sequential:
    """Linear layers at 0, 3 and 6; dropout between, which eval mode must switch off."""
    model = small_mlp(outputs=outputs)
    with torch.no_grad():
        model[6].weight.mul_(8)
    return model


def labels_for(x: Tensor, model: nn.Module, seed: int = 0) -> Tensor:
    with torch.no_grad():
        p = model.eval()(x).softmax(dim=1)
    return torch.multinomial(p, 1, generator=torch.Generator().manual_seed(seed))[:, 0]


Y = labels_for(X, network())


def seeded(method: type[ffcp.SetPredictor], **settings):
    """Make predictors of a method with a fixed seed, so that two of them draw the same numbers."""
    return lambda model, **more: method(model, **{"seed": 0, **more, **settings})


METHODS = {
    "LAC": seeded(ffcp.LAC),
    "APS": seeded(ffcp.APS),
    "RAPS": seeded(ffcp.RAPS, lam=0.05, kreg=2),
    "FFRAPS": seeded(ffcp.FFRAPS, delta=0.1, lam=0.05, kreg=2),
    "FFRAPS at a feature": seeded(
        ffcp.FFRAPS, delta=0.1, lam=0.05, kreg=2, gradient="feature", feature="0"
    ),
}

TUNED = {
    "RAPS by size": seeded(ffcp.RAPS, tune="size"),
    "RAPS by coverage": seeded(ffcp.RAPS, tune="coverage"),
    "FFRAPS by size": seeded(ffcp.FFRAPS, tune="size"),
    "FFRAPS at a feature by coverage": seeded(
        ffcp.FFRAPS, gradient="feature", feature="0", tune="coverage"
    ),
    "APS, temperature": seeded(ffcp.APS, temperature="fit"),
    "LAC, temperature": seeded(ffcp.LAC, temperature="fit"),
}
