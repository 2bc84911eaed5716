"""The two guarantees of pixel sets, tested as laws over many splits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from ffcp.conformal.rank import conformal_rank
from ffcp.segmentation import PixelSets
from ffcp.segmentation.counts import PixelCounts
from tests.law import ERROR_RATE, upper_p_value
from tests.segmentation.material import IGNORE, holed, network, pool, scenes

N, T = 30, 10
FEATURES = ["output", *(pytest.param(name, marks=pytest.mark.heavy) for name in ("0", "input"))]


def splits(counts: Tensor, repeats: int, tested: int = T, seed: int = 0):
    """Draw calibration stores and the counts of the test images."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(repeats):
        drawn = counts[torch.randperm(len(counts), generator=generator)[: N + tested]]
        yield PixelCounts().fit(drawn[:N]), drawn[N:]


def covered_share(counts: Tensor, t: int) -> Tensor:
    return counts[:, : t + 1].sum(dim=1) / counts.sum(dim=1)


def too_high(losses: np.ndarray, alpha: float) -> float:
    """P-value against "the mean is at most alpha": small where too much is missed."""
    z = (losses.mean() - alpha) / (losses.std(ddof=1) / math.sqrt(len(losses)))
    return float(stats.norm.sf(z))


# -- the law of the mean share missed ----------------------------------------------------------


def missed(counts: Tensor, rule, repeats: int, tested: int = T) -> np.ndarray:
    losses = [
        1 - covered_share(test, rule(store)).mean().item()
        for store, test in splits(counts, repeats, tested)
    ]
    return np.array(losses)


@pytest.mark.long
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.3])
def test_the_mean_share_missed_is_at_most_alpha(feature: str, alpha: float) -> None:
    losses = missed(pool(feature), lambda store: store.risk_bin(alpha), 400)
    assert too_high(losses, alpha) > ERROR_RATE
    # Conformal risk control is at most 2 / (n + 1) below alpha where losses fall in small steps.
    noise = 4 * losses.std() / math.sqrt(len(losses))
    assert losses.mean() >= alpha - 2 / (N + 1) - noise


@pytest.mark.heavy
def test_the_mean_share_missed_from_images_to_sets() -> None:
    # Nothing precomputed: every draw calibrates and predicts, and some pixels have no label.
    model, alpha, losses = network(), 0.1, []
    for seed in range(300):
        x, y = scenes(N + T, seed=100 + seed)
        y = holed(y, seed=seed)
        predictor = PixelSets(model, ignore=IGNORE).calibrate(x[:N], y[:N])
        shares = predictor.predict_set(x[N:], alpha).coverage(y[N:], IGNORE)
        losses.append(1 - shares.mean().item())
    assert too_high(np.array(losses), alpha) > ERROR_RATE
    assert np.mean(losses) >= alpha - 2 / (N + 1) - 4 * np.std(losses) / math.sqrt(len(losses))


def pooled_bin(store: PixelCounts, alpha: float) -> int:
    """The conformal quantile over all pixels, as if they were exchangeable points."""
    total = store.scores.sum(dim=0).cumsum(dim=0)
    return int((total < conformal_rank(int(total[-1]), alpha)).sum())


@pytest.mark.heavy
def test_the_law_test_catches_pixels_taken_for_independent() -> None:
    # 1080 pixels seem to be many, but they are only 30 images.
    alpha = 0.04
    right = missed(pool(), lambda store: store.risk_bin(alpha), 500, tested=40)
    wrong = missed(pool(), lambda store: pooled_bin(store, alpha), 1500, tested=40)
    assert too_high(right, alpha) > ERROR_RATE
    assert too_high(wrong, alpha) < 1e-8


# -- the law of images covered to a share ------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("share", [0.5, 0.9, 1])
def test_images_covered_to_a_share_follow_the_law(feature: str, share: float) -> None:
    alpha, k = 0.1, conformal_rank(N, 0.1)
    hits = np.array(
        [
            int((covered_share(test, store.share_bin(alpha, share)) >= share - 1e-9).sum())
            for store, test in splits(pool(feature), 400)
        ]
    )
    # One-sided: images share bins, above all bin 0, and a tie covers more than the law says.
    assert upper_p_value(hits, T, N, k) > ERROR_RATE
    tied = PixelCounts().fit(pool(feature)).image_bins(share)
    at_threshold = tied[tied >= tied.kthvalue(len(tied) * 7 // 10).values]
    largest = int(at_threshold.bincount().max()) / len(tied)
    noise = 4 * hits.std() / math.sqrt(len(hits)) / T
    assert hits.mean() / T <= k / (N + 1) + largest + noise


@pytest.mark.long
def test_the_law_test_catches_the_wrong_guarantee() -> None:
    # A mean share of 0.9 does not make nine of ten images be covered to 0.9.
    hits = [
        int((covered_share(test, store.risk_bin(0.1)) >= 0.9).sum())
        for store, test in splits(pool(), 600)
    ]
    assert upper_p_value(hits, T, N, conformal_rank(N, 0.1)) < 1e-8
