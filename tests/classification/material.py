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

METHODS = {
    "LAC": ffcp.LAC,
    "APS": ffcp.APS,
    "RAPS": lambda model, **kw: ffcp.RAPS(model, lam=0.05, kreg=2, **kw),
    "FFRAPS": lambda model, **kw: ffcp.FFRAPS(model, delta=0.1, lam=0.05, kreg=2, **kw),
    "FFRAPS at a feature": lambda model, **kw: ffcp.FFRAPS(
        model, delta=0.1, lam=0.05, kreg=2, gradient="feature", feature="0", **kw
    ),
}

TUNED = {
    "RAPS by size": lambda model, **kw: ffcp.RAPS(model, tune="size", **kw),
    "RAPS by coverage": lambda model, **kw: ffcp.RAPS(model, tune="coverage", **kw),
    "FFRAPS by size": lambda model, **kw: ffcp.FFRAPS(model, tune="size", **kw),
    "FFRAPS at a feature by coverage": lambda model, **kw: ffcp.FFRAPS(
        model, gradient="feature", feature="0", tune="coverage", **kw
    ),
    "APS, temperature": lambda model, **kw: ffcp.APS(model, **{**kw, "temperature": "fit"}),
    "LAC, temperature": lambda model, **kw: ffcp.LAC(model, **{**kw, "temperature": "fit"}),
}
