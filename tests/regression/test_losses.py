"""The pinball loss, whose minimisers are quantiles."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ffcp
from tests.conftest import normal


def test_a_network_trained_with_it_learns_quantiles() -> None:
    x, y = normal(2000, 1, seed=1), normal(2000, seed=2)
    model = nn.Linear(1, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        ffcp.pinball_loss(model(x), y, (0.2, 0.8)).backward()
        optimizer.step()
    low, high = model(x).detach().T
    assert 0.57 < float(((low <= y) & (y <= high)).double().mean()) < 0.63


def test_pinball_loss_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\b3\b"):
        ffcp.pinball_loss(torch.zeros(5, 3), torch.zeros(5))
    with pytest.raises(ValueError, match="shape"):
        ffcp.pinball_loss(torch.zeros(5, 2), torch.zeros(4))


def test_levels_are_shares_and_a_column_of_targets_is_as_good_as_a_list() -> None:
    quantiles, y = torch.zeros(4, 2), torch.arange(4.0)
    for levels in ((0.0, 0.5), (0.5, 1.0)):
        with pytest.raises(ValueError, match="level"):
            ffcp.pinball_loss(quantiles, y, levels)
    loss = ffcp.pinball_loss(quantiles, y, (0.1, 0.9))
    assert ffcp.pinball_loss(quantiles, y[:, None], (0.1, 0.9)).equal(loss)
