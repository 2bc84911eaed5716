"""The paper's regression network and its split points."""

from __future__ import annotations

from torch import nn

#: The feature names of :func:`mlp` at the paper's split points 0 to 4: the input, the outputs
#: of the three hidden Linear layers before their ReLU, and the output (plain CP).
SPLIT_POINTS = ("input", "0", "3", "6", "output")


def mlp(inputs: int, outputs: int = 1, width: int = 64, dropout: float = 0.1) -> nn.Sequential:
    """Build the paper's regression network: four Linear layers, ReLU and dropout between.

    >>> [name for name, layer in mlp(10).named_children() if isinstance(layer, nn.Linear)]
    ['0', '3', '6', '9']
    """
    layers: list[nn.Module] = []
    for size in (inputs, width, width):
        layers += [nn.Linear(size, width), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, outputs))
