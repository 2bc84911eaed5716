"""Rules by the kind of layer: one small function for each, and the table that finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ffcp.bounds.rules import activations, affine
from ffcp.bounds.rules.kinds import (
    Activation,
    Affine,
    Bounds,
    Lines,
    Own,
    Rule,
    Sum,
    UnsupportedError,
)

__all__ = [
    "LAYERS",
    "Activation",
    "Affine",
    "Bounds",
    "Lines",
    "Own",
    "Rule",
    "Sum",
    "UnsupportedError",
    "rule_of",
]

LAYERS: dict[type[nn.Module], Callable[[Any], Rule]] = {
    nn.Linear: affine.linear,
    nn.Conv1d: affine.convolution,
    nn.Conv2d: affine.convolution,
    nn.AvgPool1d: affine.average_pool,
    nn.AvgPool2d: affine.average_pool,
    nn.AdaptiveAvgPool1d: affine.adaptive_pool,
    nn.AdaptiveAvgPool2d: affine.adaptive_pool,
    nn.BatchNorm1d: affine.batch_norm,
    nn.BatchNorm2d: affine.batch_norm,
    nn.Flatten: affine.flatten,
    nn.Upsample: affine.upsample,
    nn.Identity: affine.identity,
    nn.Dropout: affine.identity,
    nn.Dropout1d: affine.identity,
    nn.Dropout2d: affine.identity,
    nn.AlphaDropout: affine.identity,
    nn.ReLU: activations.relu,
    nn.LeakyReLU: activations.leaky_relu,
    nn.Tanh: activations.tanh,
    nn.Sigmoid: activations.sigmoid,
    nn.GELU: activations.gelu,
    nn.SiLU: activations.silu,
}


def rule_of(layer: nn.Module) -> Rule | None:
    """Rule of a layer or of the layer it inherits its forward from, as parametrized ones do."""
    for kind in type(layer).__mro__:
        if kind in LAYERS and type(layer).forward is kind.forward:
            return LAYERS[kind](layer)
    bounds = getattr(layer, "bounds", None)
    return Own(layer, bounds) if callable(bounds) else None
