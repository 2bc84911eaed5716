"""Attributes of modules, set without torch's look for layers and weights among them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_KINDS = ("_modules", "_buffers", "_parameters")


class Plain(nn.Module):
    """A module most of whose attributes are plain values: these are set at once.

    Making a predictor would take twice as long if torch asked of each what kind of thing it is.

    >>> module = Plain()
    >>> module.alpha, module.layer = 0.1, nn.Linear(1, 1)
    >>> list(module._modules)
    ['layer']
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a plain value; leave the rest, and names that stand for it, to torch."""
        own = self.__dict__
        is_plain = not isinstance(value, (Tensor, nn.Module))
        if is_plain and (name in own or not any([name in own.get(kind, ()) for kind in _KINDS])):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)
