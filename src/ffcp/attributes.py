"""Attributes of modules, set without torch's look for layers and weights among them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


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
        is_torchs = isinstance(value, (Tensor, nn.Module))
        if not is_torchs and name not in own and "_modules" in own:
            kept = own["_modules"], own["_buffers"], own["_parameters"]
            is_torchs = name in kept[0] or name in kept[1] or name in kept[2]
        (nn.Module if is_torchs else object).__setattr__(self, name, value)
