"""Coverage on the worst slab."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffcp import metrics
from ffcp.metrics.slabs import worst_window


@given(st.lists(st.integers(0, 1), min_size=2, max_size=30), st.floats(0.05, 1))
def test_worst_window_agrees_with_all_windows(hits: list[int], share: float) -> None:
    n = len(hits)
    least = max(1, int(np.ceil(n * share)))
    windows = [hits[i:j] for i in range(n) for j in range(i + least, n + 1)]
    expected = min(sum(w) / len(w) for w in windows)
    mean, low, high = worst_window(torch.arange(n).double(), torch.tensor(hits).double(), share)
    assert mean == pytest.approx(expected)
    inside = hits[int(low) : int(high) + 1]
    assert sum(inside) / len(inside) == pytest.approx(expected)


def test_worst_slab_finds_a_region_that_is_not_covered() -> None:
    x = torch.randn(4000, 3)
    bad = x @ torch.tensor([1.0, 1.0, 0.0]) > 1.5
    y = torch.where(bad, 5.0, 0.0)
    band = (-torch.ones(4000), torch.ones(4000))
    worst = metrics.worst_slab_coverage(band, y, x, directions=200)
    assert worst < 0.3
    assert metrics.coverage(band, y) > 0.8


def test_worst_slab_does_not_invent_a_bad_region() -> None:
    x, y = torch.randn(4000, 3), torch.rand(4000)
    worst = metrics.worst_slab_coverage((torch.zeros(4000), torch.full((4000,), 0.9)), y, x,
                                        directions=200)  # fmt: skip
    assert worst.low <= 0.9 <= worst.high + 0.03
