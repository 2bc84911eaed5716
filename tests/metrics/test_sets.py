"""Metrics of label sets against loops over rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ffcp import metrics
from ffcp.classification.sets import LabelSet


def by_strata(mask: np.ndarray, y: np.ndarray, alpha: float) -> float:
    worst, sizes = 0.0, mask.sum(axis=1)
    for low, high in ((0, 1), (2, 3), (4, 6), (7, 10), (11, 100), (101, 10**9)):
        inside = (sizes >= low) & (sizes <= high)
        if inside.any():
            share = mask[np.arange(len(y)), y][inside].mean()
            worst = max(worst, abs(share - (1 - alpha)))
    return worst


@pytest.mark.parametrize("density", [0.001, 0.01, 0.03, 0.05, 0.9])
def test_metrics_agree_with_loops(density: float) -> None:
    random = np.random.default_rng(0)
    mask, y = random.random((300, 150)) < density, random.integers(0, 40, 300)
    hits = mask[np.arange(300), y]
    for given_sets in (LabelSet(torch.from_numpy(mask)), torch.from_numpy(mask), mask):
        assert float(metrics.set_coverage(given_sets, y)) == pytest.approx(hits.mean())
        assert metrics.mean_set_size(given_sets) == pytest.approx(mask.sum(axis=1).mean())
        assert metrics.median_set_size(given_sets) == np.median(mask.sum(axis=1))
        assert metrics.size_stratified_violation(given_sets, y, 0.2) == pytest.approx(
            by_strata(mask, y, 0.2)
        )
        gaps = [abs(hits[y == label].mean() - 0.8) for label in np.unique(y)]
        assert metrics.class_coverage_gap(given_sets, y, 0.2) == pytest.approx(np.mean(gaps))
        single = (hits & (mask.sum(axis=1) == 1)).mean()
        assert float(metrics.singleton_hit_ratio(given_sets, y)) == pytest.approx(single)
    groups = metrics.class_coverage(mask, y).groups
    assert groups[3].rows == (y == 3).sum()
    assert float(groups[3]) == pytest.approx(hits[y == 3].mean())


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2, 3), (4, 6), (7, 10), (11, 100), (101, 150)])
def test_sizes_at_both_ends_of_a_stratum_belong_to_it(low: int, high: int) -> None:
    # One hit and one miss at the two ends: half is covered if they share a stratum, else none
    # is covered in one of the two.
    mask = torch.zeros(2, 151, dtype=torch.bool)
    mask[0, 1 : 1 + low] = mask[1, :high] = True
    assert metrics.size_stratified_violation(mask, [0, 0], 0.1) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("mask", "y", "error", "message"),
    [
        (torch.ones(3, 2), [0, 1, 0], ValueError, "mask"),
        (torch.ones(3, dtype=torch.bool), [0, 1, 0], ValueError, "mask"),
        (torch.ones(0, 2, dtype=torch.bool), [], ValueError, "empty"),
        (torch.ones(3, 2, dtype=torch.bool), [0.0, 1.0, 0.0], TypeError, "integers"),
        (torch.ones(3, 2, dtype=torch.bool), [0, 1], ValueError, "labels"),
        (torch.ones(3, 2, dtype=torch.bool), [0, 2, 0], ValueError, "labels"),
        (torch.ones(3, 2, dtype=torch.bool), [0, -1, 0], ValueError, "labels"),
    ],
)
def test_bad_sets_and_labels(mask: Tensor, y: list, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        metrics.set_coverage(mask, y)
