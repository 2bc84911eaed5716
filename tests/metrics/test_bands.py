"""Metrics of bands against slow, obvious computations."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from ffcp import metrics


def test_coverage_of_several_outputs() -> None:
    lower, upper = torch.zeros(2, 2), torch.ones(2, 2)
    y = torch.tensor([[0.5, 0.5], [0.5, 2.0]])
    assert metrics.coverage((lower, upper), y) == 0.75
    assert metrics.coverage((lower, upper), y, joint=True) == 0.5
    assert metrics.coverage((lower, upper), y).rows == 2


def test_ends_of_the_band_count_as_covered() -> None:
    assert metrics.coverage(([0.0, 0.0], [1.0, 1.0]), [0.0, 1.0]) == 1


def test_interval_score_is_least_for_the_true_quantiles() -> None:
    y = torch.randn(20_000)
    z = stats.norm.ppf(0.95)
    best = metrics.interval_score((torch.full_like(y, -z), torch.full_like(y, z)), y, alpha=0.1)
    for other in (0.8 * z, 1.2 * z):
        band = (torch.full_like(y, -other), torch.full_like(y, other))
        assert metrics.interval_score(band, y, alpha=0.1) > best


def test_bad_bands_and_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="target"):
        metrics.coverage(([0, 0], [1, 1]), [1, 2, 3])
    with pytest.raises(ValueError, match="NaN"):
        metrics.coverage(([0, float("nan")], [1, 1]), [1, 2])
    with pytest.raises(ValueError, match="empty"):
        metrics.mean_length(([], []))
    with pytest.raises(ValueError, match="groups"):
        metrics.group_coverage(([0, 0], [1, 1]), [1, 2], groups=[1])
