"""Attributes of predictors and calibrations: plain values, layers and points."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ffcp.attributes import Plain


def test_what_torch_keeps_in_its_own_places_stays_there() -> None:
    module = Plain()
    module.layer, module.number = nn.Linear(1, 1), 3
    module.register_buffer("points", torch.zeros(2))
    module.points = torch.ones(3)
    assert list(module.state_dict()) == ["points", "layer.weight", "layer.bias"]
    assert len(module.points) == 3
    with pytest.raises(TypeError, match="cannot assign"):
        module.layer = 3
    module.layer = None
    assert module._modules == {"layer": None}
    module.number = nn.Linear(1, 1)  # what was plain can become a layer
    assert "number" in module._modules
    assert "number" not in vars(module)
