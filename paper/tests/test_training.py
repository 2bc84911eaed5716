"""The paper's networks with two outputs are quantiles."""

from __future__ import annotations

import pytest
import torch

from ffcp_paper.training.regression import train_quantiles


def test_trained_quantiles_cover_about_what_their_levels_say() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2000, 1, generator=generator)
    y = x[:, 0] + 0.3 * torch.randn(2000, generator=generator)
    model = train_quantiles(x, y, (0.2, 0.8), epochs=20)
    low, high = model(x).detach().T
    assert 0.5 < float(((low <= y) & (y <= high)).double().mean()) < 0.7


@pytest.mark.parametrize("levels", [(0.9, 0.1), (0.0, 0.9), (0.1, 1.0)])
def test_levels_out_of_order_are_refused(levels: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="levels"):
        train_quantiles(torch.zeros(200, 2), torch.zeros(200), levels, epochs=1)
